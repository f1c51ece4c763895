"""The worker process: it loads the checkpoint once, and decodes or scores one group of rows after another.

`PoolEngine` makes `Worker` a Ray actor; this module does not import Ray.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl import events
from genctl.config.layers import Layer
from genctl.decode.step_costs import set_threads
from genctl.engines.protocol import About, Flow, Report, Request
from genctl.errors import ModelError
from genctl.params import Runtime
from genctl.process import __version__, sources, versions

if TYPE_CHECKING:
    from genctl.engines.protocol import Outcome, ScoringOptions, TextToScore
    from genctl.engines.session import Session


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker loads, and how."""

    runtime: Runtime
    layers: tuple[Layer, ...]  # of the job, checked before the weights are read and again on the checkpoint
    threads: int  # at most; fewer if a step has no work for them
    folder: str  # the driver's working folder, to which file names are relative
    options: dict[str, Any] = field(default_factory=dict)  # for `Session.load`
    local: str = ""  # the checkpoint's folder on the driver; "" if its name is no local folder


class OpenedWorker(NamedTuple):
    """A worker that has loaded the checkpoint."""

    node: str
    identity: dict[str, Any]  # see `identity_of`
    about: About


class Worker:
    """A process that works on groups of rows. After a restart it loads the checkpoint again at its first call."""

    def __init__(self, setup: WorkerSetup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)  # torch, which is not imported yet, reads it
        if Path(setup.folder).is_dir():
            os.chdir(setup.folder)
        self.setup = setup

    def open(self) -> OpenedWorker:
        """Load the checkpoint, unless it is loaded."""
        return OpenedWorker(platform.node(), identity_of(self.session), self.session.about)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call the session's method `name`."""
        return getattr(self.session, name)(*arguments)

    def score(self, texts: tuple[TextToScore, ...], options: ScoringOptions) -> list[Outcome]:
        """Score a group of texts."""
        return [outcome for _, outcome in self.session.score(enumerate(texts), replace(options, chunk=len(texts)))]

    def decode(
        self, requests: tuple[Request, ...], report: Report, width: int, ahead: int, threads: int | None
    ) -> list[events.Event]:
        """Decode a group. For steps that nobody reads only draft counts are sent, which saves most of the traffic.

        `ahead`: requests read ahead, so that the longest begins first. `threads`: for a step; None: unchanged.
        """
        if threads is not None:
            set_threads(threads)
        result, whole = list[events.Event](), set[str]()  # `whole`: lanes whose steps are read
        steps = report.steps or any(row.resolved.runtime.processed_logprobs for row in requests)
        for event in self.session.stream(iter(requests), report, Flow(width, ahead=ahead)):
            if isinstance(event, events.Began) and (steps or (report.parents and "beam" in event.strategy)):
                whole.add(event.lane)
            elif isinstance(event, events.Stepped) and event.lane not in whole:
                if not event.drafted:
                    continue
                event = events.Stepped(event.lane, 1, (), (), event.drafted, event.accepted)
            result.append(event)
        return result

    @cached_property
    def session(self) -> Session:
        """The loaded checkpoint. Raises ModelError, and the errors of the job's settings."""
        setup = self.setup
        if setup.local and not Path(setup.local).is_dir():
            there = f"there is no {setup.local} on {platform.node()}"
            raise ModelError(f"{setup.runtime.model} is a local folder, and {there}")
        from genctl.engines.session import Session

        session = Session.load(setup.runtime, layers=setup.layers, **setup.options)
        if setup.layers:
            session.plan(session.resolve(setup.layers))
        return session


def identity_of(session: Session) -> dict[str, Any]:
    """The properties that results depend on and that are quick to compare between workers."""
    checkpoint, forward = session.loaded.checkpoint, session.forward
    return {
        **versions("torch", "transformers", "tokenizers"),
        "genctl": own_genctl(computes=forward.device.type == "cpu"),
        "config.json": checkpoint and checkpoint.config,
        "weight files": checkpoint and {path.name: path.stat().st_size for path in checkpoint.weights.files},
        "device": forward.device.type,
        "runtime": forward.kind,
        "products": session.products,
    }


@cache
def own_genctl(*, computes: bool) -> str:
    """This process's genctl: its version and sources and, if the CPU `computes`, its variant of the matrix products.

    Raises UsageError if GENCTL_PRODUCTS names an unavailable variant.
    """
    from genctl.kernels.build import choice

    products = f", products: {choice()[0] or 'torch'}" if computes else ""
    return f"{__version__} (sources {sources()}{products})"
