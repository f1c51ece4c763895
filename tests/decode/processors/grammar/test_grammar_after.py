"""A grammar that begins after a mark in the text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import genctl
from genctl.config.modes import conflicts
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.grammar import constraint
from genctl.errors import UsageError
from genctl.params import Generation
from tests.cli.tool import genctl as tool
from tests.decode.processors.grammar.machines import PROMPT
from tests.tiny import EOS, tokenizer

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


def test_the_mark_is_written_in_time() -> None:
    made = processor("ok", room=8)
    assert len(allowed(made, "ab")) > 250
    for text, following in (("abc", "o"), ("abco", "k")):
        assert names(allowed(made, text)) == {following}


def test_a_prompt_that_ends_with_the_mark_begins_with_the_grammar() -> None:
    prompt = tuple(tokenizer().encode("so ok\n", add_special_tokens=False))
    assert names(allowed(processor(prompt=prompt), "", prompt)) == {"x"}


def test_a_mark_that_is_one_token_counts_as_a_token() -> None:
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
