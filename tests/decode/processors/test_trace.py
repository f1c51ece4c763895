"""Traces, by hand on a vocabulary of four, and which processor is named when no token is left."""

from __future__ import annotations

import math

import pytest
import torch

from genctl.decode.processors.build import NamedProcessor, build, check
from genctl.decode.processors.trace import run_checked, run_traced, traces
from genctl.errors import ModelError, UsageError
from genctl.events import Trace
from tests.decode.processors.plain import material

HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
HISTORY = torch.tensor([[9]])


def drop_first(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    made = scores.clone()
    made[:, 0] = -torch.inf
    return made


def raise_last(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 3] += math.log(5.0)  # in place, as a user's own may
    return scores


def figures(trace: Trace) -> tuple[str, int, float, bool, float, float]:
    rounded = (round(number, 6) for number in (trace.moved, trace.before, trace.after))
    moved, before, after = rounded
    return trace.processor, trace.removed, moved, trace.changed, before, after


@pytest.mark.parametrize("shift", [0.0, 3.5], ids=["log-probabilities", "logits"])
def test_two_stages_by_hand(shift: float) -> None:
    """1/2 1/4 1/8 1/8; without the first 0 1/2 1/4 1/4; the last times five 0 1/4 1/8 5/8."""
    scores = HALVES + shift
    made, stages = run_traced([drop_first, raise_last], HISTORY, scores, timing=False)
    ((first, second),) = traces(stages, torch.tensor([0]), torch.tensor([3]))
    assert figures(first) == ("drop_first", 1, 0.5, True, 0.125, 0.25)
    assert figures(second) == ("raise_last", 0, 0.375, True, 0.25, 0.625)
    assert first.seconds == second.seconds == 0.0
    torch.testing.assert_close(made.softmax(-1), torch.tensor([[0.0, 0.25, 0.125, 0.625]]))
    torch.testing.assert_close(scores, HALVES + shift)


def test_candidates_are_read_from_the_row_that_they_continue() -> None:
    scores = torch.cat([HALVES, HALVES.flip(1)])
    _, stages = run_traced([drop_first], HISTORY.expand(2, 1), scores, timing=True)
    found = traces(stages, torch.tensor([1, 1, 0]), torch.tensor([3, 2, 1]))
    assert [figures(trace)[1:] for (trace,) in found] == [
        (1, 0.125, False, 0.5, round(0.5 / 0.875, 6)),
        (1, 0.125, False, 0.25, round(0.25 / 0.875, 6)),
        (1, 0.5, True, 0.25, 0.5),
    ]
    assert all(trace.seconds > 0.0 for (trace,) in found)


def test_a_low_temperature_removes_nothing() -> None:
    """Probabilities underflow to 0 at a temperature of 0.001; no token is taken away, and none comes back."""
    made = material(do_sample=True, temperature=0.001, remove_invalid_values=True, vocab_size=4, eos=())
    banned = HALVES.clone()
    banned[0, 3] = -torch.inf
    _, stages = run_traced(build(made), HISTORY, banned, timing=False)
    ((invalid, cold),) = traces(stages, torch.tensor([0]), torch.tensor([0]))
    assert (invalid.processor, invalid.removed, invalid.moved) == ("remove_invalid_values", 0, 0.0)
    assert (cold.processor, cold.removed, cold.after) == ("temperature", 0, 1.0)


def test_no_stages_no_traces() -> None:
    assert traces([], torch.tensor([0, 0]), torch.tensor([1, 2])) == [(), ()]
    assert run_checked((), HISTORY, HALVES) is HALVES


def test_an_empty_row_names_the_processors_that_emptied_it() -> None:
    made = material(vocab_size=4, eos=(), suppress_tokens=[0, 1], bad_words_ids=[[2], [3]])
    rows = torch.cat([HALVES, HALVES])
    for run in (run_checked, lambda *given: run_traced(*given, timing=False)):
        with pytest.raises(
            UsageError, match="no token is left to choose after bad_words_ids, suppress_tokens: together"
        ):
            run(build(made), HISTORY.expand(2, 1), rows)


@pytest.mark.parametrize("knobs", [{"top_h": 0.5}, {"eta_cutoff": 0.1}])
def test_a_processor_that_gets_an_empty_row_says_so(knobs: dict[str, float]) -> None:
    made = material(vocab_size=4, eos=(), do_sample=True, suppress_tokens=[0, 1, 2, 3], **knobs)
    with pytest.raises((UsageError, ModelError), match=r"minus infinity|no token is left"):
        run_checked(build(made), HISTORY, HALVES)


def test_nan_is_the_models_fault() -> None:
    scores = HALVES.clone()
    scores[0, 2] = math.nan
    with pytest.raises(ModelError, match="not all numbers after top_k: NaN or infinite") as caught:
        check(scores, build(material(vocab_size=4, eos=(), do_sample=True, top_k=2)))
    assert "remove_invalid_values" in caught.value.hint
    with pytest.raises(ModelError, match="the model gave every token"):
        check(torch.full((1, 4), -torch.inf), [])
    run_checked(build(material(vocab_size=4, eos=(), remove_invalid_values=True)), HISTORY, scores)


def test_a_processor_is_called_by_the_best_name_there_is() -> None:
    class Own:
        def __call__(self, history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    _, stages = run_traced([NamedProcessor("mine", drop_first), raise_last, Own()], HISTORY, HALVES, timing=False)
    assert [stage.name for stage in stages] == ["mine", "raise_last", "Own"]
