"""Beam search and beam sampling, sequences and scores, against the installed `generate`."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from genctl import events
from genctl.decode.stopping import Written
from genctl.strategies.beam import Beam
from tests.decode.driver import PROMPTS
from tests.strategies.oracle import NEW, case_of, cut, endings, ours, same, theirs
from tests.tiny import ARCHITECTURES

GRID = list(itertools.product((0.0, 1.0, 2.0, -1.0), (True, False, "never")))


@pytest.mark.parametrize(("arch", "beams"), [("gpt2", 2), ("gpt2", 5), ("llama", 4), ("t5", 2), ("t5", 4)])
def test_every_length_penalty_and_early_stopping(arch: str, beams: int) -> None:
    case, eos = case_of(arch), endings(arch)
    for length_penalty, early_stopping in GRID:
        options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        expected = theirs(case, PROMPTS, beams, eos, num_beams=beams, **options)
        lanes = [
            case.lane(prompt, Beam(beams, n=beams, **options), str(i), eos=eos, max_new_tokens=NEW)
            for i, prompt in enumerate(PROMPTS)
        ]
        for mine, reference in zip(ours(case, lanes, width=3), expected, strict=True):
            assert same(mine, reference), options
        alone = case.lane(PROMPTS[1], Beam(beams, **options), eos=eos, max_new_tokens=NEW)
        assert same(ours(case, [alone])[0], expected[1][:1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_beams_alone_in_a_batch_and_in_a_narrow_one(arch: str) -> None:
    case, eos = case_of(arch), endings(arch)
    expected = [theirs(case, [prompt], 4, eos, num_beams=4)[0] for prompt in PROMPTS]
    lanes = [case.lane(prompt, Beam(4, n=4), str(i), eos=eos, max_new_tokens=NEW) for i, prompt in enumerate(PROMPTS)]
    for width in (1, 2, 3):
        for mine, reference in zip(ours(case, lanes, width), expected, strict=True):
            assert same(mine, reference)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_processors_see_log_probabilities(arch: str) -> None:
    case, eos, prompt = case_of(arch), endings(arch), PROMPTS[1]
    length = 1 if case.encoder_decoder else len(prompt)
    processors = (
        RepetitionPenaltyLogitsProcessor(1.4),
        NoRepeatNGramLogitsProcessor(2),
        MinNewTokensLengthLogitsProcessor(length, 7, list(eos)),
    )
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 7}
    expected = theirs(case, [prompt], 1, eos, num_beams=3, **options)[0]
    assert case.eos[0] not in expected[0][0][:6]
    lane = case.lane(prompt, Beam(3), eos=eos, max_new_tokens=NEW, processors=processors)
    assert same(ours(case, [lane])[0], expected)


@pytest.mark.parametrize("arch", ["gpt2", "gemma3", "jamba", "bart"])
@pytest.mark.parametrize("top_k", [0, 3])
def test_seeded_beam_sampling_equals_generate_after_manual_seed(arch: str, top_k: int) -> None:
    from transformers import TopKLogitsWarper

    case, eos = case_of(arch), endings(arch)
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        expected = theirs(case, [prompt], 2, eos, num_beams=4, do_sample=True, top_k=top_k)[0]
        # transformers leaves at least two tokens to each beam
        processors = (TopKLogitsWarper(top_k, min_tokens_to_keep=1 + len(eos)),) if top_k else ()
        lane = case.lane(
            prompt, Beam(4, do_sample=True, n=2), eos=eos, max_new_tokens=NEW, seed=seed, processors=processors
        )
        assert same(ours(case, [lane])[0], expected)


class Few(LogitsProcessor):  # type: ignore[misc]
    """Leaves a few tokens, which depend on the newest one."""

    def __init__(self, after: dict[int, list[int]], first: list[int]) -> None:
        self.after, self.first = after, first

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found = torch.full_like(scores, -torch.inf)
        for row, token in enumerate(input_ids[:, -1].tolist()):
            left = self.after.get(token, self.first)
            found[row, left] = scores[row, left]
        return found


@pytest.mark.parametrize("do_sample", [False, True])
def test_where_filters_leave_too_few_candidates_the_real_rows_of_generate_are_returned(do_sample: bool) -> None:
    """`generate` fills up with rows that no filter allowed, or with duplicates, with scores of -1e9 and the like."""
    case, rng, fewer = case_of("llama"), random.Random(1), 0
    for seed in range(40):
        eos = rng.choice([(2,), (2, 8)])
        few = Few({t: rng.sample((2, 5, 6, 7, 8), rng.randint(1, 3)) for t in (5, 6, 7, 8)}, rng.sample((5, 6, 7), 2))
        beams, new = rng.randint(2, 5), rng.randint(1, 6)
        options: dict[str, Any] = {"early_stopping": rng.choice([True, False, "never"]), "do_sample": do_sample}
        torch.manual_seed(seed)
        answer = theirs(
            case,
            [PROMPTS[0]],
            beams,
            eos,
            num_beams=beams,
            max_new_tokens=new,
            logits_processor=LogitsProcessorList([few]),
            **options,
        )[0]
        real = [(tokens, score) for tokens, score in answer if score > -1e6]
        lane = case.lane(
            PROMPTS[0], Beam(beams, n=beams, **options), eos=eos, max_new_tokens=new, seed=seed, processors=(few,)
        )
        assert same(ours(case, [lane])[0], real)
        fewer += len(real) < beams
    assert fewer > 5


def test_a_beam_takes_one_prefill_and_no_pass_after_its_end() -> None:
    case, eos = case_of("gpt2"), endings("gpt2")
    before = case.forward.forwards
    found = case.stream([case.lane(PROMPTS[0], Beam(4, early_stopping=True), eos=eos, max_new_tokens=40)])
    steps = [event for event in found if isinstance(event, events.Stepped)]
    assert len(steps) < 40  # it ended because four results were there
    assert case.forward.forwards - before == len(steps)


def test_rows_tell_their_parents_and_their_totals() -> None:
    case, eos = case_of("llama"), endings("llama")
    found = case.stream([case.lane(PROMPTS[0], Beam(3, n=3), eos=eos, max_new_tokens=NEW)])
    texts: list[tuple[int, ...]] = [()]
    ended = {}
    for event in found:
        if isinstance(event, events.Stepped):
            ended |= {e.hypothesis.tokens: e for e in event.ended}
            for end in event.ended:
                assert texts[end.parent] + tuple(token.id for token in end.written) == end.hypothesis.tokens
            assert [row.total for row in event.rows] == sorted((row.total for row in event.rows), reverse=True)
            texts = [texts[row.parent] + tuple(token.id for token in row.written) for row in event.rows]
    finished = next(event for event in found if isinstance(event, events.Finished))
    assert all(hypothesis.tokens in ended for hypothesis in finished.hypotheses)


@pytest.mark.parametrize("arch", ["gpt2", "t5", "mamba"])
def test_a_criterion_ends_a_beam_as_an_eos_does(arch: str) -> None:
    """One token in five stops here: steps end more candidates than there are spare ones to replace them."""
    case, eos = case_of(arch), endings(arch)[:1]

    class EveryFifth(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids[:, -1] % 5 == 2

    def criterion(written: Written) -> tuple[str, str] | None:
        return ("stop", "") if written.token % 5 == 2 else None

    ended = 0
    for prompt in PROMPTS:
        for early_stopping in (True, False, "never"):
            answer = theirs(
                case,
                [prompt],
                3,
                eos,
                num_beams=3,
                early_stopping=early_stopping,
                stopping_criteria=StoppingCriteriaList([EveryFifth()]),
            )[0]
            expected = [([*cut(tokens, [t for t in range(300) if t % 5 == 2])], score) for tokens, score in answer]
            strategy = Beam(3, early_stopping=early_stopping, n=3)
            lane = case.lane(prompt, strategy, eos=eos, max_new_tokens=NEW, criteria=(criterion,))
            assert same(ours(case, [lane])[0], expected)
            ended += sum(tokens[-1] % 5 == 2 for tokens, _ in expected)
    assert ended
