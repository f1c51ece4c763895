"""The commands that write: the decode loop continues a branch, with what the cache has of it.

The branch is the prompt, so the tokens are those that `genctl run` writes for the same ids, settings and seed; but the
text of a grammar goes on where an earlier command left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.config.layers import Resolved
from genctl.engines.protocol import Flow, Report, Request
from genctl.errors import GenctlError, InputError, ModelError, UsageError
from genctl.events import Began, Ended, Failed, Finished, Hypothesis, Row, Stepped, Token, advance
from genctl.params import knobs
from genctl.tree.nodes import ROOT
from genctl.tree.results import Result, Searching, TokenWritten, Wrote
from genctl.tree.workspace import Workspace

if TYPE_CHECKING:
    from genctl.tree.explorer import Explorer

_ERRORS: dict[str, type[GenctlError]] = {"model": ModelError, "usage": UsageError}


@dataclass(frozen=True)
class Run:
    """One generation: where it begins, its number in the tree, and its settings."""

    number: int
    start: int
    settings: int
    resolved: Resolved
    seed: int


def generate(explorer: Explorer, n: int | None) -> Iterator[Result]:
    """Continue a branch with the current settings."""
    yield from _write(explorer, [_with(explorer.tree.knobs, max_new_tokens=n)])


def take(explorer: Explorer, token: int | str, n: int | None) -> Iterator[Result]:
    """A token that is chosen by hand, and what follows it: `n` tokens, none if that is 0."""
    space, id = explorer.space, _token(explorer.space, token)
    stops = n == 0 or id in space.session.forward.eos
    values = _with(space.tree.knobs, max_new_tokens=n, token_healing=False)
    if not space.resolved().generation.token_healing:
        del values["token_healing"]
    yield from _write(explorer, [] if stops else [values], (id,))


def _token(space: Workspace, token: int | str) -> int:
    """The id of a rank, of id:N, or of a text that is one token."""
    distribution = space.distribution(space.tree.cursor)
    if isinstance(token, int):
        if token > len(distribution):
            raise UsageError(f"rank {token}: the model has {len(distribution)} tokens")
        return distribution.at(token).id
    from genctl.models.text import watched_ids

    try:
        id = watched_ids(space.session.loaded, [token])[0]
    except UsageError as error:
        raise UsageError(error.message.replace("--watch", "take"), hint=error.hint) from None
    if id >= len(distribution):
        raise UsageError(f"take id:{id}: the model writes the ids 0 to {len(distribution) - 1}")
    return id


def sample(explorer: Explorer, k: int, n: int | None) -> Iterator[Result]:
    """`k` continuations, drawn together, each with its own seed."""
    space = explorer.space
    values = _with(space.tree.knobs, max_new_tokens=n)
    if not space.overlaid(values).generation.do_sample:
        values["do_sample"] = True
    if space.overlaid(values).generation.temperature == 0.0:
        raise UsageError("sample draws tokens, and temperature = 0 takes the best one", hint="set temperature=1")
    yield from _write(explorer, [values] * k)


def beams(explorer: Explorer, k: int, n: int | None) -> Iterator[Result]:
    """The `k` best continuations of a beam search, the best first."""
    own = {key: value for key, value in explorer.tree.knobs.items() if not _samples(key)}
    found = _with(own, max_new_tokens=n, num_beams=k, num_return_sequences=k, do_sample=False)
    if not explorer.space.base.generation.do_sample:
        del found["do_sample"]
    yield from _write(explorer, [found])


def edit(explorer: Explorer, text: str) -> Iterator[Result]:
    """A text that is typed."""
    base, ids = _tokenised(explorer.space, explorer.tree.cursor, text)
    with explorer.space.step(explorer.line):
        yield from explorer.space.write_given(base, ids, "edit")


def _tokenised(space: Workspace, node: int, text: str) -> tuple[int, tuple[int, ...]]:
    """Where a typed text forks, and its tokens: they may begin inside of the token before the cursor."""
    from genctl.decode.token_healing import heal
    from genctl.models.text import check_ids, continuation

    loaded, tree = space.session.loaded, space.tree
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer, so a text cannot be typed", hint="take id:N takes a token")
    before = ""
    try:
        healed = heal(loaded.tokenizer, tree.ids(node), space.session.forward.vocab_size)
    except UsageError:  # a tokenizer whose text is not the sum of its tokens
        healed = None
    if healed is not None and len(healed.ids) >= tree.length(ROOT):
        before = healed.text
        while tree.length(node) > len(healed.ids):
            node = tree.nodes[node].parent
    ids = tuple(continuation(loaded.tokenizer, before + text))
    check_ids(ids, space.session.forward.vocab_size)
    return node, ids


def _samples(key: str) -> bool:
    """Whether a knob is for drawing tokens alone."""
    return key == "do_sample" or (key in knobs() and bool(knobs()[key].metadata["sampling"]))


def _with(values: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return dict(values) | {key: value for key, value in more.items() if value is not None}


def _write(explorer: Explorer, entries: Sequence[dict[str, Any]], given: tuple[int, ...] = ()) -> Iterator[Result]:
    """A step: the `given` tokens, and then one generation for each entry of settings, decoded together."""
    space, start = explorer.space, explorer.tree.cursor
    resolved = [space.overlaid(values) for values in entries]
    if len(entries) > 1 and any(one.generation.is_beam_search for one in resolved):
        raise UsageError("sample draws plain samples, and num_beams is set", hint="set num_beams=1, or beams")
    if resolved and not given:
        start, resolved = _healed(space, start, resolved)
    first = space.tree.runs + 1
    requests = [
        space.request(str(first + place), start, one, space.seed(first + place), given)
        for place, one in enumerate(resolved)
    ]
    for request in requests[:1]:
        space.session.planner.plan(request, Report())  # raises, before anything is written, what would fail
    before = space.tree.cursor
    ends: list[int] = []
    with space.step(explorer.line, first + len(requests) - 1 if requests else 0):
        for written in space.write_given(start, given, "take"):
            start = written.token.node
            yield written
        if not requests or explorer.stop_reason():
            return
        runs = {
            request.id: Run(first + place, start, space.entry(values), request.resolved, request.seed)
            for place, (request, values) in enumerate(zip(requests, entries, strict=True))
        }
        for result in _streamed(space, requests, runs, explorer.stop_reason):
            if isinstance(result, Wrote):
                ends.append(result.node)
            yield result
        if len(ends) > 1:  # the best, or the first of the samples; the cursor stays where they part
            space.settle(cursor=start, tip=ends[0])
        elif not ends:
            space.settle(cursor=before if space.tree.is_on(before, space.tree.tip) else space.tree.tip)


def _healed(space: Workspace, start: int, resolved: list[Resolved]) -> tuple[int, list[Resolved]]:
    """Where a generation begins whose settings heal tokens: before the last ones, where it forks."""
    if not resolved[0].generation.token_healing:
        return start, resolved
    request = Request("", resolved[0], 0, prompt_ids=space.tree.ids(start))
    length = len(space.session.planner.plan(request, Report()).lane.tokens)
    root = space.tree.length(ROOT)
    if length < root:  # the prompt itself cannot change here
        return start, [space.overlaid({"token_healing": False}, one) for one in resolved]
    while space.tree.length(start) > length:
        start = space.tree.nodes[start].parent
    return start, resolved


def _streamed(
    space: Workspace, requests: Sequence[Request], runs: dict[str, Run], interrupted: Callable[[], str]
) -> Iterator[Result]:
    session = space.session
    generation = requests[0].resolved.generation
    start = runs[requests[0].id].start
    if generation.use_cache and generation.cache_implementation == "dynamic" and not generation.token_healing:
        prefix = space.branches.prefix(start)
        if prefix is not None:
            session.prefixes = {(space.tree.ids(start), None): prefix}
    lanes = {request.id: _Lane(space, runs[request.id]) for request in requests}
    flow = Flow(len(requests), interrupted=interrupted)
    space.speed = None
    began, tokens = 0.0, 0
    try:
        with closing(session.stream(iter(requests), Report(scores=True), flow)) as stream:
            for event in stream:
                if isinstance(event, Failed):
                    raise _ERRORS.get(event.code, InputError)(event.message, hint=event.hint)
                if isinstance(event, Stepped) and event.step and began:
                    tokens += event.new_tokens
                    space.speed = tokens / max(session.clock() - began, 1e-9)
                elif isinstance(event, Stepped):
                    began = session.clock()  # the prompt is read, and the first tokens are there
                if isinstance(event, (Began, Stepped, Finished)):
                    yield from lanes[event.lane].take(event)
    finally:
        session.prefixes = {}


class _Lane:
    """The rows of one generation as nodes of the tree.

    Rows that do not compete are written as they come. Of a search the results are, when it is done.
    """

    def __init__(self, space: Workspace, run: Run) -> None:
        self.space, self.run = space, run
        self.seed: int | None = None
        self.rows: list[tuple[int, tuple[Token, ...]]] = [(run.start, ())]  # the node, and tokens not written yet
        self.found: dict[tuple[int, ...], tuple[Token, ...]] = {}
        self.written: list[TokenWritten] = []

    def take(self, event: Began | Stepped | Finished) -> Iterator[Result]:
        if isinstance(event, Began):
            self.seed = event.seed
        elif isinstance(event, Stepped):
            self.rows, _ = advance(self.rows, event, self._grow)
            competing = any(row.slot is None for row in event.rows) or any(
                ended.hypothesis.slot is None for ended in event.ended
            )
            if competing:
                yield Searching(event, self.run.start)
            yield from self.written
            self.written = []
        else:
            for hypothesis in event.hypotheses:
                yield from self._result(hypothesis)

    def _grow(self, row: tuple[int, tuple[Token, ...]], after: Row | Ended) -> tuple[int, tuple[Token, ...]]:
        slot = after.hypothesis.slot if isinstance(after, Ended) else after.slot
        node, waiting = row
        if slot is None:
            waiting = (*waiting, *after.written)
        else:
            for token in after.written:
                node = self._write(node, token)
        if isinstance(after, Ended):
            self.found[after.hypothesis.tokens] = waiting
        return node, waiting

    def _write(self, node: int, token: Token) -> int:
        run = self.run
        self.written.append(self.space.write(node, token, "generate", run.settings, self.seed, run.start))
        return self.written[-1].token.node

    def _result(self, hypothesis: Hypothesis) -> Iterator[Result]:
        """The nodes of a result, of which those of a search are written now."""
        node = self.run.start
        for token in self.found.get(hypothesis.tokens, ()):
            node = self._write(node, token)
        yield from self.written
        self.written = []
        node = self.run.start
        for id in hypothesis.tokens:
            child = self.space.tree.child(node, id)
            if child is None:
                break
            node = child
        score = hypothesis.score if hypothesis.slot is None else None
        text = self.space.text(node, self.run.start)
        yield Wrote(node, self.run.start, hypothesis.reason, text, hypothesis.logprob, self.seed, score)
