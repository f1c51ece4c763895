"""Stop strings and patterns do not count within a thought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

import genctl
from genctl.decode.stopping.build import StoppingContext, build, stops_of
from genctl.decode.stopping.row_text import RowText
from genctl.decode.stopping.stops import Tags, tags_of
from genctl.models.text import Detokenizer
from genctl.params import Generation
from tests.cli.tool import genctl as tool
from tests.decode.stopping.rows import reader, tokenizer, written
from tests.tiny import tiny

TAGS = Tags("<think>", "</think>")
SET = ("--set", 'thinking_tags=["<think>", "</think>"]')


def stopped(text: str, *, in_thought: bool = False, words: Any = None, tags: Tags = TAGS, **knobs: Any) -> str:
    """The part of a text that is left, token by token; checks that the text shown on the way is its beginning."""
    words = words or tokenizer("bytelevel")
    read = lambda ids: words.decode(list(ids), skip_special_tokens=True)  # noqa: E731
    generation = Generation(**knobs)
    criteria = build(StoppingContext(generation, words, read, tags=tags, in_thought=in_thought))
    row, ids, shown = RowText(Detokenizer(words), stops_of(criteria, keep=generation.keep_stop)), [], ""
    for token in words.encode(text, add_special_tokens=False):
        ids.append(token)
        row.push(token)
        if any(one(written(ids, text=row)) for one in criteria):
            last, whole = row.finish("stop")
            assert shown + last == whole
            return whole
        shown += row.show()
    last, whole = row.finish("length")
    assert shown + last == whole
    return whole


@pytest.mark.parametrize(
    ("text", "in_thought", "left"),
    [
        ("a. b. c", False, "a"),
        ("<think>a. b</think>c. d", False, "<think>a. b</think>c"),
        ("a. b</think>c. d", True, "a. b</think>c"),
        ("a. b</thin. c", True, "a. b</thin. c"),  # never closed
        ("a</think>b<think>c. d</think>e. f", True, "a</think>b<think>c. d</think>e"),
        ("a</think>. b", True, "a</think>"),
        ("a.</think>b", True, "a.</think>b"),
        ("x. <think>a", False, "x"),
        ("a <thin. k", False, "a <thin"),
        ("a</think> b", False, "a</think> b"),  # nothing was open
    ],
)
def test_stops_sleep_until_the_thought_is_closed(text: str, in_thought: bool, left: str) -> None:
    for knobs in ({"stop_strings": ". "}, {"stop_strings": ["zzz", "."]}, {"stop_regex": r"\.\s?"}):
        if text != "a.</think>b" or "stop_strings" in knobs:
            assert stopped(text, in_thought=in_thought, **knobs) == left
    kept = left if left == text else f"{left}."
    assert stopped(text, in_thought=in_thought, stop_strings=".", keep_stop=True) == kept


def test_a_stop_does_not_match_in_a_tag_and_one_that_names_a_tag_never_sleeps() -> None:
    assert stopped("think</think>rethink", in_thought=True, stop_strings="think") == "think</think>re"
    assert stopped("a>b</think>c>d", in_thought=True, stop_strings=">") == "a>b</think>c"
    assert stopped("a b</think>c", in_thought=True, stop_strings="</think>") == "a b"
    assert stopped("a b</think>c", in_thought=True, stop_regex=r"\s*<\/think>") == "a b"
    assert stopped("a<think>b", stop_strings="<think>") == "a"


def test_a_thought_is_shown_as_it_is_written() -> None:
    words = tokenizer("bytelevel")
    for knobs in ({"stop_strings": "stop"}, {"stop_regex": "stop"}):
        criteria = build(StoppingContext(Generation(**knobs), words, reader("bytelevel"), tags=TAGS, in_thought=True))
        row, text = RowText(Detokenizer(words), stops_of(criteria, keep=False)), ""
        for token in words.encode("a sto", add_special_tokens=False):
            row.push(token)
            text += row.show()
        assert text == "a sto"


def test_tags_may_be_special_tokens_which_the_text_does_not_show() -> None:
    words = type(tokenizer("bytelevel"))(tokenizer_object=tokenizer("bytelevel").backend_tokenizer)
    words.add_tokens([AddedToken("<|open|>", special=True), AddedToken("<|end|>", special=True)])
    tags = Tags("<|open|>", "<|end|>")
    assert stopped("x<|open|>a. b<|end|>c. d", words=words, tags=tags, stop_strings=".") == "xa. bc"
    assert stopped("a. b<|end|>c. d", in_thought=True, words=words, tags=tags, stop_regex=r"\.") == "a. bc"
    assert stopped("a. b<|end|>c. d", in_thought=True, words=words, tags=tags, stop_strings="<|end|>") == "a. b"


def test_known_tags_are_those_of_the_template_or_the_vocabulary() -> None:
    words = type(tokenizer("bytelevel"))(tokenizer_object=tokenizer("bytelevel").backend_tokenizer)
    assert tags_of(words) is None
    words.chat_template = "{{ '<think>' }}{{ '</think>' }}"
    assert tags_of(words) == TAGS


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"do_sample": True, "seed": 4, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 4},
    ],
    ids=str,
)
def test_every_mode_ends_at_a_stop_behind_the_thought_alone(mode: dict[str, Any]) -> None:
    model = genctl.load("builtin:stories", thinking_tags=TAGS[:2], thinking_budget=6, max_new_tokens=24)
    prompts = ["Once <think>", "Once <think>upon a time", "Once upon a time"]
    for result in model.generate(prompts, stop_strings=[" ", "."], batch_size=3, **mode):
        for one in result.sequences:
            thought, tag, answer = one.text.rpartition("</think>")
            if "<think>" in result.prompt:
                assert bool(tag) == (one.finish_reason != "eos")
                assert " " in thought or not tag
            else:
                assert not {" ", "."} & set(one.text)
            assert not {" ", "."} & set(answer if tag else "")
            assert one.finish_reason == "stop" or not tag


def test_a_setting_lets_stops_end_a_thought(tmp_path: Path) -> None:
    flags = ("run", "Once <think>", "--stop-strings", " ", "-n", "9", "--format", "jsonl", *SET)
    assert tool(*flags).records[0]["finish_reason"] == "length"
    assert tool(*flags, "--stop-in-thought").records[0]["finish_reason"] == "stop"
    assert "has no effect without" in tool("run", "Once", "--stop-in-thought").err


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize(
    ("opens", "prompt", "sleeps"),
    [
        ("<think>", ("--chat", "hi"), True),
        ("<think></think>", ("--chat", "<think>"), False),
        # a prompt that is no chat may speak of a tag: it opens a thought at its end alone
        ("", ("what is <think> for",), False),
        ("", ("so <think>\n",), True),
    ],
)
def test_stops_sleep_where_a_template_or_a_prompt_opens_a_thought(
    opens: str, prompt: tuple[str, ...], sleeps: bool, stream: tuple[str, ...], tmp_path: Path
) -> None:
    tiny("llama", tmp_path)
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(f"{template}{{# <think> #}}{opens}")
    flags = ("run", "-m", str(tmp_path), *prompt, "-n", "20", *stream)
    whole = tool(*flags).out
    stop = next(letter for letter in whole[1:-1] if letter.isalnum())
    stopped = tool(*flags, "--stop-strings", stop).out
    assert stopped == (whole if sleeps else f"{whole[: whole.index(stop)]}\n")
