"""Token healing: what is taken back, what must then be written, and what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from genctl import events
from genctl.decode.processors.required_prefix import RequiredPrefix
from genctl.decode.prompts import HealedPrompt, heal
from genctl.decode.stopping.row_text import RowText
from genctl.models.text import Detokenizer
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.decode.driver import Case
from tests.models.tokenizers_made import byte_level, llama
from tests.tiny import BOS, EOS, tokenizer


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
    assert {(one.tokens, one.text) for one in finished.hypotheses} <= told(found)


def told(found: Sequence[events.Event]) -> set[tuple[tuple[int, ...], str]]:
    """Each row that ended: its tokens and the text of its steps, put together."""
    rows: list[tuple[tuple[int, ...], str]] = [((), "")]
    made = set()
    for event in found:
        if isinstance(event, events.Stepped):
            children = [(row.parent, row.written) for row in event.rows]
            children += [(one.parent, one.written) for one in event.ended]
            grown = [
                (
                    (*rows[parent][0], *(token.id for token in written)),
                    rows[parent][1] + "".join(token.text for token in written),
                )
                for parent, written in children
            ]
            made |= set(grown[len(event.rows) :])
            rows = grown[: len(event.rows)]
            for one in event.ended:
                assert (one.hypothesis.tokens, one.hypothesis.text) in made
    return made


def test_a_blank_that_the_decoder_strips_is_not_hidden_twice() -> None:
    made_by = llama()
    names = made_by.convert_tokens_to_ids
    prompt = [1, names("▁the"), names("▁")]
    healed = heal(made_by, prompt, len(made_by))
    assert healed.text == " "
    assert healed.ids == (1, names("▁the"))
    words = Detokenizer(made_by).after(healed.ids, prompt[2:])
    assert words.decode([names("▁th"), names("e")]) == "the"
