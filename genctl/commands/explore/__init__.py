"""`genctl explore`: a tree of tokens, with a screen or without one."""
