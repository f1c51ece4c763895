"""Results from events: the returned sequences of each lane, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from genctl import events
from genctl.plural import count

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

    @property
    def lack(self) -> str:
        """The phrases that it lacks, in words."""
        return "lacks " + ", ".join(f'"{name}"' for name in self.unmet)


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
    backend: str = ""  # the server that generated it

    @property
    def fewer(self) -> bool:
        """Whether there are fewer sequences than requested: filters can leave a search without candidates."""
        return self.error is None and len(self.sequences) < self.num_return_sequences

    def shortfalls(self, what: str) -> list[str]:
        """Warnings about what it lacks: sequences, forced words, the end of a text. `what` names the prompt."""
        warnings = []
        if self.fewer:
            returned = f"{len(self.sequences)} of {self.num_return_sequences} sequences"
            warnings.append(f"{what}{returned}: the search found no others (num_return_sequences)")
        for number, sequence in enumerate(self.sequences, 1):
            which = f"sequence {number}: " if len(self.sequences) > 1 else ""
            if sequence.hypothesis.incomplete:
                cut = f"cut by {sequence.finish_reason} after {count(sequence.hypothesis.length, 'token')}"
                warnings.append(f"{what}{which}{sequence.hypothesis.incomplete}: the text is incomplete, {cut}")
            if sequence.unmet:
                warnings.append(f"{what}{which}the text {sequence.lack} (force_words)")
        return warnings

    @property
    def remarks(self) -> dict[str, Any]:
        """Additional fields of its records."""
        remarks: dict[str, Any] = {"backend": self.backend, "exact": False} if self.backend else {}
        remarks |= {"truncated": self.truncated} if self.truncated else {}
        if self.fewer:
            remarks |= {"returned": len(self.sequences), "num_return_sequences": self.num_return_sequences}
        return remarks

    @property
    def text(self) -> str:
        """The best sequence's text. Raises IndexError when the lane failed."""
        return self.sequences[0].text


@dataclass
class _Lane:
    began: events.Began
    prefilled: events.Prefilled | None = None
    rows: tuple[events.Row, ...] = ()
    live: list[History] = field(default_factory=list)  # of `rows`
    ended: list[tuple[events.Hypothesis, History]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def setting(self, name: str, default: float | str) -> Any:
        return self.began.settings.get(name, default)

    def result(self, sequences: list[Sequence], **more: Any) -> Result:
        began, prefilled = self.began, self.prefilled
        return Result(
            began.lane,
            began.prompt,
            began.strategy,
            began.seed,
            began.model,
            tuple(sequences),
            prefill_s=0.0 if prefilled is None else prefilled.seconds,
            reused=0 if prefilled is None else prefilled.reused,
            drafted=self.drafted,
            accepted=self.accepted,
            truncated=int(self.setting("truncated", 0)),
            backend=str(self.setting("backend", "")),
            **more,
        )


class Collector:
    """Collects events into Results, one for each finished lane. The cost per event is that of its step."""

    def __init__(self) -> None:
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
            self._lane(event.lane).prefilled = event
        elif isinstance(event, events.Finished):
            return self._finish(event)
        elif isinstance(event, events.Failed):
            return self._pop(event.lane).result([], error=event)
        return None

    def unfinished(self, *, texts: bool = True) -> list[Result]:
        """What the lanes that are not done have so far; live rows end as interrupted, as in the loop.

        For a run whose model does not return. Without a tokenizer there are no `texts`.
        """
        results = []
        for lane in self._lanes.values():
            sequences = [Sequence(hypothesis, *recalled(history)) for hypothesis, history in lane.ended]
            sequences += [_cut(lane, row, history, texts) for row, history in zip(lane.rows, lane.live, strict=True)]
            sequences.sort(key=lambda one: (one.hypothesis.slot or 0, -one.hypothesis.score))
            count = 0 if lane.prefilled is None else lane.prefilled.prompt_tokens
            if sequences:
                returned = sequences[: int(lane.setting("num_return_sequences", 1))]
                results.append(lane.result(returned, prompt_tokens=count))
        return results

    def _lane(self, name: str) -> _Lane:
        return self._lanes.setdefault(name, _Lane(events.Began(name, "", "")))

    def _pop(self, name: str) -> _Lane:
        return self._lanes.pop(name, None) or _Lane(events.Began(name, "", ""))

    def _step(self, event: events.Stepped) -> None:
        lane = self._lane(event.lane)
        lane.drafted += event.drafted
        lane.accepted += event.accepted
        lane.rows, (lane.live, ended) = event.rows, self._histories.step(event)
        if ended:
            lane.ended += zip((one.hypothesis for one in event.ended), ended, strict=True)

    def _finish(self, event: events.Finished) -> Result:
        lane = self._pop(event.lane)
        ended = {(one.tokens, one.slot): history for one, history in lane.ended}
        sequences = []
        for hypothesis in event.hypotheses:
            history = ended.get((hypothesis.tokens, hypothesis.slot), NO_HISTORY)
            sequences.append(Sequence(hypothesis, *recalled(history)))
        return lane.result(
            sequences,
            prompt_tokens=event.prompt_tokens,
            decode_s=event.seconds,
            first_token_s=event.first_token_s,
            forwards=event.forwards,
            num_return_sequences=int(lane.setting("num_return_sequences", 1)),
        )


def _cut(lane: _Lane, row: events.Row, history: History, texts: bool) -> Sequence:
    """A live row as a sequence that was interrupted."""
    tokens, parents = recalled(history)
    ids = tuple(token.id for token in tokens)
    score = row.total / max(len(ids), 1) ** float(lane.setting("length_penalty", 1.0))
    text = "".join(token.text for token in tokens) if texts else ""
    hypothesis = events.Hypothesis(ids, row.logprob, row.total, "interrupted", score, row.slot, "", text)
    return Sequence(hypothesis, tokens, parents)


def _unlink(link: Any) -> list[Any]:
    items = []
    while link is not None:
        item, link = link
        items.append(item)
    items.reverse()
    return items
