"""Measurements and estimates of `inspect-cache`: passes, prompt reuse, memory."""
