"""The numbers of a comparison against values computed by hand, and against slow implementations."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genctl.comparing import metrics
from genctl.comparing.metrics import distinct, divergence, longest_repeat, mean_of, measure, words
from genctl.comparing.statistics import RunNumbers, bootstrap
from genctl.events import Hypothesis, Token
from genctl.events.results import Sequence
from tests.cli.tool import genctl


def sequence(*pieces: str, logprob: float = -0.5, reason: str = "eos", entropy: float | None = 1.0) -> Sequence:
    tokens = tuple(Token(sum(map(ord, piece)), logprob, piece, 1, entropy) for piece in pieces)
    total = logprob * len(pieces)
    ids = tuple(token.id for token in tokens)
    return Sequence(Hypothesis(ids, total, total, reason, total / max(len(ids), 1), text="".join(pieces)), tokens)


def test_a_text_by_hand() -> None:
    found = measure(sequence("the cat", " and", " the", " cat", "."))
    assert found == {
        "tokens": 5,
        "mean_logprob": -0.5,
        "perplexity": pytest.approx(math.exp(0.5)),
        "score": -0.5,
        "entropy": 1.0,
        "distinct_1": pytest.approx(4 / 6),
        "distinct_2": pytest.approx(4 / 5),
        "longest_repeat": 2,
    }


def test_a_text_of_nothing_says_nothing() -> None:
    found = measure(sequence())
    assert {key for key, value in found.items() if value is None} == {
        "mean_logprob", "perplexity", "entropy", "distinct_1", "distinct_2",
    }  # fmt: skip
    assert measure(sequence("a", entropy=None))["entropy"] is None


def test_words_are_runs_of_letters_and_single_signs() -> None:
    assert words("It's 3.5 — naïve!") == ["It", "'", "s", "3", ".", "5", "—", "naïve", "!"]
    assert distinct(["a"], 2) is None


@given(st.lists(st.integers(0, 2), max_size=24))
def test_the_longest_repeat_is_the_longest(items: list[int]) -> None:
    def occurs_twice(n: int) -> bool:
        grams = [tuple(items[at : at + n]) for at in range(len(items) - n + 1)]
        return any(one == other for one, other in itertools.combinations(grams, 2))

    expected = max((n for n in range(1, len(items) + 1) if occurs_twice(n)), default=0)
    assert longest_repeat(items) == expected


def test_the_longest_repeat_of_a_long_text_is_found() -> None:
    drawn = random.Random(1)
    text = [drawn.randrange(1000) for _ in range(20_000)]
    assert longest_repeat(text + text[5:3005]) >= 3000


def test_a_text_leaves_another_at_the_first_different_token() -> None:
    one, two = sequence("a", " b", " c"), sequence("a", " b", " d", " e")
    found = divergence(two, one, "first", same_tokens=True)
    assert found is not None
    assert (found.position, found.character) == (2, 3)
    assert found.token is not None
    assert found.other is not None
    assert (found.token.text, found.other.text) == (" d", " c")
    assert divergence(one, one, "first", same_tokens=True) is None


def test_a_text_that_goes_on_leaves_one_that_ended() -> None:
    found = divergence(sequence("a", " b"), sequence("a"), "first", same_tokens=True)
    assert found is not None
    assert found.position == 1
    assert found.other is None


def test_texts_of_other_tokenizers_are_compared_by_characters() -> None:
    one, two = sequence("ab", "cd", "ef"), sequence("abc", "dx")
    found = divergence(two, one, "first", same_tokens=False)
    assert found is not None
    assert (found.position, found.character) == (1, 3)
    assert found.token is not None
    assert found.other is not None
    assert (found.token.text, found.other.text) == ("dx", "ef")
    assert divergence(sequence("ab", "c"), sequence("a", "bc"), "first", same_tokens=False) is None


def test_means_leave_out_what_is_not_known_and_perplexity_is_of_the_mean() -> None:
    found = mean_of([{"mean_logprob": -1.0, "perplexity": math.e, "x": 1.0}, {"mean_logprob": -3.0, "x": None}])
    assert found == {"mean_logprob": -2.0, "perplexity": pytest.approx(math.exp(2.0)), "x": 1.0}


# -- statistics --------------------------------------------------------------------------------------------------------


def test_the_bootstrap_is_repeatable_and_about_as_wide_as_theory_says() -> None:
    drawn = random.Random(3)
    values = [drawn.gauss(5.0, 2.0) for _ in range(400)]
    found = bootstrap(values, seed=1)
    assert found == bootstrap(values, seed=1)
    assert found != bootstrap(values, seed=2)
    low, high = found.ends
    assert low < found.mean < high
    # the standard error is 2 / sqrt(400) = 0.1, and the interval 2 * 1.96 of it
    assert high - low == pytest.approx(0.392, rel=0.2)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10])
def test_fewer_than_ten_values_have_no_interval(count: int) -> None:
    """Regression: the interval of two or three values was exactly from the smallest to the largest."""
    found = bootstrap([float(value) for value in range(count)])
    assert (found.mean, found.count) == ((count - 1) / 2, count)
    assert len(found.ends) == (0 if count < 10 else 2)
    assert [one is None for one in (found.low, found.high)] == [count < 10] * 2


def test_the_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    drawn = random.Random(5)
    held = 0
    for _ in range(200):
        low, high = bootstrap([drawn.random() for _ in range(40)], resamples=300).ends
        held += low <= 0.5 <= high
    assert 178 <= held <= 200  # of 200 at 95 %: below 178 with a chance of about 1 in 1,000


def test_wins_count_ties_and_leave_out_what_failed() -> None:
    a, b = RunNumbers(), RunNumbers()
    for run, values in ((a, [-1.0, -2.0, -3.0, None, -1.0]), (b, [-2.0, -2.000001, -1.0, -1.0, None])):
        for value in values:
            run.add([] if value is None else [{"mean_logprob": value}])
    assert a.wins(b) == (1, 1, 1)


def test_runs_are_paired_by_prompts() -> None:
    a, b = RunNumbers(), RunNumbers()
    for ours, theirs in ((-1.0, -2.0), (-3.0, -5.0)):
        a.add([{"mean_logprob": ours, "perplexity": 0.0}])
        b.add([{"mean_logprob": theirs}])
    a.add([{"mean_logprob": -9.0}])
    b.add([])
    assert a.differences(b, "mean_logprob") == [1.0, 2.0]
    perplexity = a.interval("perplexity")
    assert perplexity is not None
    assert perplexity.ends == ()
    assert perplexity.mean == pytest.approx(math.exp(13 / 3))
    assert a.wins(b)[0] == 2
    for value in range(7):
        a.add([{"mean_logprob": -float(value)}])
    perplexity = a.interval("perplexity")
    assert perplexity is not None
    assert perplexity.ends[0] < perplexity.mean < perplexity.ends[1]


# -- references --------------------------------------------------------------------------------------------------------


def test_references_are_scored_by_sacrebleu() -> None:
    same = metrics.against("The cat sat on the mat. ", ["A dog.", "The cat sat on the mat."])
    assert same == {"exact_match": 1.0, "chrf": 100.0, "bleu": pytest.approx(100.0), "ter": 0.0}
    # one of four words differs: TER is 1 edit / 4 words
    other = metrics.against("one two three five", ["one two three four"])
    assert other["exact_match"] == 0.0
    assert other["ter"] == pytest.approx(25.0)
    # precisions 3/4, 2/3, 1/2 and, smoothed, 1/2: BLEU = (1/8)^(1/4)
    assert other["bleu"] == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)


def test_an_empty_text_can_be_scored() -> None:
    assert metrics.against("", ["one"]) == {"exact_match": 0.0, "chrf": 0.0, "bleu": 0.0, "ter": 100.0}


def test_a_corpus_takes_rows_with_different_numbers_of_references() -> None:
    texts = ["the cat sat on the mat", "a dog barked at the moon"]
    found = metrics.corpus(texts, [["the cat sat on the mat"], ["nothing alike here", "a dog barked at the moon"]])
    assert found == {"chrf": 100.0, "bleu": pytest.approx(100.0), "ter": 0.0}


def test_without_sacrebleu_references_are_refused_and_self_bleu_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    (tmp_path / "expected.txt").write_text("a fox\n")
    rows = '{"prompt": "One day", "reference": "a fox"}\n'
    runs = ("compare", "-p", "greedy", "-p", "nucleus", "-n", "4", "--seed", "1")
    for arguments, stdin, where in (
        (("One day", "--references", str(tmp_path / "expected.txt")), None, "--references"),
        (("--input-format", "jsonl"), rows, 'stdin, line 1: "reference"'),
    ):
        done = genctl(*runs, *arguments, stdin=stdin)
        assert (done.status, done.out) == (2, "")
        assert f"error: {where}: scores against references need sacrebleu, which is not installed" in done.err
        assert done.err.endswith('hint: pip install "genctl[metrics]"\n')
    done = genctl(*runs, "One day", "--seeds", "2", "--format", "jsonl")
    assert done.status == 0
    assert [record["metrics"]["self_bleu"] for record in done.records] == [None] * 4
    assert done.err.count('note: self-BLEU is left out: it needs sacrebleu (pip install "genctl[metrics]")\n') == 1
    assert "sacrebleu" not in genctl(*runs, "One day").err


def test_self_bleu_is_high_where_samples_are_alike() -> None:
    same = metrics.self_bleu(["the cat sat on the mat"] * 3)
    assert same == [pytest.approx(100.0)] * 3
    mixed = metrics.self_bleu(["one two three four five", "six seven eight nine ten"])
    assert all(score is not None and score < 20 for score in mixed)
    assert metrics.self_bleu(["alone"]) == [None]
