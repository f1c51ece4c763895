"""Results from events: the returned sequences of each lane, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from genctl import events

# Linked lists, newest first: the tokens of a row, and the rows that it continued. Forks share their common part.
History: TypeAlias = tuple[Any, Any]
NO_HISTORY: History = (None, None)


def grown(history: History, row: events.Row | events.Ended) -> History:
    """The history of a row, from that of its parent."""
    tokens, parents = history
    for token in row.written:
        tokens = (token, tokens)
    return tokens, (row.parent, parents)


def recalled(history: History) -> tuple[tuple[events.Token, ...], tuple[int, ...]]:
    """The tokens of a row, and the row that it continued at each step."""
    return tuple(_unlink(history[0])), tuple(_unlink(history[1]))


def histories() -> events.RowStates[History]:
    """The history of every live row."""
    return events.RowStates(lambda lane: NO_HISTORY, grown)


@dataclass(frozen=True)
class Sequence:
    """One returned sequence: the hypothesis and the reported tokens."""

    hypothesis: events.Hypothesis
    tokens: tuple[events.Token, ...]
    parents: tuple[int, ...] = ()  # the row it continued at each step: its path through a beam

    @property
    def text(self) -> str:
        return self.hypothesis.text

    @property
    def shown(self) -> str:
        """The text for people: without a tokenizer, tokens are shown as <17><4>."""
        return self.text or "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.hypothesis.tokens

    @property
    def logprob(self) -> float:
        """The log-probability of the whole sequence under the model, in nats."""
        return self.hypothesis.logprob

    @property
    def score(self) -> float:
        return self.hypothesis.score

    @property
    def finish_reason(self) -> str:
        return self.hypothesis.reason

    @property
    def unmet(self) -> tuple[str, ...]:
        """The forced phrases that the text lacks."""
        return self.hypothesis.unmet


@dataclass(frozen=True)
class Result:
    """The result of a lane: its sequences in the order in which they are returned, or its error."""

    lane: str
    prompt: str
    strategy: str
    seed: int
    model: str
    sequences: tuple[Sequence, ...]
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    error: events.Failed | None = None
    reused: int = 0  # tokens of the prompt that a prompt cache held
    truncated: int = 0  # tokens dropped from the prompt
    num_return_sequences: int = 1

    @property
    def fewer(self) -> bool:
        """Whether there are fewer sequences than requested: filters can leave a search without candidates."""
        return self.error is None and len(self.sequences) < self.num_return_sequences

    @property
    def remarks(self) -> dict[str, int]:
        """Additional fields of its records."""
        remarks = {"truncated": self.truncated} if self.truncated else {}
        if self.fewer:
            remarks |= {"returned": len(self.sequences), "num_return_sequences": self.num_return_sequences}
        return remarks

    @property
    def text(self) -> str:
        """The best sequence's text. Raises IndexError when the lane failed."""
        return self.sequences[0].text


@dataclass
class _Lane:
    began: events.Began | None = None
    prefill_s: float = 0.0
    ended: dict[tuple[tuple[int, ...], int | None], History] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    reused: int = 0


class Collector:
    """Collects events into Results, one for each finished lane. The cost per event is that of its step."""

    def __init__(self, *, tokens: bool = True) -> None:
        self._tokens = tokens
        self._lanes: dict[str, _Lane] = {}
        self._histories = histories()

    def feed(self, event: events.Event) -> Result | None:
        """Take one event. Returns the result of the lane that it completes, if any."""
        if isinstance(event, events.Stepped):
            self._step(event)
            return None
        self._histories.forget(event)
        if isinstance(event, events.Began):
            self._lanes[event.lane] = _Lane(event)
        elif isinstance(event, events.Prefilled):
            lane = self._lane(event.lane)
            lane.prefill_s, lane.reused = event.seconds, event.reused
        elif isinstance(event, events.Finished):
            return self._finish(event)
        elif isinstance(event, events.Failed):
            lane = self._lanes.pop(event.lane, _Lane())
            began = lane.began or events.Began(event.lane, "", "")
            return Result(event.lane, began.prompt, began.strategy, began.seed, began.model, (), error=event)
        return None

    def _lane(self, name: str) -> _Lane:
        return self._lanes.setdefault(name, _Lane())

    def _step(self, event: events.Stepped) -> None:
        lane = self._lanes.get(event.lane) or self._lane(event.lane)
        lane.drafted += event.drafted
        lane.accepted += event.accepted
        if self._tokens:
            _, ended = self._histories.step(event)
            for place, history in enumerate(ended):
                hypothesis = event.ended[place].hypothesis
                lane.ended[hypothesis.tokens, hypothesis.slot] = history

    def _finish(self, event: events.Finished) -> Result:
        lane = self._lanes.pop(event.lane, _Lane())
        began = lane.began or events.Began(event.lane, "", "")
        sequences = []
        for hypothesis in event.hypotheses:
            history = lane.ended.get((hypothesis.tokens, hypothesis.slot), NO_HISTORY)
            sequences.append(Sequence(hypothesis, *recalled(history)))
        return Result(
            event.lane,
            began.prompt,
            began.strategy,
            began.seed,
            began.model,
            tuple(sequences),
            event.prompt_tokens,
            lane.prefill_s,
            event.seconds,
            event.first_token_s,
            event.forwards,
            lane.drafted,
            lane.accepted,
            reused=lane.reused,
            truncated=int(began.settings.get("truncated", 0)),
            num_return_sequences=int(began.settings.get("num_return_sequences", 1)),
        )


def _unlink(link: Any) -> list[Any]:
    items = []
    while link is not None:
        item, link = link
        items.append(item)
    items.reverse()
    return items
