"""Files of a folder that somebody else may have made: what they may choose, and what only the user may."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from genctl import params
from genctl.config import found_files
from genctl.config.check import UNSAFE
from genctl.config.listed_knobs import LISTS
from genctl.config.settings import user_file
from tests.cli.tool import genctl
from tests.engines.server.stand_in import StandIn, running

ELSEWHERE = "openai:http://127.0.0.1:9"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def server(project: Path) -> typing.Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


@pytest.mark.parametrize(
    ("place", "flags"),
    [
        ("genctl.toml", ()),
        ("presets/greedy.toml", ("-p", "greedy")),
        ("presets/mine.toml", ("-p", "presets/mine.toml")),
        ("presets/mine.toml", ("-p", "child")),
    ],
)
def test_a_file_of_the_folder_does_not_choose_who_gets_the_prompts_and_the_key(
    project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, place: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GENCTL_API_KEY", "sesame-sesame")
    write(project / place, f'backend = "{server.url}"\n')
    write(project / "presets/child.toml", 'extends = "mine.toml"\n')
    done = genctl("run", *flags, "Hi")
    assert (done.status, done.out, server.asked) == (2, "", [])
    assert done.err == (
        f'error: {place}:1: backend = "{server.url}": decides who gets the prompts and the key, which a file of this '
        "folder cannot choose\nhint: to use it, name it yourself: --backend, GENCTL_BACKEND or "
        "$XDG_CONFIG_HOME/genctl/config.toml\n"
    )


@pytest.mark.parametrize("command", ["score", "beam"])
def test_no_other_command_takes_it_from_there(project: Path, server: StandIn, command: str) -> None:
    write(project / "genctl.toml", f'backend = "{server.url}"\n')
    done = genctl(command, "Hi")
    assert (done.status, done.out, server.asked) == (2, "", [])


def test_a_run_of_compare_does_not_choose_it_either(project: Path, server: StandIn) -> None:
    write(project / "presets/there.toml", f'backend = "{server.url}"\n')
    done = genctl("compare", "-p", "greedy", "-p", "there", "Hi")
    assert (done.status, server.asked) == (2, [])
    assert "run there: presets/there.toml:1: backend" in done.err
    done = genctl("compare", "-p", "greedy", "--strategy", "x:extends=there", "Hi")
    assert (done.status, server.asked) == (2, [])


@pytest.mark.parametrize("how", ["flag", "variable", "own file", "own preset"])
def test_a_backend_that_the_user_names_too_may_stand_in_a_file(
    project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write(project / "genctl.toml", f'backend = "{server.url}"\n')
    flags: tuple[str, ...] = ()
    if how == "flag":
        flags = ("--backend", server.url)
    elif how == "variable":
        monkeypatch.setenv("GENCTL_BACKEND", server.url)
    elif how == "own file":
        write(user_file(), f'backend = ["{ELSEWHERE}", "{server.url}"]\n')
    else:
        write(user_file().parent / "presets/mine.toml", f'backend = "{server.url}"\n')
        flags = ("-p", "mine")
    assert genctl("run", *flags, "Hi").out == " one two three four five six\n"


def test_another_backend_than_the_users_is_refused(project: Path) -> None:
    write(user_file(), 'backend = "openai:http://127.0.0.1:7"\n')
    write(project / "genctl.toml", f'backend = "{ELSEWHERE}"\n')
    done = genctl("run", "Hi")
    assert (done.status, done.err.startswith(f'error: genctl.toml:1: backend = "{ELSEWHERE}"')) == (2, True)


def test_a_flag_overrides_the_file(project: Path, server: StandIn) -> None:
    write(project / "genctl.toml", f'backend = "{ELSEWHERE}"\n')
    assert genctl("run", "--backend", server.url, "Hi").status == 0


def test_a_users_preset_that_extends_a_name_of_the_folder_gets_nothing_outward_of_it(
    project: Path, server: StandIn
) -> None:
    write(user_file().parent / "presets/mine.toml", 'extends = "greedy"\n')
    write(project / "presets/greedy.toml", f'backend = "{server.url}"\n')
    done = genctl("run", "-p", "mine", "Hi")
    assert (done.status, server.asked) == (2, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('offload_folder = "/tmp/x"\ndevice_map = "auto"\n', "names a folder to write to"),
        ('adapter = "\\\\\\\\host\\\\share"\n', "cannot name a folder of another machine"),
        ('model = "//host/share"\n', "cannot name a folder of another machine"),
    ],
)
def test_what_else_reaches_out_or_writes_is_refused(project: Path, text: str, words: str) -> None:
    write(project / "genctl.toml", text)
    done = genctl("run", "Hi")
    assert done.status == 2
    assert words in done.err


def test_a_file_of_the_folder_cannot_switch_the_network_on(project: Path) -> None:
    write(user_file(), "offline = true\n")
    write(project / "genctl.toml", "offline = false\n")
    done = genctl("run", "Hi")
    assert done.status == 2
    assert "genctl.toml:1: offline = false: a file of this folder cannot switch the network on" in done.err
    assert genctl("run", "--no-offline", "-n", "1", "Hi").status == 0


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--allow-pickle"])
def test_a_flag_that_lets_code_run_holds_for_what_the_user_names(project: Path, flag: str) -> None:
    write(project / "genctl.toml", 'model = "builtin:stories"\n')
    done = genctl("run", flag, "-n", "1", "Hi")
    assert (done.status, done.err.splitlines()[0]) == (
        2,
        f'error: {flag} would run code that genctl.toml:1 names: model = "builtin:stories"',
    )
    assert genctl("run", flag, "-m", "builtin:stories", "-n", "1", "Hi").status == 0
    assert genctl("run", "-n", "1", "Hi").status == 0


def test_plugins_of_a_file_that_nobody_named_need_more_than_the_flag(project: Path) -> None:
    write(project / "genctl.toml", '[[processors]]\nuse = "os:system"\n')
    done = genctl("run", "--allow-plugins", "-n", "1", "Hi")
    assert done.status == 2
    assert "--allow-plugins would run code that genctl.toml:1 names: processors" in done.err
    (project / "genctl.toml").rename(project / "named.toml")
    write(project / "named.toml", '[[processors]]\nuse = "temperature"\ntemperature = 1.0\n')
    assert genctl("run", "-p", "./named.toml", "--allow-plugins", "-n", "1", "Hi").status == 0


def test_a_preset_that_hides_a_built_in_one_is_reported(project: Path) -> None:
    write(project / "presets/greedy.toml", "do_sample = false\n")
    done = genctl("run", "-p", "greedy", "-n", "1", "Hi")
    assert done.err == "note: preset greedy is presets/greedy.toml, which hides the built-in preset\n"
    write(user_file().parent / "presets/greedy.toml", "do_sample = false\n")
    assert "which hides your own preset of this name" in genctl("run", "-p", "greedy", "-n", "1", "Hi").err
    (project / "presets/greedy.toml").unlink()
    assert genctl("run", "-p", "greedy", "-n", "1", "Hi").err == ""


def test_a_preset_may_be_looked_at_whatever_it_sets(project: Path) -> None:
    write(project / "presets/there.toml", f'backend = "{ELSEWHERE}"\n')
    assert genctl("presets", "check", "there").status == 0
    assert ELSEWHERE in genctl("presets", "show", "there").out


def test_every_knob_has_a_row() -> None:
    """A new knob, or a new key of a list, is refused here until somebody decides what a found file may do with it."""
    knobs = {*params.knobs(params.Generation), *params.knobs(params.Runtime), *LISTS, *UNSAFE}
    keys = {key for names in LISTS.values() for keys in names.values() for key in keys}
    assert {*found_files.TABLE} == {*knobs, *keys, "about"}


def test_what_may_hold_text_is_no_free_knob_unless_its_text_stays_in_the_run() -> None:
    inside = {
        "dry_sequence_breakers", "negative_prompt", "watermarking_config", "bad_words", "logit_bias", "regex", "prefix",
        "force_words", "stop_strings", "stop_regex", "device", "device_map", "max_memory", "system", "grammar_after",
        "chat_template", "chat_template_kwargs", "tools", "thinking_tags", "thinking_end", "ban",
            "src_lang", "tgt_lang",
    }  # fmt: skip
    for kind in (params.Generation, params.Runtime):
        texts = {name for name, hint in params.hints(kind).items() if _may_be_text(hint)}
        assert {name for name in texts if found_files.TABLE[name].kind == "free"} <= inside


def _may_be_text(hint: object) -> bool:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return False
    return hint is str or any(_may_be_text(one) for one in arguments)
