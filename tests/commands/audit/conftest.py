"""Traces with a planted cause."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from scripts import make_traces
from scripts.make_traces import Asked, Rows
from tests.commands.audit.traces import STORIES


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Rows, Asked]]:
    """A function: cause -> the trace with it, and the audit's options. Traces are written when they are first used."""
    folder, make = tmp_path_factory.mktemp("planted"), make_traces.maker(STORIES, 60, each=15)

    @cache
    def trace(wanted: str) -> tuple[Rows, Asked]:
        found = make_traces.planted(STORIES, folder, make, random.Random(0))
        return next(plant for cause, plant in found if cause == wanted)()

    return trace
