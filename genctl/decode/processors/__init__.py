"""Logits processors: (history, scores) -> scores. Start with `build` and `trace`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# A function of the tokens so far and their scores: (history int64 [R, T], scores f32 [R, V]) -> scores f32 [R, V].
Processor: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]


def on_host(*tensors: Tensor) -> bool:
    """Whether the host can read tensors without waiting for another device."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


T = TypeVar("T")


def function_of(processors: Sequence[object], kind: type[T]) -> T | None:
    """The first function of this kind among a lane's processors; None if there is none."""
    functions = (getattr(processor, "function", None) for processor in processors)
    return next((function for function in functions if isinstance(function, kind)), None)


_DEPTH = 64  # steps by which a row can be rolled back (drafts are far shorter)


class ByHistory(Generic[T]):
    """A cache of values keyed by a row's tokens, so rows can be moved, forked and rolled back between calls."""

    def __init__(self, depth: int = _DEPTH) -> None:
        self.depth = depth
        self._known: OrderedDict[bytes, T] = OrderedDict()

    def get(self, tokens: bytes) -> T | None:
        """The value for a row with these tokens; None if there is none or it was evicted."""
        return self._known.get(_key(tokens))

    def put(self, tokens: bytes, known: T, rows: int) -> None:
        """Store a value, evicting the oldest. `rows` is the number of rows in the call."""
        key = _key(tokens)
        self._known[key] = known
        self._known.move_to_end(key)
        while len(self._known) > self.depth * max(rows, 16):
            self._known.popitem(last=False)


def _key(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=16).digest()
