"""The tokens of rows in one buffer: a step adds a column and copies nothing until somebody reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from genctl.decode.transfer import to_device

LATE = 64  # columns that wait to be copied into the buffer, at most


class RowTokens:
    """The tokens of R rows, int64 [R, length], in a buffer with room behind it. Filled when somebody looks."""

    def __init__(self, buffer: Tensor, length: int, late: list[Tensor]) -> None:
        self.buffer = buffer  # int64 [R, capacity]
        self.length = length
        self.late = late  # the newest columns, [R, m] each, not in the buffer yet

    @classmethod
    def begin(cls, tokens: Tensor, capacity: int) -> RowTokens:
        """One row after a prompt. tokens int64 [1, T]; `capacity` is how many tokens may follow without a copy."""
        length = tokens.shape[1]
        buffer = tokens.new_empty(1, length + capacity)
        buffer[:, :length] = tokens
        return cls(buffer, length, [])

    def tensor(self) -> Tensor:
        """int64 [R, length], a view that later tokens do not change."""
        if self.late:
            columns = self.late[0] if len(self.late) == 1 else torch.cat(self.late, 1)
            count = columns.shape[1]
            if self.length > self.buffer.shape[1]:
                room = self.buffer.new_empty(len(self.buffer), max(64, self.buffer.shape[1] // 2) + count)
                self.buffer = torch.cat([self.buffer, room], 1)
            self.buffer[:, self.length - count : self.length] = columns
            self.late = []
        return self.buffer.narrow(1, 0, self.length)

    def continued(self, parents: list[int], written: Tensor, candidates: list[int]) -> RowTokens:
        """Rows `parents` of these with `written` [C, m] of the `candidates` behind each."""
        if len(self.late) >= LATE:
            self.tensor()
        buffer, late, length = self.buffer, self.late, self.length + written.shape[1]
        if parents != list(range(buffer.shape[0])):
            self.tensor()
            buffer, late = self.buffer.index_select(0, to_device(parents, buffer.device)), []
        if len(candidates) < written.shape[0]:
            written = written[to_device(candidates, written.device)]
        return RowTokens(buffer, length, [*late, written] if length > self.length and parents else late)
