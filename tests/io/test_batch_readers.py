"""Prompts from bytes, files, pipes and arguments: each line is one row or one sentence, and never a traceback."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.errors import InputError, UsageError
from genctl.io.jsonl import UsedIds
from genctl.io.readers import Format, read
from genctl.io.rows import BadRow, InputRow, RefusedRow

FORMATS: tuple[Format, ...] = ("lines", "text", "jsonl")


def rows(data: bytes, format: Format | None = None, name: str = "in", limit: int = 2**20) -> list[InputRow | BadRow]:
    return list(read(io.BytesIO(data), format=format, name=name, limit=limit))


def prompts(data: bytes, format: Format) -> list[str | None]:
    return [row.prompt if isinstance(row, InputRow) else f"!{row.message}" for row in rows(data, format)]


def only(line: str) -> InputRow | BadRow:
    (row,) = rows(line.encode("utf-8", "surrogatepass"), "jsonl")
    return row


def message(line: str) -> str:
    row = only(line)
    assert isinstance(row, BadRow), row
    assert row.code == "input"
    assert row.where == "in, line 1"
    assert row.message.startswith("line 1: ")
    return row.message.removeprefix("line 1: ")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo\n", ["one\rtwo"]),
        (b"\n\n\n", []),
        (b"one\n\n\r\n", ["one"]),
        (b"one\n\ntwo\n\n", ["one", "!line 2: empty prompt", "two"]),
        (b"\n\nthree", ["!line 1: empty prompt", "!line 2: empty prompt", "three"]),
        (b"  \n", ["  "]),
        (b"\xef\xbb\xbfone\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbf\n", []),
        (b"one\n\xef\xbb\xbftwo", ["one", "\ufefftwo"]),
        ("a\u2028b\x85c\x0cd\n".encode(), ["a\u2028b\x85c\x0cd"]),
        (b"a\0b\n", ["a\0b"]),
        (b"one\nt\xffo\nthree", ["one", "!line 2: not UTF-8: byte 0xff at byte 2", "three"]),
        (b"\xef\xbb\xbfa\xff", ["!line 1: not UTF-8: byte 0xff at byte 2"]),
        (b"\xe2\x82\none", ["!line 1: not UTF-8: byte 0xe2 at byte 1", "one"]),
    ],
)
def test_lines_are_one_prompt_each(data: bytes, wanted: list[str]) -> None:
    assert prompts(data, "lines") == wanted


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"a\nb\n", ["a\nb\n"]),
        (b"\xef\xbb\xbfa\r\n", ["a\r\n"]),
        (b"", ["!empty prompt"]),
        (b"\xef\xbb\xbf", ["!empty prompt"]),
        (b"ab\xff", ["!not UTF-8: byte 0xff at byte 3"]),
    ],
)
def test_text_is_one_prompt_with_its_newlines(data: bytes, wanted: list[str]) -> None:
    assert prompts(data, "text") == wanted
    assert [row.where for row in rows(data, "text")] == ["in"]


@pytest.mark.parametrize(
    ("name", "wanted"), [("a.jsonl", "p"), ("A.NDJSON", "p"), ("a.json", '{"prompt":"p"}'), ("jsonl", '{"prompt":"p"}')]
)
def test_jsonl_is_known_by_its_name(name: str, wanted: str) -> None:
    (row,) = rows(b'{"prompt":"p"}\n', None, name)
    assert isinstance(row, InputRow)
    assert row.prompt == wanted
    assert row.where == f"{name}, line 1"


def test_a_jsonl_row_keeps_all_that_it_says() -> None:
    line = {
        "id": 12,
        "messages": [{"role": "user", "content": ""}],
        "params": {"num_beams": 4, "force_words": [["a"]]},
        "reference": ["x", "y"],
        "system": "Be brief.",
    }
    assert only(json.dumps(line)) == InputRow(
        id="12",
        index=0,
        messages=({"role": "user", "content": ""},),
        params={"num_beams": 4, "force_words": [["a"]]},
        extra={"reference": ["x", "y"], "system": "Be brief."},
        where="in, line 1",
        own_id=True,
    )
    assert only('{"prompt_ids": [0, 9223372036854775807]}') == InputRow(
        "0", 0, prompt_ids=(0, 2**63 - 1), where="in, line 1"
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"prompt": "a",}', "not JSON: "),
        ("hello", "not JSON: expected a value at column 1"),
        ('{"prompt" "a"}', "not JSON: expected a colon at column 11"),
        ('{"prompt": "a"} {}', "not JSON: text after the end of the value at column 17"),
        ("[1]", 'expected an object such as {"prompt": "…"}, got a list'),
        ("null", 'expected an object such as {"prompt": "…"}, got null'),
        ('"a"', 'expected an object such as {"prompt": "…"}, got a string'),
        ("{}", "no prompt: expected one of prompt, prompt_ids, messages"),
        ('{"prompt": "a", "prompt_ids": [1]}', "prompt and prompt_ids exclude each other"),
        ('{"prompt": ""}', "prompt: empty prompt"),
        ('{"prompt": null}', "prompt: expected a string, got null"),
        ('{"prompt": 7}', "prompt: expected a string, got an integer"),
        ('{"prompt_ids": []}', "prompt_ids: empty prompt"),
        ('{"prompt_ids": "1 2"}', "prompt_ids: expected a list of token ids, got a string"),
        ('{"prompt_ids": [1, true]}', "prompt_ids: item 2: expected an integer, got true"),
        ('{"prompt_ids": [1.0]}', "prompt_ids: item 1: expected an integer, got a number"),
        ('{"prompt_ids": [-1]}', f"prompt_ids: item 1: a token id lies between 0 and {2**63 - 1}"),
        (f'{{"prompt_ids": [{10**30}]}}', f"prompt_ids: item 1: a token id lies between 0 and {2**63 - 1}"),
        ('{"messages": []}', "messages: empty prompt"),
        ('{"messages": {}}', "messages: expected a list of messages, got an object"),
        ('{"messages": ["a"]}', "messages: item 1: expected an object with role and content, got a string"),
        ('{"messages": [{"role": "user"}]}', "messages: item 1: no content"),
        ('{"messages": [{"role": "", "content": "a"}]}', "messages: item 1: role: is empty"),
        (
            '{"messages": [{"role": "user", "content": 1}]}',
            "messages: item 1: content: expected a string, got an integer",
        ),
        (
            '{"messages": [{"role": "user", "contents": "a"}]}',
            "messages: item 1: unknown key 'contents' (did you mean content?)",
        ),
        ('{"prompt": "a", "params": [1]}', "params: expected an object, got a list"),
        ('{"prompt": "a", "system": 1}', "system: expected a string, got an integer"),
        ('{"prompt": "a", "prefix": ["b"]}', "prefix: expected a string, got a list"),
        ('{"prompt": "a", "reference": [1]}', "reference: expected a string or a list of strings, got a list"),
        (
            '{"promt": 1, "parms": 2}',
            "no prompt: expected one of prompt, prompt_ids, messages (is 'promt' meant as prompt?)",
        ),
        (
            '{"\\u001b[2Jprompt": 1}',
            "no prompt: expected one of prompt, prompt_ids, messages (is '\\x1b[2Jprompt'",
        ),
        ('{"id": 1.5, "prompt": "a"}', "id: expected a string or an integer, got a number"),
        ('{"id": true, "prompt": "a"}', "id: expected a string or an integer, got true"),
        ('{"id": null, "prompt": "a"}', "id: expected a string or an integer, got null"),
        ('{"id": "", "prompt": "a"}', "id: is empty"),
        ('{"prompt": "a", "params": {"top_p": NaN}}', "not JSON: NaN is not a JSON number"),
        ('{"prompt": "a", "params": {"top_p": -Infinity}}', "not JSON: -Infinity is not a JSON number"),
        ('{"prompt": "a", "params": {"top_p": 1e999}}', "a number is too large"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
        ('{"prompt": "a", "params": {"top_k": 1, "top_k": 2}}', "the key 'top_k' occurs twice"),
        ('{"prompt": "a\\ud83d"}', "half of a surrogate pair ('\\ud83d') is not text"),
        ('{"prompt": "a", "params": {"x\\udc80": 1}}', "half of a surrogate pair ('\\udc80') is not text"),
        ('{"prompt": "a", "params": {"x": ' + "[" * 70 + "]" * 70 + "}}", "nested too deeply: more than 64 levels"),
        ("[" * 200_000, "nested too deeply: more than 64 levels"),
        ('{"a":' * 200_000, "nested too deeply: more than 64 levels"),
        ('{"prompt": "a", "id": ' + "9" * 5000 + "}", "a number has too many digits"),
        ('{"prompt": "a\tb"}', "not JSON: a control character in a string at column 14"),
    ],
)
def test_a_bad_jsonl_row_says_what_is_wrong(line: str, wanted: str) -> None:
    assert message(line).startswith(wanted)


def test_a_hundred_thousand_columns_are_one_short_sentence() -> None:
    assert len(message(json.dumps({f"key{number}": 0 for number in range(100_000)} | {"k" * 10**6: 1}))) < 300


def test_a_surrogate_pair_escaped_in_json_is_one_character() -> None:
    row = only('{"prompt": "\\ud83d\\ude00"}')
    assert isinstance(row, InputRow)
    assert row.prompt == "😀"


def test_blank_jsonl_lines_are_rows_only_before_others() -> None:
    made = rows(b'{"prompt":"a"}\n \t\r\n{"prompt":"b"}\n\n  \n', "jsonl")
    assert [type(row) for row in made] == [InputRow, BadRow, InputRow]
    assert made[1] == BadRow("1", 1, "in, line 2", "input", "line 2: empty prompt")


def ids(*given: object) -> list[str]:
    lines = [
        "{" if said == "broken" else json.dumps({"prompt": "a"} | ({} if said is None else {"id": said}))
        for said in given
    ]
    return [
        row.id if isinstance(row, InputRow) else f"{row.id}!{row.message}"
        for row in rows("\n".join(lines).encode(), "jsonl")
    ]


def test_an_id_is_used_once() -> None:
    used = "is already used in line"
    assert ids("a", "b", "a", "a") == ["a", "b", f"a!line 3: the id 'a' {used} 1", f"a!line 4: the id 'a' {used} 1"]
    assert ids(7, "7") == ["7", f"7!line 2: the id '7' {used} 1"]
    assert ids("1", None) == ["1", f"1!line 2: the id '1' {used} 1"]
    assert ids(None, None, 0) == ["0", "1", f"0!line 3: the id '0' {used} 1"]
    assert ids("x", None, "y", 1) == ["x", "1", "y", f"1!line 4: the id '1' {used} 2"]


NAMES = st.none() | st.integers(0, 30).map(str) | st.sampled_from(["a", "b", "é", "01", "+1", "-1", "٣"])


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES, max_size=30))
def test_as_a_dictionary_of_all_ids_would_have_it(names: list[str | None]) -> None:
    ids, used = UsedIds(), dict[str, int]()
    for index, name in enumerate(names):
        wanted = str(index) if name is None else name
        if wanted in used:
            with pytest.raises(RefusedRow, match=rf"is already used in line {used[wanted] + 1}$"):
                ids.claim(name, index)
        else:
            ids.claim(name, index)
            used[wanted] = index


def test_a_broken_line_goes_by_its_index() -> None:
    assert ids("x", "broken", "1")[2] == "1!line 3: the id '1' is already used in line 2"


def test_a_row_that_is_wrong_otherwise_still_owns_its_id() -> None:
    made = rows(b'{"id":"a"}\n{"id":"a","prompt":"b"}', "jsonl")
    assert [row.id for row in made] == ["a", "a"]
    assert [type(row) for row in made] == [BadRow, BadRow]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [10, 11, 200_000])
def test_a_piece_over_the_limit_is_one_bad_row(format: Format, length: int) -> None:
    end = b"" if format == "text" else b"\n"
    made = rows(b"x" * length + end, format, limit=10)
    if length > 10:
        assert [(type(row), row.id) for row in made] == [(BadRow, "0")]
        assert isinstance(made[0], BadRow)
        assert made[0].message.endswith(f"{length} bytes are more than the limit of 10")
    elif format != "jsonl":
        assert [row.prompt for row in made if isinstance(row, InputRow)] == ["x" * 10]


def test_lines_after_one_over_the_limit_are_read() -> None:
    made = rows(b"x" * 300_000 + b"\nshort\n" + b"y" * 11 + b"\nend", "lines", limit=10)
    assert [row.prompt if isinstance(row, InputRow) else "!" for row in made] == ["!", "short", "!", "end"]


class Endless(io.BytesIO):
    """A stream of `count` chunks, one per read, that knows how many were asked for."""

    def __init__(self, chunk: bytes, count: int) -> None:
        super().__init__()
        self.chunk, self.count, self.asked = chunk, count, 0

    def read1(self, size: int | None = -1, /) -> bytes:
        self.asked += 1
        return self.chunk if self.asked <= self.count else b""


@pytest.mark.parametrize(("format", "chunk"), [("lines", b"once\n" * 100), ("jsonl", b'{"prompt":"once"}\n' * 100)])
def test_rows_come_before_the_input_ends(format: Format, chunk: bytes) -> None:
    source = Endless(chunk, 10**9)
    taken = list(itertools.islice(read(source, format=format, name="in"), 150))
    assert len(taken) == 150
    assert source.asked == 2


@pytest.mark.parametrize("chunk", [b"once upon a time\n" * 30, b"\n" * 500, b"x" * 500])
def test_memory_does_not_grow_with_the_input(chunk: bytes) -> None:
    tracemalloc.start()
    try:
        for _ in read(Endless(chunk, 200), format="lines", name="in", limit=5000):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000  # bytes; the input has 100 000


def test_a_read_that_fails_is_an_input_error_after_the_rows_before_it() -> None:
    class Failing(Endless):
        def read1(self, size: int | None = -1, /) -> bytes:
            if self.asked == 1:
                raise OSError(5, "Input/output error")
            return super().read1(size)

    reader = read(Failing(b"one\n", 9), format="lines", name="in")
    assert next(reader).id == "0"
    with pytest.raises(InputError, match=r"^cannot read in: Input/output error$"):
        next(reader)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of lines, text, jsonl, csv"):
        rows(b"", "xml")  # type: ignore[arg-type]
