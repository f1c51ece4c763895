"""Logits processors: (history, scores) -> scores. Enter by file: `build`, `trace`."""
