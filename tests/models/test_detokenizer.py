"""Text piece by piece is the text of decode(), and always a beginning of it.

Behind a prompt the text of new tokens is what decode(prompt + new) adds to decode(prompt).
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genctl.models.text import Detokenizer, decode

from .tokenizers_made import FAMILIES, byte_level, llama, llama_first, metaspace, word_piece, word_piece_cleaned

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CLUSTERS = [
    "👩‍👩‍👧", "👍🏽", "é", "e\u0301", "🇵🇱", "한국", "你好", " n't", " ' s", "\ufffd", "\u202e", "  ", " .", "\n",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(CLUSTERS)), max_size=8).map("".join)
family = pytest.mark.parametrize("family", FAMILIES)


def some_ids(family: str, most: int) -> st.SearchStrategy[list[int]]:
    """Ids of a vocabulary, and some beyond it, as a padded model writes them."""
    return st.lists(st.integers(0, len(FAMILIES[family]()) + 3), max_size=most)


def tell(ids: list[int], family: str, skip: bool = True) -> tuple[list[str], str]:
    words = Detokenizer(FAMILIES[family](), skip)
    pieces = [words.push(id) for id in ids]
    return pieces, words.flush()


@family
@SETTINGS
@given(data=st.data())
def test_pieces_of_any_ids_add_up_to_decode(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = data.draw(some_ids(family, 24))
    pieces, rest = tell(ids, family)
    assert "".join(pieces) + rest == decode(tokenizer, ids)


@family
@SETTINGS
@given(text=TEXT)
def test_pieces_of_any_text_add_up_to_decode(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, rest = tell(ids, family)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


@family
@SETTINGS
@given(data=st.data())
def test_special_tokens_are_told_when_asked_for(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = data.draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, len(tokenizer) - 1)), max_size=12))
    pieces, rest = tell(ids, family, skip=False)
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) + rest == expected


@family
@SETTINGS
@given(data=st.data())
def test_a_fork_goes_its_own_way(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    some = some_ids(family, 8)
    ids, left, right = data.draw(some), data.draw(some), data.draw(some)
    words = Detokenizer(tokenizer)
    told = "".join(map(words.push, ids))
    twin = words.fork()
    first = told + "".join(map(words.push, left)) + words.flush()
    second = told + "".join(map(twin.push, right)) + twin.flush()
    assert (first, second) == (decode(tokenizer, ids + left), decode(tokenizer, ids + right))


def test_an_emoji_of_several_tokens_is_held_back_until_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a🦄b")["input_ids"]
    pieces, rest = tell(ids, "byte_level")
    assert len(ids) > 4
    assert [piece for piece in pieces if piece] == ["a", "🦄", "b"]
    assert rest == ""


def test_a_run_of_byte_tokens_is_told_when_it_closes() -> None:
    tokenizer = llama()
    unicorn = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🦄".encode()]
    after = tokenizer.convert_tokens_to_ids("a")
    pieces, rest = tell([*unicorn, after], "llama")
    assert pieces == ["", "", "", "", "🦄a"]
    assert rest == ""


def test_words_stream_although_spaces_are_cleaned() -> None:
    tokenizer = word_piece_cleaned()
    ids = tokenizer("the cat sat on the mat, didn't it?")["input_ids"]
    pieces, rest = tell(ids, "word_piece_cleaned")
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    assert sum(bool(piece) for piece in pieces) >= 5


@pytest.mark.parametrize("family", ["byte_level", "llama", "metaspace", "word_piece_cleaned"])
def test_a_long_text_is_told_with_bounded_memory(family: str) -> None:
    tokenizer = FAMILIES[family]()
    words = Detokenizer(tokenizer)
    ids = tokenizer("the cat sat on the mat and the dog sat on the log. " * 40)["input_ids"]
    most = 0
    for id in ids:
        words.push(id)
        most = max(most, len(words._pending) + len(words._held))
    assert most < 40


def test_a_piece_shows_spaces_special_tokens_and_loose_bytes() -> None:
    tokenizer = byte_level()
    words = Detokenizer(tokenizer)
    assert words.piece(tokenizer.eos_token_id) == "</s>"
    assert words.piece(tokenizer.convert_tokens_to_ids("Ġthe")) == " the"
    assert words.piece(tokenizer.convert_tokens_to_ids("ð")) == "<0xF0>"
    assert words.piece(10**6) == "<1000000>"
    assert Detokenizer(llama()).piece(llama().convert_tokens_to_ids("<0xF0>")) == "<0xF0>"
    assert Detokenizer(metaspace()).piece(metaspace().convert_tokens_to_ids("▁the")) == " the"


# -- behind a prompt -----------------------------------------------------------------------------------------------

PROMPTS = ["the cat", "the cat ", "the", "", " ", "o' clock", "it's 5 o' ", "cat.", "你好", "naïve", "  the", "a\n"]


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
    prompt, new = data.draw(some_ids(family, 20)), data.draw(some_ids(family, 12))
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
    new = data.draw(some_ids(family, 12))
    words = Detokenizer(tokenizer).after(prompt)
    expected = added(tokenizer, prompt, new)
    assert (words.decode(new), told(words, new)) == (expected, expected)


@family
@SETTINGS
@given(data=st.data())
def test_tokens_that_were_cut_from_the_prompt_are_not_told_again(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    prompt, cut, new = (data.draw(some_ids(family, 8)) for _ in range(3))
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


def test_a_character_that_the_prompt_began_belongs_to_the_text() -> None:
    tokenizer = byte_level()
    ids = list(tokenizer("a🦄b")["input_ids"])
    assert told(Detokenizer(tokenizer).after(ids[:3]), ids[3:]) == "🦄b"
    broken = Detokenizer(tokenizer).after(ids[:3])  # decode() ends in U+FFFD, which the prompt has already
    assert told(broken, [ids[-1]]) == "b"


@family
def test_a_prompt_costs_as_much_as_its_end(family: str) -> None:
    tokenizer = FAMILIES[family]()
    if Detokenizer(tokenizer).vocabulary.mode == "whole":
        pytest.skip("such a decoder may change all of the text")
    prompt = list(tokenizer("the cat sat on the mat and the dog sat on the log. " * 40)["input_ids"])
    assert len(Detokenizer(tokenizer).after([*prompt, 3, 4])._lead) < 40


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("byte_level", "bytes"),
        ("llama", "pieces"),
        ("metaspace", "pieces"),
        ("unigram_bytes", "pieces"),
        ("word_piece_cleaned", "pieces"),
        ("suffixes", "pieces"),
        ("undecoded", "pieces"),
        ("rewritten", "whole"),
    ],
)
def test_only_a_decoder_that_rewrites_everything_keeps_back_everything(family: str, mode: str) -> None:
    assert Detokenizer(FAMILIES[family]()).vocabulary.mode == mode


def test_a_large_vocabulary_is_not_written_out_for_its_decoder() -> None:
    """151,643 tokens with their merges are 12 MB of JSON and 80 MB of Python objects."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"word{number}": number for number in range(50_000)}, unk_token="word0"))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tracemalloc.start()
    try:
        words = Detokenizer(tokenizer)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words.vocabulary.mode == "bytes"
    assert most < 2_000_000  # of its decoder, and of modules imported for it
