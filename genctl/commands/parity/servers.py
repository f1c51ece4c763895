"""Sides that are servers: what they can be compared on, and how they are made ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from genctl.commands.parity.loading import HINT
from genctl.commands.parity.options import ParityCommandOptions
from genctl.config.layers import Resolved
from genctl.config.sides import Side
from genctl.errors import ModelError, UsageError

if TYPE_CHECKING:
    from genctl.commands.parity.distributions import Tops
    from genctl.commands.parity.loading import LoadedSides
    from genctl.engines.protocol import Engine
    from genctl.engines.server.told import ToldTop
    from genctl.parity.remote import ServerSide
    from genctl.parity.sides import LocalSide


def check_servers(options: ParityCommandOptions, sides: Sequence[Side], earlies: Sequence[Resolved]) -> None:
    """Raises UsageError for what cannot be asked of a server."""
    for number, (side, early) in enumerate(zip(sides, earlies, strict=True)):
        if not is_server(early):
            continue
        if options.by_text:
            if side.declared is not None:
                keys = " and ".join(side.declared.values)
                raise UsageError(f"{side.place}: {keys} explains logits, and --by-text compares none")
            continue
        if options.expect is not None:
            raise UsageError(
                f"--expect {options.expect} and {side.name}: both tell the best tokens alone",
                hint="compare the server with the checkpoint itself: genctl parity ./model openai:URL",
            )
        check_server(side, early, is_reference=number == 0)
        if options.show_layers:
            raise UsageError(f"--layers and {side.name}: no server tells of its layers")


def is_server(early: Resolved) -> bool:
    """Whether the settings of a side name a server."""
    return early.runtime.backend is not None


def check_server(side: Side, early: Resolved, *, is_reference: bool) -> None:
    """Raises UsageError for a server whose tokens cannot be compared."""
    if is_reference:
        raise UsageError(
            f"{side.place}: a server tells its best tokens alone, and the reference's whole distribution is needed",
            hint=f"give a checkpoint first, then {side.name}; {HINT}",
        )
    if early.runtime.tokenizer is not None:
        raise UsageError(f"{side.place}: the tokenizer of the reference makes the ids, so tokenizer has no effect")


def server_side(
    loaded: LoadedSides,
    side: Side,
    engine: Engine,
    resolved: Resolved,
    first: Side,
    reference: LocalSide,
    ids: Sequence[str],
) -> ServerSide:
    """A server, ready to be asked; with what is declared of it, the reference's checkpoint is loaded a second time."""
    from genctl.commands.parity.loading import WIDTH
    from genctl.engines.server.session import RemoteSession
    from genctl.engines.server.told import TokenNames, ToldDistributions
    from genctl.models.text import detokenizer
    from genctl.parity.remote import ServerSide

    assert isinstance(engine, RemoteSession)
    checkpoint = reference.session.loaded
    if checkpoint.tokenizer is None:
        raise ModelError(f"{side.name}: a server writes tokens as texts, and {checkpoint.name} has no tokenizer")
    if checkpoint.is_encoder_decoder:
        raise ModelError(f"{side.name}: a server continues texts, and {checkpoint.name} is an encoder-decoder")
    width = engine.width(resolved, WIDTH)
    names = TokenNames(checkpoint.tokenizer, detokenizer(checkpoint.tokenizer).piece)
    told = ToldDistributions(engine.servers, names, reference.name, width=width, hint=HINT)
    declared = None
    if side.declared is not None:
        own = replace(first, layers=(*first.layers, side.declared))
        declared = loaded.load(own, own.early(), ids)
    return ServerSide(side.name, told, declared)


def told_tops(told: Mapping[tuple[str, int], ToldTop]) -> Tops:
    """The best tokens that a server told."""
    from genctl.commands.parity.distributions import TOP

    def best(one: ToldTop) -> tuple[tuple[int, float], ...]:
        return tuple(sorted(one.known.items(), key=lambda pair: -pair[1])[:TOP])

    return lambda texts, places: {place: best(told[place]) for place in places if place in told}
