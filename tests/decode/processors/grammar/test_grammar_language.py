"""A grammar's processor allows the language, all of it and nothing else: against enumeration."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.processors.grammar import Grammar
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError
from tests.decode.processors.grammar.machines import allowed, machine, text, tiny_words, written
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


def test_every_way_to_cut_a_text_into_tokens_is_allowed() -> None:
    rows = set(written(machine(AB, (0,), regex="abab"), 4))
    cuts = {row for n in range(1, 5) for row in itertools.product(range(1, 6), repeat=n) if text(AB, row) == b"abab"}
    assert rows == cuts
    assert len(cuts) == 11  # a·b·a·b 4, ab·a·b 2, a·b·ab 2, ab·ab 1, a·bab 2: there are two ids for a


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


def test_characters_are_written_byte_by_byte() -> None:
    words = tiny_words()
    rows = list(written(machine(regex="é|ż"), 3))
    assert {text(words, row).decode() for row in rows} == {"é", "ż"}
    assert all(len(row) == 2 for row in rows)


def test_padding_rows_of_the_head_and_special_tokens_are_barred() -> None:
    grammar = machine(tiny_words(310), regex="[^x]*")
    ids = allowed(grammar, ())[0]
    assert EOS in ids
    assert not ids & {0, 1, *range(300, 310)}


def test_a_head_smaller_than_the_vocabulary_is_enough() -> None:
    ids = allowed(machine(tiny_words(290), regex="[^x]*"), ())[0]
    assert max(ids) < 290


def test_an_eos_id_with_a_text_of_its_own_ends_where_its_text_may() -> None:
    grammar = machine(AB, (2,), regex="a*b")  # "b" ends a row and is part of what is shown
    assert allowed(grammar, ()) == [{1, 2, 3, 4}]
    assert not allowed(machine(AB, (2,), regex="a*bc"), (1,))[0] & {2}


def test_lark_grammars_count() -> None:
    grammar = machine(AB, (0,), grammar='start: "a" start "b" | "c"')
    found = {text(AB, row).decode() for row in written(grammar, 5)}
    assert {"c", "acb", "aacbb"} <= found
    assert all(re.fullmatch("(a*)c(b*)", one) and one.count("a") == one.count("b") for one in found)


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", 3, None]},
            {"type": "integer", "minimum": 2, "maximum": 40},
        ]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "minItems": st.just(1), "maxItems": st.just(2)}
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: {
                "type": "object",
                "properties": {f"k{n}": part for n, part in enumerate(parts)},
                "required": ["k0"],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=3,
)


def valid(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "array":
        return isinstance(value, list) and 1 <= len(value) <= 2 and all(valid(one, schema["items"]) for one in value)
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and "k0" in value
            and all(k in known and valid(v, known[k]) for k, v in value.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_drawn_under_a_schema_parses_and_is_valid(schema: dict[str, Any], seed: int) -> None:
    grammar = machine(json_schema=schema)
    draw = random.Random(seed)
    row: list[int] = []
    while True:
        ids = sorted(allowed(grammar, row)[0])
        token = EOS if EOS in ids else draw.choice(ids)
        if token == EOS:
            break
        row.append(token)
    assert valid(json.loads(tokenizer().decode(row)), schema)


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


def test_special_tokens_forced_before_the_text_are_not_judged() -> None:
    grammar = Grammar(machine(regex="ab").source, tiny_words(), 5, (EOS,))
    scores = torch.full((1, 300), 0.5)
    assert torch.equal(grammar(torch.tensor([[7, 8, 9, 1]]), scores.clone()), scores)
    assert not torch.equal(grammar(torch.tensor([[7, 8, 9, 1, 5]]), scores.clone()), scores)
