"""The text of new tokens is what decode(prompt + new) adds to decode(prompt), told at once or piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genctl.models.text import Detokenizer, decode
from tests.models.tokenizers_made import FAMILIES, byte_level, llama, llama_first, metaspace, word_piece

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
PROMPTS = ["the cat", "the cat ", "the", "", " ", "o' clock", "it's 5 o' ", "cat.", "你好", "naïve", "  the", "a\n"]
family = pytest.mark.parametrize("family", FAMILIES)


def ids_of(tokenizer: Any, most: int) -> st.SearchStrategy[list[int]]:
    """Ids of a vocabulary and beyond it: special, added, byte and missing tokens."""
    return st.lists(st.integers(0, len(tokenizer) + 3), max_size=most)


def added(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """What new tokens add, by two calls of decode()."""
    return beyond(decode(tokenizer, prompt), decode(tokenizer, prompt + new))


def beyond(before: str, whole: str) -> str:
    """A text without the beginning that it shares with another one."""
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


def told(words: Any, new: list[int]) -> str:
    """The text of the pieces. What is told stays a beginning, wherever it is looked at."""
    text = ""
    for id in new:
        text += words.push(id)
        assert (text + words.fork().flush()).startswith(text)
    return text + str(words.flush())


@family
@SETTINGS
@given(data=st.data())
def test_new_tokens_add_what_decode_adds_after_any_ids(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    prompt, new = data.draw(ids_of(tokenizer, 20)), data.draw(ids_of(tokenizer, 12))
    words = Detokenizer(tokenizer).after(prompt)
    expected = added(tokenizer, prompt, new)
    assert words.decode(new) == expected
    assert told(words, new) == expected


@family
@SETTINGS
@given(data=st.data())
def test_new_tokens_add_what_decode_adds_after_any_text(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    text = data.draw(st.one_of(st.sampled_from(PROMPTS), st.text(max_size=12)))
    prompt = list(tokenizer(text)["input_ids"])
    new = data.draw(ids_of(tokenizer, 12))
    words = Detokenizer(tokenizer).after(prompt)
    expected = added(tokenizer, prompt, new)
    assert (words.decode(new), told(words, new)) == (expected, expected)


@family
@SETTINGS
@given(data=st.data())
def test_what_was_told_after_a_prompt_stays_a_beginning(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    prompt, new, more = (data.draw(ids_of(tokenizer, 10)) for _ in range(3))
    words = Detokenizer(tokenizer).after(prompt)
    text = "".join(map(words.push, new))
    assert added(tokenizer, prompt, new + more).startswith(text)


@family
@SETTINGS
@given(data=st.data())
def test_tokens_that_were_cut_from_the_prompt_are_not_told_again(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    prompt, cut, new = (data.draw(ids_of(tokenizer, 8)) for _ in range(3))
    words = Detokenizer(tokenizer).after(prompt, cut)
    expected = beyond(decode(tokenizer, prompt + cut), decode(tokenizer, prompt + cut + new))
    assert (words.decode(cut + new), told(words, cut + new)) == (expected, expected)


@pytest.mark.parametrize("made", [llama, llama_first, metaspace, word_piece])
def test_the_blank_between_prompt_and_text_is_part_of_the_text(made: Any) -> None:
    tokenizer = made()
    prompt, new = (list(tokenizer(text)["input_ids"]) for text in ("the cat", "sat"))
    text = Detokenizer(tokenizer).after(prompt).decode(new)
    assert text == " sat"
    assert decode(tokenizer, tokenizer("the cat" + text)["input_ids"]) == decode(tokenizer, prompt + new)


@pytest.mark.parametrize("made", [llama, metaspace, word_piece])
def test_after_no_text_a_blank_at_the_beginning_is_dropped(made: Any) -> None:
    tokenizer = made()
    new = list(tokenizer("the cat")["input_ids"])
    for prompt in ([], [1], [1, len(tokenizer) + 2]):
        assert Detokenizer(tokenizer).after(prompt).decode(new) == "the cat"


def test_a_character_that_the_prompt_began_belongs_to_the_text() -> None:
    tokenizer = byte_level()
    ids = list(tokenizer("a🦄b")["input_ids"])
    assert told(Detokenizer(tokenizer).after(ids[:3]), ids[3:]) == "🦄b"
    broken = Detokenizer(tokenizer).after(ids[:3])  # decode() ends in U+FFFD, which the prompt has already
    assert told(broken, [ids[-1]]) == "b"


@family
def test_a_prompt_costs_as_much_as_its_end(family: str) -> None:
    tokenizer = FAMILIES[family]()
    if Detokenizer(tokenizer).vocabulary.way == "whole":
        pytest.skip("such a decoder may change all of the text")
    prompt = list(tokenizer("the cat sat on the mat and the dog sat on the log. " * 40)["input_ids"])
    assert len(Detokenizer(tokenizer).after([*prompt, 3, 4])._lead) < 40
