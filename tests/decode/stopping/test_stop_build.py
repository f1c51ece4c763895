"""From knobs and `[[stopping]]` tables to criteria: order, reasons, mistakes, a user's own."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.decode.stopping import Written
from genctl.decode.stopping.build import StoppingContext, build
from genctl.errors import PresetError, UsageError
from genctl.params import Generation
from tests.decode.stopping.rows import first_stop, reader, row_text, tokenizer, written

ALL = {
    "stop_repeat_ngram": 2,
    "stop_mean_logprob": -3.0,
    "stop_regex": "z",
    "stop_token_ids": [13],
    "stop_strings": "END",
    "max_time": 5.0,
}


class Quiet:
    """A user's criterion."""

    def __init__(self, after: int = 3, answer: Any = True) -> None:
        self.after, self.answer = after, answer

    def __call__(self, written: Written) -> Any:
        return self.answer if written.count >= self.after else None


class Length(transformers.StoppingCriteria):
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        assert scores is None
        return (input_ids != 7).sum(1) >= self.most


def third(written: Written) -> bool:
    return written.count == 3


def broken(written: Written) -> bool:
    raise RuntimeError("no such\nthing")


def material(tables: list[dict[str, Any]] | None = None, allow: bool = False, **knobs: Any) -> StoppingContext:
    explicit = None if tables is None else tuple(tables)
    return StoppingContext(Generation(**knobs), tokenizer("bytelevel"), reader("bytelevel"), explicit, allow)


def names(made: StoppingContext) -> list[str]:
    return [criterion.name for criterion in build(made)]


def test_no_knob_is_no_criterion() -> None:
    assert build(material()) == ()
    assert build(material(stop_strings=[], stop_token_ids=[])) == ()


def test_the_order_is_that_of_transformers_then_ours() -> None:
    assert names(material(**ALL)) == [
        "max_time",
        "stop_strings",
        "stop_token_ids",
        "stop_regex",
        "stop_mean_logprob",
        "stop_repeat_ngram",
    ]


def test_a_list_comes_first_in_its_order_and_no_knob_is_lost() -> None:
    tables = [{"use": "stop_regex"}, {"use": "max_time", "max_time": 1}, {"use": "stop_regex", "stop_regex": "y"}]
    made = build(material(tables, stop_strings="END", stop_regex="z"))
    assert [criterion.name for criterion in made] == ["stop_regex", "max_time", "stop_regex", "stop_strings"]
    assert [pattern.source for criterion in made for pattern in criterion.stops.patterns] == ["z", "y"]


def test_the_first_of_several_says_why() -> None:
    row = written([13], elapsed=9.0)
    assert [criterion(row) for criterion in build(material(stop_token_ids=[13], max_time=5.0))] == [
        ("time", "max_time 5 s", ""),
        ("stop", "13", "token"),
    ]


def test_the_time_is_up_only_when_it_has_passed() -> None:
    (criterion,) = build(material(max_time=2.5))
    assert criterion(written([1], elapsed=2.5)) is None
    assert criterion(written([1], elapsed=2.5001)) == ("time", "max_time 2.5 s", "")


def test_a_stop_token_is_written_but_shown_only_if_it_is_kept() -> None:
    made = build(material(stop_token_ids=[13, 14]))
    assert first_stop(made[0], [1, 2, 14, 13]) == (3, ("stop", "14", "token"))
    for keep in (False, True):
        text = row_text("bytelevel", made, keep)
        for token in [20, 21, 14]:
            text.push(token)
        assert text.finish("stop")[1] == reader("bytelevel")([20, 21, 14] if keep else [20, 21])
        assert text.finish("eos")[1] == reader("bytelevel")([20, 21, 14])


def test_the_mean_falls_below_the_floor() -> None:
    (criterion,) = build(material(stop_mean_logprob=-3.0))
    row = [1] * 5
    assert criterion(written(row[:4], logprob=-400.0)) is None, "a mean over four tokens is too early"
    assert criterion(written(row, logprob=-15.0)) is None
    assert criterion(written(row, logprob=-16.0)) == ("stop", "mean log-probability -3.2 below -3.0", "floor")
    assert criterion(written(row, logprob=-15.0001)) == ("stop", "mean log-probability -3.00002 below -3.0", "floor")
    assert criterion(written(row, logprob=-math.inf)) == ("stop", "mean log-probability -inf below -3.0", "floor")
    assert criterion(written(row, logprob=math.nan)) is None
    (early,) = build(material([{"use": "stop_mean_logprob", "stop_mean_logprob": -1, "min_tokens": 1}]))
    assert early(written([1], logprob=-2.0)) == ("stop", "mean log-probability -2 below -1.0", "floor")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=st.lists(st.integers(0, 2), min_size=1, max_size=24), size=st.integers(1, 4), times=st.integers(2, 4))
def test_repetition_is_the_same_ngram_so_many_times_at_the_end(row: list[int], size: int, times: int) -> None:
    (criterion,) = build(material(stop_repeat_ngram=size, stop_repeat_times=times))
    grams = [tuple(row[len(row) - size * (n + 1) : len(row) - size * n]) for n in range(times)]
    repeated = len(row) >= size * times and len(set(grams)) == 1
    assert criterion(written(row)) == (
        ("stop", f"the same {size}-gram {times} times", "repetition") if repeated else None
    )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"use": "max_time"}, "max_time has no value: set max_time in this table or in the preset"),
        ({"use": "stop_strings", "stop_strings": []}, "the list is empty"),
        (
            {"use": "stop_strings", "stop_strings": ["a", ""]},
            "an empty text is in every text: every row would end at its first token",
        ),
        (
            {"use": "stop_strings", "stop_strings": "a\ufffd"},
            '"a\ufffd" has U+FFFD, the sign for an incomplete character',
        ),
        ({"use": "stop_token_ids", "stop_token_ids": []}, "the list is empty"),
        ({"use": "stop_token_ids", "stop_token_ids": [-1]}, "an id is at least 0, not -1"),
        *(
            (
                {"use": "stop_mean_logprob", "stop_mean_logprob": -1, "min_tokens": least},
                f"min_tokens is a whole number of at least 1, not {least!r}",
            )
            for least in (0, 1.5, True, "3")
        ),
        ({"use": "mine:Own"}, "stopping criterion mine:Own: code from outside needs --allow-plugins"),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PresetError) as caught:
        build(material([table]))
    assert str(caught.value) == f"[[stopping]] 1: {sentence}"


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(PresetError) as caught:
        build(material([{"use": "max_time"}, {"use": "stop_token_ids"}], stop_regex="(", stop_strings=""))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "[[stopping]] 1",
        "[[stopping]] 2",
        "stop_strings",
        "stop_regex",
    ]


def test_a_wrong_knob_without_a_list_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^stop_strings: an empty text"):
        build(material(stop_strings=["a", ""]))


@pytest.mark.parametrize("knobs", [{"stop_strings": "x"}, {"stop_regex": "x"}])
def test_text_needs_a_tokenizer(knobs: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="needs a tokenizer to read the text, and this checkpoint has none"):
        build(StoppingContext(Generation(**knobs)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (True, ("stop", f"{__name__}:Quiet", "plugin")),
        ("too loud", ("stop", "too loud", "plugin")),
        (("time", "late"), ("time", "late", "")),
        (False, None),
        (None, None),
    ],
)
def test_a_users_class_answers_in_its_own_way(answer: Any, stop: tuple[str, str, str] | None) -> None:
    (criterion,) = build(material([{"use": f"{__name__}:Quiet", "after": 2, "answer": answer}], allow=True))
    assert criterion(written([1])) is None
    assert criterion(written([1, 2])) == stop


@pytest.mark.parametrize("answer", [3, ("because", "x"), ("stop", 3), ("stop",), []])
def test_an_answer_that_means_nothing_is_an_error(answer: Any) -> None:
    (criterion,) = build(material([{"use": f"{__name__}:Quiet", "after": 1, "answer": answer}], allow=True))
    with pytest.raises(UsageError, match=r"Quiet answered .*, not None, a truth value, a text, or a pair of eos\|"):
        criterion(written([1]))


def test_a_users_function_is_a_criterion() -> None:
    (criterion,) = build(material([{"use": f"{__name__}:third"}], allow=True))
    assert first_stop(criterion, [1] * 9) == (3, ("stop", f"{__name__}:third", "plugin"))


def test_a_criterion_of_transformers_sees_the_new_tokens() -> None:
    (criterion,) = build(material([{"use": f"{__name__}:Length", "most": 3}], allow=True))
    assert first_stop(criterion, [1, 7, 7, 2, 3, 4]) == (5, ("stop", f"{__name__}:Length", "plugin"))


def test_the_tokenizer_is_given_to_those_who_ask_for_it() -> None:
    table = {"use": "transformers:StopStringCriteria", "stop_strings": ["stop"]}
    (criterion,) = build(material([table], allow=True))
    tokens = tokenizer("bytelevel").backend_tokenizer.encode("please stop here").ids
    (ours,) = build(material(stop_strings="stop"))
    theirs, expected = first_stop(criterion, tokens), first_stop(ours, tokens)
    assert theirs is not None
    assert expected is not None
    assert theirs[0] == expected[0]


def test_a_users_own_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(PresetError, match=rf"1: stopping criterion {__name__}:Length could not be made"):
        build(material([{"use": f"{__name__}:Length"}], allow=True))


def test_a_users_own_that_fails_is_named() -> None:
    (criterion,) = build(material([{"use": f"{__name__}:broken"}], allow=True))
    with pytest.raises(UsageError, match="broken failed at token 2: RuntimeError: no such thing"):
        criterion(written([1, 2]))


def test_importing_this_loads_neither_torch_nor_transformers() -> None:
    code = "import genctl.decode.stopping.build, sys; print({'torch', 'transformers', 'regex'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
