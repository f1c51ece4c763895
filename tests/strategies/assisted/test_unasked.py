"""Drafts without a setting: the same results, fewer passes, and a reason if nothing is drafted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from genctl import events
from genctl.config.layers import Layer, resolve
from genctl.decode.loop import decode
from genctl.decode.prefix_cache import KeptTexts
from genctl.decode.step_costs import PassPrice
from genctl.decode.types import Prefix
from genctl.engines.protocol import Flow, Report, Request
from genctl.engines.session import Session
from genctl.engines.strategy_choice import undrafted
from genctl.events.results import Collector, Result
from genctl.kernels.ops import library
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import MOST_KEPT, Index, LookupDraftWriter, SuffixDrafter
from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.assistants import drafts

pytestmark = pytest.mark.skipif(library() is None, reason="drafts need the compiled library")

STORY = "Once upon a time there was a little dog. "
TEXTS = [
    STORY * 3,
    "The numbers: 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "A cat",
    "One day, a girl saw a bird. One day,",
    STORY,
]


def session(**settings: Any) -> Session:
    settings = {"model": "builtin:stories", "device": "cpu", **settings}
    made = Session.load(resolve([Layer("load", settings, {}, "user")], tentative=True).runtime)
    made.forward.pass_price = PassPrice("float32", 500e6)  # type: ignore[misc]  # as if it were large: drafts pay
    return made


def written(made: Session, texts: list[str], width: int = 1, **knobs: Any) -> list[Result]:
    resolved = made.resolve([Layer("argument", {"max_new_tokens": 48, **knobs}, {}, "command")])
    requests = [Request(str(place), resolved, 7 + place, prompt=text) for place, text in enumerate(texts)]
    collector = Collector()
    found = [collector.feed(event) for event in made.stream(requests, Report(scores=True, top=2), Flow(width))]
    return sorted((result for result in found if result is not None), key=lambda result: result.lane)


def told(results: list[Result]) -> list[Any]:
    """Everything that goes into a record."""
    return [
        (result.strategy, result.error, [(sequence.hypothesis, sequence.tokens) for sequence in result.sequences])
        for result in results
    ]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}])
@pytest.mark.parametrize("knobs", [{}, {"do_sample": True, "temperature": 0.4, "repetition_penalty": 1.1}])
@pytest.mark.parametrize("width", [1, 5])
def test_results_are_those_without_drafts(settings: dict[str, Any], knobs: dict[str, Any], width: int) -> None:
    made = session(**settings)
    first, drafted = (written(made, TEXTS, width, **knobs) for _ in range(2))  # the second run drafts from the first
    assert told(first) == told(drafted)
    assert sum(result.accepted for result in drafted) > 0
    assert told(drafted) == told(written(made, TEXTS, width, draft=False, **knobs))


def test_nothing_is_drafted_with_products_of_torch_whose_bits_depend_on_the_number_of_tokens() -> None:
    made = session(pack=False)
    assert not made.forward.drafts_unasked
    assert sum(result.accepted for result in written(made, TEXTS)) == 0
    assert "only native models on a CPU" in undrafted(made.forward, made.resolve([]))


def test_rows_of_different_lengths_share_a_pass_without_the_list_of_calls() -> None:
    """The decoder's own code computes the pass (as for parity's float64, or if another thread holds the buffers)."""
    made = session()
    plain = written(made, TEXTS, 5, draft=False)
    assert made.forward.drafts_unasked
    made.forward.steps.step = lambda *given, **how: None  # type: ignore[attr-defined]
    found = [written(made, TEXTS, 5) for _ in range(2)][-1]
    assert sum(result.accepted for result in found) > 0
    assert [result.sequences[0].token_ids for result in found] == [result.sequences[0].token_ids for result in plain]


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "bloom"])
def test_with_windows_and_slopes_a_row_drafts_while_it_is_alone(arch: str) -> None:
    one = Case(arch)
    one.forward.pass_price = PassPrice("float32", 500e6)  # type: ignore[misc]
    assert one.forward.drafts_unasked
    assert not one.forward.abilities.ragged
    prompt = (*range(5, 17), *range(5, 9))
    found = []
    for way in (Sample(), Assisted(SuffixDrafter(), unasked=True)):
        for width in (1, 2):
            told = one.stream([one.lane(prompt, way, str(n), max_new_tokens=40) for n in range(2)], width)
            found.append({event.lane: event.hypotheses for event in told if isinstance(event, events.Finished)})
            assert (drafts(told)[0] > 0) == (way != Sample() and width == 1)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_row_drafts_when_one_that_never_does_has_left(arch: str) -> None:
    """The cache keeps what a rejected draft needs, although the batch's first row would not need it."""
    one = Case(arch)
    one.forward.pass_price = PassPrice("float32", 500e6)  # type: ignore[misc]
    prompt = (*range(5, 17), *range(5, 9))
    found = []
    for way in (Sample(), Assisted(SuffixDrafter(), unasked=True)):
        lanes = [one.lane(prompt[3:], name="0", max_new_tokens=3), one.lane(prompt, way, "1", max_new_tokens=40)]
        told = one.stream(lanes, 2)
        found.append({event.lane: event.hypotheses for event in told if isinstance(event, events.Finished)})
    assert drafts(told)[0] > drafts(told)[1] > 0
    assert found[0] == found[1]


def test_rows_that_join_while_others_have_gaps_write_what_they_would_alone() -> None:
    """Twenty rows that end at different steps, three at a time: all remaining rows may have padding before them."""
    one, dice = Case("llama"), random.Random(0)
    one.forward.pass_price = PassPrice("float32", 500e6)  # type: ignore[misc]
    prompts = [tuple(dice.choices(range(5, 300), k=dice.randint(1, 4))) * dice.randint(1, 5) for _ in range(20)]
    lengths = [dice.randint(2, 60) for _ in prompts]
    found = []
    for way in (Sample(), Assisted(SuffixDrafter(), unasked=True)):
        given = [
            one.lane(prompt, way, str(number), max_new_tokens=length, eos=())
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        told = one.stream(given, 3)
        found.append({event.lane: event.hypotheses for event in told if isinstance(event, events.Finished)})
    assert drafts(told)[1] > 10
    assert found[0] == found[1]


def test_rows_that_ended_are_drafted_from_and_so_is_a_corpus(tmp_path: Path) -> None:
    plain = written(session(draft=False), TEXTS[2:4])
    earlier = tmp_path / "earlier.jsonl"
    rows = [{"prompt": text, "text": result.sequences[0].text} for text, result in zip(TEXTS[2:4], plain, strict=True)]
    odd = {"prompt": "lines\u2028of\x85one\u2029row", "text": ""}
    earlier.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [odd, *rows]), encoding="utf-8")
    story = tmp_path / "story.txt"
    story.write_text("".join(row["prompt"] + row["text"] for row in rows))
    for knobs, texts in (
        ({"draft_corpus": str(earlier)}, TEXTS[2:4]),
        ({"draft_corpus": str(story)}, TEXTS[2:4]),
        ({}, [*TEXTS[2:4], *TEXTS[2:4]]),  # drafts from earlier rows of the run
    ):
        made = session()
        passes = made.forward.forwards
        found = written(made, texts, **knobs)
        assert told(found)[-2:] == told(plain)
        assert sum(result.accepted for result in found[-2:]) > 60
        assert made.forward.forwards - passes < 48 * len(texts) - 60


@pytest.mark.parametrize(
    ("settings", "knobs", "why"),
    [
        ({"runtime": "transformers"}, {}, "only native models on a CPU"),
        ({}, {"use_cache": False}, "the cache is off"),
        ({}, {"cache_implementation": "static"}, "of another form"),
        ({}, {"guidance_scale": 2.0}, "guidance, see every token"),
    ],
)
def test_a_corpus_that_is_of_no_use_is_said_with_the_reason(
    settings: dict[str, Any], knobs: dict[str, Any], why: str
) -> None:
    made = session(**settings)
    told = {"max_new_tokens": 20, "draft_corpus": "/a/corpus.txt", **knobs}
    remarks = made.plan(made.resolve([Layer("argument", told, {}, "command")])).remarks
    assert any("corpus.txt: nothing is drafted, since " in remark and why in remark for remark in remarks)
    assert any(why in finding for finding in made.forward.findings)  # for --verbose
    assert sum(result.drafted for result in written(made, TEXTS[:1], **knobs)) == 0


@pytest.mark.parametrize("knobs", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_searches_and_several_sequences_are_not_drafted(knobs: dict[str, Any]) -> None:
    assert sum(result.drafted for result in written(session(), TEXTS[:1], **knobs)) == 0


class Kept(KeptTexts):
    """Records the length of each text that it is given, and of its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[tuple[int, int]] = []

    def keep(self, prefix: Prefix) -> None:
        assert prefix.cache is not None
        self.lengths.append((prefix.tokens.shape[1], prefix.cache.length))


def test_a_text_that_ends_within_a_draft_is_kept_to_be_continued() -> None:
    """A chat reads nothing twice, with or without drafts."""
    case = Case("llama")
    case.forward.pass_price = PassPrice("float32", 500e6)  # type: ignore[misc]
    unit = PROMPTS[0][:3]
    lengths = []
    for strategy in (None, Assisted(SuffixDrafter(), unasked=True)):
        texts = Kept()
        lane = case.lane(unit * 5, *([strategy] if strategy else []), eos=(), max_new_tokens=30)
        found = list(decode(case.forward, [lane], texts=texts))
        lengths.append(texts.lengths)
        drafted = sum(event.drafted for event in found if isinstance(event, events.Stepped))
    assert drafted > 0
    assert lengths[0] == lengths[1]
    assert lengths[0][-1][0] == lengths[0][-1][1] > len(unit * 5)


def last_after(index: Index, *end: int) -> int | None:
    """The latest token that followed `end`, whose length is one of those that the index compares."""
    found = index.after(hash(end), index.lengths.index(len(end)))
    return None if found is None else found >> 4


def test_old_texts_are_forgotten() -> None:
    drafter = SuffixDrafter()
    for number in range(5):
        drafter.keep([number] * (MOST_KEPT // 4))
    known = drafter.texts
    assert len(known.tokens) <= MOST_KEPT
    assert last_after(known, 4, 4) in (4, -1)
    assert last_after(known, 0, 0) is None


def test_an_index_knows_what_came_last_and_how_steadily() -> None:
    texts = Index(2, [1, 2, 3, 1, 2, 3, 1, 2, 4])
    assert texts.after(hash((1, 2)), 1) == 4 << 4 | 1  # not the earlier token, which came twice
    assert texts.after(hash((2, 3)), 1) == 1 << 4 | 1 << 2  # the same token again
    assert texts.after(hash((2, 4)), 1) is None  # nothing has followed yet
    texts.tokens += [3, 1, 2, 4]
    assert texts.after(hash((1, 2)), 1) == 4 << 4 | 1 << 2 | 1
    assert last_after(texts, 4) == 3


def test_a_large_number_of_tokens_to_compare_costs_no_more_than_a_moderate_one() -> None:
    assert Index(100_000).lengths == [1, 2, 4, 8, 16, 32, 64]
    assert [Index(longest).lengths for longest in (1, 3, 8)] == [[1], [1, 2, 3], [1, 2, 4, 8]]


def test_with_short_steps_only_what_repeats_four_tokens_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    short, long = (LookupDraftWriter(8, [], (), SuffixDrafter(), agree) for agree in (4, 0))
    assert short(text, 4).tokens == []
    assert long(text, 4).tokens[:1] == [3]
    text += [3, 4]
    assert short(text, 4).tokens[:1] == long(text, 4).tokens[:1] == [5]
