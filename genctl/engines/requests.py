"""Requests to a session: prompts with their settings, and what to report of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from genctl.config.layers import Resolved
from genctl.events import row_name


@dataclass(frozen=True)
class Request:
    """One prompt with its own settings. Exactly one of `prompt`, `prompt_ids` and `messages` is set."""

    id: str
    resolved: Resolved
    seed: int
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    place: int = 0  # in the input, from 1; 0 if the id is a name
    index: int = 0  # of the row in the input, from 0
    written: int = 0  # tokens at the end of the prompt that are the beginning of a text of the grammar
    prefill: str = ""  # the beginning of the answer to `messages`, which the text continues
    run: int = 0  # of a comparison, from 1

    @property
    def name(self) -> str:
        """What messages call the request."""
        return row_name(self.id, self.place)


@dataclass(frozen=True)
class Skipped:
    """A row of the input that cannot be decoded. It has a place in its group."""

    index: int


@dataclass(frozen=True)
class Report:
    """What events report of each token besides its id and log-probability."""

    top: int = 0  # alternatives
    scores: bool = False  # rank and entropy
    trace: bool = False  # what each processor did
    watch: tuple[int, ...] = ()  # ids whose log-probability and rank are reported at each token
    steps: bool = True  # somebody reads the steps of all lanes; else an engine may leave them out
    parents: bool = True  # somebody reads the steps of beam searches


def grouped(requests: Iterable[Request | Skipped | None], span: int) -> Iterator[Iterator[Request]]:
    """The requests of each `span` rows of the input, read lazily: read each group to its end before the next.

    Groups depend on the index of a row alone, so that a row has the same neighbours wherever a run began.
    """
    rows = (row for row in requests if row is not None)
    for first in rows:
        group = itertools.chain([first], itertools.islice(rows, span - 1 - first.index % span))
        yield (row for row in group if isinstance(row, Request))
