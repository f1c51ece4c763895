"""Whatever the bytes are and however they arrive: one row or one sentence for each line."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.io.readers import Format, read
from genctl.io.rows import BadRow, InputRow
from tests.io.test_batch_readers import FORMATS, only, prompts, rows

scraps = st.sampled_from(
    [
        b"\n", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"}", b'"', b"\\ud800",
        b'{"prompt":"a"}', b'{"id":1,"prompt_ids":[1]}',
    ]
)  # fmt: skip
anything = st.one_of(
    st.binary(max_size=200), st.lists(st.one_of(scraps, st.binary(max_size=5)), max_size=30).map(b"".join)
)


@settings(max_examples=300, deadline=None)
@given(anything, st.sampled_from(FORMATS), st.sampled_from([5, 2**20]))
def test_any_bytes_become_one_row_for_each_line(data: bytes, format: Format, limit: int) -> None:
    made = rows(data, format, limit=limit)
    assert [row.index for row in made] == list(range(len(made)))
    good = [row.id for row in made if isinstance(row, InputRow)]
    assert len(good) == len(set(good))
    bad = [row for row in made if isinstance(row, BadRow)]
    assert all(row.message.isprintable() and row.where.isprintable() for row in bad)
    if format == "text":
        assert len(made) == 1
        return
    pieces = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ends = {"lines": b"\r", "jsonl": b" \t\r"}[format]
    while pieces and (
        not pieces[-1] or (pieces[-1] == b"\r" and format == "lines") or (ends[1:] and not pieces[-1].strip(ends))
    ):
        pieces.pop()
    if limit > len(data):
        assert len(made) == len(pieces)


@settings(max_examples=200, deadline=None)
@given(anything, st.sampled_from(FORMATS), st.data())
def test_how_the_bytes_arrive_makes_no_difference(data: bytes, format: Format, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    parts = [data[first:last] for first, last in itertools.pairwise([0, *cuts, len(data)]) if first < last]

    class Drip(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return parts.pop(0) if parts else b""

    whole = rows(data, format, limit=7)
    assert list(read(Drip(), format=format, name="in", limit=7)) == whole


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def written(prompts: list[str], format: Format) -> Iterator[bytes]:
    for prompt in prompts:
        if format == "jsonl":
            yield json.dumps({"prompt": prompt}, ensure_ascii=len(prompt) % 2 == 0).encode() + b"\n"
        else:
            yield prompt.encode() + b"\n"


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, max_size=8), st.sampled_from(["lines", "jsonl"]))
def test_prompts_come_back_as_they_were(given_prompts: list[str], format: Format) -> None:
    banned = "\r\n\ufeff" if format == "lines" else ""
    clean = [prompt.translate(dict.fromkeys(map(ord, banned))) or "x" for prompt in given_prompts]
    assert prompts(b"".join(written(clean, format)), format) == clean


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    ["id", "prompt", "prompt_ids", "messages", "params", "reference", "prefix", "system", "promtp", "text"]
)
objects = st.dictionaries(keys | st.text(max_size=5), json_values, max_size=5)


@settings(max_examples=200, deadline=None)
@given(objects)
def test_any_object_is_a_row_whose_every_value_is_kept_or_a_sentence(data: dict[str, object]) -> None:
    row = only(json.dumps(data))
    if isinstance(row, BadRow):
        assert row.message.startswith("line 1: ")
        return
    for key in row.columns:
        assert json.dumps(row.columns[key]) == json.dumps(data.pop(key))
    if "prompt" not in data and "text" in data:
        data["prompt"] = data.pop("text")
    kept = {"prompt": row.prompt, "params": row.params or None, **row.extra}
    kept["prompt_ids"] = None if row.prompt_ids is None else list(row.prompt_ids)
    kept["messages"] = None if row.messages is None else list(row.messages)
    assert {key: value for key, value in kept.items() if value is not None} == {
        key: value for key, value in data.items() if key != "id" and not (key == "params" and value == {})
    }
    assert row.id == str(data.get("id", 0))
