"""The workers of a job: started, told what to load, and closed at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import collection
from genctl.cli import first_sign
from genctl.cli.job import Job
from genctl.cli.worker_options import number_of
from genctl.config.layers import Layer
from genctl.params import Runtime
from genctl.plural import count
from genctl.workers.cluster import RayCluster, is_running, stop_cluster
from genctl.workers.memory import check_memory
from genctl.workers.pool import WorkerPool
from genctl.workers.worker import OpenedWorker, WorkerSetup, WorkerTask

if TYPE_CHECKING:
    from genctl.workers.processes import RayProcesses


class JobWorkers:
    """The pool of a job, once it is started. Enter it before the outputs, so that they are closed first."""

    pool: WorkerPool

    def __init__(self, job: Job[Any], stack: ExitStack) -> None:
        self.job, self.started = job, False
        self.processes: RayProcesses | None = None
        stack.push(lambda kind, *_: self._close(failed=kind is not None and not job.interrupt.status))

    def start(
        self,
        task: WorkerTask,
        runtime: Runtime,
        layers: Sequence[Layer] = (),
        *,
        need_tokenizer: bool,
        waiting: Callable[[], object],
    ) -> OpenedWorker:
        """Start the workers; returns when the first of them has loaded the checkpoint. Raises its errors."""
        job, options = self.job, self.job.options
        began = time.perf_counter()
        collection.resume()  # torch is not imported here

        def setup(cluster: RayCluster) -> WorkerSetup:
            if cluster.alone and not cluster.gpus:
                check_memory(cluster.workers, runtime, options.trust)
            folder = Path(runtime.model)
            return WorkerSetup(
                runtime,
                tuple(layers),
                cluster.threads,
                str(Path.cwd()),
                need_tokenizer,
                **options.trust,
                allow_plugins=options.allow_plugins,
                local=str(folder.resolve()) if folder.is_dir() else "",
                alone=cluster.alone,
            )

        if options.address is None and not is_running():
            from genctl.workers.processes import RayProcesses

            self.processes = RayProcesses()
        gpu = runtime.device in ("auto", "cuda")
        self.pool = WorkerPool(options.address, number_of(options), gpu, setup, task, self.processes)
        self.started = True
        opened = self.pool.open(waiting, job.remark)
        job.load_s += time.perf_counter() - began
        first_sign.clear()
        job.hide()
        cluster = self.pool.cluster
        share = f"{count(cluster.threads, 'thread')}{' and a GPU' if cluster.gpus else ''}"
        job.detail(
            f"{count(cluster.workers, 'worker')} {cluster.about}, {'each ' if cluster.workers > 1 else ''}with {share}"
        )
        return opened

    def say_shares(self) -> None:
        """With --verbose, say what each worker did."""
        for worker in self.pool.workers if self.started else ():
            done = f"{count(worker.groups, 'group')}, {count(worker.rows, 'row')}, {count(worker.tokens, 'token')}"
            deaths = f", {count(worker.deaths, 'group')} tried again alone" if worker.deaths else ""
            self.job.detail(f"{worker.name}: {done}{deaths}")

    def _close(self, *, failed: bool) -> None:
        """End the workers, and what Ray has started for them. After a signal nothing may wait."""
        hurried, ours = bool(self.job.interrupt.status), self.processes
        if ours is not None:
            ours.note()
        if self.started and not (hurried and self.pool.cluster.ours):
            self.pool.close()
        if ours is None:
            return
        if hurried:
            ours.end_after_us(keep_logs=failed)
            return
        stop_cluster()
        ours.end(keep_logs=failed)
