"""Words given as text: every way that the tokenizer writes them, on byte-level BPE and on SentencePiece-like pieces."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from genctl.decode.processors import token_sequences
from genctl.decode.processors.build import ProcessorContext, build
from genctl.errors import UsageError
from genctl.params import Generation
from tests import tiny
from tests.cli.tool import genctl as tool
from tests.decode.processors.plain import material
from tests.tiny import tokenizer


@cache
def pieces() -> Any:
    """Unigram with the space as a leading mark and a dummy one before the text, as T5 and Llama have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = '<unk> ▁ ▁cat cat ▁the the ▁a a ( " b ▁b ad ger ▁dog ? ▁('
    vocabulary = words.split(" ")
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
    ("text", "sentence"), [("", "the text is empty"), ("żółw", "the checkpoint's tokenizer has no tokens for 'żółw'")]
)
def test_what_cannot_be_written_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"bad_words: {sentence}"):
        token_sequences.variants(pieces(), text, "bad_words")


def test_text_needs_a_tokenizer_and_eos_is_not_banned() -> None:
    with pytest.raises(UsageError, match="logit_bias: 'yes' is text, but the checkpoint has no tokenizer"):
        build(material(logit_bias={"yes": 1.0}))
    assert build(material(logit_bias={"#7": 1.0}))[0].name == "logit_bias"
    with pytest.raises(UsageError, match="bad_words_ids: it lists only EOS, which ends a text and is never removed"):
        build(material(bad_words_ids=[[tiny.EOS]]))
    (processor,) = build(material(logit_bias={"#3": -math.inf}))
    assert processor(torch.tensor([[5]]), torch.zeros(1, tiny.VOCABULARY))[0, 3] == -torch.inf


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


def test_logit_bias_of_text_of_ids_and_of_several_tokens() -> None:
    """A single token always has its bias; of several the last one, once the others are there."""
    biases = token_sequences.bias_of(pieces(), {"cat": 2.0, " cat": 3.0, "#11": -1.0, "badger": 4.0})
    named = {tuple(pieces().convert_ids_to_tokens(list(ids))): bias for ids, bias in biases.items()}
    assert named == {("cat",): 2.0, ("▁cat",): 3.0, ("▁b",): -1.0, ("▁b", "ad", "ger"): 4.0, ("b", "ad", "ger"): 4.0}
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


HISTORY = torch.tensor([[3, 4, 5, 6, 7, 5, 6, 8], [9, 9, 3, 3, 9, 5, 3, 9]])
PROMPT = 3  # tokens of the prompt


def processed(window: int | None, **knobs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    context = ProcessorContext(Generation(penalty_last_n=window, **knobs), PROMPT, 40, 300, tokenizer=tokenizer())
    (processor,) = build(context)
    return scores, processor(HISTORY, scores.clone())


@pytest.mark.parametrize("window", [1, 2, 4, 8, 100])
def test_repetition_penalty_is_that_of_the_last_tokens(window: int) -> None:
    scores, after = processed(window, repetition_penalty=1.3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(HISTORY[:, -window:], scores.clone())
    assert torch.equal(after, expected)


@pytest.mark.parametrize("window", [1, 3, 5, 100, None])
def test_presence_and_frequency_count_new_tokens_in_the_window(window: int | None) -> None:
    new = HISTORY[:, max(PROMPT, HISTORY.shape[1] - (window or 100)) :]
    counts = torch.stack([torch.bincount(row, minlength=300) for row in new])
    scores, after = processed(window, frequency_penalty=0.5)
    assert torch.allclose(after, scores - 0.5 * counts)
    scores, after = processed(window, presence_penalty=0.5)
    assert torch.allclose(after, scores - 0.5 * (counts > 0))


def test_dry_sees_no_repetition_outside_the_window() -> None:
    repeated = torch.tensor([[40, 41, 42, 43, 50, 51, 40, 41, 42]])
    for window, hit in ((None, True), (9, True), (5, False)):
        context = ProcessorContext(
            Generation(dry_multiplier=1.0, penalty_last_n=window), 2, 40, 300, tokenizer=tokenizer()
        )
        (processor,) = build(context)
        assert bool(processor(repeated, torch.zeros(1, 300))[0, 43] < 0) is hit


def test_a_preset_that_lists_its_processors_sets_it_there() -> None:
    context = ProcessorContext(
        Generation(),
        PROMPT,
        40,
        300,
        explicit=({"use": "repetition_penalty", "repetition_penalty": 1.3, "penalty_last_n": 2},),
    )
    (processor,) = build(context)
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(HISTORY[:, -2:], scores.clone())
    assert torch.equal(processor(HISTORY, scores.clone()), expected)


def test_without_a_penalty_it_is_a_mistake() -> None:
    done = tool("run", "Once", "--set", "penalty_last_n=64", "-n", "2")
    assert done.status == 2
    assert "penalty_last_n = 64 (--set penalty_last_n) has no effect without repetition_penalty" in done.err
    assert tool("run", "Once", "--set", "penalty_last_n=64", "--repetition-penalty", "1.2", "-n", "2").status == 0
    assert "penalty_last_n" in tool("run", "Once", "--set", "repeat_last_n=64", "-n", "2").err
