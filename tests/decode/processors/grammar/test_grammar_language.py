"""A grammar's processor allows the language, all of it and nothing else: against enumeration."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.processors.grammar import Grammar
from genctl.decode.processors.language import GrammarPosition
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError
from tests.decode.processors.grammar.machines import PROMPT, allowed, machine, text, tiny_words, written
from tests.models.tokenizers_made import byte_level, llama, metaspace, unigram_bytes, word_piece
from tests.tiny import EOS, tokenizer

AB = Spelling((b"", b"a", b"b", b"ab", b"a", b"bab", b"", b"c"), {})  # id 0 is EOS, 6 has no text, 1 and 4 are alike


@pytest.mark.parametrize("pattern", ["(ab)*", "a|ab|abb", "a?b?a?", "(a|b){2,3}", "a+b", "(ba|ab)+c?", "b{3}"])
def test_exactly_the_texts_of_a_regular_language_can_be_written(pattern: str) -> None:
    grammar = machine(AB, (0,), regex=pattern)
    found = {text(AB, row).decode() for row in written(grammar, 5)}
    strings = ("".join(chars) for length in range(6) for chars in itertools.product("abc", repeat=length))
    expected = {string for string in strings if re.fullmatch(pattern, string)}
    assert {string for string in found if len(string) <= 5} == expected
    assert all(re.fullmatch(pattern, string) for string in found)


def test_every_way_to_cut_a_text_into_tokens_or_bytes_is_allowed() -> None:
    rows = set(written(machine(AB, (0,), regex="abab"), 4))
    cuts = {row for n in range(1, 5) for row in itertools.product(range(1, 6), repeat=n) if text(AB, row) == b"abab"}
    assert rows == cuts
    assert len(cuts) == 11  # a·b·a·b 4, ab·a·b 2, a·b·ab 2, ab·ab 1, a·bab 2: there are two ids for a
    words = tiny_words()
    rows = list(written(machine(regex="é|ż"), 3))
    assert {text(words, row).decode() for row in rows} == {"é", "ż"}
    assert all(len(row) == 2 for row in rows)


@pytest.mark.parametrize("family", [byte_level, llama, metaspace, unigram_bytes, word_piece])
def test_what_the_tokenizer_shows_is_in_the_language(family: Any) -> None:
    tokenizer = family()
    words = spelling(tokenizer, len(tokenizer), "regex")
    eos = tokenizer.eos_token_id
    pattern = "(the|a) ?(cat|t|at)"
    grammar = machine(words, (eos,), regex=pattern)
    draw = random.Random(5)
    seen = set()
    for _ in range(60):
        row: list[int] = []
        while True:
            choices = sorted(allowed(grammar, row)[0])
            if not choices:  # no piece of this vocabulary goes on
                break
            token = draw.choice(choices)
            if token == eos:
                shown = tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                assert re.fullmatch(pattern, shown), (row, shown)
                seen.add(shown)
                break
            row.append(token)
    assert len(seen) > 1


def test_a_blank_that_the_decoder_strips_is_no_part_of_the_text() -> None:
    tokenizer = llama()
    words = spelling(tokenizer, len(tokenizer), "regex")
    grammar = machine(words, (2,), regex="the")
    assert {"t", "▁th"} <= {tokenizer.convert_ids_to_tokens(token) for token in allowed(grammar, ())[0]}
    start = tokenizer.convert_tokens_to_ids("▁th")
    names = {tokenizer.convert_ids_to_tokens(token) for token in allowed(grammar, (start,))[0]}
    assert "e" in names
    assert not any(name.startswith("▁") for name in names)


def test_special_tokens_padding_and_a_smaller_head() -> None:
    grammar = machine(tiny_words(310), regex="[^x]*")
    ids = allowed(grammar, ())[0]
    assert EOS in ids
    assert not ids & {0, 1, *range(300, 310)}
    ids = allowed(machine(tiny_words(290), regex="[^x]*"), ())[0]
    assert max(ids) < 290
    grammar = Grammar(machine(regex="ab").source, tiny_words(), 5, (EOS,))
    scores = torch.full((1, 300), 0.5)
    assert torch.equal(grammar(torch.tensor([[7, 8, 9, 1]]), scores.clone()), scores)
    assert not torch.equal(grammar(torch.tensor([[7, 8, 9, 1, 5]]), scores.clone()), scores)


def test_an_eos_id_with_a_text_of_its_own_ends_where_its_text_may() -> None:
    grammar = machine(AB, (2,), regex="a*b")  # "b" ends a row and is part of what is shown
    assert allowed(grammar, ()) == [{1, 2, 3, 4}]
    assert not allowed(machine(AB, (2,), regex="a*bc"), (1,))[0] & {2}


def test_lark_grammars_count() -> None:
    grammar = machine(AB, (0,), grammar='start: "a" start "b" | "c"')
    found = {text(AB, row).decode() for row in written(grammar, 5)}
    assert {"c", "acb", "aacbb"} <= found
    assert all(re.fullmatch("(a*)c(b*)", one) and one.count("a") == one.count("b") for one in found)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_may_be_compact_or_indented(indent: int | None) -> None:
    value = {"a": [1, {"b": 'ü\n"'}], "c": None}
    grammar = machine(json_schema={"type": "object"})
    for made in (
        json.dumps(value, indent=indent, ensure_ascii=False),
        json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    ):
        assert grammar.accepts(tokenizer().encode(made))
        assert not grammar.accepts(tokenizer().encode(made[:-1]))


def test_a_language_that_the_tokenizer_cannot_write_is_refused() -> None:
    with pytest.raises(UsageError, match="no text that this tokenizer can write"):
        machine(AB, (0,), regex="xyz")
    with pytest.raises(UsageError, match="empty one, and there is no EOS"):
        machine(AB, (), regex="d?")


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


def test_drafts_outside_of_the_grammar_and_rows_that_others_barred() -> None:
    grammar = machine(regex="ab")
    scores = torch.linspace(-1, 1, 300)[None]
    assert torch.equal(grammar(torch.tensor([[*PROMPT, 70, 71]]), scores.clone()), scores)
    grammar = machine(regex="a")
    scores = torch.full((1, 300), -torch.inf)
    scores[0, 68] = 1.0
    assert bool((grammar(torch.tensor([list(PROMPT)]), scores) == -torch.inf).all())
