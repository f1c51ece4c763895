"""A side that is a server: of each distribution it tells the token of the text and the best ones.

The reference runs here, so its whole distribution is known. What weights and rounding explain is measured here, too, on
the reference and on a side with what is declared of the server; `noise` explains how. Because servers tell
log-probabilities and no logits, all is compared as log-probabilities of the tokens that they list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from genctl.engines.protocol import Request, never
from genctl.engines.server.told import Asked, OwnText, ToldDistributions, ToldTop
from genctl.errors import GenctlError
from genctl.parity.golden import CHECKED
from genctl.parity.measure import NOTHING_COMPARED, UNMEASURED, pick
from genctl.parity.noise import TINY, MeasuredNoise, beyond_weights, left_out, measure_noise, reached, read_rows
from genctl.parity.oracle import Reading, places_read
from genctl.parity.partial import position_of_server
from genctl.parity.partings import concluded, judge_margin, reach_of
from genctl.parity.sides import LocalSide
from genctl.parity.statistics import quantiles
from genctl.parity.values import Noise, Parity, Place, Position, Text, TextParting, Variation, Verdict

TWICE = 4  # texts that a server is asked about twice
Told = dict[Place, ToldTop]


@dataclass(frozen=True)
class ServerSide:
    """A server. `declared`: what it is said to compute, as a side here; None: what the reference computes."""

    name: str
    told: ToldDistributions
    declared: LocalSide | None = None


@dataclass(frozen=True)
class ServerParity:
    """What is found, with all that the server told."""

    parity: Parity
    told: Told


def compare(
    reference: LocalSide,
    server: ServerSide,
    requests: Sequence[Request] = (),
    texts: Sequence[Text] = (),
    *,
    on_position: Callable[[Position], object] = lambda position: None,
    on_stage: Callable[[str], object] = lambda stage: None,
    interrupted: Callable[[], str] = never,
) -> ServerParity:
    """Compare a server with the reference, as `measure` compares two sides. Raises BackendError and ModelError."""
    failed: dict[str, str] = {}
    parted: dict[str, OwnText] = {}
    if requests:
        on_stage("writing")
        written, failed = reference.write(requests, interrupted=interrupted)
        texts = [*texts, *written]
        for id, own in server.told.write(_rows(written), interrupted):
            if isinstance(own, GenctlError):
                failed[id] = own.message
            elif own is not None:
                parted[id] = own
    on_stage("reading")
    told, changes, missing = _read(server, texts, interrupted)
    failed |= missing
    readable = [text for text in texts if text.id not in missing]
    found: dict[Place, Position] = {}
    chances: dict[str, Tensor] = {}  # of the reference, where texts part

    def receive(number: int, index: int, logits: Tensor) -> None:
        text = readable[number]
        if text.id in parted and parted[text.id].index == index:
            chances[text.id] = logits.detach().double().log_softmax(-1).cpu()
        if told[text.id, index].has_first:
            place = (text.id, index, text.token_ids[index])
            one = found[text.id, index] = position_of_server(place, logits.detach().float().cpu(), told[text.id, index])
            on_position(one)

    failed |= reference.read(readable, receive, interrupted=interrupted)
    order = [(text.id, index) for text in readable for index in range(len(text.token_ids))]
    positions = [found[place] for place in order if place in found and place[0] not in failed]
    by_id = {text.id: text for text in readable if text.id not in failed}
    parted = {id: own for id, own in parted.items() if id in by_id}
    notes = _notes(server, told, found, changes)
    judged: _JudgedServer | None = None
    if any(each.shift for each in positions) and not interrupted():
        on_stage("noise")
        pairs = [(by_id[id], by_id[id], own.index) for id, own in parted.items()]
        try:
            judged = _judged(reference, server, pick(positions, texts, pairs, CHECKED), told, changes)
        except GenctlError as error:
            notes.append(f"rounding could not be measured: {error.message}")
    noise = replace(UNMEASURED, changed=_largest(changes)) if judged is None else judged.noise
    partings = [
        _parting(by_id[id], own, told, chances.get(id), noise, judged)
        for id, own in parted.items()
        if not interrupted()
    ]
    parity = concluded(
        (reference.name, server.name),
        texts,
        positions,
        partings,
        _verdict(positions, judged),
        noise=noise,
        notes=tuple(notes),
        failed=failed,
    )
    return ServerParity(parity, told)


# -- asking ------------------------------------------------------------------------------------------------------------


def _rows(texts: Iterable[Text]) -> list[Asked]:
    return [(text.id, text.name or text.id, text.prompt_ids, text.token_ids) for text in texts if text.token_ids]


def _read(
    server: ServerSide, texts: Sequence[Text], interrupted: Callable[[], str]
) -> tuple[Told, dict[Place, tuple[float, ...]], dict[str, str]]:
    """What the server tells; by how much the first texts changed when they were asked again; and why texts fail."""
    failed: dict[str, str] = {}

    def answers(rows: Sequence[Asked]) -> Iterator[tuple[Place, ToldTop]]:
        for id, answer in server.told.read(rows, interrupted):
            if isinstance(answer, GenctlError):
                failed[id] = answer.message
            else:
                yield from (((id, index), one) for index, one in enumerate(answer))

    told = dict(answers(_rows(texts)))
    again = _rows(text for text in texts if text.id not in failed)[:TWICE]
    changes: dict[Place, tuple[float, ...]] = {}
    for place, one in answers(again):
        before, now = told[place].known, one.known
        changes[place] = tuple(now[token] - before[token] for token in before if token in now)
    return told, changes, failed


def _largest(changes: Mapping[Place, tuple[float, ...]]) -> float:
    return max((abs(each) for row in changes.values() for each in row), default=0.0)


def _notes(
    server: ServerSide, told: Told, found: Mapping[Place, Position], changes: Mapping[Place, tuple[float, ...]]
) -> list[str]:
    notes = ["KL is bounded from below alone: the server may give a token that it does not list any probability"]
    if server.declared is None:
        notes.append("the server does not say its dtype: that of the reference is assumed; @dtype= declares another")
    if server.told.mute:
        silent = sum(math.isnan(one.logprob) for one in told.values())
        words = f"; {silent} tokens are not in its lists" if silent else ""
        notes.append(f"the server echoes no prompt: what it tells as it writes is compared{words}")
    if largest := _largest(changes):
        notes.append(f"the server changes its answers: asked twice, a log-probability moved by {largest:.2g} nats")
    if left := sum(not one.has_first for one in told.values()):
        notes.append(f"{left} positions are left out: several tokens have the text of the server's first choice")
    return notes


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _JudgedServer:
    """What remains at each checked position. `noise` counts rounding alone, the `own` ratios the server's changes."""

    noise: Noise
    measured: MeasuredNoise
    worst: str  # the position with the largest ratio, as messages call it
    own_typical: float
    own_largest: float


def _judged(
    reference: LocalSide,
    server: ServerSide,
    readings: Sequence[Reading],
    told: Told,
    changes: Mapping[Place, tuple[float, ...]],
) -> _JudgedServer:
    declared = reference if server.declared is None else server.declared
    rows = read_rows(reference, readings)
    theirs = rows if declared is reference else read_rows(declared, readings)
    measured = measure_noise(reference, declared, readings, (rows, theirs))
    known = [told[place].known for place in places_read(readings)]
    expected = rows.double() + measured.weights
    base = _listed(expected, known)
    remains = torch.stack([_size(torch.tensor([*one.values()], dtype=torch.float64) - row)
                           for one, row in zip(known, base, strict=True)])  # fmt: skip
    shaken = torch.stack([
        torch.stack([_size(row - mine) for row, mine in zip(_listed(expected + each, known), base, strict=True)])
        for each in measured.rounding
    ])  # fmt: skip
    smallest = torch.finfo(torch.float32).eps * torch.stack([row.abs().max() for row in base])  # servers tell float32
    scale = torch.maximum(shaken.square().mean(0).sqrt(), smallest).clamp(min=TINY)
    spread = left_out(shaken)
    raised = torch.maximum(scale, shaken.max() / spread.max().clamp(min=1.0))  # rounding may jump anywhere
    own = [float(torch.tensor(row, dtype=torch.float64).square().mean().sqrt()) for row in changes.values() if row]
    most = max(own, default=0.0)
    ratios = remains / raised
    allowed, typical_allowed = reached(spread)
    noise = replace(
        measured.noise,
        variations=(*measured.noise.variations, Variation("server asked twice", quantiles(own), not most)),
        margin=max(measured.noise.margin, 2 * _largest(changes)),
        residual=float(remains.median()),
        allowed=allowed,
        typical_allowed=typical_allowed,
        typical_ratio=float((remains / scale).median()),
        largest_ratio=float(ratios.max()),
        changed=_largest(changes),
        how=f"{measured.noise.how}; the server was asked twice about {len({id for id, _ in changes})} texts",
    )
    return _JudgedServer(
        noise,
        measured,
        measured.token(int(ratios.argmax())),
        float((remains / scale.clamp(min=most)).median()),
        float((remains / raised.clamp(min=most)).max()),
    )


def _listed(logits: Tensor, known: Sequence[Mapping[int, float]]) -> list[Tensor]:
    """The log-probabilities of the listed tokens, from logits f64 [M, V]."""
    return [row[[*one]] for row, one in zip(logits.log_softmax(-1), known, strict=True)]


def _size(difference: Tensor) -> Tensor:
    return difference.square().mean().sqrt()


def _verdict(positions: Sequence[Position], judged: _JudgedServer | None) -> tuple[Verdict | None, str]:
    if not positions:
        return None, NOTHING_COMPARED
    if not any(each.shift for each in positions):
        return "tie", "every log-probability that the server tells is equal"
    if judged is None:
        return "drift", "the log-probabilities differ, and rounding could not be measured"
    noise = judged.noise
    typical, largest = noise.typical_allowed, noise.allowed
    remains = beyond_weights(noise.typical_ratio)
    if noise.typical_ratio <= typical and noise.largest_ratio <= largest:
        if judged.measured.equal:
            return "tie", f"{remains}: rounding explains it"
        return "drift", f"{remains}: what is declared of the server explains the difference"
    if judged.own_typical <= typical and judged.own_largest <= largest:
        most = f"what remains is up to {noise.largest_ratio:.2g} times the rounding, which reaches {largest:.2g}"
        return "drift", f"{most}: only what the server itself changes when it is asked twice explains it"
    if noise.typical_ratio > typical:
        return "defect", f"{remains}, and rounding itself reaches {typical:.2g}"
    most = f"what remains is {noise.largest_ratio:.2g} times the rounding, which reaches {largest:.2g}"
    return "defect", f"{judged.worst}: {most}"


def _parting(
    text: Text, own: OwnText, told: Told, chances: Tensor | None, noise: Noise, judged: _JudgedServer | None
) -> TextParting:
    """Where the server's own text parts from the reference's."""
    mine, theirs = text.token_ids[own.index], own.token
    if theirs is None or chances is None:
        unknown = (math.nan, math.nan)
        reason = "the server's text ends where the reference goes on: a limit or a stop of its settings ended it"
        return TextParting(text.id, own.index, mine, theirs, unknown, unknown, math.nan, "drift", reason)
    ours = float(chances[mine]), float(chances[theirs])
    # what it tells as it writes, or, where the reference's token is not listed there, as it reads the same text
    others = own.known.get(mine, told[text.id, own.index].logprob), own.known[theirs]
    margin = ours[0] - ours[1]
    measured, changed = (None, 0.0) if judged is None else (judged.measured, noise.changed or 0.0)
    reach = reach_of(text.id, own.index, (mine, theirs), noise, measured) + 2 * changed
    verdict, reason = judge_margin(margin, margin - (others[0] - others[1]), noise, reach)
    return TextParting(text.id, own.index, mine, theirs, ours, others, margin, verdict, reason)
