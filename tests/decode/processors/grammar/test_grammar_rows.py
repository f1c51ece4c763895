"""Rows are reordered, forked, rolled back and interleaved: what a row may write depends on what it wrote alone."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.processors.language import GrammarPosition
from tests.decode.processors.grammar.machines import PROMPT, allowed, machine

PATTERN = "((the|a) (cat|dog|mat) (sat|ran)(, )?){1,9}"


@cache
def _fresh(row: tuple[int, ...]) -> frozenset[int]:
    return frozenset(allowed(machine(regex=PATTERN), row)[0])


def fresh(row: list[int]) -> set[int]:
    """What may follow, asked of a reader that has seen nothing else."""
    return set(_fresh(tuple(row)))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_any_order_of_questions_gets_the_answers_of_a_fresh_reader(seed: int) -> None:
    draw = random.Random(seed)
    grammar = machine(regex=PATTERN)
    rows: list[list[int]] = [[]] * 3
    for _ in range(20):
        answers = allowed(grammar, *rows)
        assert answers == [fresh(row) for row in rows]
        move = draw.random()
        if move < 0.15 and len(rows[0]) > 2:  # rolled back
            back = draw.randrange(1, 3)
            rows = [row[:-back] for row in rows]
        elif move < 0.25:  # a token on trial that leaves the grammar
            rows = [[*rows[0], draw.randrange(300)], *([*row, draw.randrange(300)] for row in rows[1:])]
            allowed(grammar, *rows)
            rows = [row[:-1] for row in rows]
        else:
            rows = [draw.choice(rows) for _ in rows]
            steps = [sorted(fresh(row) - {2}) for row in rows]
            if not all(steps):
                return
            rows = [[*row, draw.choice(ids)] for row, ids in zip(rows, steps, strict=True)]


def test_a_row_that_goes_on_costs_one_token_each_step_even_with_drafts(monkeypatch: Any) -> None:
    grammar = machine(regex="[ab]*")
    moved = 0
    advance = GrammarPosition.after

    def counting(self: Any, token: int) -> Any:
        nonlocal moved
        moved += 1
        return advance(self, token)

    monkeypatch.setattr(GrammarPosition, "after", counting)
    row: list[int] = []
    for _ in range(200):
        for draft in range(4):  # three tokens on trial, one of them kept
            allowed(grammar, [*row, *[67] * draft])
        row.append(68)
    assert moved <= 200 * 4


def test_what_is_kept_is_bounded_and_a_forgotten_row_is_read_again() -> None:
    grammar = machine(regex="a{0,300}b")
    row: list[int] = []
    for _ in range(300):
        row.append(68)
        allowed(grammar, row)
    assert len(grammar._rows._known) <= 64
    assert allowed(grammar, row[:5], [*row[:4], 69]) == allowed(machine(regex="a{0,300}b"), row[:5], [*row[:4], 69])


def test_a_draft_that_left_the_grammar_is_left_alone() -> None:
    grammar = machine(regex="ab")
    scores = torch.linspace(-1, 1, 300)[None]
    assert torch.equal(grammar(torch.tensor([[*PROMPT, 70, 71]]), scores.clone()), scores)


def test_all_minus_infinity_where_others_barred_what_the_grammar_needs() -> None:
    grammar = machine(regex="a")
    scores = torch.full((1, 300), -torch.inf)
    scores[0, 68] = 1.0
    assert bool((grammar(torch.tensor([list(PROMPT)]), scores) == -torch.inf).all())
