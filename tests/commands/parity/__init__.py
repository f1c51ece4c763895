"""Tests of `genctl parity`."""
