"""Many prompts in, records out."""
