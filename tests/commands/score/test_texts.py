"""Which tokens of a text are scored, and which of its bytes are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from genctl.engines.scorer import TextReader
from genctl.errors import InputError, ModelError
from tests.models.tokenizers_made import FAMILIES, byte_level, llama, metaspace
from tests.tiny import BOS, EOS, tokenizer


def reader(made: Any, *, encoder_decoder: bool = False, **options: Any) -> TextReader:
    loaded: Any = SimpleNamespace(tokenizer=made, is_encoder_decoder=encoder_decoder, vocab_size=10**6, name="it")
    return TextReader(loaded, **{"eos": None, "start": 0, "add_eos": False, **options})


def framed(single: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with special tokens around each text."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer.from_str(tokenizer().backend_tokenizer.to_str()),
        eos_token="<eos>",
    )
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return made


def test_without_bos_the_first_token_and_its_bytes_are_not_counted() -> None:
    made = reader(tokenizer()).plain("the cat")
    ids = tokenizer()("the cat")["input_ids"]
    assert (made.ids, made.begin, made.first) == (tuple(ids), 0, 1)
    assert made.bytes == len("the cat") - len(tokenizer().decode(ids[:1]))


def test_with_bos_the_whole_text_is_counted() -> None:
    made = reader(framed("<bos> $A")).plain("the cat")
    assert made.ids == (BOS, *tokenizer()("the cat")["input_ids"])
    assert (made.begin, made.first, made.bytes) == (0, 1, 7)


def test_a_character_shared_by_the_first_two_tokens_counts_whole() -> None:
    made = reader(tokenizer()).plain("é!")  # one token per byte
    assert len(made.ids) == 3
    assert made.bytes == len("é!".encode())


@pytest.mark.parametrize(("text", "after"), [(" the cat", 7 - 3), ("the cat", 7 - 3)])
def test_bytes_after_the_first_token_of_a_tokenizer_that_prepends_spaces(text: str, after: int) -> None:
    made = reader(metaspace()).plain(text)
    first = metaspace().convert_ids_to_tokens(made.ids[0])
    assert made.bytes == len(text) - len(first.replace("▁", " " if text[0] == " " else ""))


def test_eos_is_added_once() -> None:
    assert reader(framed("<bos> $A"), add_eos=True).plain("the").ids[-1] == EOS
    both = reader(framed("<bos> $A <eos>"), add_eos=True).plain("the")
    assert both.ids.count(EOS) == 1
    assert reader(framed("$A <eos>")).plain("the cat").ids[-1] == EOS  # the tokenizer's own EOS is scored, too
    nameless = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    assert reader(nameless, add_eos=True, eos=7).plain("the cat").ids[-1] == 7
    with pytest.raises(ModelError, match="names no EOS"):
        reader(nameless, add_eos=True)


def test_a_lone_token_without_bos_has_nothing_to_score() -> None:
    with pytest.raises(InputError, match=r"single token.*--context"):
        reader(tokenizer()).plain("a")
    assert len(reader(tokenizer(), add_eos=True).plain("a").ids) == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(("context", "text"), [("the cat", " sat on"), ("the d", "og"), ("a b", " c"), ("a ", "b c")])
def test_the_context_keeps_its_tokens_and_the_text_all_of_its_own(family: str, context: str, text: str) -> None:
    made = FAMILIES[family]()
    found = reader(made).after_context(context, text)
    assert list(found.ids[: found.begin]) == made(context)["input_ids"]
    assert found.first == found.begin < len(found.ids)
    assert found.bytes == len(text)
    joint = made(context + text)["input_ids"]
    if joint[: found.begin] == list(found.ids[: found.begin]) and len(joint) > found.begin:
        assert list(found.ids) == joint
    if family in ("byte_level", "llama", "metaspace"):  # the others do not distinguish a word's end from its beginning
        assert made.decode(found.ids) == context + text


@pytest.mark.parametrize("made", [llama(), metaspace()], ids=["llama", "metaspace"])
def test_a_word_is_not_begun_twice_where_it_goes_on_from_the_context(made: Any) -> None:
    found = reader(made).after_context("the d", "og")
    alone = made("og")["input_ids"]
    assert made.convert_ids_to_tokens(alone)[0].startswith("▁")  # what must not be put after the context
    assert not made.convert_ids_to_tokens(found.ids[found.begin]).startswith("▁")


def test_a_token_is_not_melted_across_the_boundary() -> None:
    assert len(byte_level()("the")["input_ids"]) == 1
    found = reader(byte_level()).after_context("th", "e")
    assert list(found.ids) == [*byte_level()("th")["input_ids"], *byte_level()("e")["input_ids"]]


def test_specials_around_a_context_go_where_they_belong() -> None:
    found = reader(framed("<bos> $A <eos>")).after_context("the cat", " sat")
    assert found.ids[0] == BOS
    assert found.ids.count(EOS) == 1
    assert found.ids[-1] == EOS
    assert found.ids[found.begin : -1] == tuple(tokenizer()(" sat")["input_ids"])


def test_no_context_is_bos_or_refused() -> None:
    assert reader(framed("<bos> $A")).after_context("", "the").begin == 1
    with pytest.raises(InputError, match=r"no context.*BOS"):
        reader(tokenizer()).after_context("", "the")


def test_a_target_begins_with_the_decoder_start_and_is_scored_whole() -> None:
    found = reader(framed("$A <eos>"), encoder_decoder=True, start=9).target("the cat", "the dog")
    assert found.ids == (9, *tokenizer()("the dog")["input_ids"], EOS)
    assert (found.begin, found.first, found.bytes, found.text) == (1, 1, 7, "the dog")
    assert found.source == (*tokenizer()("the cat")["input_ids"], EOS)
    with pytest.raises(ModelError, match="decoder_start_token_id"):
        reader(tokenizer(), encoder_decoder=True, start=None)
