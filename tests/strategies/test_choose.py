"""Which strategy the knobs choose, which of them conflict, and that one loop drives all strategies."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import genctl
from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import FinishedRow
from genctl.errors import UsageError
from genctl.params import Generation
from genctl.strategies.beam import EarlyStopping, EarlyStoppingRule
from genctl.strategies.constrained import ConstrainedBeam
from genctl.strategies.factory import choose
from tests.decode.driver import PROMPTS
from tests.source import nodes_of
from tests.strategies.oracle import case_of
from tests.tiny import tokenizer

MODES: list[tuple[dict[str, Any], str]] = [
    ({}, "greedy"),
    ({"do_sample": True}, "sample"),
    ({"do_sample": True, "num_return_sequences": 3}, "sample"),
    ({"num_beams": 3, "num_return_sequences": 2}, "beam"),
    ({"num_beams": 3, "do_sample": True}, "beam-sample"),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "diverse-beam"),
    ({"num_beams": 2, "force_words_ids": [[5, 6]]}, "constrained-beam"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ({"penalty_alpha": 0.0, "top_k": 4}, "greedy"),
]


@pytest.mark.parametrize(("knobs", "kind"), MODES)
def test_the_mode_follows_from_the_knobs_and_runs_in_the_one_loop(knobs: dict[str, Any], kind: str) -> None:
    strategy = choose(Generation(**knobs))
    assert strategy.kind == kind
    assert inspect.isgeneratorfunction(type(strategy).search)
    case = case_of("gpt2")
    returned = knobs.get("num_return_sequences", 1)
    lane = case.lane(PROMPTS[0], strategy, max_new_tokens=5, eos=(), returned=returned)
    finished = [event for event in decode(case.forward, [lane]) if isinstance(event, events.Finished)]
    assert [len(hypothesis.tokens) for hypothesis in finished[0].hypotheses] == [5] * returned


@pytest.mark.parametrize(
    ("knobs", "both"),
    [
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, ("num_beams = 4", "num_beam_groups = 3")),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0}, ("num_beam_groups = 2", "num_beams = 1")),
        ({"num_beams": 4, "num_beam_groups": 2}, ("num_beam_groups = 2", "diversity_penalty")),
        ({"num_beams": 4, "diversity_penalty": 0.5}, ("diversity_penalty = 0.5", "num_beam_groups = 1")),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": True},
            ("num_beam_groups = 2", "do_sample = true"),
        ),
        ({"penalty_alpha": 0.6, "do_sample": True}, ("penalty_alpha = 0.6", "do_sample = true")),
        ({"penalty_alpha": 0.6, "num_beams": 2}, ("penalty_alpha = 0.6", "num_beams = 2")),
        ({"penalty_alpha": 0.6, "top_k": 1}, ("penalty_alpha = 0.6", "top_k = 1")),
        ({"penalty_alpha": 0.6, "num_return_sequences": 2}, ("penalty_alpha = 0.6", "num_return_sequences = 2")),
        ({"num_return_sequences": 2}, ("num_return_sequences = 2", "num_beams = 1")),
        ({"num_return_sequences": 3, "num_beams": 2}, ("num_return_sequences = 3", "num_beams = 2")),
        ({"force_words_ids": [[5]]}, ("force_words_ids", "num_beams = 1")),
        ({"force_words_ids": [[5]], "num_beams": 2, "do_sample": True}, ("force_words_ids", "do_sample = true")),
        ({"force_words_ids": [[]], "num_beams": 2}, ("force_words_ids", "empty phrase")),
        ({"force_words_ids": [[-1]], "num_beams": 2}, ("force_words_ids", "-1")),
        ({"force_words_ids": [[5, [6]]], "num_beams": 2}, ("force_words_ids", "mixes")),
    ],
)
def test_a_contradiction_names_both_sides_in_one_sentence(knobs: dict[str, Any], both: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        choose(Generation(**knobs))
    assert all(side in caught.value.message for side in both)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("penalty", "early_stopping", "best", "reached"),
    [
        # "never" assumes the length at which a live row scores best: the longest, or for a negative penalty the current
        (1.0, "never", -4.0, False),
        (1.0, False, -4.0, True),
        (-1.0, "never", -1.5, False),
        (-1.0, "never", -4.0, True),
        (1.0, True, -0.1, True),
        (1.0, False, -2.0, True),  # a tie
    ],
)
def test_a_search_ends_when_no_live_row_can_beat_its_worst_result(
    penalty: float, early_stopping: EarlyStopping, best: float, reached: bool
) -> None:
    rule = EarlyStoppingRule(penalty, early_stopping, longest=20)
    result = FinishedRow((5, 6), -2.0, -2.0, "eos")  # scores -1 with penalty 1, and -4 with penalty -1
    assert rule.reached([result], 1, best, written=2) is reached
    assert not rule.reached([], 1, best, written=2)


def test_forced_texts_become_phrases_wherever_they_may_stand() -> None:
    made = choose(Generation(num_beams=2, force_words=["cat", ["dog", "log"]]), tokenizer())
    assert isinstance(made, ConstrainedBeam)
    assert len(made.words) == 2
    texts = [{tokenizer().decode(phrase).strip() for phrase in alternatives} for alternatives in made.words]
    assert texts == [{"cat"}, {"dog", "log"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [([[2]], "ends a sequence"), ([[9999]], "not a token"), ([[5] * 30], "max_new_tokens = 20")],
)
def test_words_that_cannot_be_forced_fail_the_lane_before_its_first_step(words: Any, said: str) -> None:
    case = case_of("gpt2")
    strategy = choose(Generation(num_beams=2, force_words_ids=words))
    found = list(decode(case.forward, [case.lane(PROMPTS[0], strategy)]))
    failed = [event for event in found if isinstance(event, events.Failed)]
    assert said in failed[0].message
    assert not any(isinstance(event, events.Stepped) for event in found)


def test_when_everything_is_forbidden_the_lane_fails_instead_of_writing_something() -> None:
    case = case_of("gpt2")
    nothing = lambda history, scores: scores.fill_(float("-inf"))  # noqa: E731
    for knobs in ({"num_beams": 2}, {"num_beams": 2, "force_words_ids": [[5]]}):
        lane = case.lane(PROMPTS[0], choose(Generation(**knobs)), processors=(nothing,))
        failed = [event for event in decode(case.forward, [lane]) if isinstance(event, events.Failed)]
        assert len(failed) == 1


def test_tokens_are_written_in_one_place_only() -> None:
    """A second loop would have to commit its choices, too."""
    package = Path(genctl.__file__).parent
    homes = {"commit": "genctl.decode.commit", "LaneState": "genctl.decode.lane", "Batch": "genctl.decode.batch"}
    places = []
    for path in package.rglob("*.py"):
        nodes = nodes_of(path)
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and homes.get(node.func.id, "") in modules
            ):
                places.append(path.relative_to(package).as_posix())
    assert sorted(places) == ["decode/choose.py", "decode/scheduler.py", "decode/scheduler.py"]
