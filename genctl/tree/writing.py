"""The commands that write: the decode loop continues a branch, with what the cache has of it.

The branch is the prompt, so the tokens are those that `genctl run` writes for the same ids, settings and seed; but the
text of a grammar begins after the prompt of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any

from genctl.engines.protocol import Flow, Report, Request
from genctl.errors import GenctlError, InputError, ModelError, UsageError
from genctl.events import Began, Ended, Failed, Stepped
from genctl.events.results import Collector
from genctl.events.results import Sequence as TokenSequence
from genctl.params import knobs
from genctl.tree.expanding import MOST, BestFirst
from genctl.tree.explorer import Explorer
from genctl.tree.results import Continuation, Covered, Result, Searching, TokenWritten, Wrote

_ERRORS: dict[str, type[GenctlError]] = {"model": ModelError, "usage": UsageError}


def generate(explorer: Explorer, n: int | None) -> Iterator[Result]:
    """Continue a branch with the current settings."""
    yield from _write(explorer, [_with(explorer.tree.settings, max_new_tokens=n)])


def take(explorer: Explorer, token: int | str, n: int | None) -> Iterator[Result]:
    """A token that is chosen by hand, and what follows it: `n` tokens, none if that is 0."""
    from genctl.models.text import watched_ids

    distribution = explorer.distribution(explorer.tree.cursor)
    if isinstance(token, int):
        if token > len(distribution):
            raise UsageError(f"rank {token}: the model has {len(distribution)} tokens")
        id = distribution.at(token).id
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
    """`k` continuations, drawn together, each with its own seed."""
    values = _with(explorer.tree.settings, max_new_tokens=n)
    if not explorer.resolved(values).generation.do_sample:
        values["do_sample"] = True
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

    Before that come the dead ends, if the mass is not covered: they are why it is not. `nodes` bounds the texts that
    are continued, each a row of a forward pass. Raises ModelError for logits that are no numbers.
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
    """A text that is typed."""
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
    """A step: the `given` tokens, and then one generation for each entry of settings, decoded together."""
    tree, before = explorer.tree, explorer.tree.cursor
    resolved = [explorer.resolved(values) for values in entries]
    if len(entries) > 1 and any(one.generation.is_beam_search for one in resolved):
        raise UsageError("sample draws plain samples, and num_beams is set", hint="set num_beams=1, or beams")
    requests = [
        explorer.request(str(number), before, one, explorer.seed(number), given)
        for number, one in enumerate(resolved, tree.runs + 1)
    ]
    for request in requests[:1]:
        explorer.session.planner.plan(request, Report())  # raises, before anything is written, what would fail
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
    if len(ends) > 1:  # the best, or the first of the samples; the cursor stays where they part
        explorer.move(start, ends[0])
    elif not ends:
        explorer.move(before, tree.tip)


def _streamed(explorer: Explorer, requests: Sequence[Request], start: int) -> Iterator[Result]:
    """What the generations after a node write, as it happens.

    Rows that do not compete are written as they come, the results of a search when it is done.
    """
    collector, seeds = Collector(), dict[str, int | None]()
    ends: dict[tuple[str, int], int] = {}  # of the rows that do not compete, by lane and slot
    flow = Flow(len(requests), interrupted=explorer.stop_reason)
    with closing(explorer.session.stream(iter(requests), Report(scores=True), flow)) as stream:
        for event in stream:
            if isinstance(event, Failed):
                raise _ERRORS.get(event.code, InputError)(event.message, hint=event.hint)
            if isinstance(event, Began):
                seeds[event.lane] = event.seed
            elif isinstance(event, Stepped):
                slots = [each.hypothesis.slot if isinstance(each, Ended) else each.slot for each in event.children]
                if None in slots:
                    yield Searching(event, start)
                for slot, each in zip(slots, event.children, strict=True):
                    if slot is None:
                        continue
                    for token in each.written:
                        node = ends.get((event.lane, slot), start)
                        written = explorer.write(node, token, "generate", seeds[event.lane], start)
                        ends[event.lane, slot] = written.token.node
                        yield written
            if (result := collector.feed(event)) is not None:
                for sequence in result.sequences:
                    yield from _ended(explorer, sequence, result.seed, start)


def _ended(explorer: Explorer, sequence: TokenSequence, seed: int | None, start: int) -> Iterator[Result]:
    """A result of a generation after a node. The tokens of a search are written now."""
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
