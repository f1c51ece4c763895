"""What a worker process does: it loads the checkpoint once, and works on one group of rows after another, or decodes
rows that join a running batch.

`pool` makes a Ray actor of `Worker`; nothing of Ray is imported here. Errors that a user can fix are returned, not
raised, so that they arrive as they are.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from genctl.config.layers import Layer
from genctl.engines.pool.work import WorkerProgress
from genctl.errors import ContractError, GenctlError, ModelError
from genctl.identity import __version__, sources, versions
from genctl.params import Runtime

if TYPE_CHECKING:
    from genctl.engines.local.session import Session
    from genctl.engines.pool.joined_rows import JoinedRows
    from genctl.engines.pool.work import DecodeWork


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker loads, and how."""

    runtime: Runtime
    layers: tuple[Layer, ...]  # of a job that is checked, before the weights are read and on the checkpoint
    threads: int  # at most; less where a step has no work for them
    folder: str  # the driver's working folder: names of files are relative to it
    need_tokenizer: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    local: str = ""  # the checkpoint's folder on the driver; "" for one that has another kind of name
    exact: bool = False  # as many threads, whatever the work
    alone: bool = True  # all workers are on the driver's machine


class GroupWork(Protocol):
    """What is done with a group of rows."""

    def perform(self, session: Session, progress: WorkerProgress) -> Any:
        """The result of the group: plain values that can be pickled."""


@dataclass(frozen=True)
class OpenedWorker:
    """A worker that has loaded the checkpoint."""

    node: str
    process: int
    identity: dict[str, Any]  # what must be equal for all workers
    genctl: str = ""  # what must be that of the driver


@dataclass(frozen=True)
class FinishedGroup:
    """The result of a group. `tokens` were written since the process began."""

    value: Any
    process: int
    tokens: int


class Worker:
    """A process that works on groups. After a restart it loads the checkpoint again at its first call."""

    def __init__(self, setup: WorkerSetup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)  # torch, which is not imported yet, reads it
        if Path(setup.folder).is_dir():
            os.chdir(setup.folder)
        self.setup = setup
        self.progress = WorkerProgress()
        self.opened: tuple[Session, OpenedWorker] | None = None
        self.joined: JoinedRows | None = None
        self._loading = threading.Lock()

    def open(self) -> OpenedWorker | GenctlError:
        """Load the checkpoint, if that is not done yet."""
        try:
            return self._open()[1]
        except GenctlError as error:
            return self._placed(error)

    def work(self, number: int, work: GroupWork) -> FinishedGroup | GenctlError:
        """Work on the group `number`."""
        try:
            session, _ = self._open()
        except GenctlError as error:
            return self._placed(error)
        self.progress.rows, self.progress.group = 0, number
        try:
            value = work.perform(session, self.progress)
        except ContractError as error:
            return self._placed(error)
        return FinishedGroup(value, os.getpid(), self.progress.tokens)

    async def join(self, number: int, work: DecodeWork) -> FinishedGroup | GenctlError:
        """Decode rows beside those of other calls that are awaited."""
        try:
            session, _ = self._open()
        except GenctlError as error:
            return self._placed(error)
        if self.joined is None:
            from genctl.engines.pool.joined_rows import JoinedRows

            self.joined = JoinedRows(session, self.progress)
        try:
            value = await asyncio.wrap_future(self.joined.join(number, work))
        except ContractError as error:
            return self._placed(error)
        return FinishedGroup(value, os.getpid(), self.progress.tokens)

    def report(self) -> tuple[int, int, int, int]:
        """The process, the group that it works on, how many rows of it are done, and the tokens of all groups."""
        progress = self.progress
        return os.getpid(), progress.group, progress.rows, progress.tokens

    def ask(self, name: str, *arguments: Any) -> Any:
        """The attribute `name` of the session, or the result of the method of that name. Errors are returned."""
        try:
            session, _ = self._open()
            value = getattr(session, name)
            return value(*arguments) if callable(value) else value
        except GenctlError as error:
            return self._placed(error)

    def _open(self) -> tuple[Session, OpenedWorker]:
        with self._loading:
            if self.opened is None:
                self.opened = self._load()
            return self.opened

    def _load(self) -> tuple[Session, OpenedWorker]:
        setup = self.setup
        if setup.local and not Path(setup.local).is_dir():
            raise ModelError(f"{setup.runtime.model} is a local folder, and there is no {setup.local}")
        from genctl.decode.threads import Threads
        from genctl.engines.local.session import Session

        threads = Threads(setup.threads if setup.exact else None, share=setup.threads)
        session = Session.load(
            setup.runtime,
            allow_pickle=setup.allow_pickle,
            trust_remote_code=setup.trust_remote_code,
            allow_plugins=setup.allow_plugins,
            layers=setup.layers,
            need_tokenizer=setup.need_tokenizer,
            threads=threads,
        )
        if setup.layers:
            session.check(session.resolve(setup.layers))
        computes = session.forward.device.type == "cpu"
        return session, OpenedWorker(platform.node(), os.getpid(), identity_of(session), own_genctl(computes))

    def _placed(self, error: GenctlError) -> GenctlError:
        """The error, with the name of the node where there are several."""
        if not self.setup.alone:
            error.message = f"{error.message} (on node {platform.node()})"
            error.args = (error.message,)
        return error


@cache
def own_genctl(computes: bool) -> str:
    """This process's genctl: the version, a digest of its sources, and the products that this CPU `computes` with.

    Raises UsageError where GENCTL_PRODUCTS names others than are there.
    """
    products = ""
    if computes:
        from genctl.kernels.variant import choice

        products = f", products: {choice()[0] or 'torch'}"
    return f"{__version__} (sources {sources()}{products})"


def identity_of(session: Session) -> dict[str, Any]:
    """What decides the results and can be compared at once: versions, the config, the sizes of the weight files."""
    checkpoint = session.loaded.checkpoint
    files = [] if checkpoint is None else checkpoint.weights.files
    sizes = {path.name: path.stat().st_size for path in files}
    return {
        **versions("torch", "transformers", "tokenizers"),
        "config.json": None if checkpoint is None else checkpoint.config,
        "weight files": sizes,
        "device": session.forward.device.type,
        "runtime": session.forward.kind,
        "products": session.products,
    }
