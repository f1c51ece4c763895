"""Tests of the cache and its layers."""
