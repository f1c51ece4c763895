"""Tests of the measuring core of `genctl parity`."""
