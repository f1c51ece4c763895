"""Generation strategies: one frozen dataclass with one generator in each file."""
