"""One file, one frozen dataclass, one generator for each way to choose tokens."""
