"""Batches: input rows, records, resumable outputs."""
