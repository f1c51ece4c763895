"""The part of a page that compares runs: which lanes stand side by side, where texts part, metrics with intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from genctl.comparing.metrics import divergence, measure
from genctl.comparing.statistics import RunStatistics
from genctl.comparing.tables import COLUMNS
from genctl.events import Token
from genctl.render.html.tree_columns import Vocabulary, scaled

if TYPE_CHECKING:
    from genctl.render.html.page_data import PageData


def comparison(page: PageData, vocabulary: Vocabulary, baseline: str | None) -> dict[str, Any]:
    """The runs, the lanes of each prompt by run (numbers of the page's lanes), partings and metrics.

    A parting is where the first text of a run leaves that of the base run with the same seed, or else the first one:
    `position` counts the tokens before it, `token` and `other` are [number in the vocabulary, log-probability], null
    where a text had ended.
    """
    from genctl.render.html.page_data import run_of

    numbers = {name: place for place, name in enumerate(page.lanes)}
    prompts: dict[str, dict[str, list[str]]] = {}
    names: list[str] = []
    for name, lane in page.lanes.items():
        run = None if lane.began is None else run_of(lane.began)
        if run is not None:
            names += [run[0]] if run[0] not in names else []
            prompts.setdefault(run[1], {}).setdefault(run[0], []).append(name)
    base = baseline if baseline in names else names[0]
    statistics = RunStatistics(names)
    listed = []
    for id, by_run in prompts.items():
        values = {}
        for run_name in names:
            results = [page.results[name] for name in by_run.get(run_name, ()) if name in page.results]
            values[run_name] = [measure(sequence) for result in results for sequence in result.sequences]
            for result in results:
                for sequence in result.sequences:
                    statistics.count(run_name, sequence.finish_reason, len(sequence.token_ids))
                statistics.seconds[run_name] += result.decode_s
        statistics.add(values)
        lanes = {name: [numbers[lane] for lane in of_run] for name, of_run in by_run.items()}
        listed.append({"id": id, "lanes": lanes, "partings": _partings(page, by_run, base, vocabulary)})
    return {"runs": names, "base": base, "prompts": listed, "metrics": _metrics(statistics)}


def _partings(
    page: PageData, by_run: dict[str, list[str]], base: str, vocabulary: Vocabulary
) -> dict[str, dict[str, Any]]:
    """By run: where the first text of its first lane leaves the base run's."""

    def entry(token: Token | None) -> list[Any] | None:
        return None if token is None else [vocabulary.number(token.id, token.text), scaled(token.logprob)]

    homes = [page.results[name] for name in by_run.get(base, ()) if name in page.results]
    found: dict[str, dict[str, Any]] = {}
    for run, names in by_run.items():
        ours = [page.results[name] for name in names if name in page.results][:1]
        if run == base or not ours or not ours[0].sequences:
            continue
        home = next((one for one in homes if one.seed == ours[0].seed), homes[0] if homes else None)
        if home is None or not home.sequences:
            continue
        same = home.model == ours[0].model
        point = divergence(ours[0].sequences[0], home.sequences[0], base, same_tokens=same)
        if point is None:
            found[run] = {"equal": True}
        else:
            found[run] = {"position": point.position, "token": entry(point.token), "other": entry(point.other)}
            found[run] |= {"same": same}
    return found


def _metrics(statistics: RunStatistics) -> list[dict[str, Any]]:
    """Each metric that any run has: by run its mean, both ends of its interval, and the number of prompts."""
    metrics = []
    for key, (label, digits, _) in COLUMNS.items():
        runs = {}
        for run in statistics.runs:
            interval = statistics.interval(run, key)
            if interval is not None and all(map(math.isfinite, (interval.mean, interval.low, interval.high))):
                ends = (interval.mean, interval.low, interval.high)
                runs[run] = [*(float(f"{value:.6g}") for value in ends), interval.count]
        if runs:
            metrics.append({"label": label, "digits": digits, "runs": runs})
    return metrics
