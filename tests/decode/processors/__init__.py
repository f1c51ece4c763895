"""Tests of the logits processors."""
