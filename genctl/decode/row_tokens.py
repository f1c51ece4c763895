"""The tokens of rows: linked lists on the host, and one buffer on the device, which is filled on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from genctl.decode.transfer import to_device

# A new token and the node before it; None at the prompt. Forked rows share their common nodes.
Node: TypeAlias = "tuple[int, Any] | None"


class RowTokens:
    """The tokens of R rows, int64 [R, length]."""

    def __init__(self, buffer: Tensor, filled: int, length: int, nodes: list[Node]) -> None:
        self.buffer = buffer  # int64 [R, capacity], of which `filled` columns hold tokens
        self.filled = filled
        self.length = length
        self.nodes = nodes  # R, the newest token of each row

    @classmethod
    def begin(cls, tokens: Tensor, capacity: int) -> RowTokens:
        """One row that begins with the prompt `tokens`, int64 [1, T]. `capacity` more tokens fit without a copy."""
        length = tokens.shape[1]
        buffer = tokens.new_empty(1, length + capacity)
        buffer[:, :length] = tokens
        return cls(buffer, length, length, [None])

    def tensor(self) -> Tensor:
        """int64 [R, length], a view that later tokens do not change."""
        count = self.length - self.filled
        if count:
            if self.length > self.buffer.shape[1]:
                room = self.buffer.new_empty(len(self.buffer), max(64, self.buffer.shape[1] // 2) + count)
                self.buffer = torch.cat([self.buffer, room], 1)
            columns = [token for node in self.nodes for token in newest(node, count)]
            self.buffer[:, self.filled : self.length] = to_device(columns, self.buffer.device).view(-1, count)
            self.filled = self.length
        return self.buffer.narrow(1, 0, self.length)

    def append(self, token: int) -> None:
        """Add a token to the only row."""
        self.nodes[0] = token, self.nodes[0]
        self.length += 1

    def continued(self, parents: list[int], written: Sequence[Sequence[int]]) -> RowTokens:
        """The rows `parents`, each followed by its `written` tokens, equally many for all."""
        nodes = []
        for parent, tokens in zip(parents, written, strict=True):
            node = self.nodes[parent]
            for token in tokens:
                node = token, node
            nodes.append(node)
        buffer, length = self.buffer, self.length + len(written[0]) if written else self.length
        if parents != [*range(len(self.nodes))]:
            buffer = buffer.index_select(0, to_device(parents, buffer.device))
        return RowTokens(buffer, self.filled, length, nodes)


class PaddedTokens:
    """The tokens of rows of different lengths, int64 [R, T], padded on the left."""

    def __init__(self, rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> None:
        self.length = max(map(len, rows))
        flat = [token for row in rows for token in (*[pad] * (self.length - len(row)), *row)]
        self.buffer = to_device(flat, device).view(len(rows), self.length)

    def append(self, tokens: Sequence[int]) -> None:
        """Add a token to each row."""
        if self.length == self.buffer.shape[1]:
            self.buffer = torch.cat([self.buffer, torch.empty_like(self.buffer)], 1)
        self.buffer[:, self.length] = to_device(tokens, self.buffer.device)
        self.length += 1

    def tensor(self) -> Tensor:
        """int64 [R, T], a view that later tokens do not change."""
        return self.buffer.narrow(1, 0, self.length)


def newest(node: Node, count: int) -> list[int]:
    """The last `count` tokens of a row, oldest first; only new ones, so there may be fewer."""
    tokens: list[int] = []
    while node is not None and len(tokens) < count:
        token, node = node
        tokens.append(token)
    tokens.reverse()
    return tokens


def tail(node: Node, written: list[int]) -> Callable[[int], list[int]]:
    """A function of n: the last n new tokens of a row followed by `written`."""

    def last(count: int) -> list[int]:
        return newest(node, count - len(written)) + written[max(0, len(written) - count) :]

    return last
