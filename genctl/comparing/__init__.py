"""Several ways to continue the same prompts: what they are called, how they differ, what was recorded of them."""
