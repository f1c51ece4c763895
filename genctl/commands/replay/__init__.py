"""`genctl replay` and `genctl report`: what a recording shows, again. Enter by `replay`."""
