"""A checkpoint that is loaded in this process."""
