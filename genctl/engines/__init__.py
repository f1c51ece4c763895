"""Engines compute tokens: in this process, on servers, with worker processes, or with ranks that share one model."""
