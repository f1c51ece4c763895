"""Sides, loaded: a checkpoint that two sides share is loaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl import params
from genctl.commands.engine_choice import LOCAL, SERVERS
from genctl.commands.parity.options import FLAGS
from genctl.commands.parity.resumed import ResumedSide
from genctl.commands.parity.sides import Side
from genctl.config.layers import Resolved
from genctl.engines.local.session import Session
from genctl.engines.protocol import Engine, EngineSetup
from genctl.params import Runtime
from genctl.parity.sides import LocalSide, greedy

WIDTH = 16  # texts read at once where no batch size is set, as `run` does in a pipe
LOADING = tuple(
    name
    for name, item in params.knobs(Runtime).items()
    if (item.metadata["group"] == params.MODEL and name != "offline") or name == "prompt_cache"
)


@dataclass
class LoadedSides:
    """Loads sides. `setup` makes what an engine is loaded with."""

    setup: Callable[[Side, Resolved], EngineSetup]
    engines: dict[tuple[Any, ...], Engine] = field(default_factory=dict)

    def engine(self, side: Side, early: Resolved) -> tuple[Engine, Resolved]:
        """The engine of a side, and its settings. Raises what loading raises."""
        key = _key(early.runtime)
        if key not in self.engines:
            choice = LOCAL if early.runtime.backend is None else SERVERS
            self.engines[key] = choice.load(self.setup(side, early))
        engine = self.engines[key]
        resolved = greedy(engine.resolve(side.layers), (*FLAGS, "max_length"))
        engine.check(resolved)
        return engine, resolved

    def load(self, side: Side, early: Resolved, ids: Sequence[str]) -> LocalSide:
        """A side, ready to read. `ids` are those of all texts, in order. Raises what loading raises."""
        engine, resolved = self.engine(side, early)
        assert isinstance(engine, Session)
        width = engine.width(resolved, WIDTH)
        if side.resume is not None:
            return ResumedSide(side.name, engine, resolved, width=width, ids=ids, done=side.resume)
        return LocalSide(side.name, engine, resolved, width=width)

    def keep(self, *earlies: Resolved) -> None:
        """Let go of all checkpoints but those of these settings."""
        kept = {_key(early.runtime) for early in earlies}
        for key in [key for key in self.engines if key not in kept]:
            self.engines.pop(key).close()

    def close(self) -> None:
        """Let go of all checkpoints."""
        self.keep()


def check_models(earlies: Sequence[Resolved]) -> None:
    """Look for every checkpoint before the first is loaded. Raises ModelError for one that is not there."""
    from genctl.models.resolve import resolve

    local = [early.runtime for early in earlies if early.runtime.backend is None]
    for model, revision, offline in dict.fromkeys((each.model, each.revision, each.offline) for each in local):
        resolve(model, revision=revision, offline=offline, configs_only=True)


def _key(runtime: Runtime) -> tuple[Any, ...]:
    return tuple(str(getattr(runtime, name)) for name in LOADING)
