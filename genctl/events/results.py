"""Results from events: the returned sequences of each lane, with their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from genctl import events
from genctl.errors import count
from genctl.events.history import ROOT, LaneHistory, Path

REPR_LETTERS = 40  # of a text in a `repr`


@dataclass(frozen=True)
class Sequence:
    """One returned sequence: the hypothesis and the reported tokens."""

    hypothesis: events.Hypothesis
    tokens: tuple[events.Token, ...]
    parents: tuple[int, ...] = ()  # the row it continued at each step: its path through a beam

    def __repr__(self) -> str:
        return f"<Sequence {_brief(self.text)}, {count(self.hypothesis.length, 'token')}, {self.finish_reason}>"

    @property
    def text(self) -> str:
        return self.hypothesis.text

    @property
    def shown(self) -> str:
        """The text in readable form; without a tokenizer, tokens are shown as <17><4>."""
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
        """The missing phrases, in words."""
        return "lacks " + ", ".join(f'"{name}"' for name in self.unmet)


@dataclass(frozen=True)
class Result:
    """The result of a lane: its sequences in the order in which they are returned, or its error."""

    lane: str
    prompt: str
    strategy: str
    seed: int | None  # None if nothing is sampled
    model: str
    sequences: tuple[Sequence, ...]
    others: tuple[Sequence, ...] = ()  # samples that best_of or mbr_samples did not choose, best first
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    error: events.Failed | None = None
    reused: int = 0  # tokens of the prompt found in a prompt cache
    truncated: int = 0  # tokens dropped from the prompt
    num_return_sequences: int = 1
    backend: str = ""  # the server that generated it
    prompt_ids: tuple[int, ...] = ()  # the ids that were read, if they do not follow from `prompt`
    languages: Mapping[str, str] = field(default_factory=dict)  # src_lang and tgt_lang of a translation

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Result {self.lane}: failed, {_brief(self.error.message)}>"
        first = f", {self.sequences[0]!r}" if self.sequences else ""
        more = f" and {len(self.sequences) - 1} more" if len(self.sequences) > 1 else ""
        return f"<Result {self.lane}: {self.strategy} of {_brief(self.prompt)}{first}{more}>"

    @property
    def fewer(self) -> bool:
        """Whether there are fewer sequences than requested: filters can leave a search without candidates."""
        return self.error is None and len(self.sequences) < self.num_return_sequences

    def shortfalls(self, what: str) -> list[str]:
        """Warnings about missing sequences, missing forced words and incomplete texts. `what` names the prompt."""
        warnings = []
        if self.fewer:
            returned = f"{len(self.sequences)} of {self.num_return_sequences} sequences"
            warnings.append(f"{what}{returned}: the search found no others (num_return_sequences)")
        for number, sequence in enumerate(self.sequences, 1):
            which = f"sequence {number}: " if len(self.sequences) > 1 else ""
            hypothesis = sequence.hypothesis
            cut = f"cut by {hypothesis.reason} after {count(hypothesis.length, 'token')}"
            if hypothesis.incomplete:
                warnings.append(f"{what}{which}{hypothesis.incomplete}: the text is incomplete, {cut}")
            elif hypothesis.thought_text and hypothesis.thought_cut:
                warnings.append(f"{what}{which}the thought has not ended, so there is no answer: {cut}")
            if sequence.unmet:
                warnings.append(f"{what}{which}the text {sequence.lack} (force_words)")
        return warnings

    @property
    def remarks(self) -> dict[str, Any]:
        """Additional fields of its records."""
        remarks: dict[str, Any] = {"backend": self.backend, "exact": False} if self.backend else {}
        remarks |= {"truncated": self.truncated} if self.truncated else {}
        remarks |= self.languages
        if self.fewer:
            remarks |= {"returned": len(self.sequences), "num_return_sequences": self.num_return_sequences}
        return remarks

    @property
    def text(self) -> str:
        """The first sequence's text. Raises IndexError if the lane failed."""
        return self.sequences[0].text


def _brief(text: str) -> str:
    """The beginning of a text, on one line."""
    return repr(text if len(text) <= REPR_LETTERS else f"{text[: REPR_LETTERS - 1]}…")


class Collector:
    """Collects events into Results, one for each finished lane. The cost of an event depends only on its step."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneHistory] = {}
        self._steps: dict[str, list[events.Stepped]] = {}  # by lane: steps that its history does not include yet

    def feed(self, event: events.Event) -> Result | None:
        """Take one event. Returns the result of the lane that it completes, if any."""
        if isinstance(event, events.Stepped):
            self._steps.setdefault(event.lane, []).append(event)
            return None
        if isinstance(event, (events.Loading, events.CacheRead)):
            return None
        lane = self._lanes[event.lane] = self._lane(event.lane).after(event)
        if isinstance(event, (events.Finished, events.Failed)):
            del self._lanes[event.lane]
            return _finished(lane, event) if isinstance(event, events.Finished) else _result(lane, [], error=event)
        return None

    def _lane(self, name: str) -> LaneHistory:
        """The whole history of a lane."""
        lane = self._lanes.get(name) or LaneHistory(name)
        steps = self._steps.pop(name, ())
        return lane.after_all(steps) if steps else lane

    def unfinished(self, *, texts: bool = True) -> list[Result]:
        """Results so far of lanes that are not done; live rows end as interrupted, as in the loop.

        For a run that ends while the model is still computing. Without a tokenizer `texts` is False.
        """
        results = []
        for name in dict.fromkeys([*self._lanes, *self._steps]):
            lane = self._lanes[name] = self._lane(name)
            sequences = [_sequence(path.hypothesis, path) for path in lane.ended]
            sequences += [_sequence(_cut(lane, path, texts), path) for path in lane.rows if lane.steps]
            sequences.sort(key=lambda sequence: (sequence.hypothesis.slot or 0, -sequence.hypothesis.score))
            count = 0 if lane.prefilled is None else lane.prefilled.prompt_tokens
            if sequences:
                returned = sequences[: int(_setting(lane, "num_return_sequences", 1))]
                results.append(_result(lane, returned, prompt_tokens=count))
        return results


def _setting(lane: LaneHistory, name: str, default: float | str) -> Any:
    return default if lane.began is None else lane.began.settings.get(name, default)


def _sequence(hypothesis: events.Hypothesis, path: Path) -> Sequence:
    return Sequence(hypothesis, tuple(path.tokens()), path.parents)


def _finished(lane: LaneHistory, event: events.Finished) -> Result:
    ended = {(path.hypothesis.tokens, path.slot): path for path in lane.ended}

    def with_tokens(hypotheses: Iterable[events.Hypothesis]) -> list[Sequence]:
        return [
            _sequence(hypothesis, ended.get((hypothesis.tokens, hypothesis.slot), ROOT)) for hypothesis in hypotheses
        ]

    return _result(
        lane,
        with_tokens(event.hypotheses),
        others=tuple(with_tokens(event.others)),
        prompt_tokens=event.prompt_tokens,
        decode_s=event.seconds,
        first_token_s=event.first_token_s,
        forwards=event.forwards,
        num_return_sequences=int(_setting(lane, "num_return_sequences", 1)),
    )


def _result(lane: LaneHistory, sequences: list[Sequence], **more: Any) -> Result:
    began, prefilled = lane.began or events.Began(lane.lane, "", ""), lane.prefilled
    return Result(
        began.lane,
        began.prompt,
        began.strategy,
        began.seed,
        began.model,
        tuple(sequences),
        prefill_s=0.0 if prefilled is None else prefilled.seconds,
        reused=0 if prefilled is None else prefilled.reused,
        drafted=lane.drafted,
        accepted=lane.accepted,
        truncated=int(_setting(lane, "truncated", 0)),
        backend=str(_setting(lane, "backend", "")),
        prompt_ids=began.prompt_ids,
        languages={name: str(value) for name, value in began.settings.items() if name in ("src_lang", "tgt_lang")},
        **more,
    )


def _cut(lane: LaneHistory, path: Path, texts: bool) -> events.Hypothesis:
    """A live row as an interrupted sequence."""
    row = path.live
    score = row.total / max(path.length, 1) ** float(_setting(lane, "length_penalty", 1.0))
    text = path.text() if texts else ""
    return events.Hypothesis(path.ids, row.logprob, row.total, "interrupted", score, row.slot, "", text)
