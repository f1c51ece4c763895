"""The engine of a checkpoint in this process."""
