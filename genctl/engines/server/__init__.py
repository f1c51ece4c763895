"""A server that already runs: requests by OpenAI's HTTP interface in place of a checkpoint (`--backend openai:URL`)."""
