"""Engines that are not loaded yet, and what a job has to know of them before."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from genctl.commands.worker_options import check_workers, number_of, wanted
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines.protocol import Engine, EngineSetup
from genctl.errors import UsageError
from genctl.params import Runtime


def _local(setup: EngineSetup) -> Engine:
    from genctl.engines.local.session import load_local

    return load_local(setup)


def _servers(setup: EngineSetup) -> Engine:
    from genctl.engines.server.session import load_servers

    return load_servers(setup)


def _pool(options: Any, setup: EngineSetup) -> Engine:
    from genctl.engines.pool.engine import load_pool

    return load_pool(setup, address=options.address, workers=number_of(options))


def shared(setup: EngineSetup) -> Engine:
    """Ranks that compute the same rows together."""
    from genctl.engines.ranks.shared import load_shared

    return load_shared(setup)


def own_rows(setup: EngineSetup) -> Engine:
    """Ranks that have rows of their own."""
    from genctl.engines.ranks.own_rows import load_own_rows

    return load_own_rows(setup)


def _planned(runtime: Runtime, layers: list[Layer], trust: dict[str, bool]) -> Resolved:
    from genctl.engines.local.session import planned

    return planned(runtime, layers, **trust)


def _anything(options: Any, early: Resolved) -> None:
    """No option is refused."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine that is not loaded yet, and what a job has to know before."""

    load: Callable[[EngineSetup], Engine] = _local
    check: Callable[[Any, Resolved], None] = _anything  # raises UsageError for options that it cannot serve
    planned: Callable[[Runtime, list[Layer], dict[str, bool]], Resolved] = _planned  # the settings, for --dry
    live: bool = True  # events come as they are made, so that a view can follow them
    batches: bool = True  # rows are computed together, so the last digits of a row's numbers depend on its neighbours
    ranks: str = ""  # the option that shares the work among processes that were started together

    @property
    def follows(self) -> bool:
        """Whether another process reads and writes, and this one computes beside it."""
        return bool(self.ranks) and os.environ.get("RANK") != "0"

    def meet(self, stack: ExitStack) -> None:
        """Meet the other ranks, if there are any. A rank that follows writes nothing from now on."""
        if self.ranks:
            from genctl.engines.ranks import launch, launcher
            from genctl.models import rank_group as group

            here = launch.launch_of()
            assert here is not None
            launcher.watch(here.rank)
            group.start()
            stack.callback(group.stop)
            if self.follows:
                group.silence(stack)

    def agree(self, value: Any) -> Any:
        """What rank 0 gives; where there are no ranks, the value itself."""
        if not self.ranks:
            return value
        from genctl.models import rank_group as group

        return group.broadcast(value, wait=True)


LOCAL = EngineChoice()
SERVERS = EngineChoice(_servers, planned=lambda runtime, layers, trust: resolve(layers), batches=False)


def on_servers(options: Any) -> bool:
    """Whether any layer of settings names a server. Raises UsageError where workers are asked for, too."""
    layer = next((layer for layer in options.layers() if layer.values.get("backend") is not None), None)
    if layer is not None and (flag := wanted(options)):
        place = layer.place("backend")
        raise UsageError(f"{flag} computes in processes of this program, but {place} leaves that to a server")
    return layer is not None


def _check_workers(options: Any, early: Resolved) -> None:
    if not getattr(options, "dry", False):
        check_workers(options, early)


def engine_of(options: Any) -> EngineChoice:
    """The engine of a command that decodes or scores here, by workers or on servers."""
    if on_servers(options):
        return SERVERS
    if wanted(options):
        return EngineChoice(partial(_pool, options), _check_workers, live=False)
    return LOCAL
