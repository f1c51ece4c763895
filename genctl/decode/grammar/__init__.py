"""Structured output: a grammar that the new text must follow."""
