"""`genctl presets …`: what goes to stdout, and what ends the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.config import presets
from genctl.config.layers import Layer, resolve
from genctl.config.toml import parse
from tests.cli.tool import genctl

pytestmark = pytest.mark.usefixtures("project")


def shown(*arguments: str) -> str:
    done = genctl("presets", *arguments)
    assert (done.status, done.err) == (0, "")
    return done.out


@pytest.fixture
def own(project: Path) -> Path:
    """The folder of the user's presets."""
    folder = presets.config_home() / "presets"
    folder.mkdir(parents=True)
    return folder


def test_list_names_every_preset_with_what_it_is_for() -> None:
    rows = [line.split("\t") for line in shown("list").splitlines()]
    assert [row[0] for row in rows] == sorted(path.stem for path in presets.shipped_folder().glob("*.toml"))
    assert all(len(row) == 3 and row[1] == "shipped" and len(row[2]) >= 20 for row in rows)


def test_list_as_json_is_data(own: Path) -> None:
    (own / "mine.toml").write_text('about = "mine [bold]"')
    found = {entry["name"]: entry for entry in json.loads(shown("list", "--format", "json"))}
    mine = {"name": "mine", "where": "user", "path": str(own / "mine.toml"), "about": "mine [bold]"}
    assert found["mine"] == mine
    assert "greedy" in found


def test_a_broken_preset_is_listed_with_what_is_wrong_and_one_without_about_too(own: Path) -> None:
    (own / "broken.toml").write_text("about =")
    (own / "silent.toml").write_text("seed = 1")
    (own / "hostile.toml").write_text('about = "a\\u001b[2Jb\\nc"')
    rows = {line.split("\t")[0]: line.split("\t")[2] for line in shown("list").splitlines()}
    assert rows["broken"].startswith(f"broken: {own}/broken.toml:1:8: not valid TOML")
    assert (rows["silent"], rows["hostile"]) == ("", "a\\x1b[2Jb\\nc")


def test_show_writes_what_is_set_with_origins_and_it_loads_again() -> None:
    text = shown("show", "long-form")
    assert "top_p = 0.95" in text
    assert "# nucleus:3" in text  # by its name, not a path into the installation
    assert ".toml" not in text
    assert "default" not in text
    again = resolve([Layer("shown.toml", parse(text, "shown.toml"))])
    assert again.generation == resolve(presets.load(["long-form"])).generation


def test_show_raw_is_the_file_itself_and_a_terminal_is_not_sent_its_escapes() -> None:
    Path("job.toml").write_text('about = "[red]x"\t# a comment  \n\nseed = 1   ')
    assert shown("show", "job.toml", "--raw") == Path("job.toml").read_text()
    assert shown("show", "job.toml") != Path("job.toml").read_text(), "the flag of one call is not that of the next"
    Path("job.toml").write_text('about = "a\u009b2Jb"\n', encoding="utf-8")
    assert genctl("presets", "show", "--raw", "job.toml", terminal=True).out == 'about = "a\\x9b2Jb"\n'


def test_check_tells_every_mistake_of_every_file_and_ends_with_2() -> None:
    Path("a.toml").write_text("top_k = -1\ntop_p = 2")
    Path("b.toml").write_text("temperature = 0.7")
    done = genctl("presets", "check", "a.toml", "greedy", "b.toml", "c.toml")
    assert (done.status, done.out) == (2, "ok: greedy\n")
    assert done.err.splitlines() == [
        "error: a.toml:1: top_k = -1: must be at least 0",
        "error: a.toml:2: top_p = 2: must be at most 1",
        "error: temperature = 0.7 (b.toml:1) has no effect while do_sample is false (default)",
        "error: cannot read c.toml: no such file",
        "hint: add do_sample = true",
    ]


def test_path_says_where_presets_are_looked_for_and_which_file_one_is() -> None:
    assert [line.split("\t")[0] for line in shown("path").splitlines()] == ["user", "shipped"]
    assert shown("path", "greedy") == f"{presets.shipped_folder() / 'greedy.toml'}\n"


@pytest.mark.parametrize("words", ["show nuclues", "show --raw none.toml", "path nuclues", "path none.toml"])
def test_what_is_not_there_is_an_error(words: str) -> None:
    done = genctl("presets", *words.split())
    assert (done.status, done.out, done.err[:7]) == (2, "", "error: ")
