"""Notes beside the results of a run: what a search could not do, a second BOS, rows that fail alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import genctl as library
from genctl import events
from genctl.engines.lane_results import ForcedPhrase, ForcedPhrases
from genctl.strategies.constraints import Constraints
from tests.cli.tool import genctl, ok

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
    done = ok(command, "One day", *FOUR, *mode, "-q")
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


RAW = (
    "the prompt begins with <bos> twice: the tokenizer writes it before each prompt; leave <bos> out of what you write"
)
CHAT = (
    "the prompt begins with <bos> twice: the chat template writes it before a message that begins with it; "
    "leave <bos> out of what you write"
)
ROW = json.dumps({"messages": [{"role": "user", "content": "<bos>Hi"}]})
WAYS: dict[str, tuple[tuple[str, ...], str, str | None]] = {
    "run": (("run", "-n", "2", "<bos>Once"), RAW, None),
    "beam": (("beam", "-n", "2", "<bos>Once"), RAW, None),
    "compare": (("compare", "-n", "2", "--strategy", "greedy", "--strategy", "beam", "<bos>Once"), RAW, None),
    "explore": (("explore", "--expand", "depth=1,nodes=2", "<bos>Once"), RAW, None),
    "--chat": (("run", "-n", "2", "--chat", "<bos>Once"), CHAT, None),
    "messages": (("run", "-n", "2", "--input-format", "jsonl"), CHAT, ROW),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_doubled_bos_gets_a_note_with_advice(way: str) -> None:
    arguments, note, stdin = WAYS[way]
    done = ok(*arguments, stdin=stdin)
    assert done.err.count(note) == 1
    assert note not in genctl(*arguments, "-q", stdin=stdin).err


@pytest.mark.parametrize("prompt", ["Once", "Once <bos>", "<eos>Once", " <bos>Once"])
def test_no_other_prompt_gets_one(prompt: str) -> None:
    assert "twice" not in genctl("run", "-n", "2", prompt).err


def test_many_prompts_get_one_note() -> None:
    done = genctl("run", "-n", "2", "a", "<bos>b", "<bos>c")
    assert done.err.count("twice") == 1
    assert f"note: prompt 2: {RAW}" in done.err


BAD = json.dumps({"prompt": 7})


@pytest.mark.parametrize(
    "command", [("run",), ("compare", "-p", "greedy", "-p", "beam5"), ("score",)], ids=lambda it: it[0]
)
def test_equal_errors_are_one_line_and_a_number(command: tuple[str, ...]) -> None:
    done = genctl(*command, "--input-format", "jsonl", stdin=f"{BAD}\n" * 200)
    first, more, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert "line 1: prompt: expected a string" in first
    assert more == "error: 199 more like it"
    assert not [line for line in rest if line.startswith("error:")]
    assert done.status == 1


def test_different_errors_are_counted_apart() -> None:
    empty = json.dumps({"prompt": ""})
    done = genctl("run", "--input-format", "jsonl", stdin="\n".join([BAD, empty, BAD, empty, BAD, "{}"]))
    lines = done.err.splitlines()
    assert [line.split(":")[1] for line in lines[:3]] == [" prompt 1", " prompt 2", " prompt 6"]
    assert lines[3].startswith("error: 2 more like it: prompt: expected a string")
    assert lines[4] == "error: 1 more like it: prompt: empty prompt"
    assert len(lines) == 5


def test_errors_on_a_terminal_are_one_too_and_records_keep_all(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi", "params": {"num_beams": 0}}\n' * 5)
    done = genctl("run", "-i", str(tmp_path / "rows.jsonl"), terminal=True)
    assert done.err.count("num_beams") == 1
    assert "4 more like it" in done.err
    done = genctl("run", "--input-format", "jsonl", "--format", "jsonl", stdin=f"{BAD}\n" * 3)
    assert [record["error"]["code"] for record in done.records] == ["input"] * 3


def test_a_prompt_beyond_the_context_gets_its_hint_wherever_it_is_said() -> None:
    words, hint = ("a " * 600,), "hint: --truncate left keeps its end (right its beginning, middle both)\n"
    compare = ("compare", "-p", "greedy", "-p", "beam5")
    for command in (("run",), ("beam",), compare, ("inspect-cache",)):
        for terminal in (False, True):
            done = genctl(*command, *words, terminal=terminal, color="never")
            assert done.status == 1, (command, done.err)
            assert re.search(r"the prompt has \d+ tokens, but the model's\s+context is 512", done.err), (
                command,
                done.err,
            )
            assert done.err.count("hint: --truncate left") == 1, (command, terminal, done.err)
    [record] = genctl("run", *words, "--format", "jsonl").records
    assert list(record["error"]) == ["code", "message"]
    assert record["error"]["message"].endswith("but the model's context is 512")
    assert hint in genctl("run", *words).err
