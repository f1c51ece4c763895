"""What is in a cache, measured: passes as they were made, what reusing a prompt saves, what a plan predicts."""
