"""Words given as text: every way that the tokenizer writes them, on byte-level BPE and on SentencePiece-like pieces."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from genctl.decode.processors import token_sequences
from genctl.decode.processors.build import build
from genctl.errors import UsageError
from tests import tiny
from tests.decode.processors.plain import material


@cache
def pieces() -> Any:
    """Unigram with the space as a leading mark and a dummy one before the text, as T5 and Llama have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = [
        "<unk>",
        "▁",
        "▁cat",
        "cat",
        "▁the",
        "the",
        "▁a",
        "a",
        "(",
        '"',
        "b",
        "▁b",
        "ad",
        "ger",
        "▁dog",
        "?",
        "▁(",
    ]
    made = Tokenizer(models.Unigram([(piece, -float(len(vocabulary) - len(piece))) for piece in vocabulary], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def spelled(tokenizer: Any, text: str) -> set[tuple[str, ...]]:
    return {
        tuple(tokenizer.convert_ids_to_tokens(list(ids)))
        for ids in token_sequences.variants(tokenizer, text, "bad_words")
    }


def test_byte_level_words_bare_and_after_a_space() -> None:
    tokenizer = tiny.tokenizer()
    bare, after = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("dog", " dog"))
    assert bare != after
    assert set(token_sequences.variants(tokenizer, "dog", "bad_words")) == {bare, after}
    assert token_sequences.variants(tokenizer, " dog", "bad_words") == [after]


def test_pieces_with_a_dummy_space_are_found_without_it_too() -> None:
    """Encoding "cat" alone gives ▁cat, so the form inside "(cat" is only found in a context."""
    assert spelled(pieces(), "cat") == {("▁cat",), ("cat",)}
    assert spelled(pieces(), " cat") == {("▁cat",)}
    assert spelled(pieces(), "badger") == {("▁b", "ad", "ger"), ("b", "ad", "ger")}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "the text is empty"), ("żółw", "the checkpoint's tokenizer has no tokens for 'żółw'")],
)
def test_what_cannot_be_written_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"bad_words: {sentence}"):
        token_sequences.variants(pieces(), text, "bad_words")


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="logit_bias: 'yes' is text, but the checkpoint has no tokenizer"):
        build(material(logit_bias={"yes": 1.0}))
    assert build(material(logit_bias={"#7": 1.0}))[0].name == "logit_bias"


def test_bad_words_are_never_completed() -> None:
    tokenizer = tiny.tokenizer()
    (processor,) = build(material(bad_words=["badger"], tokenizer=tokenizer))
    zeros = torch.zeros(1, tiny.VOCABULARY)
    for text in ("badger", "the badger", '"badger'):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) > 1
        made = processor(torch.tensor([ids[:-1]]), zeros)
        assert made[0, ids[-1]] == -torch.inf
        assert int(made.isinf().sum()) == 1


def test_bad_words_that_are_only_eos_are_refused() -> None:
    with pytest.raises(UsageError, match="bad_words_ids: it lists only EOS, which ends a text and is never removed"):
        build(material(bad_words_ids=[[tiny.EOS]]))


def test_logit_bias_of_text_of_ids_and_of_several_tokens() -> None:
    """A single token always has its bias; of several the last one, once the others are there."""
    biases = token_sequences.bias_of(pieces(), {"cat": 2.0, " cat": 3.0, "#11": -1.0, "badger": 4.0})
    named = {tuple(pieces().convert_ids_to_tokens(list(ids))): bias for ids, bias in biases.items()}
    assert named == {
        ("cat",): 2.0,
        ("▁cat",): 3.0,
        ("▁b",): -1.0,
        ("▁b", "ad", "ger"): 4.0,
        ("b", "ad", "ger"): 4.0,
    }
    (processor,) = build(material(logit_bias={"badger": 4.0}, tokenizer=pieces(), vocab_size=17))
    ids = pieces().encode("badger", add_special_tokens=False)
    assert processor(torch.tensor([ids[:-1]]), torch.zeros(1, 17))[0].nonzero().tolist() == [[ids[-1]]]
    assert not processor(torch.tensor([ids[:1]]), torch.zeros(1, 17)).any()


@pytest.mark.parametrize(
    ("biases", "sentence"),
    [
        ({"#300": 1.0}, "logit_bias: 300 is not one of the 300 ids"),
        ({"#3": math.nan}, "logit_bias: a bias must be a number or -inf, but is nan"),
        ({"#3": math.inf}, "logit_bias: a bias must be a number or -inf, but is inf"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(biases: dict[str, float], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(material(logit_bias=biases))


def test_a_minus_infinite_bias_bans_a_token() -> None:
    (processor,) = build(material(logit_bias={"#3": -math.inf}))
    assert processor(torch.tensor([[5]]), torch.zeros(1, tiny.VOCABULARY))[0, 3] == -torch.inf


def test_dry_breaks_at_every_token_that_contains_a_breaker() -> None:
    found = token_sequences.containing(pieces(), "(", "dry_sequence_breakers")
    assert {pieces().convert_ids_to_tokens(ids[0]) for ids in found} == {"(", "▁("}
    several = token_sequences.containing(pieces(), "badger", "dry_sequence_breakers")
    assert all(len(ids) == 3 for ids in several)
    colon = tiny.tokenizer().encode(":", add_special_tokens=False)[0]
    history = torch.tensor([[40, 41, colon, 42, 43, 40, 41, colon, 42]])
    zeros = torch.zeros(1, tiny.VOCABULARY)
    (free,) = build(material(dry_multiplier=1.0, dry_allowed_length=1, dry_base=2.0, dry_sequence_breakers=[]))
    (broken,) = build(material(dry_multiplier=1.0, dry_allowed_length=1, dry_base=2.0, tokenizer=tiny.tokenizer()))
    assert free(history, zeros)[0, 43] == -8.0
    assert broken(history, zeros)[0, 43] == -1.0
