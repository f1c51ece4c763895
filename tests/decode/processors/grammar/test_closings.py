"""Where a text fits the budget, it ends complete: for schemas, patterns and grammars of every kind, from the least
budget on, which exhaustive search finds.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from genctl.decode.processors.closing_search import ClosingSearch
from genctl.decode.processors.closing_witness import reach, witnesses
from genctl.decode.processors.grammar import Grammar
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError
from genctl.params import Generation
from tests.decode.processors.grammar.machines import PROMPT, allowed, machine, text, tiny_words
from tests.models.tokenizers_made import byte_level, llama, metaspace, unigram_bytes

LETTERS = [b'"', b"{", b"}", b"[", b"]", b":", b",", b"a", b"b", b"0", b"1", b".", b"@", b"-"]
LONGER = [b"ab", b'":', b'{"', b'"}', b'","', b"a@", b"b.", b"00", b"[[", b"aaa", b'"a"', b',"', b'":"']
VOCABULARIES = {"letters": LETTERS, "longer": LETTERS + LONGER, "some": LETTERS + LONGER[::3]}
SCHEMAS: dict[str, Any] = {
    "email": {"type": "string", "format": "email"},
    "uri": {"type": "string", "format": "uri"},
    "a pattern without anchors": {"type": "string", "pattern": "a.*b"},
    "a pattern of digits": {"type": "string", "pattern": "[01]{2}b"},
    "letters of two kinds": {"type": "string", "pattern": "(ab|ba)b"},
    "a long string": {"type": "string", "minLength": 3},
    "an enum": {"enum": ["aab", "b0b0", [10]]},
    "branches": {"anyOf": [{"const": "aaaaaaaa"}, {"type": "string", "pattern": "b@"}]},
    "items": {"type": "array", "minItems": 2, "items": {"type": "integer", "minimum": 10}},
    "an object": {"type": "object", "properties": {"a": {"type": "string", "pattern": "1$"}}, "required": ["a"]},
}
PATTERNS = [".*ab.*", "(aab|b)*0", "a.*b.*0", "(a{3}b?){2}1", "[^a]*aba"]


def shortest(words: Spelling, knobs: dict[str, Any], most: int = 9) -> int:
    """The fewest tokens of a text, by trying all; texts that are reached again are not followed again."""
    level = {b"": machine(words, (0,), **knobs)._root.matcher}
    for count in range(1, most + 1):
        longer: dict[bytes, Any] = {}
        for written, matcher in level.items():
            for token, piece in enumerate(words.pieces):
                after = matcher.deep_copy()
                if not piece or written + piece in longer or not after.try_consume_tokens([token]):
                    continue
                if after.is_accepting():
                    return count
                longer[written + piece] = after
        level = longer
    raise AssertionError("no text is so short")


def drawn(made: Grammar, room: int, seed: int, eos: int) -> list[int]:
    """A row drawn from what is allowed; seed 0 takes the least probable end, as a greedy search may."""
    row: list[int] = []
    draw = random.Random(seed)
    while len(row) < room:
        ids = sorted(allowed(made, row)[0])
        others = [token for token in ids if token != eos]
        token = draw.choice(ids) if seed or not others else others[-1]
        if token == eos:
            break
        row.append(token)
    return row


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "knobs",
    [*({"json_schema": schema} for schema in SCHEMAS.values()), *({"regex": pattern} for pattern in PATTERNS)],
    ids=[*SCHEMAS, *PATTERNS],
)
def test_from_the_least_budget_on_every_text_is_whole(knobs: dict[str, Any], vocabulary: str) -> None:
    words = Spelling((b"", *VOCABULARIES[vocabulary]), {})
    source = read(Generation(**knobs))
    assert source is not None
    least = shortest(words, knobs)
    for room in (least, least + 1, least + 4):
        for seed in range(3):
            made = Grammar(source, words, len(PROMPT), (0,), room)
            row = drawn(made, room, seed, 0)
            assert made.accepts(row), text(words, row)
            if "json_schema" in knobs:
                jsonschema.validate(json.loads(text(words, row)), knobs["json_schema"])
    if least > 1:  # a smaller budget is refused, or the text is reported as cut
        try:
            cut = Grammar(source, words, len(PROMPT), (0,), least - 1)
        except UsageError:
            return
        assert cut.cut([*PROMPT, *drawn(cut, least - 1, 1, 0)], 0)


@pytest.mark.parametrize("family", [byte_level, llama, unigram_bytes, metaspace])
@pytest.mark.parametrize("name", ["email", "uri", "a pattern without anchors", "an object"])
def test_whatever_the_tokenizer(family: Any, name: str) -> None:
    tokenizer = family()
    words, eos = spelling(tokenizer, len(tokenizer), "json_schema"), tokenizer.eos_token_id
    source = read(Generation(json_schema=SCHEMAS[name]))
    assert source is not None
    if family is metaspace:  # it lacks the marks of JSON
        with pytest.raises(UsageError, match="no text that this tokenizer can write"):
            Grammar(source, words, len(PROMPT), (eos,), 30)
        return
    first = Grammar(source, words, len(PROMPT), (eos,), 60).first
    assert first is not None
    for room in (len(first), len(first) + 2):
        for seed in range(2):
            made = Grammar(source, words, len(PROMPT), (eos,), room)
            row = drawn(made, room, seed, eos)
            assert made.accepts(row)
            jsonschema.validate(json.loads(text(words, row)), SCHEMAS[name])


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string", "pattern": "foo.*bar"}, b'"foobar"'),
        ({"type": "string", "pattern": "(?i)^(yes|no)$"}, b'"no"'),
        ({"type": "string", "format": "email"}, b'"a@a"'),
        ({"type": "string", "minLength": 4}, b'"aaaa"'),
        ({"type": "string", "pattern": "^a*$"}, b'""'),
    ],
)
def test_the_shortest_text_of_a_pattern_is_found_by_its_length(schema: dict[str, Any], found: bytes) -> None:
    source = read(Generation(json_schema=schema))
    assert source is not None
    assert [len(one) for one in witnesses(source.lark)] == [len(found)]


@pytest.mark.parametrize(
    ("knobs", "least"),
    [
        ({"regex": "x((y{30}){30}z)?"}, 901),
        (
            {
                "json_schema": {
                    "type": "array",
                    "items": {"type": "array", "minItems": 50, "items": {"const": "abcdef"}},
                }
            },
            100,
        ),
        (
            {
                "json_schema": {
                    "$ref": "#/$defs/a",
                    "$defs": {
                        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
                        "b": {"type": "array", "minItems": 40, "items": {"$ref": "#/$defs/c"}},
                        "c": {"type": "object", "properties": {"long": {"type": "integer"}}, "required": ["long"]},
                    },
                }
            },
            400,
        ),
    ],
)
def test_one_token_may_require_what_is_repeated(knobs: dict[str, Any], least: int) -> None:
    source = read(Generation(**knobs))
    assert source is not None
    assert reach(source.lark) >= least


def test_a_large_vocabulary_is_searched_in_a_part() -> None:
    pieces = [
        b"",
        *(bytes([byte]) for byte in range(256)),
        *(f"word{n}".encode() for n in range(3000)),
        b"foobar",
        b'"',
    ]
    words = Spelling(tuple(pieces), {})
    source = read(Generation(json_schema={"type": "string", "pattern": "foobar"}))
    assert source is not None
    search = ClosingSearch(words, source.lark, (0,))
    assert len(search._tokens) < 600
    closing = search.find(b"", False)
    assert closing is not None
    assert b"".join(pieces[token] for token in closing) == b'"foobar"'
    assert len(closing) == 3


def test_a_search_in_the_middle_of_a_text_goes_on_from_there() -> None:
    words = tiny_words()
    source = read(Generation(json_schema={"type": "string", "pattern": "foo.*bar"}))
    assert source is not None
    search = ClosingSearch(words, source.lark, (2,))
    for written, rest in ((b'"xfo', b'obar"'), (b'"foo bab', b'ar"'), (b'"foobar', b'"')):
        closing = search.find(written, True)
        assert closing is not None
        assert b"".join(words.pieces[token] for token in closing) == rest
