"""Screens, folding and hostile text."""
