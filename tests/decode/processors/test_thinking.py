"""Thinking budgets: where the closing tag is forced, what the record says about it, and how tags are found."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import genctl
from genctl.config.modes import conflicts
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.thinking import Thinking, thinking
from genctl.decode.stopping.stops import FAMILIES, Tags
from genctl.errors import GenctlError, UsageError
from genctl.models.chat import after_messages, render_chat_text, render_prefilled
from genctl.params import Generation
from tests.cli.tool import genctl as tool
from tests.tiny import EOS, tiny, tokenizer

TAGS = ("<think>", "</think>")
SET: dict[str, Any] = {"thinking_tags": TAGS, "max_new_tokens": 16}
PROMPT = "Once <think>upon a time"


def processor(budget: int, prompt: str = "a <think>", words: Any = None, **knobs: Any) -> Thinking:
    words = words or tokenizer()
    ids = torch.tensor([words.encode(prompt, add_special_tokens=False)])
    generation = Generation(thinking_budget=budget, **{"thinking_tags": TAGS, **knobs})
    length = ids.shape[1]
    context = ProcessorContext(
        generation, length, length + 50, len(words), (EOS,), encoder_ids=ids, tokenizer=words, opening=prompt
    )
    made = thinking(context, budget)
    assert made.prompt_len == length
    return made


def forced(made: Thinking, text: str, words: Any = None, more: Sequence[int] = ()) -> int | None:
    """The token that is forced after a text and `more` tokens; None if none is."""
    words = words or tokenizer()
    row = [0] * made.prompt_len + words.encode(text, add_special_tokens=False) + [*more]
    after = made(torch.tensor([row]), torch.zeros(1, len(words)))[0]
    ids = (after > -torch.inf).nonzero()[:, 0].tolist()
    return ids[0] if len(ids) == 1 else None


def written(made: Thinking, text: str, words: Any = None) -> str:
    """A text with all that is forced after it."""
    more: list[int] = []
    while (token := forced(made, text, words, more)) is not None:
        more.append(token)
        assert len(more) < 99
    return text + (words or tokenizer()).decode(more)


def test_after_the_budget_the_closing_tag_is_the_only_choice_and_nothing_after_it() -> None:
    made = processor(4)
    assert forced(made, "abc") is None
    assert written(made, "abcd") == "abcd</think>"
    assert made.of(tokenizer().encode("abcd</think> more"))[:4] == (False, 4, True, ())


def test_a_budget_of_nothing_closes_the_thought_at_once_and_one_that_begins_later_too() -> None:
    assert written(processor(0), "") == "</think>"
    later = processor(0, prompt="plain")
    assert forced(later, "so <think") is None
    assert written(later, "so <think>") == "so <think></think>"
    assert forced(later, "so </think>") is None


def test_a_thought_that_ends_in_time_is_not_touched_and_further_ones_share_the_budget() -> None:
    made = processor(3)
    assert forced(made, "ab</think>cdefgh") is None
    assert made.of(tokenizer().encode("ab</think>cdefgh"))[:3] == (False, 2, False)
    assert written(made, "ab</think>c<think>d") == "ab</think>c<think>d</think>"


def test_a_closing_tag_that_has_begun_is_completed_and_counts_as_no_thought() -> None:
    made = processor(5)
    assert written(made, "abc</") == "abc</think>"
    assert made.of(tokenizer().encode("abc</think>"))[:3] == (False, 3, False)
    assert made.of(tokenizer().encode("a</think>"))[:3] == (False, 1, False)
    assert written(made, "a</b>") == "a</b></think>"  # it was another tag


def test_a_tag_that_is_spelled_out_counts_as_no_thought() -> None:
    for budget in (6, 50):  # where the tag is completed for the budget, and far from it
        made = processor(budget)
        assert made.of(tokenizer().encode("abc</think>x"))[:3] == (False, 3, False)
        assert made.of(tokenizer().encode("ab</think>c<think>d</think>"))[:3] == (False, 3, False)
        assert made.of(tokenizer().encode("ab</thin"))[1] in (2, 2 + len(tokenizer().encode("</thin")))
    texts = [b"a", b"b</", b"think>c", b"<think", b">d", b"</think>"]  # tokens that cross the ends of tags
    crossing = Thinking(50, Tags(*TAGS), [5], texts, made.words, 0, [], is_open=True)
    assert crossing.of([0, 1, 2])[:3] == (False, 2, False)  # the one in which the tag begins is thought
    assert crossing.of([0, 1, 2, 0, 3, 4, 0, 5, 0])[:3] == (False, 3, False)


def test_no_processor_before_it_bars_the_forced_token_and_its_score_stays() -> None:
    made = processor(0)
    row = torch.zeros(1, made.prompt_len, dtype=torch.long)
    token = int(made(row, torch.zeros(1, 300))[0].argmax())
    scores = torch.zeros(1, 300)
    scores[0, token] = -3.5
    assert made(row, scores)[0, token] == -3.5
    scores[0, token] = -torch.inf
    assert made(row, scores)[0].isfinite().nonzero()[:, 0].tolist() == [token]


def test_the_end_may_say_more_than_the_tag() -> None:
    assert written(processor(1, thinking_end="Enough.</think>\n"), "a") == "aEnough.</think>\n"
    with pytest.raises(UsageError, match=r"thinking_end: 'So\.' does not hold the closing tag '</think>'"):
        processor(1, thinking_end="So.")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_the_tags_of_a_family_come_from_the_template_or_the_vocabulary(family: tuple[str, str, str]) -> None:
    opening, closing, end = family
    words = deepcopy(tokenizer())
    with pytest.raises(UsageError, match="has tags of a thought that are known") as error:
        processor(2, words=words, thinking_tags=None)
    assert "thinking_tags=" in str(error.value.hint)
    words.chat_template = f"{{% generation %}}{opening}{{{{x}}}}{closing}"
    assert written(processor(2, opening, words=words, thinking_tags=None), "ab") == f"ab{end or closing}"
    words = deepcopy(tokenizer())
    words.add_tokens([opening, closing], special_tokens=opening != "<think>")
    made = processor(2, opening, words=words, thinking_tags=None)
    row = torch.tensor([[0] * made.prompt_len + words.encode("ab", add_special_tokens=False)])
    assert int(made(row, torch.zeros(1, len(words))).argmax()) == (
        words.convert_tokens_to_ids(closing) if not end.removeprefix(closing) else words.encode(end)[0]
    )


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<assistant>\n{% endif %}"
OPENS = "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}"
CLOSED = "{% if add_generation_prompt %}<assistant>\n<think>\n\n</think>\n\n{% endif %}"
ALWAYS = "<assistant><think>"  # a template that does not ask for add_generation_prompt
SHOUTS = CHATML.replace("m.content", "m.content | upper")


@pytest.mark.parametrize(
    "message", ["hi", "in", "t", "think", ">", "<think>", "</think>", "a <think> b", "\n", "assistant"]
)
@pytest.mark.parametrize(
    ("template", "is_open"),
    [
        (CHATML + GENERATION, False),
        (CHATML + OPENS, True),
        (CHATML + CLOSED, False),
        (CHATML + ALWAYS, True),
        (SHOUTS + OPENS, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}" + ALWAYS, True),
    ],
)
def test_a_chat_begins_within_a_thought_where_its_template_opens_one(
    template: str, is_open: bool, message: str, tmp_path: Path
) -> None:
    tiny("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    model = genctl.load(str(tmp_path), thinking_tags=TAGS)
    answer = model.generate([{"role": "user", "content": message}], thinking_budget=0, max_new_tokens=12)[0].sequences[
        0
    ]
    assert answer.text.startswith("</think>") == is_open


def test_a_beginning_of_the_answer_may_open_a_thought_and_earlier_turns_do_not(tmp_path: Path) -> None:
    words = deepcopy(tokenizer())
    words.chat_template = CHATML + GENERATION
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>never closed"},
        {"role": "user", "content": "hi"},
    ]
    assert after_messages(words, turns, render_chat_text(words, turns)) == "<assistant>\n"
    begun = render_prefilled(words, turns, "<think>so")
    assert after_messages(words, turns, begun) == "<assistant><think>so"
    parts = [{"role": "user", "content": [{"type": "text", "text": "<think>"}]}]
    words.chat_template = "{% for m in messages %}{{ m.content[0].text }}{{ m.content[-1].text }}{% endfor %}" + ALWAYS
    assert after_messages(words, parts, render_chat_text(words, parts)) == ALWAYS


def by_hand(model: Any, ids: Any, budget: int) -> dict[str, Any]:
    """Count the tokens before the closing tag, by decoding every prefix."""
    texts = [model.tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    thought = texts[-1].partition("</think>")[0]
    count = next((count for count, text in enumerate(texts) if len(text) >= len(thought)), len(ids))
    return {"tokens": count, "cut": count == budget}


@pytest.mark.parametrize("budget", [0, 1, 5, 40])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"do_sample": True, "seed": 4, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 3},
        {"penalty_alpha": 0.98, "top_k": 8},
        {"prompt_lookup_num_tokens": 4},
        {"repetition_penalty": 1.5, "bad_words": ["</"], "top_k": 5, "do_sample": True, "seed": 2},
    ],
    ids=str,
)
def test_every_mode_closes_the_thought_and_measures_it(mode: dict[str, Any], budget: int) -> None:
    model = genctl.load("builtin:stories")
    prompts = ["Once <think>", PROMPT]
    together = model.generate(prompts, thinking_budget=budget, batch_size=2, **SET, **mode)
    assert [result.sequences[0].token_ids for result in together[:1]] == [
        result.sequences[0].token_ids for result in model.generate(prompts[:1], thinking_budget=budget, **SET, **mode)
    ]
    for result in together:
        for one in result.sequences:
            assert "</think>" in one.text or one.finish_reason == "eos" or budget == 40
            found = {"tokens": one.hypothesis.thought, "cut": one.hypothesis.thought_cut}
            assert found == by_hand(model, [id for id in one.token_ids if id != EOS], budget)


def test_forced_tokens_have_the_log_probability_of_the_model() -> None:
    model = genctl.load("builtin:stories")
    (one,) = model.generate([PROMPT], thinking_budget=2, **SET)[0].sequences
    ids = torch.tensor([[*model.tokenizer(PROMPT)["input_ids"], *one.token_ids]])
    forward, total = model.session.forward, 0.0
    for place, token in enumerate(one.token_ids, ids.shape[1] - len(one.token_ids)):
        prefix = forward.prefill(ids[0, :place].tolist(), None)
        total += float(prefix.logits[0].log_softmax(-1)[token])
    assert one.logprob == pytest.approx(total, abs=1e-3)


def test_the_record_counts_what_was_thought() -> None:
    tags = ("--set", 'thinking_tags=["<think>", "</think>"]')
    for budget, thought in ((3, {"tokens": 3, "cut": True}), (200, {"tokens": 5, "cut": False})):
        done = tool("run", PROMPT, "-n", "5", "--thinking-budget", str(budget), "--format", "jsonl", *tags)
        assert done.status == 0, done.err
        assert done.records[0]["thinking"] == thought
    assert "thinking" not in tool("run", PROMPT, "-n", "3", "--format", "jsonl").records[0]


def test_a_grammar_begins_after_the_thought_or_the_two_are_refused() -> None:
    model = genctl.load("builtin:stories")
    after: dict[str, Any] = {"regex": "x{3}", "grammar_after": "</think>", "thinking_budget": 3, **SET}
    (one,) = model.generate([PROMPT], **after)[0].sequences
    assert one.text.endswith("</think>xxx")
    assert one.hypothesis.thought == 3
    with pytest.raises(GenctlError, match="the one must end with the other"):
        model.generate([PROMPT], **after, thinking_end="</think>!")
    values: dict[str, Any] = {"regex": "a", "prefix": "a", "token_healing": True}
    for name, value in values.items():
        (said,) = conflicts(Generation(thinking_budget=3, **{name: value}))
        assert said.startswith(f"thinking_budget = 3 cannot be combined with {name}: both say how the text begins")
    (said,) = conflicts(Generation(thinking_budget=3, thinking_tags=("a", "a")))
    assert said == "thinking_tags = ['a', 'a']: two different texts are needed, neither of them empty"


def test_without_a_budget_its_settings_are_a_mistake_and_without_tags_the_way_out_is_named() -> None:
    done = tool("run", "Once", "--set", "thinking_end=a")
    assert 'thinking_end = "a" (--set thinking_end) has no effect without thinking_budget' in done.err
    done = tool("run", "Once", "--thinking-budget", "3")
    assert done.status == 2
    assert "hint: --set 'thinking_tags=" in done.err
