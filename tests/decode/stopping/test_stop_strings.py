"""Stop strings against a plain search in the decoded text, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from genctl.decode.stopping.build import StoppingContext, build
from genctl.decode.stopping.stops import quoted
from genctl.params import Generation
from tests.decode.stopping.rows import KINDS, RARE, first_stop, reader, row_text, tokenizer, written

BROKEN = "\ufffd"
PIECES = [
    "the cat",
    " mat",
    "don't",
    " do not",
    " . ",
    "stop",
    " st",
    "op",
    "\n\n",
    "日本語",
    "。",
    "🙂",
    "👩‍👩‍👧",
    "é",
    "naïve ",
    "  ",
]


def criterion(kind: str, stops: Sequence[str]):
    return build(StoppingContext(Generation(stop_strings=list(stops)), tokenizer(kind), reader(kind)))[0]


def plain_search(kind: str, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """The earliest prefix whose text holds a stop string: the definition."""
    read = reader(kind)
    for count in range(1, len(tokens) + 1):
        text = read(tokens[:count]).rstrip(BROKEN)
        if any(stop in text for stop in stops):
            return count
    return None


@st.composite
def rows(draw: st.DrawFn, kind: str) -> list[int]:
    """Encoded texts cut where no tokenizer would cut them, single bytes, special tokens and ids at random."""
    made = tokenizer(kind)
    encode = made.backend_tokenizer.encode
    text = st.one_of(st.sampled_from(PIECES), st.text(RARE + "ab .'\n", max_size=12), st.text(max_size=4))
    encoded = text.map(lambda piece: encode(piece, add_special_tokens=False).ids)
    single = st.integers(0, len(made) - 1).map(lambda token: [token])
    special = st.integers(1, 12).map(lambda count: [0] * count)
    repeated = st.tuples(encoded, st.integers(1, 20)).map(lambda pair: pair[0] * pair[1])
    parts = draw(st.lists(st.one_of(encoded, encoded, encoded, repeated, single, special), min_size=1, max_size=24))
    return [token for part in parts for token in part][:220]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_row_ends_with_the_first_token_whose_text_holds_a_stop_string(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(rows(kind))
    assume(tokens)
    text = reader(kind)(tokens)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        length = data.draw(st.one_of(st.integers(1, 4), st.integers(1, 40)))
        if data.draw(st.booleans()):  # one that occurs late for the first time, where the tail is no longer the whole
            start = max(start, len(text) * 2 // 3)
            while text.find(text[start : start + length]) < start and length < 60:
                length += 1
        stops.append(text[start : start + length])
    stops = [stop for stop in stops if stop and BROKEN not in stop] or ["☃"]
    found = first_stop(criterion(kind, stops), tokens, kind)
    assert (found and found[0]) == plain_search(kind, tokens, stops)


def test_text_that_only_the_end_decoded_alone_holds_is_no_stop() -> None:
    # an invalid byte long ago makes the whole run of byte tokens unreadable: the whole text has no "a", its end has
    made = tokenizer("bytefallback")
    bad, letter = made.convert_tokens_to_ids(["<0xFF>", "<0x61>"])
    tokens = [bad] + [letter] * 200
    assert "a" not in reader("bytefallback")(tokens)
    assert first_stop(criterion("bytefallback", ["a"]), tokens, "bytefallback") is None


def test_the_earliest_stop_string_is_named_and_the_longest_of_those_that_begin_together() -> None:
    tokens = tokenizer("bytelevel").backend_tokenizer.encode("xyz").ids
    assert len(tokens) > 1
    assert first_stop(criterion("bytelevel", ["y", "x", "xy"]), tokens) == (1, ("stop", "x", "string"))
    three = [token for letter in "xyz" for token in tokenizer("bytelevel").backend_tokenizer.encode(letter).ids]
    assert first_stop(criterion("bytelevel", ["z", "yz", "yx"]), three) == (3, ("stop", "yz", "string"))


def test_the_reason_shows_control_characters_as_escapes() -> None:
    tokens = tokenizer("bytelevel").backend_tokenizer.encode("a\n\nb").ids
    found = first_stop(criterion("bytelevel", ["\n\n"]), tokens)
    assert found is not None
    assert found[1] == ("stop", "\n\n", "string")
    assert quoted("\x1b[31m") == r'"\u001b[31m"'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filler", ["the cat sat. ", "日本語", " do not . "])
def test_the_cost_of_a_token_does_not_grow_with_the_row(
    monkeypatch: pytest.MonkeyPatch, kind: str, filler: str
) -> None:
    tokens = tokenizer(kind).backend_tokenizer.encode(filler, add_special_tokens=False).ids * 200
    stop = criterion(kind, ["never!!"])
    text, lengths = row_text(kind, [stop]), [0]
    decoded = text.words.vocabulary.text

    def counting(ids: list[int], *, clean: bool | None = None) -> str:
        lengths.append(len(ids))
        return decoded(ids, clean=clean)

    monkeypatch.setattr(text.words.vocabulary, "text", counting)
    for token in tokens:
        text.push(token)
        assert stop(written([token], text=text)) is None
        text.show()
    assert max(lengths) < 40
