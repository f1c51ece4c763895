"""`genctl parity` and `genctl audit`."""
