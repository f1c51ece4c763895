"""The tokens of unfinished lanes, from their events alone: for a run whose model does not return."""

from __future__ import annotations

from dataclasses import dataclass, field

from genctl import events
from genctl.results import History, Result, Sequence, histories, recalled

REASON = "interrupted"


@dataclass
class _PartialLane:
    began: events.Began
    returned: int
    prefilled: events.Prefilled | None = None
    rows: tuple[events.Row, ...] = ()
    live: list[History] = field(default_factory=list)  # of `rows`
    ended: list[tuple[events.Ended, History]] = field(default_factory=list)


class Unfinished:
    """A listener of events; `results` gives each lane that has tokens and is not finished."""

    def __init__(self, *, texts: bool = True) -> None:
        self._texts = texts  # whether there is a tokenizer to write any
        self._lanes: dict[str, _PartialLane] = {}
        self._histories = histories()
        self._returned: dict[str, int] = {}

    def expect(self, lane: str, returned: int) -> None:
        """Say how many sequences of a lane are returned."""
        self._returned[lane] = returned

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if isinstance(event, events.Stepped):
            if (stepped := self._lanes.get(event.lane)) is not None:
                stepped.rows, (stepped.live, ended) = event.rows, self._histories.step(event)
                stepped.ended += zip(event.ended, ended, strict=True) if ended else ()
            return
        self._histories.forget(event)
        if isinstance(event, events.Began):
            self._lanes[event.lane] = _PartialLane(event, self._returned.pop(event.lane, 1))
        elif isinstance(event, (events.Finished, events.Failed)):
            self._lanes.pop(event.lane, None)
            self._returned.pop(event.lane, None)
        elif isinstance(event, events.Prefilled) and event.lane in self._lanes:
            self._lanes[event.lane].prefilled = event

    def results(self) -> list[Result]:
        """Results of all unfinished lanes; live rows end as interrupted, as in the loop."""
        return [result for lane in self._lanes.values() if (result := _result(lane, self._texts)) is not None]


def _result(lane: _PartialLane, texts: bool) -> Result | None:
    sequences = []
    for one, history in lane.ended:
        sequences.append(Sequence(one.hypothesis, *recalled(history)))
    penalty = float(lane.began.settings.get("length_penalty", 1.0))
    for row, history in zip(lane.rows, lane.live, strict=True):
        tokens, parents = recalled(history)
        ids = tuple(token.id for token in tokens)
        score = row.total / max(len(ids), 1) ** penalty
        text = "".join(token.text for token in tokens) if texts else ""
        hypothesis = events.Hypothesis(ids, row.logprob, row.total, REASON, score, row.slot, "", text)
        sequences.append(Sequence(hypothesis, tokens, parents))
    if not sequences:
        return None
    sequences.sort(key=lambda one: (one.hypothesis.slot or 0, -one.hypothesis.score))
    began, prefilled = lane.began, lane.prefilled
    return Result(
        began.lane,
        began.prompt,
        began.strategy,
        began.seed,
        began.model,
        tuple(sequences[: lane.returned]),
        prefilled.prompt_tokens if prefilled is not None else 0,
        prefilled.seconds if prefilled is not None else 0.0,
    )
