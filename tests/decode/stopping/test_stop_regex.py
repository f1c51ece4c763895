"""A regular expression on the text: where it is searched, and what happens to patterns that are wrong or too slow."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genctl.decode.stopping import stops as module
from genctl.decode.stopping.build import NamedCriterion, StoppingContext, build, stops_of
from genctl.decode.stopping.stops import REGEX_WINDOW, Pattern
from genctl.errors import UsageError
from genctl.params import Generation
from tests.decode.stopping.rows import first_stop, reader, row_text, tokenizer, written


def criterion(pattern: str, kind: str = "bytelevel"):
    return build(StoppingContext(Generation(stop_regex=pattern), tokenizer(kind), reader(kind)))[0]


def ended(stop: NamedCriterion, tokens: list[int]) -> object:
    """The criterion's result after the last of the tokens."""
    text = row_text("bytelevel", [stop])
    for token in tokens:
        text.push(token)
    return stop(written(tokens, text=text))


def encode(text: str, kind: str = "bytelevel") -> list[int]:
    return list(tokenizer(kind).backend_tokenizer.encode(text, add_special_tokens=False).ids)


PATTERNS = [
    r"\d+",
    r"cat|dog",
    r"(?<=a)t",
    r"\n\n+",
    r"日.語",
    r"\bend\b",
    r"^the.*mat$",
    r"[^a-z\s]{2}",
    r"(?m)^\S",
    "🙂$",
]


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace", "bytefallback", "wordpiece"])
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    pieces=st.lists(
        st.sampled_from(["the ", "cat", " mat", "12", "日本語", "🙂", "\n", " end", "a", "ǅ"]), max_size=30
    ),
    pattern=st.sampled_from(PATTERNS),
)
def test_a_row_ends_with_the_first_token_whose_text_matches(kind: str, pieces: list[str], pattern: str) -> None:
    tokens = [token for piece in pieces for token in encode(piece, kind)]
    read, compiled = reader(kind), re.compile(pattern)
    expected = next((n for n in range(1, len(tokens) + 1) if compiled.search(read(tokens[:n]).rstrip("\ufffd"))), None)
    found = first_stop(criterion(pattern, kind), tokens, kind)
    assert (found and found[0]) == expected
    if found:
        assert found[1] == ("stop", pattern, "regex")
        text = read(tokens[: found[0]])
        match = compiled.search(text.rstrip("\ufffd"))
        assert match is not None
        stops = stops_of([criterion(pattern, kind)], keep=False)
        assert stops is not None
        assert stops.cut(text) == text[: match.start()]


def test_a_match_that_began_long_ago_is_seen_up_to_the_window() -> None:
    stop = criterion(r"BEGIN[^!]*!")
    near, far = REGEX_WINDOW - 200, REGEX_WINDOW
    for distance, ends in ((near, True), (far, False)):
        tokens = encode("the cat " * 300 + "BEGIN" + "x" * distance + "!")
        assert (ended(stop, tokens) is not None) == ends


@pytest.mark.parametrize("pattern", ["^the", r"\Athe", "(?<![a-z] )the", r"\bhe"])
def test_the_edge_of_the_window_is_not_the_beginning_of_the_text(pattern: str) -> None:
    tokens = encode("A cat, " + "the " * 3000)[:-1]
    stop = criterion(pattern)
    expected = re.compile(pattern).search("A cat, " + "the " * 50)
    assert (first_stop(stop, tokens[:40]) is not None) == (expected is not None)
    for count in range(len(tokens) - 12, len(tokens)):
        assert ended(stop, tokens[:count]) is None


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(cat", r'stop_regex: the regular expression "(cat" is wrong at position 4: '),
        ("*", 'stop_regex: the regular expression "*" is wrong at position 0: '),
        ("[a", 'stop_regex: the regular expression "[a" is wrong at position 2: '),
        (r"a\p{Nope}", r'stop_regex: the regular expression "a\p{Nope}" is wrong at position 9: '),
        ("(?<=a*", 'stop_regex: the regular expression "(?<=a*" is wrong at position 6: '),
        ("a*", 'stop_regex: the regular expression "a*" matches the empty text and would end every row at once'),
        ("", 'stop_regex: the regular expression "" matches the empty text and would end every row at once'),
    ],
)
def test_a_wrong_pattern_is_refused_with_its_place(pattern: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        criterion(pattern)
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) > len(sentence) or not sentence.endswith(" "), "says what is wrong"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("ab(){}[]*+?|\\^$.,0123-:<>=!PpLN", max_size=14))
def test_no_pattern_is_a_traceback(source: str) -> None:
    with suppress(UsageError):  # and nothing else
        assert Pattern(source).find("") is None


def test_an_incomplete_character_is_not_the_end_of_the_text() -> None:
    assert Pattern("t$").find("cat\ufffd") == (2, 3)
    assert Pattern(".$").find("\ufffd\ufffd") is None


def test_a_pattern_that_takes_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REGEX_SECONDS", 0.05)
    pattern = Pattern(r"(\w+\w+)+(\w+\w+)+(x+x+)+\d!")
    with pytest.raises(UsageError, match=r"searched for more than 0\.05 s") as caught:
        pattern.find("x" * 4000)
    assert "repetitions" in caught.value.hint
