"""Assisted greedy text is plain greedy text, on every architecture whose cache can be cropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.stopping import Written
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import Drafter, ModelDrafter, PromptLookup, early_exit
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.assistants import Counting, Scripted, alike, drafts, written
from tests.tiny import ARCHITECTURES, CAUSAL, SEQ2SEQ, tiny
from tests.versions import needs_newest

RECURRENT = ("mamba", "jamba")
CROPPABLE = tuple(arch for arch in ARCHITECTURES if arch not in RECURRENT)
NEW = 24


def assisted(drafter: Drafter, count: int = 5, **knobs: object) -> Assisted:
    return Assisted(drafter, num_assistant_tokens=count, assistant_confidence_threshold=0.0, **knobs)  # type: ignore[arg-type]


def assistant(arch: str) -> ModelDrafter:
    return ModelDrafter(runtimes.forward(alike(arch)))


def result(found: list[events.Event]) -> events.Hypothesis:
    """The one result of a lane's events."""
    last = found[-1]
    assert isinstance(last, events.Finished)
    return last.hypotheses[0]


@pytest.mark.parametrize("arch", CROPPABLE)
def test_greedy_text_is_that_of_plain_greedy_decoding(arch: str) -> None:
    case = Case(arch)
    drafters: list[Drafter] = [assistant(arch), PromptLookup(2)]
    if arch in CAUSAL:
        drafters.append(early_exit(case.forward, 1))
    plain = result(case.stream([case.lane(PROMPTS[1], eos=(), max_new_tokens=NEW)]))
    for drafter in drafters:
        found = case.stream([case.lane(PROMPTS[1], assisted(drafter), eos=(), max_new_tokens=NEW)])
        assert result(found).tokens == plain.tokens, drafter.kind
        assert result(found).logprob == pytest.approx(plain.logprob, abs=1e-3)
        if isinstance(drafter, ModelDrafter):
            drafted, accepted = drafts(found)
            assert 0 < accepted < drafted  # both cases occur: some drafts are accepted, some rejected


@pytest.mark.parametrize("arch", ["llama", "mamba", "jamba", "t5"])
def test_without_a_cache_recurrent_models_are_assisted_too(arch: str) -> None:
    case = Case(arch)
    plain = case.ours([case.lane(PROMPTS[0])])
    assert case.ours([case.lane(PROMPTS[0], assisted(assistant(arch)), use_cache=False)]) == plain


@pytest.mark.parametrize("arch", ["mistral", "gemma3"])
def test_windows_forget_no_more_than_they_should_over_long_texts(arch: str) -> None:
    case = Case(arch)
    plain = case.ours([case.lane(PROMPTS[0], eos=(), max_new_tokens=60)])
    for drafter in (assistant(arch), PromptLookup(1), early_exit(case.forward, 1)):
        lane = case.lane(PROMPTS[0], assisted(drafter, 9), eos=(), max_new_tokens=60)
        assert case.ours([lane]) == plain


@needs_newest("fail with an assistant that has windows, and write nothing with prompt lookup for an encoder-decoder")
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral", "t5", "bart"])
def test_token_ids_are_those_of_generate_with_an_assistant(arch: str) -> None:
    case = Case(arch)
    for prompt in PROMPTS[:2]:
        ours = case.ours([case.lane(prompt, Assisted(assistant(arch)))])["0"]
        assert ours == case.generate(prompt, do_sample=False, assistant_model=alike(arch))
        ours = case.ours([case.lane(prompt, assisted(PromptLookup(2), 4))])["0"]
        assert ours == case.generate(prompt, do_sample=False, prompt_lookup_num_tokens=4, max_matching_ngram_size=2)


def counting(history: Tensor, scores: Tensor) -> Tensor:
    """Writes 10, 11, … 16, 10, … whatever the model predicts: right only if each draft position has its own history."""
    scores = scores.clone()
    following = 10 + (history[:, -1] - 9) % 7
    scores[torch.arange(len(scores)), following] += 1000.0
    return scores


@pytest.mark.parametrize("arch", ["llama", "t5"])
def test_repeating_text_needs_fewer_passes_than_tokens(arch: str) -> None:
    case = Case(arch)
    fields = {"eos": (), "max_new_tokens": 60, "processors": (counting,)}
    plain = case.ours([case.lane(PROMPTS[0], **fields)])
    before = case.forward.forwards
    found = case.stream([case.lane(PROMPTS[0], assisted(PromptLookup(2), 10), **fields)])
    finished = found[-1]
    assert isinstance(finished, events.Finished)
    assert [list(finished.hypotheses[0].tokens)] == plain["0"]
    assert finished.forwards == case.forward.forwards - before
    assert finished.forwards <= 20


def test_the_assistant_reads_the_prompt_once_and_nothing_twice() -> None:
    case = Case("llama")
    forward = Counting(alike("llama"))
    found = case.stream([case.lane(PROMPTS[1], assisted(ModelDrafter(forward)), eos=(), max_new_tokens=NEW)])
    drafted, accepted = drafts(found)
    rejected = drafted - accepted
    assert forward.fed[0] == len(PROMPTS[1])
    assert max(forward.fed[1:]) <= 2  # the token that the model wrote, and a last draft that was not read
    assert sum(forward.fed) <= len(PROMPTS[1]) + NEW + rejected


def script(case: Case, count: int) -> tuple[int, ...]:
    """The tokens that the model writes after the first prompt."""
    return tuple(case.ours([case.lane(PROMPTS[0], eos=(), max_new_tokens=count)])["0"][0])


def test_an_eos_inside_an_accepted_draft_ends_the_row_there() -> None:
    case = Case("llama")
    text = script(case, 20)
    eos = text[7]
    end = text.index(eos) + 1
    found = case.stream([case.lane(PROMPTS[0], assisted(Scripted(text, 5, 6)), eos=(eos,))])
    finished = found[-1].hypotheses[0]  # type: ignore[union-attr]
    assert (finished.tokens, finished.reason) == (text[:end], "eos")
    check_sums(found, text[:end])


def test_a_criterion_inside_an_accepted_draft_ends_the_row_there() -> None:
    case = Case("llama")
    text = script(case, 20)

    def after_nine(look: Written) -> tuple[str, str] | None:
        return ("stop", "nine") if look.count == 9 and look.tail(2) == list(text[7:9]) else None

    found = case.stream([case.lane(PROMPTS[0], assisted(Scripted(text, 5, 6)), eos=(), criteria=(after_nine,))])
    finished = found[-1].hypotheses[0]  # type: ignore[union-attr]
    assert (finished.tokens, finished.reason, finished.stop) == (text[:9], "stop", "nine")
    plain = result(case.stream([case.lane(PROMPTS[0], eos=(), criteria=(after_nine,))]))
    assert finished.logprob == pytest.approx(plain.logprob, abs=1e-3)  # without the tokens drafted beyond the end
    check_sums(found, text[:9])


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 8])
def test_the_length_may_be_reached_inside_a_draft(limit: int) -> None:
    case = Case("llama")
    text = script(case, 20)
    found = case.stream([case.lane(PROMPTS[0], assisted(Scripted(text, 5, 6)), eos=(), max_new_tokens=limit)])
    finished = found[-1].hypotheses[0]  # type: ignore[union-attr]
    assert (finished.tokens, finished.reason) == (text[:limit], "length")
    check_sums(found, text[:limit])


def check_sums(found: list[events.Event], tokens: tuple[int, ...]) -> None:
    """Every written token is an accepted draft token or the one that each pass adds, as the step's counts say."""
    steps = [event for event in found if isinstance(event, events.Stepped)]
    assert tuple(token for step in steps for token in written(step)) == tokens
    for step in steps:
        assert step.accepted <= step.drafted
        assert len(written(step)) == step.accepted + (not step.ended or len(written(step)) > step.accepted)


def test_drafts_are_no_longer_than_what_may_still_be_written() -> None:
    case = Case("llama")
    for limit in (1, 2, 3, 9):
        found = case.stream(
            [case.lane(PROMPTS[0], assisted(ModelDrafter(case.forward), 20), eos=(), max_new_tokens=limit)]
        )
        drafted, accepted = drafts(found)
        assert drafted == accepted == max(0, limit - 2)


def test_an_unsure_assistant_stops_early() -> None:
    case = Case("llama")
    lengths = {}
    for confidence in (0.0, 0.9):
        strategy = Assisted(assistant("llama"), num_assistant_tokens=8, assistant_confidence_threshold=confidence)
        lengths[confidence] = drafts(case.stream([case.lane(PROMPTS[0], strategy, eos=(), max_new_tokens=40)]))
    (many, kept), (few, still) = lengths[0.0], lengths[0.9]
    assert few < many / 2
    assert still / few > kept / many


def test_each_written_token_is_traced_and_scored() -> None:
    case = Case("llama")
    fields = {"trace": True, "scores": True, "top": 2, "processors": (counting,), "eos": (), "max_new_tokens": 12}
    plain = case.stream([case.lane(PROMPTS[0], Sample(), **fields)])
    made = case.stream([case.lane(PROMPTS[0], assisted(PromptLookup(2)), **fields)])
    told = [
        [
            (t.id, t.rank, round(t.logprob, 3), t.trace[0].changed)
            for s in found
            if isinstance(s, events.Stepped)
            for t in row(s)
        ]
        for found in (plain, made)
    ]
    assert told[0] == told[1]


def row(step: events.Stepped) -> tuple[events.Token, ...]:
    (one,) = (*step.rows, *step.ended)
    return one.written


REFUSED: list[tuple[str, Callable[[], Drafter], str]] = [
    ("mamba", lambda: PromptLookup(2), "keeps recurrent states"),
    ("jamba", lambda: PromptLookup(2), "keeps recurrent states"),
    ("llama", lambda: ModelDrafter(runtimes.forward(tiny("mamba"))), "cannot draft: it keeps recurrent states"),
    ("llama", lambda: ModelDrafter(runtimes.forward(tiny("t5"))), "the assistant is an encoder-decoder"),
    ("t5", lambda: ModelDrafter(runtimes.forward(tiny("llama"))), "the assistant is a decoder-only model"),
]


@pytest.mark.parametrize(("arch", "drafter", "why"), REFUSED)
def test_what_cannot_be_is_refused_before_the_first_step(arch: str, drafter: Callable[[], Drafter], why: str) -> None:
    case = Case(arch)
    found = list(decode(case.forward, [case.lane(PROMPTS[0], assisted(drafter()))]))
    failed = [event for event in found if isinstance(event, events.Failed)]
    assert [event.code for event in failed] == ["model"]
    assert why in failed[0].message
    assert not [event for event in found if isinstance(event, events.Stepped)]


def test_every_promised_architecture_is_either_assisted_or_refused() -> None:
    assert set(CROPPABLE) | set(RECURRENT) == set(ARCHITECTURES)
    assert set(SEQ2SEQ) <= set(CROPPABLE)
