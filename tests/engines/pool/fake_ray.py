"""The part of Ray that a `PoolEngine` uses, in this process: a function computes the result of each worker's call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """A call raised an exception."""


class Died(RayError):
    """The process of an actor died more often than Ray retries."""


class FakeRef:
    """The result of a call: computed when it is fetched."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class FakeActor:
    """Calls of its methods go to `behave(number, method, arguments)`."""

    def __init__(self, ray: FakeRay, number: int) -> None:
        self.ray, self.number = ray, number

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> FakeRef:
            return FakeRef(lambda: self.ray.behave(self.number, method, arguments))

        made = SimpleNamespace(remote=call)
        made.options = lambda **options: made
        return made


class FakeRay:
    """A module `ray` whose calls end in a random order."""

    def __init__(self, behave: Callable[[int, str, tuple[Any, ...]], Any], seed: int = 0) -> None:
        self.behave, self.chance = behave, random.Random(seed)
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.actors: list[FakeActor] = []
        self.resources, self.alive = {"CPU": 8.0}, [True]  # of all machines; which of them are there

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": alive} for alive in self.alive]

    def remote(self, **options: Any) -> Any:
        def make(*arguments: Any) -> FakeActor:
            self.actors.append(FakeActor(self, len(self.actors) + 1))
            return self.actors[-1]

        factory = SimpleNamespace(remote=make)
        factory.options = lambda **more: factory
        return lambda kind: factory

    def wait(self, refs: Sequence[FakeRef], *, num_returns: int, timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
        ready = [self.chance.choice(refs)]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: FakeRef) -> Any:
        return ref.make()
