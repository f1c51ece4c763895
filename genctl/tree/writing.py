"""The commands that need the model or change the settings; moves are in `token_tree`.

The tokens are those that `genctl run` writes for the same ids, settings and seed, with the branch as its prompt; only
the text of a grammar begins after the prompt of the tree.

`expand` is a best-first search: of all incomplete texts, it always continues the most probable one first. A text is
never more probable than its prefixes, so complete texts come out in order, and no continuation that is left out is
more probable than one that is found. A text after which the processors leave no token is a dead end: it has
probability 0, and comes last.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genctl.config import presets
from genctl.decode.processors import Processor, trace
from genctl.engines.protocol import Flow, Report, Request
from genctl.errors import GenctlError, InputError, ModelError, PresetError, UsageError
from genctl.events import Began, Ended, Failed, Stepped, Token
from genctl.events.results import Collector
from genctl.events.results import Sequence as TokenSequence
from genctl.io.output import open_beside
from genctl.params import knobs
from genctl.tree.commands import (
    Alternative,
    BranchText,
    Continuation,
    Covered,
    Result,
    Saved,
    Settings,
    Shown,
    TokenWritten,
    Why,
    Wrote,
)
from genctl.tree.explorer import Explorer
from genctl.tree.scores import Distribution, processed_logprobs
from genctl.tree.token_tree import At

_ERRORS: dict[str, type[GenctlError]] = {"model": ModelError, "usage": UsageError}


def generate(explorer: Explorer, n: int | None) -> Iterator[Result]:
    """Continue a branch with the current settings."""
    yield from _write(explorer, [_with(explorer.tree.settings, max_new_tokens=n)])


def take(explorer: Explorer, token: int | str, n: int | None) -> Iterator[Result]:
    """Write a token that was chosen by hand, then generate up to `n` more; none if `n` is 0."""
    from genctl.models.tokenizer_alone import watched_ids

    distribution = explorer.distribution(explorer.tree.cursor)
    if isinstance(token, int):
        if token > len(distribution):
            raise UsageError(f"rank {token}: the model has {len(distribution)} tokens")
        id = int(distribution.order[token - 1])
    else:
        try:
            id = watched_ids(explorer.session.loaded, [token])[0]
        except UsageError as error:
            raise UsageError(error.message.replace("--watch", "take"), hint=error.hint) from None
        if id >= len(distribution):
            raise UsageError(f"take id:{id}: the model writes the ids 0 to {len(distribution) - 1}")
    stops = n == 0 or id in explorer.session.forward.eos
    yield from _write(explorer, [] if stops else [_with(explorer.tree.settings, max_new_tokens=n)], (id,))


def sample(explorer: Explorer, k: int, n: int | None) -> Iterator[Result]:
    """Sample `k` continuations as one batch, each with its own seed."""
    values = _with(explorer.tree.settings, max_new_tokens=n)
    if not explorer.resolved(values).generation.do_sample:
        values |= {"do_sample": True}
    if explorer.resolved(values).generation.temperature == 0.0:
        raise UsageError("sample draws tokens, and temperature = 0 takes the best one", hint="set temperature=1")
    yield from _write(explorer, [values] * k)


def beams(explorer: Explorer, k: int, n: int | None) -> Iterator[Result]:
    """The `k` best continuations of a beam search, the best first."""
    sampling = {key for key, knob in knobs().items() if knob.metadata["sampling"]} | {"do_sample"}
    own = {key: value for key, value in explorer.tree.settings.items() if key not in sampling}
    found = _with(own, max_new_tokens=n, num_beams=k, num_return_sequences=k, do_sample=False)
    if not explorer.base.generation.do_sample:
        del found["do_sample"]
    yield from _write(explorer, [found])


def expand(explorer: Explorer, mass: float, depth: int, nodes: int | None = None) -> Iterator[Result]:
    """Yield a Continuation for each text that ends, or has `depth` tokens, until `mass` is covered; then Covered.

    If the mass is not reached, dead ends come before Covered: they hold part of the rest. `nodes` bounds the texts that
    are continued, each a row of a forward pass. Raises ModelError for logits that are no distribution.
    """
    start = explorer.tree.cursor
    search = BestFirst(explorer, start, depth, MOST if nodes is None else nodes)
    first = None
    covered, count, reason = 0.0, 0, ""
    explorer.begin_step()
    for written, total in chain(search.texts(), ((dead, -math.inf) for dead in search.dead)):
        node = start
        logprob = 0.0
        for token in written:
            logprob += token.logprob
            result = explorer.write(node, token, "expand", None, start)
            node = result.token.node
            if not result.known:
                yield TokenWritten(result.token)
        first = node if first is None else first
        covered += math.exp(total)
        dead = total == -math.inf
        count += not dead
        ids, text = tuple(token.id for token in written), explorer.text(node, start)
        yield Continuation(node, ids, text, logprob, total, covered, ids[-1:] in search.ends, dead)
        reason = explorer.stop_reason()
        if reason or (mass < 1.0 and covered >= mass):
            break
    explorer.move(start, explorer.tree.tip if first is None else first)
    if not reason and search.exhausted:
        reason = f"{search.read} texts were continued, which is the most"
    yield Covered(covered, count, search.read, not reason, reason, len(search.dead))


def edit(explorer: Explorer, text: str) -> Iterator[Result]:
    """Write a typed text."""
    from genctl.models.text import check_ids, continuation

    loaded = explorer.session.loaded
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer, so a text cannot be typed", hint="take id:N takes a token")
    ids = tuple(continuation(loaded.tokenizer, text))
    check_ids(ids, explorer.session.forward.vocab_size)
    explorer.begin_step()
    yield from explorer.write_given(explorer.tree.cursor, ids, "edit")


def _with(values: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return dict(values) | {key: value for key, value in more.items() if value is not None}


def _write(explorer: Explorer, entries: Sequence[dict[str, Any]], given: tuple[int, ...] = ()) -> Iterator[Result]:
    """Begin a step: write the `given` tokens, then decode one generation per entry of settings, as a batch."""
    tree, before = explorer.tree, explorer.tree.cursor
    resolved = [explorer.resolved(values) for values in entries]
    if len(entries) > 1 and any(one.generation.is_beam_search for one in resolved):
        raise UsageError("sample draws plain samples, and num_beams is set", hint="set num_beams=1, or beams")
    requests = [
        explorer.request(str(number), before, one, explorer.seed(number), given)
        for number, one in enumerate(resolved, tree.runs + 1)
    ]
    if requests:
        explorer.session.planner.plan(requests[0], Report())  # raises errors before anything is written
    explorer.begin_step(len(requests))
    start = before
    for written in explorer.write_given(before, given, "take"):
        start = written.token.node
        yield written
    if not requests or explorer.stop_reason():
        return
    ends: list[int] = []
    for result in _streamed(explorer, requests, start):
        if isinstance(result, Wrote):
            ends.append(result.node)
        yield result
    if len(ends) > 1:  # follow the best, or the first sample; the cursor stays at the fork
        explorer.move(start, ends[0])
    elif not ends:
        explorer.move(before, tree.tip)


def _streamed(explorer: Explorer, requests: Sequence[Request], start: int) -> Iterator[Result]:
    """Run generations after a node, and yield their tokens as they are written.

    Independent rows are written token by token, the results of a search when it is done.
    """
    collector, seeds = Collector(), dict[str, int | None]()
    ends: dict[tuple[str, int | None], int] = {}  # last nodes of independent rows, by lane and slot
    flow = Flow(len(requests), interrupted=explorer.stop_reason)
    with closing(explorer.session.stream(iter(requests), Report(scores=True), flow)) as stream:
        for event in stream:
            if isinstance(event, Failed):
                raise _ERRORS.get(event.code, InputError)(event.message, hint=event.hint)
            if isinstance(event, Began):
                seeds[event.lane] = event.seed
            elif isinstance(event, Stepped):
                for each in event.children:
                    slot = each.hypothesis.slot if isinstance(each, Ended) else each.slot
                    for token in () if slot is None else each.written:
                        row = event.lane, slot
                        written = explorer.write(ends.get(row, start), token, "generate", seeds[event.lane], start)
                        ends[row] = written.token.node
                        yield written
            if (result := collector.feed(event)) is not None:
                for sequence in result.sequences:
                    yield from _ended(explorer, sequence, result.seed, start)


def _ended(explorer: Explorer, sequence: TokenSequence, seed: int | None, start: int) -> Iterator[Result]:
    """Yield a result of a generation after a node. The tokens of a search are only written now."""
    hypothesis, node = sequence.hypothesis, start
    for token in sequence.tokens if hypothesis.slot is None else ():
        written = explorer.write(node, token, "generate", seed, start)
        node = written.token.node
        yield written
    node = start
    for id in hypothesis.tokens:
        child = explorer.tree.child(node, id)
        if child is None:
            break
        node = child
    score = hypothesis.score if hypothesis.slot is None else None
    yield Wrote(node, start, hypothesis.reason, explorer.text(node, start), hypothesis.logprob, seed, score)


# -- expand: best first ------------------------------------------------------------------------------------------------

MOST = 1000  # texts that are continued by default
ROWS = 16  # per forward pass
NEAR = math.log(10.0)  # siblings that are at least a tenth as probable share the pass
BLOCK = 1024  # next tokens of a text that are held at a time


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text that was read, with a block of its next tokens, the most probable first."""

    written: tuple[Token, ...]  # after the start
    total: float  # log-probability by the distribution that is expanded
    begin: int  # where the block begins in the order of all tokens
    ids: NDArray[np.int64]
    totals: NDArray[np.float64]  # log-probability of each token, after the processors
    logprobs: NDArray[np.float64]  # the model's own
    ranks: NDArray[np.int64]
    entropy: float
    more: bool  # whether further tokens are possible

    def child(self, place: int) -> tuple[tuple[Token, ...], float]:
        """The text with one more token, and its log-probability."""
        token = Token(
            int(self.ids[place]), float(self.logprobs[place]), rank=int(self.ranks[place]), entropy=self.entropy
        )
        return (*self.written, token), self.total + float(self.totals[place])


class BestFirst:
    """Best-first search of the texts after a node."""

    def __init__(self, explorer: Explorer, start: int, depth: int, most: int) -> None:
        self.explorer, self.start, self.depth, self.most = explorer, start, depth, most
        resolved = explorer.resolved()
        request = explorer.request("", start, resolved, explorer.seed(explorer.tree.runs + 1))
        lane = explorer.session.planner.plan(request, Report()).lane
        self.processors: Sequence[Processor] = lane.processors
        if resolved.generation.ban:
            words = "expand only goes forward, and ban takes back what was written"
            raise UsageError(words, hint="leave out one of them")
        self.resolved = resolved
        self.eos, self.logprobs = lane.eos, lane.strategy.traits.space == "logprobs"
        self.ends = {(id,) for id in lane.eos}
        self.read = 0  # texts that were continued
        self.exhausted = False  # whether `most` texts were continued
        self._read: dict[tuple[int, ...], ReadText] = {}  # read in the pass of a sibling, not needed yet
        self.dead: list[tuple[Token, ...]] = []  # texts that nothing can follow

    def texts(self) -> Iterator[tuple[tuple[Token, ...], float]]:
        """The complete texts and their log-probabilities, the most probable first; ties by token ids."""
        heap: list[tuple[float, tuple[int, ...], int, ReadText]] = []

        def push(text: ReadText, place: int) -> None:
            if not text.begin and not len(text.ids):
                self.dead.append(text.written)
            if place == len(text.ids) and text.more:
                text, place = self._continued(text), 0
            if place < len(text.ids):
                written, total = text.child(place)
                heapq.heappush(heap, (-total, tuple(token.id for token in written), place, text))

        push(self._block((), 0.0, self.explorer.branches.scores(self.start), 0), 0)
        self.read += 1
        while heap:
            _, ids, place, parent = heapq.heappop(heap)
            written, total = parent.child(place)
            if ids[-1] in self.eos or len(ids) == self.depth:
                yield written, total
            elif ids in self._read or self.read < self.most:
                push(self._text(ids, parent, place), 0)
            else:
                self.exhausted = True
                return
            push(parent, place + 1)

    def _text(self, ids: tuple[int, ...], parent: ReadText, place: int) -> ReadText:
        """Read a text, and siblings of similar probability, in one forward pass."""
        if ids not in self._read:
            least = float(parent.totals[place]) - NEAR
            rows: list[tuple[tuple[int, ...], int]] = []
            for other in range(place, len(parent.ids)):
                sibling = (*ids[:-1], int(parent.ids[other]))
                if parent.totals[other] < least or len(rows) == min(ROWS, self.most - self.read):
                    break
                if sibling[-1] not in self.eos and sibling not in self._read:
                    rows.append((sibling, other))
            scores = self.explorer.branches.continuations(self.start, [sibling for sibling, _ in rows])
            self.read += len(rows)
            for (sibling, other), logits in zip(rows, scores, strict=True):
                self._read[sibling] = self._block(*parent.child(other), logits, 0)
        return self._read.pop(ids)

    def _continued(self, text: ReadText) -> ReadText:
        """The next block of tokens after a text; the text is read again."""
        ids = tuple(token.id for token in text.written)
        branches = self.explorer.branches
        logits = branches.continuations(self.start, [ids])[0] if ids else branches.scores(self.start)
        return self._block(text.written, text.total, logits, text.begin + BLOCK)

    def _block(self, written: tuple[Token, ...], total: float, logits: torch.Tensor, begin: int) -> ReadText:
        device = self.explorer.session.forward.device
        given = [token.id for token in written]
        self.explorer.check_finite(logits, self.start, given, self.resolved)
        own = logits.double().log_softmax(-1)
        processed = own
        if self.processors:
            history = torch.tensor([[*self.explorer.tree.ids(self.start), *given]], device=device)
            scores = logits[None].to(device)
            scores = scores.log_softmax(-1) if self.logprobs else scores
            try:
                scores = trace.run_checked(self.processors, history, scores)
            except GenctlError:  # no token is left; otherwise running one processor at a time names the fault
                scores, _ = trace.run_traced(self.processors, history, scores, may_end=True)
            processed = processed_logprobs(scores[0]).cpu()
        values = processed.numpy()
        possible = int((values > -np.inf).sum())
        order = np.argsort(-values, kind="stable")[begin : min(begin + BLOCK, possible)]
        model = own.numpy()
        ranks = len(model) - np.searchsorted(np.sort(model), model[order], side="right") + 1
        entropy = float(torch.special.entr(own.exp()).numpy().sum())
        more = begin + len(order) < possible
        return ReadText(written, total, begin, order, values[order], model[order], ranks, entropy, more)


# -- commands that write no token ------------------------------------------------------------------------------------

FOUND = 20  # tokens that `find` lists


def undo(explorer: Explorer) -> Iterator[At]:
    """Undo the last step."""
    note = "" if explorer.tree.steps else "nothing is left to undo"
    if not note:
        explorer.undo()
    yield replace(explorer.tree.at, note=note)


def set_knob(explorer: Explorer, key: str, value: Any) -> Iterator[Settings]:
    """Change a setting of later commands."""
    yield _set(explorer, {**explorer.tree.settings, key: value})


def preset(explorer: Explorer, name: str) -> Iterator[Settings]:
    """Replace the settings by those of a preset."""
    values: dict[str, Any] = {}
    for layer in presets.load([name]):
        for error in layer.broken:
            raise error
        values |= layer.values
    yield _set(explorer, {key: value for key, value in values.items() if key != "about"})


def _set(explorer: Explorer, values: dict[str, Any]) -> Settings:
    try:
        resolved = explorer.resolved(values)
    except PresetError as error:
        raise UsageError(error.message, hint=error.hint) from None
    explorer.session.plan(resolved)
    explorer.begin_step(settings=values)
    return Settings(values)


def show(explorer: Explorer, n: int) -> Iterator[Shown]:
    """The n most probable tokens at the cursor."""
    found = explorer.distribution(explorer.tree.cursor)
    yield _shown(explorer, found, [found.of(id) for id in found.order[:n].tolist()])


def find(explorer: Explorer, text: str) -> Iterator[Shown]:
    """The tokens at the cursor that have this text, FOUND at most."""
    found = explorer.distribution(explorer.tree.cursor)
    yield _shown(explorer, found, list(islice(found.containing(text), FOUND)))


def _shown(explorer: Explorer, found: Distribution, listed: list[Alternative]) -> Shown:
    """List tokens of a distribution, with their nodes in the tree and the effect of each processor."""
    mass = float(np.exp(np.array([each.logprob for each in listed], np.float64)).sum())
    placed = (replace(each, node=explorer.tree.child(found.node, each.id)) for each in listed)
    return Shown(found.node, found.entropy, mass, tuple(placed), found.why(int(found.order[0])), found.after_eos)


def why(explorer: Explorer) -> Iterator[Why]:
    """What each processor did to the token under the cursor; at the end of a branch, to the most probable one."""
    distribution, under = explorer.distribution(explorer.tree.cursor), explorer.tree.under()
    id = int(distribution.order[0]) if under is None else explorer.tree.nodes[under].id
    yield Why(distribution.of(id), distribution.why(id), distribution.after_eos)


def text(explorer: Explorer) -> Iterator[BranchText]:
    """The text of the branch."""
    tip = explorer.tree.tip
    yield BranchText(tip, explorer.text(tip), explorer.tree.opened.prompt)


def save(explorer: Explorer, name: str) -> Iterator[Saved]:
    """Save the tree to a new file, without undone steps; later changes are appended there. Raises OutputError."""
    if name == "-":
        raise UsageError("a tree is a file that is read again; give it a name")
    explorer.save(open_beside(Path(name)))
    yield Saved(name)
