"""What a search could not do is said in the record and on standard error, in a pipe and with -q too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genctl as library
from genctl import events
from genctl.engines.lane_results import ForcedPhrase, ForcedPhrases
from genctl.strategies.constraints import Constraints
from tests.cli.tool import genctl

FORMAT = ("--format", "jsonl", "--seed", "1")
FOUR = ("--num-beams", "4", "--num-return-sequences", "4", "-n", "6", *FORMAT)
NOTE = "warning: {}{} of 4 sequences: the search found no others (num_return_sequences)"


@pytest.mark.parametrize("command", ["run", "beam"])
@pytest.mark.parametrize(
    "mode",
    [
        ("--regex", "a|b"),
        ("--regex", "a|b", "--do-sample"),
        ("--regex", "a", "--num-beam-groups", "2", "--diversity-penalty", "1.0"),
        ("--regex", "a|ab", "--force-words", "a"),
    ],
)
def test_fewer_sequences_than_asked_for_are_said(command: str, mode: tuple[str, ...]) -> None:
    done = genctl(command, "One day", *FOUR, *mode, "-q")
    assert done.status == 0
    assert len(done.records) == 2
    assert [(one["returned"], one["num_return_sequences"]) for one in done.records] == [(2, 4)] * 2
    assert done.err.splitlines() == [NOTE.format("", 2)]


def test_in_a_batch_each_prompt_says_it_for_itself(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "One day"},
        {"id": "b", "prompt": "The old fox", "params": {"regex": "a|b"}},
        {"id": "c", "prompt": "One day", "params": {"regex": "a", "num_beams": 1, "do_sample": True}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = genctl("run", "-i", str(tmp_path / "in.jsonl"), *FOUR)
    assert [(one["id"], "returned" in one) for one in done.records] == [
        *[("a", False)] * 4, *[("b", True)] * 2, *[("c", False)] * 4
    ]  # fmt: skip
    assert done.err.splitlines() == [NOTE.format("prompt b: ", 2)]


@pytest.mark.parametrize("rank", [("--best-of", "6"), ("--mbr-samples", "6")])
def test_reranked_samples_are_all_there(rank: tuple[str, str]) -> None:
    done = genctl("run", "One day", "--do-sample", "--num-return-sequences", "3", *rank, "-n", "4", *FORMAT)
    assert [one.get("returned") for one in done.records] == [None] * 3
    assert done.err == ""


def test_compared_runs_say_it_too(tmp_path: Path) -> None:
    for name, pattern in (("few", "a|b"), ("many", "a[a-z]*")):
        (tmp_path / f"{name}.toml").write_text(
            f'num_beams = 4\nnum_return_sequences = 4\nmax_new_tokens = 6\nregex = "{pattern}"\n'
        )
    presets = [part for name in ("few", "many") for part in ("-p", str(tmp_path / f"{name}.toml"))]
    done = genctl("compare", "One day", *presets, "--format", "jsonl")
    assert [(one["run"], one.get("returned")) for one in done.records] == [("few", 2)] * 2 + [("many", None)] * 4
    assert "warning: run few: 2 of 4 sequences" in done.err


WORDS = ("--num-beams", "4", "--force-words", "bridge", "--force-words", "dog", "-n", "30", *FORMAT)


def test_words_that_are_there_are_nothing_to_speak_of() -> None:
    done = genctl("run", "One day", *WORDS, "--fail-on", "unmet")
    assert (done.status, done.err) == (0, "")
    (record,) = done.records
    assert "bridge" in record["text"]
    assert "dog" in record["text"]
    assert "unmet" not in record


@pytest.mark.parametrize("command", ["run", "beam"])
def test_a_word_that_could_not_be_written_is_named(command: str) -> None:
    barred = ("--regex", "[a-f ]*")
    done = genctl(command, "One day", *WORDS, *barred, "--fail-on", "length", "-q")
    (record,) = done.records
    assert record["unmet"] == ["bridge", "dog"]
    assert done.err.splitlines()[0] == 'warning: the text lacks "bridge", "dog" (force_words)'
    failed = genctl(command, "One day", *WORDS, *barred, "--fail-on", "unmet")
    assert failed.status == 4
    assert failed.err.splitlines()[-1] == 'error: --fail-on: the text lacks "bridge", "dog"'
    assert genctl(command, "One day", *WORDS, *barred).status == 0


def test_what_keeps_more_words_comes_first_where_none_keeps_all() -> None:
    done = genctl("run", "One day", *WORDS, "--regex", "[abdgo ]*", "--num-return-sequences", "2")
    assert done.records[0]["unmet"] == ["bridge"]
    assert all("bridge" in one["unmet"] for one in done.records)


def test_alternatives_and_ids_are_named_as_they_were_given() -> None:
    words = ("--set", 'force_words=[["bridge", "river"], "dog"]', "--set", "force_words_ids=[[300]]")
    done = genctl("run", "One day", "--num-beams", "2", *words, "--regex", "[xyz]*", "-n", "20", *FORMAT)
    text = library.load("builtin:stories").tokenizer.decode([300]).strip()
    assert done.records[0]["unmet"] == [text, "bridge | river", "dog"]


def test_a_text_that_time_cuts_short_lacks_what_would_have_followed() -> None:
    done = genctl("run", "One day", *WORDS, "--max-time", "0.000001")
    assert "bridge" in done.records[0]["unmet"]
    assert "lacks" in done.err


def test_a_word_that_a_stop_cuts_away_is_missing_from_the_text() -> None:
    stop = ("--num-beams", "2", "--force-words", "bridge", "--stop-strings", "bridge", "-n", "30", *FORMAT)
    done = genctl("run", "One day", *stop)
    assert ("bridge" in done.records[0]["text"], done.records[0]["unmet"]) == (False, ["bridge"])
    assert "lacks" in done.err
    kept = genctl("run", "One day", *stop, "--keep-stop")
    assert ("bridge" in kept.records[0]["text"], kept.records[0].get("unmet"), kept.err) == (True, None, "")


def test_a_word_that_other_tokens_spell_is_there() -> None:
    phrases = ForcedPhrases(
        Constraints([((5, 6),), ((7,),)]),
        (ForcedPhrase("cat", ("cat",), True), ForcedPhrase("[7]", ("t",), False)),
        str,
    )
    assert phrases.unmet(events.Hypothesis((1, 2), 0.0, 0.0, "eos", text="a cat")).unmet == ("[7]",)
    assert phrases.unmet(events.Hypothesis((1, 2), 0.0, 0.0, "eos", text="a cow")).unmet == ("cat", "[7]")


def test_a_recorded_search_names_them_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    genctl("beam", "One day", *WORDS, "--regex", "[a-f ]*", "--events", str(path))
    finished = [json.loads(line) for line in path.read_text().splitlines()][-1]
    assert finished["hypotheses"][0]["unmet"] == ["bridge", "dog"]


def test_the_last_token_that_forced_eos_takes_is_not_counted_on() -> None:
    options = ("--num-beams", "2", "--force-words", "bridge", "--set", "forced_eos_token_id=2", *FORMAT)
    done = genctl("run", "One day", *options, "-n", "2")
    assert done.err == ""
    assert all("bridge" in one["text"] for one in done.records)
    refused = genctl("run", "One day", *options, "-n", "1")
    assert "forced_eos_token_id takes the last one" in refused.records[0]["error"]["message"]


def test_many_words_in_a_narrow_beam_are_all_there() -> None:
    words = ["bridge", "dog", "apple", "rain", "boat", "garden", "stone", "river", "music", "cat", "winter", "house"]
    model = library.load("builtin:stories")
    for beams in (2, 4):
        (found,) = model.generate("One day", num_beams=beams, force_words=words, max_new_tokens=60)
        assert [word for word in words if word not in found.text] == []
        assert found.sequences[0].unmet == ()
