"""Phrase bans, against a slow search that reads everything at each step and backtracks by the text alone."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genctl
from genctl import events
from genctl.api import Model
from genctl.commands import job
from genctl.config.layers import Layer
from genctl.config.modes import conflicts
from genctl.config.reader import text_lines
from genctl.decode.processors.bans import Bans
from genctl.engines.protocol import Flow, Report, Request
from genctl.engines.session import Session
from genctl.errors import GenctlError
from genctl.events.results import Collector
from genctl.io import resumable
from genctl.models.text import detokenizer
from genctl.params import Generation, Runtime
from genctl.strategies.banned import Trial
from tests.cli.tool import genctl as tool
from tests.tiny import EOS, VOCABULARY, checkpoint, tiny, tokenizer

PROMPTS = ["the cat", "On", "a dog sat there"]
NEW = 24
Fold = Callable[[str], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return genctl.load(str(checkpoint("llama", tmp_path_factory.mktemp("banned") / "model")))


def begin(text: str, new: Sequence[int], phrases: Sequence[str], fold: Fold) -> int | None:
    """The index of the token in which the earliest phrase of a text begins, if there is one."""
    folded = [fold(character) for character in text]
    places = [
        place
        for place in range(len(text))
        for phrase in phrases
        if "".join(folded[place:]).startswith(fold(phrase)) and text[place] != "\ufffd"
    ]
    if not places:
        return None
    return next(k for k in range(len(new)) if len(tokenizer().decode(new[: k + 1])) > places[0])


def naive(
    prompt: str, phrases: Sequence[str], *, seed: int | None = None, fold: Fold = str, count: int = NEW
) -> tuple[list[int], int]:
    """The new tokens, and how often the search backtracked."""
    words, scorer, rng = tokenizer(), tiny("llama"), torch.Generator()
    ids = words(prompt)["input_ids"]
    whole = [id for id in range(VOCABULARY) if any(fold(phrase) in fold(words.decode([id])) for phrase in phrases)]
    barred: dict[tuple[int, ...], set[int]] = {}
    draws = [rng.manual_seed(seed or 0).get_state()]
    new: list[int] = []
    back = 0
    while len(new) < count and EOS not in new:
        with torch.no_grad():
            logits = scorer(torch.tensor([[*ids, *new]])).logits[0, -1]
        logits[[*whole, *barred.get(tuple(new), ())]] = -torch.inf
        if seed is None:
            token = int(logits.argmax())
        else:
            logits[logits < logits.topk(50).values[-1]] = -torch.inf
            rng.set_state(draws[len(new)])
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=rng))
            draws[len(new) + 1 :] = [rng.get_state()]
        new.append(token)
        at = begin(words.decode(new, skip_special_tokens=True), new, phrases, fold)
        if at is not None:
            barred.setdefault(tuple(new[:at]), set()).add(new[at])
            del new[at:]
            back += 1
    return new, back


def bans_of(prompt: str, **options: Any) -> list[list[str]]:
    """Lists of phrases from the text that is written without bans; they cross the borders of tokens and characters."""
    new, _ = naive(prompt, (), **options)
    text = tokenizer().decode(new, skip_special_tokens=True)
    runs = [run for run in text.split("\ufffd") if len(run) > 1]
    one = [run[:size] for run in runs for size in (2, 3, 5) if len(run) >= size]
    return [one[:1], one[1:3], one, [run[1:4] for run in runs]]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_tokens_are_those_of_the_slow_search(model: Model, seed: int | None) -> None:
    went_back = 0
    drawing = {} if seed is None else {"do_sample": True, "seed": seed}
    for prompt, phrases in [(each, phrases) for each in PROMPTS for phrases in bans_of(each, seed=seed)]:
        expected, back = naive(prompt, phrases, seed=seed)
        (one,) = model.generate([prompt], ban=phrases, max_new_tokens=NEW, **drawing)[0].sequences
        assert list(one.token_ids) == expected
        assert not any(phrase in one.text for phrase in phrases)
        went_back += back
    assert went_back > 2


def test_upper_and_lower_case_are_the_same_if_that_is_set(model: Model) -> None:
    text = tokenizer().decode(naive(PROMPTS[0], ())[0])
    run = next(run for run in text.split("\ufffd") if any(map(str.isalpha, run)) and len(run) > 1)
    phrases = [run.swapcase()]
    for fold, ignore in ((str, False), (str.casefold, True)):
        (one,) = model.generate(PROMPTS[:1], ban=phrases, ban_ignore_case=ignore, max_new_tokens=NEW)[0].sequences
        assert list(one.token_ids) == naive(PROMPTS[0], phrases, fold=fold)[0]
        assert (fold(phrases[0]) in fold(one.text)) is False


@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "seed": 5, "temperature": 2.0, "top_k": 0}], ids=str)
def test_no_banned_text_is_ever_written_and_batches_are_rows_alone(model: Model, drawing: dict[str, Any]) -> None:
    """Letters and spaces are so frequent that most tokens begin one of the phrases."""
    phrases = ["e", "at", " t", "é", "ß", "th", "\n", "o ", "日", "ab", "dog", "0x", ".."]
    prompts = [f"{prompt} {number}" for number in range(4) for prompt in PROMPTS]
    knobs = {"ban": phrases, "max_new_tokens": 40, **drawing}
    together = model.generate(prompts, batch_size=4, **knobs)
    for prompt, result in zip(prompts[:3], together, strict=False):
        (alone,) = model.generate([prompt], **{**knobs, **({"seed": result.seed} if drawing else {})})
        assert alone.sequences[0].token_ids == result.sequences[0].token_ids
    for result in together:
        assert not [phrase for phrase in phrases if phrase in result.text]


def test_rows_come_and_go_in_passes_that_they_share(tmp_path: Path) -> None:
    """The longest row of a batch takes tokens back, or has drafts on trial, while another row joins."""
    made = Session.load(Runtime(model=str(checkpoint("llama", tmp_path / "model"))))
    letters = "abcdefghilmnoprstuwy "
    held = [one + other + last for one in letters for other in letters for last in "eq"]
    rows = [
        {"ban": held if at % 3 else None, "max_new_tokens": 5 + at % 4, "do_sample": at % 4 > 1} for at in range(30)
    ]
    rows[::15] = [{"ban": held, "max_new_tokens": 45, "do_sample": True}] * 2
    requests = [
        Request(str(at), made.resolve([Layer("argument", knobs, {}, "command")]), at, prompt=PROMPTS[at % 3] * long)
        for at, knobs in enumerate(rows)
        for long in (1 + 5 * (at % 15 == 0),)
    ]

    def written(width: int) -> tuple[dict[str, Any], int]:
        collector, before = Collector(), made.forward.forwards
        found = [collector.feed(event) for event in made.stream(requests, Report(), Flow(width))]
        results = {each.lane: (each.error, each.sequences[0].hypothesis) for each in found if each is not None}
        return results, made.forward.forwards - before

    (alone, passes), (together, shared) = written(1), written(4)
    assert alone == together
    assert shared < passes / 2


def test_a_ban_that_never_holds_changes_no_byte_with_any_sampler(model: Model) -> None:
    for drawing in ({}, *({"do_sample": True, "seed": 3, "sampler": name} for name in ("inverse-cdf", "counter"))):
        plain, banned = (
            model.generate(PROMPTS, max_new_tokens=NEW, **drawing, **ban) for ban in ({}, {"ban": ["#~#"]})
        )
        assert [one.sequences[0].token_ids for one in plain] == [one.sequences[0].token_ids for one in banned]
        assert banned[0].drafted == 0


def test_the_parts_of_a_character_are_one_character(model: Model) -> None:
    """Phrases of characters of three bytes each, for which this vocabulary has no tokens."""
    for phrase in ("日本", "日"):
        with pytest.raises(GenctlError, match=f"nothing may follow but what begins '{phrase}'"):
            model.generate(["a"], prefix="x日本", ban=[phrase])
        (one,) = model.generate(["a"], prefix="x日木", ban=["日本"], max_new_tokens=9)[0].sequences
        assert one.text.startswith("x日木")


def steps_of(model: Model, prompt: str, **knobs: Any) -> list[str]:
    """The text that is shown at each step."""
    return [
        "".join(token.text for row in (*event.rows, *event.ended) for token in row.written)
        for event in model.stream([prompt], **knobs)
        if isinstance(event, events.Stepped)
    ]


def test_what_was_shown_never_changes_and_no_more_is_held_back_than_may_be_taken_back() -> None:
    stories = genctl.load("builtin:stories")
    knobs: dict[str, Any] = {"max_new_tokens": 12, "ban": [" curious girl named Bo"]}
    plain = stories.generate(["Once upon a time"], max_new_tokens=12)[0].text
    shown = steps_of(stories, "Once upon a time", **knobs)
    assert "".join(shown) == plain == ", there was a curious girl named Poppy who lived in a"
    assert " curious girl named Poppy" in shown  # in one step, once it was certain
    assert shown[1:4] == [" there", " was", " a"]  # nothing else is held back
    assert "".join(steps_of(stories, "Once upon a time", max_new_tokens=12, ban=[" curious girl named P"])) != plain


def test_a_row_ends_where_it_would_end_without_waiting(model: Model) -> None:
    stories = genctl.load("builtin:stories")
    ban, prompt = [" curious girl named Poppy"], ["Once upon a time"]
    for stop in ({"stop_strings": " girl"}, {"stop_regex": "gi.l"}, {"stop_token_ids": [395]}, {"max_new_tokens": 6}):
        plain, banned = (
            stories.generate(prompt, **{"max_new_tokens": 12, **stop, **more}) for more in ({}, {"ban": ban})
        )
        assert banned[0].sequences[0].hypothesis == plain[0].sequences[0].hypothesis
    (one,) = stories.generate(prompt, ban=ban, max_new_tokens=12, stop_mean_logprob=-0.9)[0].sequences
    assert (
        one.hypothesis == stories.generate(prompt, max_new_tokens=12, stop_mean_logprob=-0.9)[0].sequences[0].hypothesis
    )


def test_numbers_of_tokens_are_those_of_the_model_and_of_what_was_drawn_from(model: Model, tmp_path: Path) -> None:
    row = {"prompt": "the cat", "params": {"ban": bans_of("the cat")[2], "max_new_tokens": NEW}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    done = tool(
        "run", "-m", model.name, "-i", str(path), "--format", "jsonl", "--top-logprobs", "2",
        "--set", "processed_logprobs=true",
    )  # fmt: skip
    assert done.status == 0, done.err
    (record,) = done.records
    words, scorer = tokenizer(), tiny("llama")
    ids = [*words("the cat")["input_ids"], *record["token_ids"]]
    logprobs = scorer(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
    for token, place in zip(record["tokens"], range(len(ids) - len(record["token_ids"]), len(ids)), strict=True):
        assert token["logprob"] == pytest.approx(float(logprobs[place - 1, token["id"]]), abs=1e-3)
        assert token["processed"] >= token["logprob"] - 1e-6
        assert token["rank"] == 1 or token["processed"] > token["logprob"]
    assert record["logprob"] == pytest.approx(sum(token["logprob"] for token in record["tokens"]), abs=1e-3)
    assert "drafts" not in done.err


def test_grammars_and_other_processors_follow_what_is_taken_back(model: Model) -> None:
    (one,) = model.generate(["a"], regex="(cat|cow|dog)!", ban=["ca", "cow"], max_new_tokens=20)[0].sequences
    assert one.text == "dog!"
    (one,) = model.generate(["a"], ban=["e"], min_new_tokens=NEW, max_new_tokens=NEW, no_repeat_ngram_size=1)[
        0
    ].sequences
    assert len(set(one.token_ids)) == NEW
    with pytest.raises(GenctlError, match=r"after 1 new tokens nothing may follow but what begins 'bc'"):
        model.generate(["a"], regex="abc", ban=["bc"])
    with pytest.raises(GenctlError, match=r"no token is left to choose after ban \('x'\), regex"):
        model.generate(["a"], regex="x", ban=["x"])
    with pytest.raises(GenctlError, match=r"nothing may follow but what begins '</t>'"):
        model.generate(["a <t>"], thinking_budget=0, thinking_tags=("<t>", "</t>"), ban=["</t>"])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("arch", ["gpt2", "mistral", "gemma2", "t5"])
def test_every_cache_that_can_be_cut_gives_the_tokens_of_no_cache(arch: str, use_cache: bool, tmp_path: Path) -> None:
    """Windows of 8 tokens; of the longer text they dropped what a token that was taken back makes visible again."""
    made = genctl.load(str(checkpoint(arch, tmp_path / "model")))
    for prompt in ("the cat", "the cat sat on the mat and the dog"):
        text = made.generate([prompt], max_new_tokens=NEW, use_cache=use_cache)[0].text
        run = max(text.split("\ufffd"), key=len)
        phrases = [run[n : n + 2] for n in range(0, len(run) - 1, 2)]
        found = [made.generate([prompt], ban=phrases, max_new_tokens=NEW, use_cache=on)[0] for on in (use_cache, False)]
        assert found[0].sequences[0].token_ids == found[1].sequences[0].token_ids
        assert not any(phrase in found[0].text for phrase in phrases)


def test_recurrent_states_cannot_be_taken_back_and_the_way_out_is_named(tmp_path: Path) -> None:
    made = genctl.load(str(checkpoint("mamba", tmp_path / "model")))
    with pytest.raises(GenctlError, match="takes back tokens that it tried") as error:
        made.generate(["the cat"], ban=["a"])
    assert "use_cache = false" in str(error.value)
    assert "a" not in made.generate(["the cat"], ban=["a"], use_cache=False, max_new_tokens=8)[0].text


@pytest.mark.parametrize(
    "other", [{"num_beams": 2}, {"num_return_sequences": 2}, {"best_of": 2}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_what_has_several_rows_is_refused_with_both_sides(other: dict[str, Any]) -> None:
    said, *_ = conflicts(Generation(ban=["a b"], **other))
    assert said.startswith(f"ban = 'a b' cannot be combined with {next(iter(other))}")


def test_the_commands_of_a_tree_take_back_or_refuse(tmp_path: Path) -> None:
    script = tmp_path / "script"
    for command, said in {
        "generate 6": 'node 6  ", a dreamy boy named Rowan"',
        "sample 6": "seed ",
        "beams 2": "cannot be combined with num_beams = 2",
        "expand mass=0.5 depth=2": "expand only goes forward, and ban takes back what was written",
    }.items():
        script.write_text(command)
        done = tool("explore", "Once upon a time", "--ban", "there was", "--script", str(script))
        assert said in done.out + done.err, (command, done.out, done.err)
        assert "there was" not in done.out


def test_explain_says_what_was_barred_where_a_text_was_taken_back() -> None:
    done = tool("run", "Once upon a time", "-n", "3", "--ban", "there was", "--explain")
    (changed,) = [line.split() for line in done.err.splitlines() + done.out.splitlines() if "new winner" in line]
    assert changed[:2] == ["ban", "−1"]


def test_an_output_that_was_cut_off_is_continued_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SPAN", 1)
    monkeypatch.setattr(resumable, "EVERY_S", 0.0)
    rows, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    rows.write_text("Once\nOne day\nThe fox\n")
    run = (
        "run",
        "-i",
        str(rows),
        "-o",
        str(out),
        "-n",
        "9",
        "--do-sample",
        "--seed",
        "3",
        "--ban",
        " named",
        "--resume",
    )
    assert tool(*run).status == 0
    whole, journal = out.read_bytes(), tmp_path / "out.jsonl.journal"
    assert b" named" not in whole
    kept = journal.read_bytes().splitlines(keepends=True)[:2]
    journal.write_bytes(b"".join(kept))
    out.write_bytes(whole[: json.loads(kept[-1])["bytes"] + 9])
    assert tool(*run).status == 0
    assert out.read_bytes() == whole


def test_a_list_of_processors_needs_the_ban_and_the_setting_beside_it() -> None:
    for arguments, said in (
        (
            ("--ban", "was", "--set", 'processors=[{use="min_length"}]'),
            "has no effect: the list of processors (--set processors) leaves it out",
        ),
        (("--set", 'processors=[{use="ban", ban=["was"]}]'), "ban is set in the list of processors alone"),
    ):
        done = tool("run", "Once upon a time", "-n", "9", *arguments)
        assert done.status != 0
        assert said in done.err
    done = tool("run", "Once upon a time", "-n", "9", "--ban", "re was", "--set", 'processors=[{use="ban"}]')
    assert done.status == 0
    assert "re was" not in done.out


def tokens_and_phrases() -> st.SearchStrategy[tuple[list[int], list[str]]]:
    letters = st.text("aAeéÉßsS ", min_size=1, max_size=4)
    pieces = st.one_of(letters, st.sampled_from(["s", "é", "日", "th"]))
    texts = st.lists(pieces, min_size=1, max_size=8)
    ids = texts.map(lambda parts: [id for part in parts for id in tokenizer().encode(part, add_special_tokens=False)])
    broken = st.tuples(ids, st.integers(0, 12), st.integers(3, VOCABULARY - 1)).map(
        lambda drawn: [*drawn[0][: drawn[1]], drawn[2], *drawn[0][drawn[1] :]]
    )
    return st.tuples(st.one_of(ids, broken), st.lists(letters, min_size=1, max_size=3))


@given(tokens_and_phrases(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_phrases_are_found_where_they_begin_and_nothing_that_may_begin_one_is_settled(
    drawn: tuple[list[int], list[str]], ignore_case: bool
) -> None:
    ids, phrases = drawn
    fold: Fold = str.casefold if ignore_case else str
    bans = Bans(phrases, ignore_case=ignore_case, whole=torch.zeros(VOCABULARY, dtype=torch.bool), prompt_len=0)
    trial, settled = Trial(bans, detokenizer(tokenizer())), 0
    for count, token in enumerate(ids, 1):
        trial.push(token)
        found = trial.find(whole=False)
        at = begin(
            tokenizer().decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd"), ids[:count], phrases, fold
        )
        assert (None if found is None else settled + found[0]) == at
        if found is not None:
            return
        settled += len(trial.accept(trial.settled))


def test_an_empty_text_cannot_be_banned() -> None:
    assert "ban: an empty text is in every text" in tool("run", "Once upon a time", "-n", "8", "--ban", "").err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\r\nb\n", ["a", "b"]),
        ("\n a\n\n", ["", " a", ""]),
        ("a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h\n", ["a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h"]),
    ],
)
def test_only_a_newline_ends_a_line(text: str, lines: list[str]) -> None:
    assert text_lines(text) == lines


def pairs(*phrases: str) -> list[str]:
    return [part for phrase in phrases for part in ("--ban", phrase)]


def test_a_text_that_is_taken_back_is_in_no_journal_or_event(model: Model) -> None:
    prompt = PROMPTS[0]
    phrases = bans_of(prompt)[2]
    found = list(model.stream([prompt], ban=phrases, max_new_tokens=NEW))
    steps = [event for event in found if isinstance(event, events.Stepped)]
    written = [token.id for step in steps for row in (*step.rows, *step.ended) for token in row.written]
    assert written == naive(prompt, phrases)[0]
    assert all(later.step == step.step + 1 for step, later in pairwise(steps))


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8), st.text("abc", min_size=1, max_size=6))
def test_what_may_begin_a_phrase_is_the_beginning_of_one(phrases: list[str], text: str) -> None:
    bans = Bans(phrases, ignore_case=False, whole=torch.zeros(1), prompt_len=0)
    assert bans.may_begin(text) == any(phrase.startswith(text) and phrase != text for phrase in phrases)


def test_the_memory_of_bans_grows_with_their_length() -> None:
    phrases = [f"{number:04}" + "x" * 996 for number in range(1000)]
    tracemalloc.start()
    bans = Bans(phrases, ignore_case=True, whole=torch.zeros(1), prompt_len=0)
    assert bans.may_begin("0999x")
    assert tracemalloc.get_traced_memory()[1] < 8e6  # they have a million characters
    tracemalloc.stop()
