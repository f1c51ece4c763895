"""How probable a text is under a checkpoint, token by token."""
