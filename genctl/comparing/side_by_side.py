"""The runs of a comparison side by side, from their events: the lanes of each prompt, divergences, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from genctl.comparing.metrics import divergence, measure
from genctl.comparing.statistics import COLUMNS, RunNumbers
from genctl.events import Began, Event, Token
from genctl.events.results import Collector, Result
from genctl.io.records import finite


class SideBySide:
    """Listens to a run. If all of its lanes are from `compare`, `part` returns the data that a page shows."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._lanes: dict[str, tuple[str, str]] = {}  # lane -> run and row
        self._order: dict[str, int] = {}  # run -> its place on the command line, 0 in recordings without it
        self._results: dict[str, Result] = {}
        self._others = False  # whether there are lanes of another command

    def feed(self, event: Event) -> None:
        """Process one event."""
        if isinstance(event, Began):
            parts = event.lane.rsplit("/", 2)  # run/id/seed if it is a lane of `compare`
            if len(parts) != 3 or not parts[2].isdecimal() or event.seed not in (None, int(parts[2])):
                self._others = True
            else:
                self._lanes[event.lane] = parts[0], unquote(parts[1])
                self._order.setdefault(parts[0], event.run)
        if not self._others and (result := self._collector.feed(event)) is not None:
            self._results[result.lane] = result

    def part(self, baseline: str | None = None) -> dict[str, Any] | None:
        """The runs, the lanes of each prompt by run, divergences and metrics; None if this is no comparison.

        Runs and lanes are in the order of the command line. They are decoded in another order: checkpoint by
        checkpoint, and those that use hidden states first.

        A parting is where the first text of a run diverges from the base run's text with the same seed, or else its
        first text: `position` counts the tokens before it, `token` and `other` are [id, text, log-probability], null
        if a text has ended; `equal` if there is none. A metric has, by run, its mean, both ends of its interval (null
        for fewer than ten prompts), and the number of prompts.
        """
        if self._others or not self._lanes:
            return None
        names = sorted(self._order, key=lambda run: self._order[run])
        base = baseline if baseline in names else names[0]
        lanes: dict[str, dict[str, list[str]]] = {}  # by row and run
        for lane, (run, row) in self._lanes.items():
            lanes.setdefault(row, {name: [] for name in names})[run].append(lane)
        numbers, prompts = {name: RunNumbers() for name in names}, []
        for row, by_run in lanes.items():
            results = {
                run: [found for name in by_run[run] if (found := self._results.get(name)) and found.sequences]
                for run in names
            }
            for run, of_run in results.items():
                numbers[run].add([measure(text) for one in of_run for text in one.sequences])
            present = {run: listed for run, listed in by_run.items() if listed}
            prompts.append({"id": row, "lanes": present, "partings": _partings(results, base)})
        return {
            "runs": names,
            "base": base,
            "lanes": {
                lane: [run, row] for row, by_run in lanes.items() for run, listed in by_run.items() for lane in listed
            },
            "prompts": prompts,
            "metrics": _metrics(numbers),
        }


def _partings(results: Mapping[str, Sequence[Result]], base: str) -> dict[str, dict[str, Any]]:
    """Where the first text of each run diverges from the base run's text with the same seed."""
    points: dict[str, dict[str, Any]] = {}
    for run, (ours, *_) in ((run, found) for run, found in results.items() if found and results[base]):
        if run == base:
            continue
        home = next((one for one in results[base] if one.seed == ours.seed), results[base][0])
        point = divergence(ours.sequences[0], home.sequences[0], base, same_tokens=home.model == ours.model)
        if point is None:
            points[run] = {"equal": True}
        else:
            points[run] = {"position": point.position, "token": _entry(point.token), "other": _entry(point.other)}
    return points


def _entry(token: Token | None) -> list[Any] | None:
    return None if token is None else [token.id, token.text, finite(token.logprob)]


def _metrics(numbers: Mapping[str, RunNumbers]) -> list[dict[str, Any]]:
    metrics = []
    for key, (label, digits, _) in COLUMNS.items():
        runs = {}
        for run, of_run in numbers.items():
            interval = of_run.interval(key)
            if interval is not None and all(map(math.isfinite, (interval.mean, *interval.ends))):
                runs[run] = [interval.mean, *(interval.ends or (None, None)), interval.count]
        if runs:
            metrics.append({"label": label, "digits": digits, "runs": runs})
    return metrics
