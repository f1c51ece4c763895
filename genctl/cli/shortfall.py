"""Warnings about what a result lacks: sequences, forced words, the end of a structured text."""

from __future__ import annotations

from genctl.plural import count
from genctl.results import Result


def shortfalls(result: Result, what: str) -> list[str]:
    """The warnings about a finished prompt. `what` says which it is, with a colon; "" if it is alone."""
    warnings = []
    if result.fewer:
        returned, wanted = len(result.sequences), result.num_return_sequences
        warnings.append(f"{what}{returned} of {wanted} sequences: the search found no others (num_return_sequences)")
    for number, sequence in enumerate(result.sequences, 1):
        which = f"sequence {number}: " if len(result.sequences) > 1 else ""
        if sequence.hypothesis.incomplete:
            cut = f"cut by {sequence.finish_reason} after {count(len(sequence.token_ids), 'token')}"
            warnings.append(f"{what}{which}{sequence.hypothesis.incomplete}: the text is incomplete, {cut}")
        if sequence.unmet:
            warnings.append(f"{what}{which}the text lacks {listed(sequence.unmet)} (force_words)")
    return warnings


def listed(names: tuple[str, ...]) -> str:
    """Names in quotes, with commas."""
    return ", ".join(f'"{name}"' for name in names)
