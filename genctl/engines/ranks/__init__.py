"""Processes that were started together (`torchrun`) and share a model: rank 0 reads and writes."""
