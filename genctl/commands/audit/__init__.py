"""`genctl audit`."""
