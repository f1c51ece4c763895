"""What `inspect-cache` measures and estimates: passes, prompt reuse, memory."""
