"""`genctl parity`."""
