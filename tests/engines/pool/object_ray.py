"""The part of Ray that a `PoolEngine` uses, with workers that are objects in this process. They load and decode as
usual; their arguments and results are pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

from tests.engines.pool.fake_ray import FakeRay, RayTaskError


class ObjectActor:
    """An actor that calls the methods of an object, one call after another."""

    def __init__(self, made: Any) -> None:
        self.object, self.thread = made, ThreadPoolExecutor(1)

    def __getattr__(self, method: str) -> Any:
        function = getattr(self.object, method)

        def call(*arguments: Any) -> Future[Any]:
            return self.thread.submit(function, *pickle.loads(pickle.dumps(arguments)))

        return SimpleNamespace(remote=call, options=lambda **others: SimpleNamespace(remote=call))


class ObjectRay(FakeRay):
    """A module `ray` whose actors are objects in this process."""

    def __init__(self) -> None:
        super().__init__(lambda number, method, arguments: None)
        self.__spec__ = ModuleSpec("ray", None)  # it is installed
        self.objects: list[ObjectActor] = []

    def remote(self, **options: Any) -> Any:
        def with_class(kind: Callable[..., Any]) -> Any:
            def make(*arguments: Any) -> ObjectActor:
                self.objects.append(ObjectActor(kind(*arguments)))
                return self.objects[-1]

            factory = SimpleNamespace(remote=make)
            factory.options = lambda **more: factory
            return factory

        return with_class

    def wait(self, refs: Sequence[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        wait(refs, timeout, FIRST_COMPLETED)
        ready = [ref for ref in refs if ref.done()][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any) -> Any:
        try:
            return pickle.loads(pickle.dumps(ref.result()))
        except Exception as error:
            failed = RayTaskError(str(error))
            failed.cause = error  # type: ignore[attr-defined]
            raise failed from error

    def shutdown(self) -> None:
        """End its threads."""
        for actor in self.objects:
            actor.thread.shutdown()
