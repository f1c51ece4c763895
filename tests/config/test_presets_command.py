"""`genctl presets …`: what goes to stdout, and what ends the program."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from genctl.commands.listings import app
from genctl.config import presets
from genctl.config.layers import Layer, resolve
from genctl.config.toml import parse
from genctl.errors import GenctlError, PresetError
from tests.cli.tool import genctl

Run = Callable[..., str]


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the sub-app in process; what it printed, or the error that it raised."""

    def invoke(*arguments: str) -> str:
        capsys.readouterr()
        typer.main.get_command(app)(list(arguments), prog_name="genctl presets", standalone_mode=False)
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return invoke


def test_list_names_every_preset_with_what_it_is_for(run: Run) -> None:
    rows = [line.split("\t") for line in run("list").splitlines()]
    assert [row[0] for row in rows] == sorted(path.stem for path in presets.shipped_folder().glob("*.toml"))
    assert all(len(row) == 3 and row[1] == "shipped" and len(row[2]) >= 20 for row in rows)


def test_list_as_json_is_data(run: Run) -> None:
    own = presets.config_home() / "presets"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text('about = "mine [bold]"')
    found = {entry["name"]: entry for entry in json.loads(run("list", "--format", "json"))}
    assert found["mine"] == {
        "name": "mine",
        "where": "user",
        "path": str(own / "mine.toml"),
        "about": "mine [bold]",
    }
    assert "greedy" in found


def test_a_broken_preset_is_listed_with_what_is_wrong_and_one_without_about_too(run: Run) -> None:
    own = presets.config_home() / "presets"
    own.mkdir(parents=True)
    (own / "broken.toml").write_text("about =")
    (own / "silent.toml").write_text("seed = 1")
    (own / "hostile.toml").write_text('about = "a\\u001b[2Jb\\nc"')
    rows = {line.split("\t")[0]: line.split("\t")[2] for line in run("list").splitlines()}
    assert rows["broken"].startswith(f"broken: {own}/broken.toml:1:8: not valid TOML")
    assert rows["silent"] == ""
    assert rows["hostile"] == "a\\x1b[2Jb\\nc"


def test_show_writes_what_is_set_with_origins_and_it_loads_again(run: Run) -> None:
    text = run("show", "long-form")
    assert "top_p = 0.95" in text
    assert "# nucleus:3" in text  # by its name, not a path into the installation
    assert ".toml" not in text
    assert "default" not in text
    again = resolve([Layer("shown.toml", parse(text, "shown.toml"))])
    assert again.generation == resolve(presets.load(["long-form"])).generation


def test_show_raw_is_the_file_itself(run: Run) -> None:
    Path("job.toml").write_text('about = "[red]x"\t# a comment  \n\nseed = 1   ')
    assert run("show", "job.toml", "--raw") == Path("job.toml").read_text()


def test_check_says_which_are_right(run: Run) -> None:
    assert run("check", "greedy", "creative") == "ok: greedy\nok: creative\n"


def test_check_tells_every_mistake_of_every_file_and_ends_with_2(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text("top_k = -1\ntop_p = 2")
    Path("b.toml").write_text("temperature = 0.7")
    with pytest.raises(PresetError) as caught:
        run("check", "a.toml", "greedy", "b.toml", "c.toml")
    assert caught.value.message.splitlines() == [
        "a.toml:1: top_k = -1: must be at least 0",
        "a.toml:2: top_p = 2: must be at most 1",
        "temperature = 0.7 (b.toml:1) has no effect while do_sample is false (default)",
        "cannot read c.toml: no such file",
    ]
    assert caught.value.exit == 2
    assert caught.value.hint == "add do_sample = true"
    assert capsys.readouterr().out == "ok: greedy\n"


def test_the_schema_was_removed(project: Path) -> None:
    done = genctl("presets", "schema")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: genctl presets schema was removed: genctl run --dry -v")


def test_path_says_where_presets_are_looked_for_and_which_file_one_is(run: Run) -> None:
    rows = [line.split("\t") for line in run("path").splitlines()]
    assert [row[0] for row in rows] == ["user", "shipped"]
    assert run("path", "greedy") == f"{presets.shipped_folder() / 'greedy.toml'}\n"


@pytest.mark.parametrize(
    "arguments", [["show", "nuclues"], ["show", "--raw", "none.toml"], ["path", "nuclues"], ["path", "none.toml"]]
)
def test_what_is_not_there_is_our_error(run: Run, arguments: list[str]) -> None:
    with pytest.raises(GenctlError):
        run(*arguments)


def test_an_unknown_format_is_a_usage_error(run: Run) -> None:
    with pytest.raises(typer.BadParameter):
        run("list", "--format", "xml")


def test_a_terminal_is_shown_escapes_and_not_sent_them(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    from rich.console import Console

    screen = io.StringIO()
    stand_in = types.ModuleType("genctl.terminal.console")
    stand_in.make_consoles = lambda color: (Console(file=screen, force_terminal=True, width=80),) * 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "genctl.terminal.console", stand_in)
    Path("job.toml").write_text('about = "a\u009b2Jb"\n', encoding="utf-8")
    typer.main.get_command(app)(["show", "--raw", "job.toml"], standalone_mode=False)
    assert screen.getvalue() == 'about = "a\\x9b2Jb"\n'


def test_a_flag_of_one_call_is_not_that_of_the_next() -> None:
    shown = genctl("presets", "show", "nucleus")
    assert genctl("presets", "show", "--raw", "nucleus").out != shown.out
    assert genctl("presets", "show", "nucleus") == shown
