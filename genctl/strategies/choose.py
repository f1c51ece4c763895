"""Which strategy the parameters ask for, determined as in transformers."""

from __future__ import annotations

from genctl.decode.types import Strategy
from genctl.params import Generation
from genctl.strategies.sample import Sample


def choose(generation: Generation) -> Strategy:
    """The strategy for these knobs."""
    return Sample(generation.do_sample, generation.num_return_sequences)
