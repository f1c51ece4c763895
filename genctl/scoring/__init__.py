"""Texts to score and their scores, as values, whoever computes them."""
