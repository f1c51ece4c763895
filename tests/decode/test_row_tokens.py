"""The tokens of rows: whichever rows continue, and whenever they are read, these are the tokens that were written."""

from __future__ import annotations

import random

import pytest
import torch

from genctl.decode.row_tokens import RowTokens, newest, tail


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_what_was_written(seed: int) -> None:
    chance = random.Random(seed)
    plain = [[5, 6, 7]]
    rows = RowTokens.begin(torch.tensor(plain), chance.choice([0, 3, 100]))
    read: list[tuple[torch.Tensor, list[list[int]]]] = []
    for _ in range(40):
        width, count = chance.randint(1, 4), chance.randint(0, 3)
        parents = [chance.randrange(len(plain)) for _ in range(width)]
        if chance.random() < 0.7:
            parents = list(range(len(plain)))
        written = [[chance.randrange(100) for _ in range(count)] for _ in parents]
        plain = [plain[parent] + tokens for parent, tokens in zip(parents, written, strict=True)]
        rows = rows.continued(parents, written)
        assert rows.length == len(plain[0])
        if chance.random() < 0.3:
            read.append((rows.tensor(), plain))
    assert rows.tensor().tolist() == plain
    assert all(tensor.tolist() == known for tensor, known in read), "later tokens changed what was read before"
    assert [newest(node, 10_000) for node in rows.nodes] == [row[3:] for row in plain]


@pytest.mark.parametrize("wanted", range(7))
def test_the_end_of_a_row_and_its_newest_tokens(wanted: int) -> None:
    rows = RowTokens.begin(torch.tensor([[9]]), 4).continued([0], [[1, 2, 3]])
    last = tail(rows.nodes[0], [4, 5])
    assert last(wanted) == [1, 2, 3, 4, 5][max(0, 5 - wanted) :]


def test_when_no_row_lives_on_nothing_is_left() -> None:
    rows = RowTokens.begin(torch.tensor([[9]]), 4).continued([0], [[1, 2]]).continued([], [])
    assert rows.tensor().shape == (0, 3)
