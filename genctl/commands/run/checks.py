"""`--check-runtime` and `--check-batch`: what a run decodes, compared by `genctl.parity` with other ways to decode it.

Parity compares forward passes on given texts. That a batch gives other tokens than each prompt alone is a difference
of any strategy, so for --check-batch each prompt is decoded again; parity then says whether rounding explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from genctl import events
from genctl.commands.run.options import RunOptions
from genctl.engines.protocol import Engine, Flow, Report, Request, Skipped, grouped
from genctl.errors import CheckError, GenctlError, ModelError, UsageError, count
from genctl.results import Collector, Result
from genctl.results import Sequence as Decoded
from genctl.sequences import shared_length

if TYPE_CHECKING:
    from genctl.engines.local.session import Session
    from genctl.parity.values import Position

Requests = Iterator["Request | Skipped | None"]
COMPARED = 5  # alternatives searched for the other choice
STEPS = 16  # of the first prompt, by both runtimes


class RunChecks:
    """The checks of one run. `say` prints what they find."""

    def __init__(self, options: RunOptions, say: Callable[[str], object]) -> None:
        self.options, self.say = options, say
        self._different = 0  # sequences that depend on their batch
        self._parted: list[Request] = []  # the first batch that has one
        self._compared = False  # the first prompt went through both runtimes
        self._runtime_difference = ""  # what that found, if rounding does not explain it

    def stream(
        self, engine: Engine, requests: Requests, report: Report, flow: Flow
    ) -> Generator[events.Event, None, None]:
        """As `Engine.stream`; with --check-batch the prompts of each batch are then decoded alone."""
        from genctl.engines.local.session import Session

        assert isinstance(engine, Session)  # both checks look into a checkpoint that was loaded here
        if self.options.check_runtime:
            requests = self._with_both_runtimes(engine, requests)
        if not self.options.check_batch:
            yield from engine.stream(requests, report, flow)
            return
        wide = replace(report, top=max(report.top, COMPARED))
        for group in grouped(requests, flow.span or 1):
            while batch := list(islice(group, flow.width)):
                yield from self._batch(engine, batch, wide, flow)
        if self._parted and not flow.interrupted():
            self.say(f"check: the same texts read alone and in a batch: {_explained(engine, self._parted, flow)}")

    def verdict(self) -> None:
        """Raises CheckError where a check failed."""
        if self._runtime_difference:
            raise CheckError(f"--check-runtime: {self._runtime_difference}")
        if self._different:
            differ = count(self._different, "sequence differs", "sequences differ")
            raise CheckError(f"--check-batch: {differ} from what is decoded alone")

    def _with_both_runtimes(self, session: Session, requests: Requests) -> Requests:
        """The same requests; the first prompt goes through both runtimes before it is decoded."""
        for request in requests:
            if isinstance(request, Request) and not self._compared:
                self._compared = True
                found, explained = compare_runtimes(session, request)
                self.say(f"check: {found}")
                self._runtime_difference = "" if explained else found
            yield request

    def _batch(
        self, session: Session, batch: Sequence[Request], report: Report, flow: Flow
    ) -> Generator[events.Event, None, None]:
        """The events of prompts that are decoded together; then each is decoded alone."""
        together: dict[str, Result] = {}
        collector = Collector()
        for event in session.stream(iter(batch), report, Flow(flow.width, interrupted=flow.interrupted)):
            result = collector.feed(event)
            if result is not None:
                together[result.lane] = result
            yield event
        for request in batch:
            batched = together.get(request.id)
            if flow.interrupted() or batched is None or batched.error is not None:
                continue
            again = Collector()
            for event in session.stream(iter([request]), report, Flow(interrupted=flow.interrupted)):
                alone = again.feed(event)
                if alone is not None and alone.error is None:
                    for sentence in differences(batched, alone, str(request.place or request.id)):
                        self._different += 1
                        self._parted = self._parted or [*batch]
                        self.say(f"check: {sentence}")


def differences(batched: Result, alone: Result, prompt: str) -> Iterator[str]:
    """A sentence on the first difference of each sequence, the best sequence first. `prompt` is its name."""
    none = Decoded(events.Hypothesis((), 0.0, 0.0, ""), ())  # for sequences that only one of them has
    pairs = zip_longest(batched.sequences, alone.sequences, fillvalue=none)
    for number, (one, another) in enumerate(pairs, 1):
        if one.token_ids == another.token_ids:
            continue
        at = shared_length(one.token_ids, another.token_ids)
        theirs, own = (each.tokens[at] if at < len(each.tokens) else None for each in (one, another))
        sentence = f"prompt {prompt}, sequence {number}, token {at + 1}: {_named(theirs)} in the batch, "
        sentence += f"{_named(own)} alone"
        if theirs is not None and own is not None:
            known = {own.id: own.logprob, **{token: logprob for token, _, logprob in own.top}}
            if theirs.id in known:
                sentence += f" (gap {known[own.id] - known[theirs.id]:.2e} nats)"
        yield sentence


def _named(token: events.Token | None) -> str:
    return "the end" if token is None else f"{token.id} {token.text!r}"


def _explained(session: Session, batch: Sequence[Request], flow: Flow) -> str:
    """What parity says of the prompts of a batch, read alone and together."""
    from genctl.parity.measure import measure
    from genctl.parity.sides import LocalSide, greedy

    resolved = greedy(batch[0].resolved, ("max_new_tokens", "max_length", "cache_implementation", "use_cache"))
    sides = [LocalSide(name, session, resolved, width=width) for name, width in (("alone", 1), ("batch", flow.width))]
    for side in sides:
        side.threaded = False  # as many threads as the run has
    texts, _ = sides[0].write(batch, interrupted=flow.interrupted)
    one = measure(sides[0], sides[1], texts=texts, interrupted=flow.interrupted)
    return one.sentence


def compare_runtimes(session: Session, request: Request, *, steps: int = STEPS) -> tuple[str, bool]:
    """Feed a request's prompt and the greedy tokens after it to both runtimes. The checkpoint is loaded again.

    Returns what is found, and whether rounding explains it. Raises UsageError if the run is not native, or quantised.
    """
    native, runtime = session.forward, session.planner.runtime
    if native.kind != "native":
        chosen = runtime.runtime == "transformers"
        raise UsageError(
            f"--check-runtime compares the native runtime with transformers' classes, which run {native.name}",
            hint="leave out --runtime transformers" if chosen else "-v says why it does not run natively",
        )
    if runtime.quantize is not None:
        problem = f"--check-runtime and --quantize {runtime.quantize} contradict each other"
        raise UsageError(f"{problem}: rounded weights have other logits")
    from genctl.parity.measure import judge
    from genctl.parity.noise import measure_noise
    from genctl.parity.oracle import Reading
    from genctl.parity.reading import ReadBoth
    from genctl.parity.sides import LocalSide, greedy, prompt_of

    ids = prompt_of(session.planner.plan(request, Report()).lane)
    resolved = greedy(request.resolved, (), max_new_tokens=steps + 1, min_new_tokens=steps + 1)
    again = replace(runtime, runtime="transformers", pack=False, prompt_cache=None)
    loaded = type(session).load(again, **session.planner.flags, threads=session.threads)
    reference, other = LocalSide("transformers", loaded, resolved), LocalSide("native", session, resolved)
    texts, failed = reference.write([Request(request.id, resolved, 0, prompt_ids=ids)])
    with ReadBoth(reference, other, texts) as both:
        positions: list[Position] = []
        both.read(positions.append)
        for message in {**failed, **both.failed}.values():
            raise ModelError(f"--check-runtime: {message}")
        readings = [Reading(texts[0], tuple(range(len(positions))))]
        rows = both.rows(readings)
    difference = float((rows[1] - rows[0]).abs().nan_to_num(0.0).max())  # what both forbid is -inf on both
    largest = float(rows[0].abs().nan_to_num(posinf=0.0).max())
    tokens = count(len(ids), "token")
    sentence = (
        f"largest difference of logits to transformers: {difference:.1e} ({difference / largest:.1e} of the largest "
        f"logit), over a {'source' if session.is_encoder_decoder else 'prompt'} of {tokens} "
        f"and {count(len(positions) - 1, 'step')}"
    )
    equal = not any(position.shift for position in positions)
    try:
        measured = None if equal else measure_noise(reference, other, readings, rows)
    except GenctlError as error:
        return f"{sentence}; rounding could not be measured: {error.message}", False
    verdict, reason = judge(positions, equal, measured)
    return f"{sentence}; {verdict or 'no verdict'}: {reason}", verdict in ("tie", "drift")
