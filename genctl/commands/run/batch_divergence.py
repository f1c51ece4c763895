"""Check whether a batch changes the output of its prompts: each is decoded again alone and compared.

Sums of floating-point numbers depend on their order, and so on the shapes of a batch; in bfloat16 and float16 the best
token of a close decision may change. The first difference is reported with its gap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

from genctl import events
from genctl.engines.local.session import Session
from genctl.engines.protocol import Flow
from genctl.engines.requests import Report, Request
from genctl.results import Collector, Result, Sequence
from genctl.sequences import shared_length

COMPARED = 5  # alternatives searched for the other choice


@dataclass(frozen=True)
class BatchDivergence:
    """Where a sequence decoded in a batch diverges from the one decoded alone."""

    prompt: str  # its place in the input, from 1, or its name
    sequence: int  # from 0
    position: int  # the first new token that differs, from 0
    batched: events.Token | None  # None if the sequence had ended
    alone: events.Token | None
    gap: float | None  # log-probability of the token chosen alone less that of the other, both alone, in nats

    def __str__(self) -> str:
        text = f"prompt {self.prompt}, sequence {self.sequence + 1}, token {self.position + 1}: "
        text += f"{_named(self.batched)} in the batch, {_named(self.alone)} alone"
        return text if self.gap is None else f"{text} (gap {self.gap:.2e} nats)"


def checked(
    session: Session,
    requests: Iterable[Request],
    report: Report,
    *,
    width: int,
    told: Callable[[BatchDivergence], None],
    interrupted: Callable[[], str] = lambda: "",
) -> Generator[events.Event, None, None]:
    """`session.stream`, `width` prompts at a time. After each batch, decodes its prompts alone and passes each
    difference to `told`.

    Yields the events of the batches only.
    """
    waiting = iter(requests)
    wide = replace(report, top=max(report.top, COMPARED))
    while chunk := list(islice(waiting, width)):
        together: dict[str, Result] = {}
        collector = Collector()
        for event in session.stream(chunk, wide, Flow(width, interrupted=interrupted)):
            result = collector.feed(event)
            if result is not None:
                together[result.lane] = result
            yield event
        for request in chunk:
            if interrupted():
                return
            batched = together.get(request.id)
            if batched is None or batched.error is not None:
                continue
            again = Collector()
            for event in session.stream([request], wide, Flow(interrupted=interrupted)):
                alone = again.feed(event)
                if alone is not None and alone.error is None:
                    for divergence in differences(batched, alone, str(request.place or request.id)):
                        told(divergence)


def differences(batched: Result, alone: Result, prompt: str) -> Iterator[BatchDivergence]:
    """The first difference of each sequence, best sequence first. `prompt` is its name in messages."""
    none = Sequence(events.Hypothesis((), 0.0, 0.0, ""), ())  # for sequences that only one of them has
    pairs = zip_longest(batched.sequences, alone.sequences, fillvalue=none)
    for number, (batched_sequence, alone_sequence) in enumerate(pairs):
        if batched_sequence.token_ids != alone_sequence.token_ids:
            yield _first(prompt, number, batched_sequence, alone_sequence)


def _first(prompt: str, number: int, batched: Sequence, alone: Sequence) -> BatchDivergence:
    position = shared_length(batched.token_ids, alone.token_ids)
    from_batch = batched.tokens[position] if position < len(batched.tokens) else None
    own = alone.tokens[position] if position < len(alone.tokens) else None
    gap = None
    if from_batch is not None and own is not None:
        known = {own.id: own.logprob, **{token: logprob for token, _, logprob in own.top}}
        gap = known[own.id] - known[from_batch.id] if from_batch.id in known else None
    return BatchDivergence(prompt, number, position, from_batch, own, gap)


def _named(token: events.Token | None) -> str:
    return "the end" if token is None else f"{token.id} {token.text!r}"
