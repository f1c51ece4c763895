"""Older names of `stable_prefix` and `divergences`."""

from genctl.terminal.divergences import column, legend, parts
from genctl.terminal.divergences import divergences as departures
from genctl.terminal.divergences import word_boundary as leaves
from genctl.terminal.stable_prefix import StablePrefix as Certain

__all__ = ["Certain", "column", "departures", "leaves", "legend", "parts"]
