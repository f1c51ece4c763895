"""Grammars in the loop with every strategy, and grammars that begin after a mark in the text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import genctl
from genctl import events
from genctl.config.modes import conflicts
from genctl.decode.loop import decode
from genctl.decode.processors.build import NamedProcessor, ProcessorContext
from genctl.decode.processors.grammar import Grammar, constraint
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import spelling
from genctl.decode.types import Lane, Strategy
from genctl.errors import UsageError
from genctl.params import Generation
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.cli.tool import genctl as tool
from tests.decode.driver import PROMPTS, Case
from tests.decode.processors.grammar.machines import PROMPT
from tests.tiny import EOS, tokenizer

LANGUAGE = ["the cat", "the dog", "a cat", "a dog"]
PATTERN = "(the|a) (cat|dog)"


def lane(
    case: Case, strategy: Strategy, name: str = "0", pattern: str = PATTERN, prompt: int = 0, **fields: object
) -> Lane:
    source = read(Generation(regex=pattern))
    assert source is not None
    made = case.lane(PROMPTS[prompt], strategy, name)
    grammar = Grammar(source, spelling(tokenizer(), 300, "regex"), len(made.tokens), (EOS,))
    return case.lane(PROMPTS[prompt], strategy, name, processors=(NamedProcessor("regex", grammar),), **fields)


def texts(found: list[list[int]]) -> list[str]:
    assert all(row[-1] == EOS for row in found)
    return [tokenizer().decode(row, skip_special_tokens=True) for row in found]


@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("strategy", [Sample(), Sample(True, 3), Beam(3, n=3), Beam(3, do_sample=True)])
def test_every_strategy_stays_in_the_grammar(arch: str, strategy: Strategy) -> None:
    case = Case(arch)
    assert set(texts(case.ours([lane(case, strategy)])["0"])) <= set(LANGUAGE)


def test_sampling_reaches_every_text() -> None:
    case = Case("llama")
    lanes = [lane(case, Sample(True, 16), str(seed), "a|b|ab", seed=seed) for seed in range(12)]
    found = {text for rows in case.ours(lanes, width=2).values() for text in texts(rows)}
    assert found == {"a", "b", "ab"}


def test_a_processor_that_bars_what_the_grammar_needs_fails_with_both_names() -> None:
    case = Case("llama")

    def no_letters(history: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(35, 300), -torch.inf)

    good = lane(case, Sample())
    bad = Lane(
        "0",
        good.tokens,
        good.strategy,
        20,
        good.eos,
        processors=(*good.processors, NamedProcessor("letters", no_letters)),
    )
    [failed] = [event for event in decode(case.forward, [bad]) if isinstance(event, events.Failed)]
    assert "regex" in failed.message
    assert "letters" in failed.message


def test_a_forced_language_token_comes_before_the_text() -> None:
    case = Case("bart")
    generation = Generation(json_schema={"enum": ["a"]}, forced_bos_token_id=1)
    made = constraint(ProcessorContext(generation, 1, 20, 300, (EOS,), tokenizer=tokenizer()), None, "json_schema")
    assert made is not None

    def first(history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] == 1:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 1] = 0.0
        return scores

    found = case.ours([case.lane(PROMPTS[0], processors=(first, made))])["0"]
    assert found[0][0] == 1
    assert texts(found) == ['"a"']


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def processor(mark: str = "ok", room: int = 40, prompt: tuple[int, ...] = PROMPT, **knobs: Any) -> Any:
    generation = Generation(regex="x+y", grammar_after=mark, **knobs)
    context = ProcessorContext(
        generation,
        len(prompt),
        len(prompt) + room,
        300,
        (EOS,),
        encoder_ids=torch.tensor([prompt]),
        tokenizer=tokenizer(),
    )
    return constraint(context, None, "regex")


def allowed(made: Any, text: str, prompt: tuple[int, ...] = PROMPT) -> set[int]:
    row = tokenizer().encode(text, add_special_tokens=False) if text else []
    after = made(torch.tensor([[*prompt, *row]]), torch.zeros(1, 300))
    return set((after[0] > -torch.inf).nonzero()[:, 0].tolist())


def names(ids: set[int]) -> set[str]:
    return {tokenizer().decode([token]) for token in ids}


def test_everything_but_the_end_may_come_before_the_mark_and_the_grammar_after_it() -> None:
    made = processor()
    assert made.mark is not None
    before = allowed(made, "the cat")
    assert EOS not in before
    assert len(before) > 250
    assert names(allowed(made, "the cat ok")) == {"x"}
    assert names(allowed(made, "okx")) == {"x", "y"}
    assert allowed(made, "okxy") == {EOS}


def test_a_token_that_goes_on_behind_the_mark_is_barred() -> None:
    made = processor(" b")
    assert " ball" not in names(allowed(made, "the"))
    assert " b" not in names(allowed(made, "the")) or names(allowed(made, "the b")) == {"x"}
    partly = processor("t ")
    assert not any(name.startswith(" ") and len(name) > 1 for name in names(allowed(partly, "cat")))


def test_the_mark_is_written_in_time_stands_in_a_prompt_or_is_one_token() -> None:
    made = processor("ok", room=8)
    assert len(allowed(made, "ab")) > 250
    for text, following in (("abc", "o"), ("abco", "k")):
        assert names(allowed(made, text)) == {following}
    prompt = tuple(tokenizer().encode("so ok\n", add_special_tokens=False))
    assert names(allowed(processor(prompt=prompt), "", prompt)) == {"x"}
    made = processor(tokenizer().convert_ids_to_tokens(EOS - 1))
    assert made.mark.ids == (EOS - 1,)
    with pytest.raises(UsageError, match="grammar_after: this tokenizer cannot write"):
        processor(tokenizer().convert_ids_to_tokens(EOS))


def test_what_is_cut_and_what_is_whole() -> None:
    made = processor()
    ids = [tokenizer().encode(text, add_special_tokens=False) for text in ("no", "ok", "okx", "a okxy")]
    assert [made.cut([*PROMPT, *row], 0) for row in ids] == [True, True, True, False]
    assert [made.begins_with(row) for row in ids] == [True] * 4
    assert not made.begins_with(tokenizer().encode("okz", add_special_tokens=False))


@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}, {"num_beams": 3}])
def test_every_mode_writes_the_mark_and_a_whole_text(mode: dict[str, Any]) -> None:
    model = genctl.load("builtin:stories")
    for result in model.generate(
        ["Once upon", "The"], json_schema=SCHEMA, grammar_after="</think>", max_new_tokens=30, **mode
    ):
        for one in result.sequences:
            thought, _, rest = one.text.partition("</think>")
            assert thought
            assert set(json.loads(rest)) == {"a"}
            assert one.finish_reason == "eos"


def test_where_the_model_writes_the_mark_itself_the_grammar_begins_there() -> None:
    (result,) = genctl.load("builtin:stories").generate(
        ["Once upon a time"], regex="x{3}", grammar_after=" was", max_new_tokens=60
    )
    assert re.fullmatch(r", there wasx{3}", result.text)


def test_without_a_grammar_it_is_a_mistake() -> None:
    assert conflicts(Generation(grammar_after="", regex="a")) == ["grammar_after is empty: the grammar begins at once"]
    done = tool("run", "Once", "--set", 'grammar_after="</think>"')
    assert (done.status, done.out) == (2, "")
    assert "has no effect without json_schema, regex or grammar" in done.err
