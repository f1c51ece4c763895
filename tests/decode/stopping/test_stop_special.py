"""Stops that name special tokens: found by the token, never in the middle of one, and never shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import genctl
from genctl import events
from genctl.decode.stopping.build import NamedCriterion, StoppingContext, build
from genctl.events.results import Result
from genctl.params import Generation
from tests.decode.stopping.rows import KINDS, first_stop, marked, reader, row_text, tokenizer
from tests.tiny import BOS, EOS, PAD, checkpoint
from tests.tiny import tokenizer as tiny_tokenizer

RESERVED = "<|reserved|>"


def criterion(kind: str, stops: Sequence[str]) -> NamedCriterion:
    return build(StoppingContext(Generation(stop_strings=list(stops)), tokenizer(kind), reader(kind)))[0]


def ids(kind: str, *parts: str) -> list[int]:
    """The tokens of parts; a special token is a part of its own."""
    made = tokenizer(kind)
    return [
        token
        for part in parts
        for token in (
            [made.convert_tokens_to_ids(part)]
            if part.startswith("<")
            else made.backend_tokenizer.encode(part, add_special_tokens=False).ids
        )
    ]


def cut(kind: str, one: NamedCriterion, tokens: Sequence[int], keep: bool = False) -> str:
    text = row_text(kind, [one], keep)
    for token in tokens:
        text.push(token)
    return text.finish("stop")[1]


def test_no_stop_string_is_found_within_a_special_token() -> None:
    row = ids("bytelevel", "the cat", RESERVED, "</s>", " sat")
    for stops in (["|"], [">"], ["reserved"], ["t<"], ["></"], [f"|{RESERVED}"], ["> sat"], ["|", RESERVED[:-1]]):
        assert first_stop(criterion("bytelevel", stops), row) is None


@cache
def _mark_of(kind: str, *stops: str) -> NamedCriterion:
    return criterion(kind, stops)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_row_ends_where_its_text_with_the_named_tokens_first_holds_a_stop(kind: str, data: st.DataObject) -> None:
    stops = data.draw(
        st.lists(
            st.sampled_from(
                [RESERVED, "</s>", f"\n{RESERVED}", f"at{RESERVED}", f"</s>{RESERVED}", "cat", f"{RESERVED} s"]
            ),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    parts = st.sampled_from([RESERVED, "</s>", "<pad>", "the cat", "\n", " sat on the mat", "日本", "t"])
    row = [token for part in data.draw(st.lists(parts, min_size=1, max_size=12)) for token in ids(kind, part)]
    if not row:
        return
    one = _mark_of(kind, *stops)
    names = {mark: tokenizer(kind).convert_ids_to_tokens(token) for token, mark in one.stops.marks.ids.items()}

    def holds(count: int) -> bool:
        text = marked(one.stops.marks, reader(kind), row[:count]).rstrip("\ufffd")
        for stop in stops:
            for mark, name in names.items():
                stop = stop.replace(name, mark)
            if stop in text:
                return True
        return False

    expected = next((count for count in range(1, len(row) + 1) if holds(count)), None)
    found = first_stop(one, row, kind)
    assert (None if found is None else found[0]) == expected


def test_what_is_held_back_is_the_text_before_a_special_token() -> None:
    one = criterion("bytelevel", [f"\n\n{RESERVED}"])
    text, shown = row_text("bytelevel", [one]), []
    for token in ids("bytelevel", "a", "\n", "b", "\n", "\n", RESERVED):
        text.push(token)
        shown.append(text.show())
    assert shown == ["a", "", "\nb", "", "", ""]
    assert text.finish("stop") == ("", "a\nb")
    assert text.finish("eos") == ("\n\n", "a\nb\n\n")


@pytest.mark.parametrize(
    ("pattern", "stops"),
    [
        (r"<\|reserved\|>", True),
        (r"\.?\s*(?:END|<\|reserved\|>)", True),
        (r"cat<\|reserved\|>", True),
        (r"<\|reserved\|>$", True),
        (r"cat</s>", False),
        (r"(?P<s>x)y", False),
        (r"<\|res", False),
        (r"<\|reserved\|>+", False),  # the last letter, repeated
    ],
)
def test_a_pattern_finds_the_special_tokens_that_it_names(pattern: str, stops: bool) -> None:
    (one,) = build(StoppingContext(Generation(stop_regex=pattern), tokenizer("bytelevel"), reader("bytelevel")))
    row = ids("bytelevel", "the cat", RESERVED, " dog")
    found = first_stop(one, row)
    assert (found is not None) == stops
    if found is not None:
        assert found == (len(ids("bytelevel", "the cat")) + 1, ("stop", pattern, "regex"))
        assert cut("bytelevel", one, row[: found[0]]) == ("the " if pattern.startswith("cat") else "the cat")


def test_a_pattern_still_finds_what_it_found_in_the_text() -> None:
    (one,) = build(StoppingContext(Generation(stop_regex="b</s>|c<pad>"), tokenizer("bytelevel"), reader("bytelevel")))
    row = [tokenizer("bytelevel").convert_tokens_to_ids(letter) for letter in "ab</s>"]
    assert first_stop(one, row) is not None


# -- the whole way -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # no id ends a row, and the special ones are probable: <eos> and <bos> are then tokens like <|im_end|>
    return genctl.load(str(checkpoint("llama", tmp_path_factory.mktemp("tiny") / "llama")))


@pytest.fixture(scope="module")
def free_of() -> dict[int, list[Result]]:
    """The results of `model` without a stop, by seed: filled by the first test that needs one."""
    return {}


PLAIN: dict[str, Any] = {
    "eos_token_id": 299,
    "logit_bias": {"#2": 11.0, "#1": 9.0, "#299": -100.0, "e": 8.0, "a": 8.0},
    "max_new_tokens": 40,
    "batch_size": 3,
}


def _streamed(stream: Any) -> tuple[dict[str, list[str]], dict[str, events.Finished]]:
    """The text shown for the first row of each lane, and how each ended."""
    shown: dict[str, str] = {}
    done: dict[str, events.Finished] = {}
    for event in stream:
        if isinstance(event, events.Stepped):
            for row in (*event.rows, *event.ended):
                shown[event.lane] = shown.get(event.lane, "") + "".join(token.text for token in row.written)
        elif isinstance(event, events.Finished):
            done[event.lane] = event
    return shown, done  # type: ignore[return-value]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stops", [["<eos>"], ["<bos>"], ["e<eos>", "aa<bos>"], ["<eos><eos>"], ["e"]])
def test_rows_of_a_batch_end_at_the_token_and_show_the_text_before_it(
    model: Any, free_of: dict[int, list[Result]], stops: list[str], keep: bool
) -> None:
    prompts = ["the cat", "a dog ran", "once upon", "she threw", "what a"]
    ended = 0
    for seed in range(4):
        knobs = {**PLAIN, "do_sample": True, "seed": seed}
        knobs["suppress_tokens"] = [token for token in range(3, 300) if max(_bytes(token)) > 127]  # parts of letters
        if seed not in free_of:
            free_of[seed] = model.generate(prompts, **knobs)
        shown, done = _streamed(model.stream(prompts, stop_strings=stops, keep_stop=keep, **knobs))
        for result in free_of[seed]:
            tokens, text, what = _expected(result.sequences[0].token_ids, stops, keep)
            (one,) = done[result.lane].hypotheses
            assert one.tokens == tuple(tokens)
            assert one.text == text
            assert shown[result.lane] == text
            assert (one.reason, one.kind, one.stop) == (("stop", "string", what) if what else ("length", "", ""))
            ended += one.reason == "stop"
    assert ended > 3


def _expected(tokens: Sequence[int], stops: Sequence[str], keep: bool) -> tuple[Sequence[int], str, str]:
    """By definition: each special token that is named is one letter, the others are left out."""
    letters = {
        token: letter
        for token, letter in ((EOS, "\U0010fffd"), (BOS, "\U0010fffc"))
        if any(_NAMES[token] in stop for stop in stops)
    }
    searched = {}
    for stop in stops:
        for token, letter in letters.items():
            searched[stop] = searched.get(stop, stop).replace(_NAMES[token], letter)
    pieces = b""
    for count, token in enumerate(tokens, 1):
        if token in letters:
            pieces += letters[token].encode()
        elif token not in (PAD, BOS, EOS):
            pieces += _bytes(token)
        text = pieces.decode(errors="replace").rstrip("\ufffd")
        found = [
            (text.find(letter), -len(letter), stop)
            for stop, letter in {**{s: s for s in stops}, **searched}.items()
            if letter in text
        ]
        if found:
            at, length, stop = min(found)
            text = text[: at - length if keep else at]
            return tokens[:count], re.sub("[\U0010fffc\U0010fffd]", "", text), stop
    return tokens, tiny_tokenizer().decode(list(tokens), skip_special_tokens=True), ""


_NAMES = {EOS: "<eos>", BOS: "<bos>"}


def _bytes(token: int) -> bytes:
    from genctl.decode.processors.token_bytes import spelling

    return spelling(tiny_tokenizer(), 300, "test").pieces[token]


def test_beams_end_at_the_token_too(model: Any) -> None:
    knobs = {**PLAIN, "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "stop_strings": ["<eos>"]}
    knobs["logit_bias"] = {"#2": 9.0, "#299": -100.0}
    (result,) = model.generate(["the cat"], **knobs)
    stopped = [one for one in result.sequences if one.finish_reason == "stop"]
    assert stopped
    for one in result.sequences:
        assert EOS not in one.token_ids[:-1]
        assert (one.token_ids[-1] == EOS) == (one.finish_reason == "stop")
        assert one.text == tiny_tokenizer().decode(list(one.token_ids), skip_special_tokens=True)


def test_a_healed_prompt_keeps_its_text(model: Any) -> None:
    knobs = {**PLAIN, "do_sample": True, "seed": 1, "token_healing": True}
    (free,) = model.generate(["the ca"], **knobs)
    (result,) = model.generate(["the ca"], stop_strings=["<eos>", "<bos>"], **knobs)
    tokens = free.sequences[0].token_ids
    end = next(place for place, token in enumerate(tokens) if token in (EOS, BOS))
    assert result.sequences[0].token_ids == tokens[: end + 1]
    whole = tiny_tokenizer().decode(list(tokens[: end + 1]), skip_special_tokens=True)
    assert whole.startswith("ca")
    assert result.text == whole[2:]
