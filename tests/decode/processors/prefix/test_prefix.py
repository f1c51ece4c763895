"""A forced prefix, against brute force; token healing: what is taken back, what must then be written, what is shown."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.required_prefix import RequiredPrefix, prefix
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.decode.prompts import HealedPrompt, heal
from genctl.decode.stopping.row_text import RowText
from genctl.errors import UsageError
from genctl.models.text import Detokenizer
from genctl.params import Generation
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case
from tests.models.tokenizers_made import (
    byte_level,
    llama,
    metaspace,
    rewritten,
    suffixes,
    unigram_bytes,
    word_piece,
    word_piece_cleaned,
)
from tests.tiny import BOS, EOS, tokenizer

AB = Spelling((b"", b"a", b"b", b"ab", b"abc", b"c", b""), {})  # id 0 is EOS


def allowed(made: Any, row: tuple[int, ...], size: int, start: int = 2) -> set[int]:
    history = torch.tensor([[*[1] * start, *row]])
    scores = made(history, torch.zeros(1, size))
    return set((scores[0] == 0).nonzero()[:, 0].tolist())


def rows(made: Any, size: int, longest: int, row: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """Every row of `longest` tokens."""
    if len(row) == longest:
        return {row}
    return {one for token in allowed(made, row, size) for one in rows(made, size, longest, (*row, token))}


@pytest.mark.parametrize("text", [b"a", b"ab", b"abab", b"bab", b"abcab", b"c"])
def test_exactly_the_rows_that_spell_it_can_be_written(text: bytes) -> None:
    made = RequiredPrefix(text, text, AB, 2, (0,))
    longest = len(text) + 1
    expected = set()
    for row in itertools.product(range(7), repeat=longest):
        sums = list(itertools.accumulate((AB.pieces[token] for token in row), initial=b""))
        # without text, nothing may come before the whole prefix is there
        until = next((n for n, told in enumerate(sums) if told.startswith(text)), None)
        if until is not None and all(AB.pieces[token] for token in row[:until]):
            expected.add(row)
    assert rows(made, 7, longest) == expected


def test_ways_that_cannot_be_finished_ends_and_no_prefix() -> None:
    words = Spelling((b"", b"a", b"ab", b"bcd"), {})
    assert allowed(RequiredPrefix(b"abc", b"abc", words, 2), (), 4) == {1}  # "ab" leaves "c", which nothing begins with
    made = RequiredPrefix(b"ab", b"ab", AB, 2, (1, 3))
    assert allowed(made, (), 7) == {3, 4}  # "a" would end the row too early; "ab" ends it where it may
    assert prefix(ProcessorContext(Generation(), 3, 9, 300, tokenizer=tokenizer())) is None
    assert prefix(ProcessorContext(Generation(prefix=""), 3, 9, 300, tokenizer=tokenizer())) is None


@pytest.mark.parametrize("family", [byte_level, llama, metaspace, unigram_bytes, word_piece])
@pytest.mark.parametrize("text", ["the", "a cat", "the t", "at"])
def test_what_is_shown_begins_with_it(family: Any, text: str) -> None:
    made_by = family()
    size = len(made_by) + 4
    made = prefix(ProcessorContext(Generation(prefix=text), 2, 40, size, (made_by.eos_token_id,), tokenizer=made_by))
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        row: tuple[int, ...] = ()
        while len(row) < len(text) + 2:
            ids = sorted(allowed(made, row, size) - {made_by.eos_token_id})
            assert ids, row
            if set(range(size)) - {made_by.eos_token_id} <= set(ids):
                break
            row = (*row, ids[int(torch.randint(len(ids), (1,), generator=generator))])
        shown = made_by.decode(list(row), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert shown.startswith(text), (row, shown)


def test_a_blank_that_is_not_shown_at_the_beginning_may_be_meant() -> None:
    made_by = llama()
    made = prefix(ProcessorContext(Generation(prefix=" the"), 2, 40, len(made_by), (2,), tokenizer=made_by))
    assert made_by.convert_tokens_to_ids("▁th") in allowed(made, (), len(made_by))
    assert made_by.convert_tokens_to_ids("t") not in allowed(made, (), len(made_by))


def test_characters_may_be_spelled_byte_by_byte() -> None:
    words = spelling(tokenizer(), 300, "prefix")
    made = RequiredPrefix("é".encode(), "é".encode(), words, 2, (EOS,))
    [first] = allowed(made, (), 300)
    [second] = allowed(made, (first,), 300)
    assert words.pieces[first] + words.pieces[second] == "é".encode()


@pytest.mark.parametrize("strategy", [Sample(), Sample(True, 3), Beam(3, n=3)])
@pytest.mark.parametrize("arch", ["llama", "t5"])
def test_every_strategy_keeps_the_promise(arch: str, strategy: Any) -> None:
    case = Case(arch)
    length = 1 if case.encoder_decoder else len(PROMPTS[0])
    material = ProcessorContext(
        Generation(prefix="once upon a"), length, length + 20, 300, (EOS,), tokenizer=tokenizer()
    )
    made = prefix(material)
    assert made is not None
    found = case.ours([case.lane(PROMPTS[0], strategy, processors=(made,))])["0"]
    assert all(tokenizer().decode(row).startswith("once upon a") for row in found)
    free = case.ours([case.lane(PROMPTS[0], strategy)])["0"]
    assert found != free


@pytest.mark.parametrize(
    ("made_by", "text", "room", "message"),
    [
        (word_piece, "the €", 9, "prefix: the checkpoint's tokenizer has no tokens for 'the €'"),
        (byte_level, "naïve café", 2, "prefix: 'naïve café' takes"),
        (word_piece_cleaned, "a", 9, "prefix: this tokenizer removes blanks from finished text"),
        (suffixes, "a", 9, "prefix: the text of this tokenizer is not the sum of its tokens"),
        (rewritten, "a", 9, "prefix: the text of this tokenizer is not the sum of its tokens"),
        (lambda: None, "a", 9, "prefix: works on text, but the checkpoint has no tokenizer"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(made_by: Any, text: str, room: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        prefix(ProcessorContext(Generation(prefix=text), 3, 3 + room, 500, (2,), tokenizer=made_by()))
    assert caught.value.message.startswith(message)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("the ca", "ca"),  # "cat" is one token, so "c" and "a" go back; " cat" is none
        ("the dog s", " s"),
        ("a!", ""),  # no token goes on after "!"
    ],
)
def test_as_much_is_taken_back_as_a_longer_token_could_cover(prompt: str, taken: str) -> None:
    healed = heal(tokenizer(), ids(prompt), 300)
    assert healed.text == taken
    assert tokenizer().decode(list(healed.ids)) + healed.text == prompt


def test_at_least_one_token_stays_and_special_ones_do() -> None:
    assert heal(tokenizer(), ids("h"), 300).text == ""
    assert heal(tokenizer(), [BOS, *ids("h")], 300).ids == (BOS,)
    assert heal(tokenizer(), [*ids("the c"), EOS], 300).text == ""
    assert heal(tokenizer(), [5, BOS, *ids("h")], 300).ids == (5, BOS)


def test_no_character_is_cut() -> None:
    made_by = byte_level()
    prompt = "naïve caf"
    for cut in range(1, len(prompt) + 1):
        healed = heal(made_by, made_by.encode(prompt[:cut]), len(made_by))
        assert made_by.decode(list(healed.ids)) + healed.text == prompt[:cut]


def test_a_stop_string_is_not_brought_into_the_new_text() -> None:
    assert heal(tokenizer(), ids("the ca"), 300, stops=["ca"]).text == "a"  # less, rather than nothing
    assert heal(tokenizer(), ids("the ca"), 300, stops=["a"]).text == ""
    assert heal(tokenizer(), ids("the ca"), 300, stops=["a\n"]).text == ""
    assert heal(tokenizer(), ids("the ca"), 300, stops=["t\n"]).text == "ca"


def stream(
    case: Case, prompt: str, strategy: Any, healed: HealedPrompt | None = None, seed: int = 0
) -> list[events.Event]:
    tokens, processors = ids(prompt), list[RequiredPrefix]()
    words = Detokenizer(tokenizer())
    if healed is not None:
        words = words.after(healed.ids, tokens[len(healed.ids) :])
        tokens = list(healed.ids)
        text = healed.text.encode()
        processors.append(RequiredPrefix(None, text, healed.words, len(tokens), (EOS,)))
    return case.stream([case.lane(tokens, strategy, processors=tuple(processors), seed=seed, text=RowText(words))])


@pytest.mark.parametrize("strategy", [Sample(), Sample(True, 3), Beam(3, n=2)])
def test_what_is_shown_follows_the_original_prompt(strategy: Any) -> None:
    case, prompt = Case("llama"), "the girl and the ca"
    healed = heal(tokenizer(), ids(prompt), 300)
    found = stream(case, prompt, strategy, healed)
    finished = found[-1]
    assert isinstance(finished, events.Finished)
    for one in finished.hypotheses:
        whole = tokenizer().decode([*healed.ids, *one.tokens], skip_special_tokens=True)
        assert whole == prompt + one.text


def test_a_blank_that_the_decoder_strips_is_not_hidden_twice() -> None:
    made_by = llama()
    names = made_by.convert_tokens_to_ids
    prompt = [1, names("▁the"), names("▁")]
    healed = heal(made_by, prompt, len(made_by))
    assert healed.text == " "
    assert healed.ids == (1, names("▁the"))
    words = Detokenizer(made_by).after(healed.ids, prompt[2:])
    assert words.decode([names("▁th"), names("e")]) == "the"
