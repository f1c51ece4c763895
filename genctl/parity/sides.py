"""A side that runs here: reads given texts and writes its own, with its own runtime settings.

`tapped` also records the output of each layer, which the forward pass of either runtime reports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from genctl import events
from genctl.config.layers import Resolved
from genctl.decode.loop import decode
from genctl.decode.runtime import Output, Pass
from genctl.decode.types import Choice, Context, Lane, Scores, Search, Sources, Traits
from genctl.engines.protocol import Flow, Report, Request, never
from genctl.engines.session import Session
from genctl.errors import GenctlError
from genctl.events.results import Collector
from genctl.params import MOST_DRAFTED, Generation, Runtime
from genctl.parity.values import ENCODER, Text

# -- a strategy that writes given tokens and hands out the logits before each: a text is read as a run would write it


Observe: TypeAlias = Callable[[int, Tensor], None]  # index of a token, logits f32 [V] before it


@dataclass(frozen=True)
class Forced:
    """Write `given`, whatever the scores (teacher forcing, Williams and Zipser 1989).

    With `drafted` above 0 the tokens come as drafts of that length, the last token of each wrong: a pass then reads
    several tokens and the cache drops one, as in speculative decoding.
    """

    given: tuple[int, ...]
    observe: Observe
    drafted: int = 0

    kind: ClassVar[str] = "forced"
    max_rows: ClassVar[int] = 1
    length_penalty: ClassVar[float] = 1.0

    @property
    def traits(self) -> Traits:
        return Traits("raw", drafts=self.drafted > 0, independent=True)

    def search(self, scores: Scores, context: Context) -> Search:
        row = torch.zeros(1, dtype=torch.long, device=scores.raw.device)
        index, right = 0, 0  # the first `right` tokens of the draft are correct
        while True:
            for place in range(right + 1):
                self.observe(index + place, scores.raw[0, place])
            token, accepted = self.given[index + right], right
            index += right + 1
            room = min(self.drafted, len(self.given) - index - 1)  # the pass that checks a draft writes one more token
            if room > 0:
                room = int(min(room, context.model.draft_room(scores.rows.prompt_len + index)))
            draft = list(self.given[index : index + max(room, 0)])
            if draft:
                draft[-1] = (draft[-1] + 1) % int(scores.raw.shape[-1])
            right = max(len(draft) - 1, 0)
            tried = row.new_tensor(draft)[None, None] if draft else None
            scores = yield Choice(row, row.new_tensor([token]), accepted=accepted, draft=tried)


ReceiveLogits: TypeAlias = Callable[[int, int, Tensor], None]  # index of a text, index of a token, logits f32 [V]
LARGEST = 2**20  # logits of a pass over a whole text, which has at least LEAST tokens: 8 MiB in float64
LEAST, LONGEST = 16, 128  # tokens of such a pass: with logits, and without
IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id")


def greedy(resolved: Resolved, kept: Iterable[str], **changes: Any) -> Resolved:
    """The same settings for greedy decoding: only `kept` and `changes` may influence the choice of tokens."""
    values = {name: getattr(resolved.generation, name) for name in (*kept, *IDS)}
    return replace(resolved, generation=Generation(**{**values, **changes}), processors=None, stopping=None)


def prompt_of(lane: Lane) -> tuple[int, ...]:
    """The prompt that a lane reads: for an encoder-decoder, the source."""
    return lane.tokens if lane.source is None else lane.source


class LocalSide:
    """A session with the settings of a side.

    `width` texts are read at once. A `whole` side reads only by `whole_text` and `together`, not step by step.
    """

    def __init__(self, name: str, session: Session, resolved: Resolved, *, width: int = 1, whole: bool = False) -> None:
        self.name, self.session, self.resolved = name, session, resolved
        self.width, self.whole = width, whole

    @property
    def vocabulary(self) -> int:
        """Entries of a distribution."""
        return self.session.forward.vocab_size

    @property
    def drafted(self) -> int:
        """Tokens of a draft, if the side speculates; else 0."""
        generation = self.resolved.generation
        if generation.prompt_lookup_num_tokens:
            return int(generation.prompt_lookup_num_tokens)
        if generation.assistant_model or generation.assistant_early_exit:
            return int(generation.num_assistant_tokens or MOST_DRAFTED)
        return 0

    def loaded_again(self, runtime: Runtime) -> Session:
        """A new session, loaded like the side's but with `runtime`."""
        flags = {name: value for name, value in self.session.planner.flags.items() if name != "on_event"}
        return Session.load(runtime, **flags, threads=self.session.threads)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(
        self, texts: Sequence[Text], receive: ReceiveLogits, *, interrupted: Callable[[], str] = never
    ) -> dict[str, str]:
        """Hand out the logits before every token of every text, in any order. Returns the texts that it cannot read."""
        self._use_threads()
        failed: dict[str, str] = {}
        lanes = self._lanes(texts, receive, failed)
        session = self.session
        for event in decode(session.forward, lanes, width=self.width, interrupted=interrupted, texts=session.texts):
            if isinstance(event, events.Failed):
                failed[texts[int(event.lane)].id] = event.message
        return failed

    def _lanes(self, texts: Sequence[Text], receive: ReceiveLogits, failed: dict[str, str]) -> Iterator[Lane]:
        for place, text in enumerate(texts):
            if not text.token_ids:
                continue
            try:
                lane = self._lane(text)
            except GenctlError as error:
                failed[text.id] = error.message
                continue
            forced = Forced(text.token_ids, partial(receive, place), self.drafted)
            yield replace(lane, name=str(place), strategy=forced, max_new_tokens=len(text.token_ids))

    def _lane(self, text: Text) -> Lane:
        """The lane of a text's prompt, with its cache, and without processors or stops."""
        lane = self.session.planner.plan(Request(text.id, self.resolved, 0, prompt_ids=text.prompt_ids), Report()).lane
        lane = replace(lane, processors=(), criteria=(), eos=(), returned=1)
        return replace(lane, tokens=text.prompt_ids) if lane.source is None else replace(lane, source=text.prompt_ids)

    def together(self, texts: Sequence[Text]) -> list[Tensor]:
        """Logits [T, V] before the tokens of each text, read in one batch: padding at the end does not change them."""
        rows = [[*self._lane(text).tokens, *text.token_ids][:-1] for text in texts]
        longest = max(map(len, rows))
        feed = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=self.session.forward.device)
        sizes = [len(text.token_ids) for text in texts]
        begin = min(len(row) - size for row, size in zip(rows, sizes, strict=True))
        logits = self.session.forward(Pass(feed, None, first=True, keep=longest - begin)).logits
        return [
            each[len(row) - size - begin : len(row) - begin]
            for each, row, size in zip(logits, rows, sizes, strict=True)
        ]

    def whole_text(self, text: Text, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Each `wanted` index of a text with the logits before its token, in as few passes as memory allows."""
        from genctl.engines.score_passes import Passes

        if not wanted:
            return
        forward = self.session.forward
        lane = self._lane(text)
        first = len(lane.tokens) - 1  # this position has the logits of the first token
        places = [first + index for index in wanted]
        end = places[-1] + 1
        feed = torch.tensor([[*lane.tokens, *text.token_ids][:end]], device=forward.device)
        sources = None if lane.source is None else Sources(forward.encode(lane.source).states, None, None)
        most = max(LARGEST // forward.vocab_size, LEAST)
        longest = max(most, LONGEST)
        skipped = max(places[0] + most - longest, 0) // longest * longest  # read in passes of their own
        begins = [*range(0, skipped + 1, longest), *range(places[0] + most, end, most)]
        cache = None
        if len(begins) > 1 and sources is None and Passes(forward, batch_size=1).continues:
            cache = forward.new_cache(room=end)
        else:
            begins = [0]
        for begin, stop in pairwise([*begins, end]):
            own = [place for place in places if begin <= place < stop]
            keep = stop - own[0] if own else 1
            given = Pass(feed[:, begin:stop], cache, sources=sources, first=begin == 0, keep=keep)
            logits = forward(given).logits[0]
            yield from ((place - first, logits[place - stop]) for place in own)

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(
        self, requests: Sequence[Request], *, interrupted: Callable[[], str] = never
    ) -> tuple[list[Text], dict[str, str]]:
        """The texts that the side writes on its own (the first sequence of each), and why others are missing, by id."""
        self._use_threads()
        collector, texts, failed = Collector(), dict[str, Text](), dict[str, str]()
        wanted = {request.id: request for request in requests}
        for event in self.session.stream(requests, Report(), Flow(self.width, interrupted=interrupted)):
            result = collector.feed(event)
            if result is not None and result.error is not None:
                failed[result.lane] = result.error.message
            elif result is not None and result.sequences:
                request = wanted[result.lane]
                prompt = prompt_of(self.session.planner.plan(request, Report()).lane)
                tokens = tuple(result.sequences[0].token_ids)
                texts[request.id] = Text(request.id, prompt, tokens, request.prompt or "", request.name)
        return [texts[request.id] for request in requests if request.id in texts], failed

    def _use_threads(self) -> None:
        """Use as many threads as a run does."""
        self.session.use_threads(self.session.plan(self.resolved).rows * self.width)


# -- outputs of the layers ---------------------------------------------------------------------------------------------

LOGITS = 4096  # entries of a distribution that are compared, evenly spaced


@dataclass(frozen=True)
class Sublayer:
    """A part of a model. Parts of two models match if all but their names are equal."""

    layer: int | None  # None: before the first layer, or after the last
    sublayer: str  # embedding, layer, head; prefixed with ENCODER for outputs of an encoder
    name: str = field(compare=False)

    @property
    def of_encoder(self) -> bool:
        """Whether its positions are those of a source."""
        return self.sublayer.startswith(ENCODER)


Outputs: TypeAlias = dict[Sublayer, Tensor]  # [positions, E] of each part


@dataclass
class Taps:
    """Outputs of each part at the last `count` positions of a text that is read alone."""

    count: int
    passes: dict[Sublayer, list[Tensor]] = field(default_factory=dict)  # [F, E] each, pass by pass
    inside: bool = False  # within a pass, which may consist of others

    def receive(self, part: Sublayer, output: Tensor) -> None:
        """Record the output [F, E] of a part."""
        self.passes.setdefault(part, []).append(output[-self.count :].detach().cpu().clone())

    def receive_logits(self, logits: Tensor) -> None:
        """Record evenly spaced ones of the logits [V] at a position."""
        some = logits.detach()[:: -(-len(logits) // LOGITS)].double()
        some = some.where(some.isfinite(), 0.0)  # some models forbid tokens by -inf
        self.receive(Sublayer(None, "head", "logits"), some[None])

    def outputs(self) -> Outputs:
        """The outputs of all parts at the last `count` positions; a source may have fewer."""
        found = {part: torch.cat(passes)[-self.count :] for part, passes in self.passes.items()}
        return {part: output for part, output in found.items() if part.of_encoder or len(output) == self.count}


@contextmanager
def tapped(session: Session, count: int) -> Iterator[tuple[Session, Taps]]:
    """A session that reads like the given one, and the outputs of its parts at the last `count` positions."""
    taps, kind = Taps(count), type(session.forward)

    class Tapped(kind):  # type: ignore[misc, valid-type]
        """A runtime whose passes report the states of all layers, which are recorded."""

        def __call__(self, given: Pass) -> Output:
            is_part, taps.inside = taps.inside, True
            output: Output = super().__call__(replace(given, hidden=True))
            taps.inside = is_part
            layers = () if is_part or output.layers is None else output.layers
            for number, states in enumerate(layers, -1):
                place = (None, "embedding", "embeddings") if number < 0 else (number, "layer", f"layers.{number}")
                taps.receive(Sublayer(*place), states[0])
            return output

        def encode(self, ids: Sequence[int]) -> Any:
            source = super().encode(ids)
            taps.receive(Sublayer(None, f"{ENCODER}states", "encoder"), source.states[0])
            return source

    twin: Any = copy.copy(session)
    twin.forward = Tapped.__new__(Tapped)
    vars(twin.forward).update(vars(session.forward))  # a copy that records
    yield twin, taps
