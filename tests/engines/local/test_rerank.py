"""Best-of-n and minimum-Bayes-risk: which samples are returned, in which order and with which scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl import events
from genctl.config.modes import conflicts
from genctl.decode.stopping.row_text import RowText
from genctl.engines.lane_results import LaneResults, RerankPlan, expected_chrf, rerank
from genctl.models.text import Detokenizer
from genctl.params import Generation
from genctl.strategies.sample import Sample
from tests.cli.tool import genctl
from tests.decode.driver import PROMPTS, Case
from tests.tiny import tokenizer


def hypothesis(logprob: float, length: int, slot: int, text: str = "") -> events.Hypothesis:
    return events.Hypothesis(tuple(range(length)), logprob, logprob, "eos", 0.0, slot, text=text)


def chrf(text: str, reference: str) -> float:
    return 2 * expected_chrf([text, reference])[0] - 1  # the mean with the text itself


# Made once with sacrebleu 2.6.0: sentence_chrf(text, [reference]).score / 100
GOLDEN = [
    ("the cat sat on the mat", "the cat is on the mat", 0.645779420625287),
    ("ab", "abcdef", 0.3125),
    ("hello", "world", 0.08),
    ("Popović", "Popovic wrote this", 0.2848764361501831),
    ("", "x", 0.0),
    ("a", "a", 1.0),
]


@pytest.mark.parametrize(("text", "reference", "score"), GOLDEN)
def test_chrf_is_that_of_sacrebleu(text: str, reference: str, score: float) -> None:
    assert chrf(text, reference) == pytest.approx(score, abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text("ab c", max_size=9), min_size=1, max_size=7))
def test_the_expected_utility_is_the_mean_over_all_pairs(texts: list[str]) -> None:
    expected = [sum(chrf(one, other) for other in texts) / len(texts) for one in texts]
    assert expected_chrf(texts) == pytest.approx(expected)


def test_best_of_takes_the_log_probability_of_a_token() -> None:
    found = [hypothesis(-4.0, 2, 0), hypothesis(-6.0, 6, 1), hypothesis(-3.0, 1, 2)]
    best = rerank(found, ["", "", ""], RerankPlan("best_of", 3, 2))
    assert [(one.slot, one.score) for one in best] == [(1, -1.0), (0, -2.0), (2, -3.0)]
    total = rerank(found, ["", "", ""], RerankPlan("best_of", 3, 3, length_penalty=0.0))
    assert [one.slot for one in total] == [2, 0, 1]


def test_equal_utilities_are_ordered_by_log_probability_then_by_the_draw() -> None:
    found = [hypothesis(-2.0, 1, 0), hypothesis(-1.0, 1, 1), hypothesis(-1.0, 1, 2)]
    assert [one.slot for one in rerank(found, ["x"] * 3, RerankPlan("mbr", 3, 3))] == [1, 2, 0]


def test_only_lanes_with_a_plan_are_touched() -> None:
    case, draws, text = Case("llama"), Sample(True, 6), RowText(Detokenizer(tokenizer()))
    lanes = [case.lane(PROMPTS[0], draws, name, seed=3, text=text) for name in ("plain", "best", "mbr")]
    stream = case.stream(lanes, width=2)
    plans = {"plain": None, "best": RerankPlan("best_of", 6, 2), "mbr": RerankPlan("mbr", 6, 1)}
    made = [LaneResults(ranking=plans[event.lane]).completed(event) for event in stream if hasattr(event, "lane")]
    assert [event for event in made if not isinstance(event, events.Finished)] == [
        event for event in stream if not isinstance(event, events.Finished)
    ]
    found = {event.lane: event.hypotheses for event in made if isinstance(event, events.Finished)}
    assert {name: len(hypotheses) for name, hypotheses in found.items()} == {"plain": 6, "best": 2, "mbr": 1}
    means = sorted((one.logprob / len(one.tokens) for one in found["plain"]), reverse=True)
    assert [one.score for one in found["best"]] == pytest.approx(means[:2])
    others = {event.lane: event.others for event in made if isinstance(event, events.Finished)}
    assert [one.score for one in others["best"]] == pytest.approx(means[2:])
    assert {name: len(hypotheses) for name, hypotheses in others.items()} == {"plain": 0, "best": 4, "mbr": 5}
    [chosen] = found["mbr"]
    texts = [one.text for one in found["plain"]]
    assert chosen.score == pytest.approx(max(sum(chrf(one, other) for other in texts) / 6 for one in texts))


def test_what_cannot_be_followed_is_told() -> None:
    assert conflicts(Generation(best_of=4)) == ["best_of = 4 chooses among samples, but do_sample is false"]
    assert conflicts(Generation(do_sample=True, temperature=0.0, mbr_samples=4)) == [
        "mbr_samples = 4 chooses among samples, but temperature is 0"
    ]
    found = conflicts(Generation(do_sample=True, best_of=2, mbr_samples=4, num_return_sequences=3, num_beams=2))
    assert found == [
        "best_of = 2 chooses among independent samples, but num_beams = 2",
        "num_return_sequences = 3 cannot exceed best_of = 2",
        "mbr_samples = 4 chooses among independent samples, but num_beams = 2",
        "best_of and mbr_samples both say which samples are returned; leave out one of them",
    ]


def test_what_was_not_chosen_is_in_records_with_their_tokens_and_in_recordings(tmp_path: Path) -> None:
    recording = tmp_path / "events.jsonl"
    words = ("run", "One day", "--do-sample", "--seed", "1", "-n", "6", "--format", "jsonl")
    choice = ("--best-of", "4", "--num-return-sequences", "2")
    plain = [json.loads(line) for line in genctl(*words, "--num-return-sequences", "4").out.splitlines()]
    done = genctl(*words, *choice, "--scores", "--events", str(recording))
    first, second = (json.loads(line) for line in done.out.splitlines())
    assert "others" not in second
    assert [list(one) for one in first["others"]] == [["text", "token_ids", "finish_reason", "logprob", "score"]] * 2
    best = sorted(plain, key=lambda one: -one["logprob"] / len(one["token_ids"]))
    assert [one["token_ids"] for one in (first, second, *first["others"])] == [one["token_ids"] for one in best]
    assert all("others" not in json.loads(line) for line in genctl(*words, *choice).out.splitlines())
    [finished] = [
        one for line in recording.read_text().splitlines() if (one := json.loads(line))["event"] == "finished"
    ]
    assert [one["text"] for one in finished["others"]] == [one["text"] for one in first["others"]]


@pytest.mark.parametrize("kind", [("--best-of", "4"), ("--mbr-samples", "4")])
def test_a_terminal_shows_the_samples_that_lost_and_their_scores(kind: tuple[str, str]) -> None:
    words = ("run", "One day", "--do-sample", "--seed", "1", "-n", "6", *kind)
    done = genctl(*words, terminal=True, color="never")
    marks = [line.split()[:2] for line in done.out.splitlines() if line[:1] in "★✗" and "│" in line]
    assert marks == [["★", "1"], ["✗", "2"], ["✗", "3"], ["✗", "4"]]
    score = "log-probability / tokens ** 1.0" if kind[0] == "--best-of" else "the mean chrF with all samples"
    assert f"★ returned for the highest score: {score}" in done.out
    assert "✗" not in genctl(*words, "-q", terminal=True, color="never").out
    assert "✗" not in genctl(*words).out


def test_compare_shows_the_best_that_were_not_chosen() -> None:
    runs = ("-p", "greedy", "--strategy", "best:do_sample=true,best_of=6")
    done = genctl("compare", "One day", *runs, "-n", "6", "--seed", "1", terminal=True, color="never")
    lines = done.out.splitlines()
    at = next(place for place, line in enumerate(lines) if "not chosen, 2 more are lower:" in line)
    scores = [float(line.split()[0]) for line in lines[at + 1 : at + 4]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] <= float(lines[at].split()[1].rstrip(";"))
