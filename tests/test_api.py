"""The Python interface: what an interpreter prints, and what counts as a prompt."""

from __future__ import annotations

from typing import Any

import pytest

import genctl
from genctl.api import Model
from genctl.errors import GenctlError
from genctl.events import Began, Failed
from genctl.events.results import Result


def test_a_model_and_a_result_are_printed_in_a_line() -> None:
    model = genctl.load()
    assert repr(model) == "<genctl.Model builtin:stories, native (llama), on cpu>"
    results = model.generate(["Once upon a time " * 9], num_beams=2, num_return_sequences=2, max_new_tokens=3)
    (result,) = results
    assert repr(result).startswith("<Result 0: beam of 'Once upon a time Once upon a time Once …', <Sequence '")
    assert repr(result).endswith("3 tokens, length> and 1 more>")
    assert len(repr(results)) < 200


def test_a_failed_result_says_why() -> None:
    failed = Result("7", "x", "greedy", None, "made-up", (), error=Failed("7", "input", "the prompt is empty"))
    assert repr(failed) == "<Result 7: failed, 'the prompt is empty'>"


HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def stories() -> Model:
    return genctl.load()


def lanes(model: Model, prompts: Any, **settings: Any) -> list[tuple[str, str, int]]:
    results = model.generate(prompts, **{"max_new_tokens": 2, **settings})
    return [(result.lane, result.prompt, len(result.sequences[0].token_ids)) for result in results]


def test_rows_are_prompts_alone_in_lists_and_beside_others(stories: Model) -> None:
    row = {"prompt": "The fox", "id": "a"}
    assert lanes(stories, row) == lanes(stories, [row]) == [("a", "The fox", 2)]
    mixed = [row, "One day", {"prompt_ids": (5, 6), "params": {"max_new_tokens": 1}}, [5, 6], [HI], {"messages": [HI]}]
    assert lanes(stories, mixed) == [
        ("a", "The fox", 2), ("1", "One day", 2), ("2", "#$", 1), ("3", "#$", 2), ("4", "<bos>Hi", 2),
        ("5", "<bos>Hi", 2),
    ]  # fmt: skip
    assert [lane for lane, *_ in lanes(stories, (text for text in ("a", "b")))] == ["0", "1"]
    began = [event for event in stories.stream({**row, "label": 3}, max_new_tokens=1) if isinstance(event, Began)]
    assert [(event.lane, event.input) for event in began] == [("a", {"label": 3})]


def test_a_row_has_settings_and_a_seed_of_its_own(stories: Model) -> None:
    rows = [{"prompt": "The", "params": {"do_sample": True, "seed": 9}}, {"prompt": "The"}]
    drawn, greedy = stories.generate(rows, max_new_tokens=3)
    assert (drawn.strategy, drawn.seed, greedy.strategy) == ("sample", 9, "greedy")
    (alone,) = stories.generate("The", do_sample=True, seed=9, max_new_tokens=3)
    assert drawn.sequences[0].token_ids == alone.sequences[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        (None, "a prompt is a text, .*; got NoneType"),
        (5, "; got int"),
        (b"hi", "; got bytes"),
        ([], "there is no prompt"),
        (["a", b"hi"], "prompt 2: a prompt is a text, .*; got bytes"),
        ([True], "prompt 1: .*; got bool"),
        ([5, "x"], "prompt 1: .*; got int"),
        (HI, 'prompt 1: .* a row such as {"prompt": "Hi"}; got dict'),
        ([HI, {"prompt": "x"}], "prompt 1: .*; got dict"),
        ({}, "prompt 1: no prompt: expected one of prompt, prompt_ids, messages"),
        ({"prompt": ""}, "prompt 1: prompt: empty prompt"),
        ({"prompt": 3}, "prompt 1: prompt: expected a string, got an integer"),
        ({"prompt": "x", "prompt_ids": [1]}, "prompt 1: prompt and prompt_ids exclude each other"),
        ([{"prompt": "x", "id": "1"}, "y"], "prompt 2: the id '1' is already used in prompt 1"),
        ({"prompt": "x", "params": {"no_such": 1}}, "params of prompt 1: unknown key no_such"),
    ],
)
def test_what_is_no_prompt_is_refused(stories: Model, prompts: Any, sentence: str) -> None:
    for method in (stories.generate, stories.stream):
        with pytest.raises(GenctlError, match=sentence):
            method(prompts)


def test_settings_beside_the_prompt_of_a_row_are_warned_of(stories: Model) -> None:
    with pytest.warns(UserWarning, match=r'not as settings: temperature; .* "params": \{"temperature": …\}'):
        stories.generate({"prompt": "x", "temperature": 0.5}, max_new_tokens=1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1, "num_return_sequences": 2}, {"stop_strings": [" girl"]}],
    ids=str,
)
def test_pieces_of_a_stream_add_up_to_the_text(settings: dict[str, Any]) -> None:
    model = genctl.load("builtin:stories", max_new_tokens=12)
    pieces = list(model.stream(["Once upon", "One day"], **settings))
    for lane, result in zip(("0", "1"), model.generate(["Once upon", "One day"], **settings), strict=True):
        texts = [piece.text for piece in pieces if piece.lane == lane]  # type: ignore[union-attr]
        assert "".join(texts) == result.text
        assert sum(map(bool, texts)) > 1  # while it grows
