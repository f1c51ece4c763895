"""Text for the built-in checkpoints: everything here is generated, nothing is downloaded."""
