"""What a model writes and what a prompt says is shown, never executed: on terminals, in tables, notes and errors."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from genctl.commands.explore.panes import edit_line
from genctl.engines.server import client as address
from genctl.errors import SECRETS, InputError, without_secrets
from genctl.tree.commands import parse
from tests.cli.tool import genctl, ok
from tests.hostile.words import FIRST, HOSTILE, OBEYED, hostile_vocabulary, tame
from tests.tiny import checkpoint

SAID = "\x1b]0;owned\x07 \u202ecod.exe [bold]x[/bold] \x1b[31m\x00"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes nothing but hostile words, drawn at random."""
    folder = hostile_vocabulary(checkpoint("gpt2", tmp_path_factory.mktemp("hostile")))
    bad = [number for number in range(FIRST)]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": bad}))
    return str(folder)


DRAWN = ("--do-sample", "--temperature", "3.0", "--top-k", "0", "-n", "40", "--seed", "1")
SHOWN = {
    "run": ("run", *DRAWN),
    "scores": ("run", *DRAWN, "--scores", "--top-logprobs", "3"),
    "explain": ("run", *DRAWN, "--top-p", "0.9", "--explain"),
    "samples": ("run", *DRAWN, "--num-return-sequences", "3"),
    "echo": ("run", *DRAWN, "--echo"),
    "stream": ("run", *DRAWN, "--stream"),
    "beam": ("beam", "-n", "20", "--num-beams", "4"),
    "tree": ("beam", "-n", "20", "--num-beams", "4", "--tree"),
    "inspect": ("inspect-cache", "--steps", "6", "--inputs"),
    "score": ("score",),
    "tokens": ("tokens",),
    "tokens side by side": ("tokens", "-m", "builtin:stories", SAID),
}


@pytest.mark.parametrize("name", SHOWN)
def test_nothing_that_a_terminal_obeys_reaches_it(name: str, hostile: str) -> None:
    command, *options = SHOWN[name]
    done = ok(command, SAID, "-m", hostile, *options, terminal=True, color="always")
    tame(done.out)
    tame(done.err)


LOGGED = {
    **{name: line for name, line in SHOWN.items() if name not in ("inspect", "score")},
    "scores of samples": ("run", *DRAWN, "--scores", "--num-return-sequences", "2", "--echo"),
    "explain of samples": ("run", *DRAWN, "--explain", "--num-return-sequences", "2", "--echo", "-v"),
    "scores of beams": ("beam", "-n", "20", "--num-beams", "3", "--scores", "--explain", "--echo", "-v"),
    "streamed scores": ("run", *DRAWN, "--scores", "--stream", "--echo"),
    "checks": ("run", *DRAWN, "--fail-on", "length", "--fail-on", "empty", "-v"),
    "cut": ("run", *DRAWN, "--truncate", "left", "--max-length", "8", "-v"),
}


@pytest.mark.parametrize("name", LOGGED)
def test_nothing_that_a_terminal_obeys_reaches_a_log(name: str, hostile: str) -> None:
    """`2>log` in a pipe: the text goes to standard output as it is, and everything else is read on a terminal later."""
    command, *options = LOGGED[name]
    done = genctl(command, SAID, SAID, "-m", hostile, *options, stdin="")
    assert done.status in (0, 2, 4), done.err
    assert OBEYED.search(done.err) is None, done.err


TABLES = {
    "inspect": ("inspect-cache", "--steps", "4", "--inputs"),
    "score": ("score", "--scores"),
    "rank": ("score", "--context", SAID, "--rank", SAID),
    "tokens": ("tokens", "-m", "builtin:stories", SAID),
    "counts": ("tokens", "--count", "--format", "tsv"),
    "compare": ("compare", "-p", "greedy", "--strategy", "b:do_sample=true,seed=1", "-n", "9"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_in_a_pipe_are_tame_too(name: str, hostile: str) -> None:
    command, *options = TABLES[name]
    done = ok(command, SAID, "-m", hostile, *options, stdin="")
    assert OBEYED.search(done.err) is None
    assert OBEYED.search(done.out) is None


def test_a_recording_of_hostile_words_is_shown_tamely(hostile: str, tmp_path: Path) -> None:
    recording = str(tmp_path / "events")
    assert genctl("run", SAID, "-m", hostile, *DRAWN, "--scores", "--explain", "--events", recording).status == 0
    assert OBEYED.search(Path(recording).read_text(encoding="utf-8")) is None


def test_the_words_are_shown_all_the_same(hostile: str) -> None:
    shown = tame(genctl("run", "a", "-m", hostile, *DRAWN, "-n", "200", terminal=True).out)
    for word in ("[bold red]x[/bold red]", "<script>alert(1)</script>"):
        assert word in re.sub(r"\s", "", shown) or word.replace(" ", "") in re.sub(r"\s", "", shown)


def test_a_pipe_gets_the_text_itself(hostile: str) -> None:
    text = genctl("run", "a", "-m", hostile, *DRAWN, stdin="").out
    assert "\x1b" in text
    record = json.loads(genctl("run", "a", "-m", hostile, *DRAWN, "--format", "jsonl", stdin="").out)
    assert text == record["text"] + "\n"


@pytest.mark.parametrize("command", ["run", "beam"])
def test_a_table_has_as_many_lines_and_columns_as_it_should(command: str, hostile: str) -> None:
    drawn = DRAWN if command == "run" else ("-n", "20", "--num-beams", "4")
    count = ("--num-return-sequences", "3")
    done = ok(command, "a\tb", SAID, "-m", hostile, *drawn, *count, "--format", "tsv")
    head, *rows = done.out.split("\n")[:-1]
    assert len(rows) == 6
    assert {row.count("\t") for row in rows} == {head.count("\t")}
    tame(done.out)
    assert len(list(csv.reader(io.StringIO(done.out), delimiter="\t", quoting=csv.QUOTE_NONE))) == 7


def test_records_are_one_line_each_and_hold_the_text_unchanged(hostile: str) -> None:
    done = genctl("run", SAID, "-m", hostile, *DRAWN, "-n", "120", "--scores", "--format", "jsonl")
    assert done.out.count("\n") == 1
    assert "\x1b" not in done.out
    (record,) = done.records
    assert record["prompt"] == SAID
    assert record["text"] == "".join(token["text"] for token in record["tokens"])
    assert any(word in record["text"] for word in HOSTILE)


def test_errors_show_names_without_obeying_them(tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07\nerror: all is well\u202e"
    for arguments in (
        ("run", "a", "-m", f"./{name}"),
        ("run", "a", "-p", name),
        ("run", "a", "--set", f"{name}=1"),
        ("run", "-i", str(tmp_path / name)),
        ("run", "a", "-o", str(tmp_path / "missing" / name)),
        ("run", "a", "--strategy", name),
        ("report", str(tmp_path / name)),
        ("run", "a", f"--{name}"),
    ):
        done = genctl(*arguments, terminal=True)
        assert done.status in (2, 3), arguments
        tame(done.err)
        assert "\nerror: all is well" not in done.err


@pytest.mark.parametrize("word", [*HOSTILE, SAID, "\x1b]52;c;ZXZpbA==\x07", "\x9b31m"])
def test_a_text_of_a_tree_is_edited_without_obeying_it(word: str) -> None:
    line = edit_line(word)
    tame(line)
    assert parse(line).arguments == {"text": word}


def test_the_name_of_a_run_is_shown_without_obeying_it(tmp_path: Path) -> None:
    preset = tmp_path / "a\x1b]0;owned\x07.toml"
    preset.write_text('about = "x\\u001b]0;owned\\u0007"\nmax_new_tokens = 1\n')
    for arguments in (
        ("compare", "a", "-p", str(preset), "--strategy", "b:num_beams=2", "--dry"),
        ("run", "a", "-p", str(preset), "--dry"),
        ("presets", "show", str(preset)),
        ("presets", "check", str(preset)),
    ):
        done = genctl(*arguments, terminal=True)
        tame(done.out)
        tame(done.err)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GENCTL_API_KEY", "OPENAI_API_KEY"])
def test_each_key_is_a_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it turns up: in a message, a hint, and the command that a page shows."""
    monkeypatch.setenv(name, " sesame-sesame\n")
    assert without_secrets("a sesame-sesame b") == "a (token) b"
    error = InputError("no sesame-sesame", hint="try sesame-sesame")
    assert "sesame" not in error.message + error.hint
    done = genctl("run", "-m", "./no/sesame-sesame", "x")
    assert (done.status, "sesame" in done.err) == (3, False)


def test_every_key_of_a_server_is_a_secret() -> None:
    assert set(address.KEYS) <= set(SECRETS)
