"""A text that fits the budget is never cut: whatever is drawn, a row can be closed in the tokens that are left."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genctl
from genctl.decode.processors.grammar import Grammar
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError
from genctl.params import Generation
from tests.decode.processors.grammar.machines import PROMPT, allowed, text, tiny_words, written
from tests.tiny import EOS, checkpoint
from tests.tiny import tokenizer as tiny_tokenizer

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "tree": TREE,
    "anything": {},
    "strings": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 2},
    "choice": {"anyOf": [{"const": 1}, {"const": "a rather long text that nobody can have time for"}]},
    "open": {"type": "object", "additionalProperties": {"type": "object", "properties": {"k": {}}, "required": ["k"]}},
}
REGEXES = ["a|b{60}", "(ab|c[0-9]{20})*d", "[0-9]{4}-[0-9]{2}(-[0-9]{2})?", "x(y{30})?(z|w{25})", "[a-z ]*(stop|!)"]
LARK = 'start: "(" start ")" | "[" start start "]" | WORD\nWORD: /[a-z]{2,30}/'


def grammar(words: Spelling, room: int, **knobs: Any) -> Grammar:
    source = read(Generation(**knobs))
    assert source is not None
    return Grammar(source, words, len(PROMPT), (EOS,), room)


@cache
def story_words() -> Spelling:
    return spelling(genctl.load("builtin:stories").tokenizer, 1536, "test")


def walk(made: Grammar, room: int, draw: random.Random, taste: str) -> tuple[list[int], bool]:
    """A row of at most `room` tokens drawn from what is allowed, and whether it ended by EOS."""
    row: list[int] = []
    size = len(made.words.pieces)
    while len(row) < room:
        ids = sorted(allowed(made, row, size=size)[0])
        assert ids, "no token is left"
        others = [token for token in ids if token != EOS]
        if taste == "long" and others:  # never ends by itself, and opens what it can
            opening = [token for token in others if set(made.words.pieces[token]) & set(b'{["(,bcwy')]
            ids = opening if opening and draw.random() < 0.7 else others
        token = draw.choice(ids)
        if token == EOS:
            return row, True
        row.append(token)
    return row, False


def shortest_room(words: Spelling, knobs: dict[str, Any]) -> int:
    """The least budget that is not refused and in which a closing is known."""
    for room in range(1, 200):
        try:
            made = grammar(words, room, **knobs)
        except UsageError:
            continue
        if 0 < made.least <= room:
            return room
    raise AssertionError("no room is enough")


@pytest.mark.parametrize("taste", ["long", "any"])
@pytest.mark.parametrize(
    "knobs",
    [
        *({"json_schema": schema} for schema in SCHEMAS.values()),
        *({"regex": pattern} for pattern in REGEXES),
        {"grammar": LARK},
    ],
    ids=[*SCHEMAS, *REGEXES, "lark"],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_is_drawn_the_text_is_whole_at_the_end(knobs: dict[str, Any], taste: str, data: st.DataObject) -> None:
    words = tiny_words()
    least = _least(json.dumps(knobs))
    room = least + data.draw(st.integers(0, 40))
    made = grammar(words, room, **knobs)
    row, ended = walk(made, room, random.Random(data.draw(st.integers(0, 2**32))), taste)
    shown = text(words, row).decode()
    assert ended or (room == least and len(row) == room)
    assert made.accepts(row)
    if "json_schema" in knobs:
        json.loads(shown)
    elif "regex" in knobs:
        assert re.fullmatch(knobs["regex"], shown)


@cache
def _least(knobs: str) -> int:
    return shortest_room(tiny_words(), json.loads(knobs))


LINES = Spelling((b"", b"a", b"b", b"\n", b"\\", b"\t", b"a\n", b"b\\", b"\xc3", b"\xb6", b"\xb6\n", b" ", b"ab"), {})
JSON = Spelling((b"", *(m.encode() for m in ('"', "{", "}", "[", "]", ":", ",", "a", "1", '":', '"}', '{"', 'a"'))), {})
AB = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SMALL: list[tuple[Spelling, dict[str, Any], int]] = [
    (LINES, {"regex": r"[^\n]*\n"}, 4),
    *((LINES, {"regex": pattern}, 5) for pattern in (r"[ab]+\\", r"([ab]+\t)+", r"(ö|a)+\n", r"a( b)*\n")),
    (LINES, {"regex": "(ab|ba)*b|b{5}"}, 6),
    (LINES, {"grammar": 'root ::= [^\\n]+ "\\n"'}, 4),
    (LINES, {"grammar": 'root ::= ("a" "\\n")+'}, 6),
    (LINES, {"grammar": 'start: "a" start "b" | " "'}, 6),
    (JSON, {"json_schema": {"enum": ["a", 1, [1]], "x-guidance": {"whitespace_flexible": False}}}, 6),
    (JSON, {"json_schema": {**AB, "x-guidance": {"whitespace_flexible": False}}}, 8),
    (JSON, {"json_schema": {"anyOf": [{"const": "a"}, AB], "x-guidance": {"whitespace_flexible": False}}}, 8),
]


@pytest.mark.parametrize(("words", "knobs", "longest"), SMALL, ids=lambda part: str(part)[:40])
def test_a_budget_bars_what_cannot_end_in_time_and_nothing_else(
    words: Spelling, knobs: dict[str, Any], longest: int
) -> None:
    """By enumeration: the texts that can be written in a budget are those of the grammar that fit it."""
    source = read(Generation(**knobs))
    assert source is not None
    free = set(written(Grammar(source, words, len(PROMPT), (0,)), longest - 1))
    for room in range(2, longest + 1):
        fits = {row for row in free if len(row) < room}
        if fits:
            made = Grammar(source, words, len(PROMPT), (0,), room)
            assert set(written(made, room - 1)) == fits


def test_what_other_rows_wrote_bars_no_token() -> None:
    """After b, as after a, the same ids may follow and the same way leads out, but q needs another one."""
    pieces = (b"<pad>", b"<bos>", b"", *(letter.encode() for letter in "abxy!qrst"))
    a_row, b_row, following = ([pieces.index(letter.encode()) for letter in row] for row in ("ax", "bx", "xy!q"))
    after = []
    for earlier in ([], [a_row]):
        words = Spelling(pieces, {})
        made = grammar(words, 8, regex="a[xy]*(!|qr)|b[xy]*(!|qst)")
        for row in earlier:
            allowed(made, row)
        after.append(allowed(made, b_row))
    assert after[0] == after[1] == [set(following)]


WANTED = [
    ({"regex": r"[^\n]*\n"}, "wö\n"),
    ({"grammar": 'root ::= [^\\n]+ "\\n"'}, "grün\n"),
    ({"regex": r"[a-z ]+\t[a-zäöü ]+\t"}, "the cat\tgrün wö\t"),
    ({"regex": r"[^\\]+\\"}, "the end\\"),
    ({"grammar": 'root ::= (term "=" term "\\n")+\nterm ::= [0-9]+ ([-+*] [0-9]+)*'}, "1+2=3\n4*5=20\n12-7=5\n"),
    ({"json_schema": AB}, '{"a": 1234}'),
    ({"json_schema": {"type": "array", "items": {"type": "string"}}}, '["é\\n", "grün \\\\", "\\u001f"]'),
    ({"json_schema": {"anyOf": [{"const": 1}, {"const": "a rather long text"}]}}, '"a rather long text"'),
]


@pytest.mark.parametrize(("knobs", "wanted"), WANTED, ids=[wanted for _, wanted in WANTED])
def test_a_text_that_ends_in_time_by_itself_is_not_changed(knobs: dict[str, Any], wanted: str) -> None:
    for words, tokenizer in ((tiny_words(), tiny_tokenizer()), (story_words(), _stories().tokenizer)):
        row = [*tokenizer.backend_tokenizer.encode(wanted, add_special_tokens=False).ids, EOS]
        assert text(words, row[:-1]).decode() == wanted
        for room in (len(row), len(row) + 1, len(row) + 3, len(row) + 9, 60, 300):
            made = grammar(words, room, **knobs)
            scores = torch.randn(1, len(words.pieces), generator=torch.Generator().manual_seed(room))
            for step, token in enumerate(row):
                liked = scores.index_fill(1, torch.tensor([token]), 9.0)
                after = made(torch.tensor([[*PROMPT, *row[:step]]]), liked)
                assert int(after.argmax()) == token, (room, text(words, row[:step]))


def test_where_no_way_out_is_found_the_grammar_alone_decides() -> None:
    words = tiny_words()
    knobs = {"json_schema": {"type": "string", "pattern": "(?s:.*)a.{2}b.{3}c.{2}d(?s:.*)"}}
    source = read(Generation(**knobs))
    assert source is not None
    free, near = Grammar(source, words, len(PROMPT), (EOS,)), grammar(words, 12, **knobs)
    row: list[int] = []
    while len(row) < 11:
        ids = allowed(free, row)[0]
        assert allowed(near, row)[0] == ids
        row.append(min(ids - {EOS}))


@pytest.mark.parametrize(
    ("knobs", "room"),
    [({"regex": "a{30}"}, 5), ({"json_schema": SCHEMAS["object"]}, 4), ({"json_schema": {"const": "abcabcabc"}}, 3)],
)
def test_a_budget_that_no_text_fits_is_refused(knobs: dict[str, Any], room: int) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(knobs))}: no text of it fits in {room} tokens"):
        grammar(tiny_words(), room, **knobs)


def test_where_others_bar_what_would_close_the_text_it_goes_on_as_far_as_it_comes() -> None:
    words = tiny_words()
    made = grammar(words, 2, regex="a*b")
    b, a = (next(iter(words.spelled(letter))) for letter in (b"b", b"a"))
    scores = torch.zeros(1, len(words.pieces))
    scores[0, b] = -torch.inf
    after = made(torch.tensor([[*PROMPT, a]]), scores)
    assert after[0, a] == 0.0


@pytest.mark.parametrize(
    "mode", [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}, {}]
)
def test_every_mode_writes_whole_json_in_every_budget_that_is_enough(mode: dict[str, Any], tmp_path: Any) -> None:
    stories = _stories()
    check: Callable[[str], Any] = json.loads
    for room in (15, 16, 17, 19, 24, 40):
        results = stories.generate(
            ["Once upon", "A boy named Tom and his dog"], json_schema=SCHEMAS["object"], max_new_tokens=room,
            seed=room, **mode,
        )  # fmt: skip
        for result in results:
            for one in result.sequences:
                assert set(check(one.text)) >= {"name", "age"}
                assert one.finish_reason == "eos"


@cache
def _stories() -> Any:
    return genctl.load("builtin:stories")


def test_an_encoder_decoder_and_a_prefix(tmp_path: Any) -> None:
    t5 = genctl.load(str(checkpoint("t5", tmp_path / "t5")))
    for room in (4, 6):
        (result,) = t5.generate(["the cat"], regex="(ab)+c|d{40}", max_new_tokens=room, do_sample=True, seed=room)
        assert re.fullmatch("(ab)+c", result.text)
    (result,) = _stories().generate(
        ["Once"], regex=" the [a-z]{3,30}", prefix=" the c", max_new_tokens=12, do_sample=True, seed=1
    )
    assert result.text.startswith(" the c")
