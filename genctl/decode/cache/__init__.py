"""The key-value cache: its layers in all forms, and their rows."""
