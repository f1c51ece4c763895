"""Checkpoints: find, check and load them; tokenizers and chat templates; text from ids."""
