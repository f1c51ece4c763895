"""genctl: generate text with transformer checkpoints, and see how it came about."""
__version__ = "0.1.0"
