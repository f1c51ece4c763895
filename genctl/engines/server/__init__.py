"""Servers in place of a checkpoint: requests over OpenAI's HTTP API (`--backend openai:URL`)."""
