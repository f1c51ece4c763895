"""Files are read where they are named, and a file that is not the user's own cannot grant trust."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from genctl import params
from genctl.commands.chat.chat import SAVED
from genctl.config.layers import flags_layer, model_layer, resolve, row_layer
from genctl.config.names import UNSAFE
from genctl.config.presets import file_layers, user_file
from genctl.config.settings import config_layers, environment_layer, objection, standing_layers
from genctl.errors import PresetError
from tests.cli.tool import genctl, ok
from tests.engines.server.stand_in import StandIn, running


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def server(project: Path) -> typing.Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


@pytest.mark.parametrize("command", ["run", "beam", "score", "tokens", "inspect-cache"])
def test_a_genctl_toml_that_nobody_named_is_a_note_and_nothing_else(project: Path, command: str) -> None:
    write(project / "genctl.toml", "max_new_tokens = 'not even valid'\n[")
    text = "Once upon a time"
    done = ok(command, text)
    note = "note: genctl.toml is not read; name it with --config genctl.toml\n"
    assert done.err.count(note) == 1
    assert note not in genctl(command, "-q", text).err


def test_one_note_for_all_runs_of_a_comparison_and_none_with_the_name(project: Path) -> None:
    write(project / "genctl.toml", "max_new_tokens = 1\n")
    runs = ("compare", "-p", "greedy", "-p", "nucleus", "Hi")
    assert genctl(*runs).err.count("is not read") == 1
    assert genctl(*runs, "--config", "genctl.toml").err.count("is not read") == 0


def test_config_names_a_file_above_the_users_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(user_file(), "seed = 1\nmax_new_tokens = 1\n")
    write(project / "genctl.toml", "max_new_tokens = 2\n")
    write(project / "other.toml", "max_new_tokens = 3\n")

    def origin(*flags: str) -> str:
        lines = genctl("run", "--dry", *flags, "Hi").out.splitlines()
        return next(line for line in lines if line.startswith("max_new_tokens")).split("# ")[1]

    assert origin() == f"{user_file()}:2"
    assert origin("--config", "genctl.toml") == "genctl.toml:1"
    monkeypatch.setenv("GENCTL_CONFIG", "other.toml")
    assert origin() == "other.toml:1"
    assert origin("--config", "genctl.toml") == "genctl.toml:1"
    assert origin("--config", "other.toml", "--config", "genctl.toml") == "genctl.toml:1"
    monkeypatch.setenv("GENCTL_CONFIG", "")
    assert origin() == f"{user_file()}:2"


@pytest.mark.parametrize(
    ("text", "words", "how"),
    [
        (None, "cannot read job.toml: no such file", "flag"),
        (None, "cannot read job.toml: no such file", "variable"),
        ("top_k = ", "job.toml:1:9: not valid TOML", "flag"),
        ("tpo_k = 3", "job.toml:1: unknown key tpo_k; did you mean top_k?", "variable"),
        ("[tool.genctl]\ntop_k = 3",
         "job.toml:1: unknown key tool: write the settings of [tool.genctl] as top-level keys", "flag"),
    ],
)  # fmt: skip
def test_a_config_file_that_cannot_be_used_is_an_error(
    project: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: str, how: str
) -> None:
    if text is not None:
        write(project / "job.toml", text)
    if how == "variable":
        monkeypatch.setenv("GENCTL_CONFIG", "job.toml")
    done = genctl("run", *(("--config", "job.toml") if how == "flag" else ()), "Hi")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {words}"), done.err


def test_a_preset_of_the_folder_needs_its_path(project: Path) -> None:
    write(project / "presets/mine.toml", "max_new_tokens = 1\n")
    done = genctl("run", "-p", "mine", "Hi")
    assert (done.status, done.err.splitlines()[1]) == (2, "hint: name the file: -p ./presets/mine.toml")
    done = genctl("compare", "-p", "greedy", "--strategy", "mine", "Hi")
    assert (done.status, done.err.splitlines()[1]) == (2, "hint: name the file: ./presets/mine.toml")
    assert genctl("run", "-p", "./presets/mine.toml", "Hi").err == ""
    write(project / "other.toml", "top_k = 3\n")
    assert genctl("run", "-p", "other", "Hi").err.endswith("hint: name the file: -p ./other.toml\n")


def test_a_preset_that_hid_another_one_is_a_note(project: Path) -> None:
    write(project / "presets/greedy.toml", "max_new_tokens = 'nonsense'\n")
    done = genctl("run", "-p", "greedy", "-n", "1", "Hi")
    assert (done.status, done.err) == (
        0,
        "note: presets/greedy.toml is not read; name it with -p ./presets/greedy.toml\n",
    )


def test_paths_in_a_settings_file_start_from_its_folder(project: Path) -> None:
    write(project / "a/job.toml", 'preset = "../b/mine.toml"\n')
    write(project / "b/mine.toml", 'extends = "base.toml"\n')
    write(project / "b/base.toml", "max_new_tokens = 1\n")
    assert "b/base.toml:1" in genctl("run", "--dry", "--config", "a/job.toml", "Hi").out


@pytest.mark.parametrize("key", UNSAFE)
def test_a_file_that_is_not_the_users_config_grants_no_trust(project: Path, key: str) -> None:
    write(project / "job.toml", f"{key} = true\n")
    write(user_file().parent / "presets/mine.toml", f"{key} = true\n")
    for flags in (("--config", "job.toml"), ("-p", "./job.toml"), ("-p", "mine")):
        done = genctl("run", *flags, "Hi")
        assert (done.status, done.out) == (2, "")
        assert f"{key} runs code that others wrote; only the flag and your own config.toml can enable it" in done.err
        assert f"hint: use --{key.replace('_', '-')}\n" in done.err


def test_the_users_own_config_grants_trust(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    write(project / "own.py", "def loud(history, scores):\n    return scores\n")
    write(project / "job.toml", '[[processors]]\nuse = "own:loud"\n')
    run = ("run", "-p", "./job.toml", "-n", "1", "Hi")
    assert "--allow-plugins" in genctl(*run).err
    write(user_file(), "allow_plugins = true\n")
    assert genctl(*run).status == 0
    write(user_file(), "allow_plugins = 'yes'\n")
    assert 'allow_plugins = "yes": must be true or false, not a string' in genctl(*run).err


@pytest.mark.parametrize("flags", [("--config", "job.toml"), ("-p", "./job.toml")])
def test_a_named_file_chooses_a_server_without_a_key_alone(
    project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    write(project / "job.toml", f'backend = "{server.url}"\n')
    assert genctl("run", *flags, "Hi").out == " one two three four five six\n"
    server.asked.clear()
    monkeypatch.setenv("GENCTL_API_KEY", "sesame-sesame")
    for command in ("run", "beam", *(["score"] if flags[0] == "--config" else [])):
        done = genctl(command, *flags, "Hi")
        assert (done.status, done.out, server.asked) == (2, "", [])
        assert done.err == (
            f'error: job.toml:1: backend = "{server.url}": this server would be sent your API key, and a file outside '
            "your own folder cannot choose it\n"
            "hint: name it with --backend, GENCTL_BACKEND or in your own config.toml\n"
        )
    assert genctl("run", *flags, "--backend", server.url, "Hi").status == 0


def test_a_run_of_compare_does_not_choose_it_either(
    project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENCTL_API_KEY", "sesame-sesame")
    write(project / "there.toml", f'backend = "{server.url}"\n')
    for sides in (("-p", "./there.toml"), ("--strategy", "x=@extends=./there.toml")):
        done = genctl("compare", "-p", "greedy", *sides, "Hi")
        assert (done.status, server.asked) == (2, [])
        assert "there.toml:1: backend" in done.err


@pytest.mark.parametrize("place", ["config.toml", "presets/mine.toml"])
def test_the_users_own_files_choose_any_server(
    project: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("GENCTL_API_KEY", "sesame-sesame")
    write(user_file().parent / place, f'backend = "{server.url}"\n')
    flags = () if place == "config.toml" else ("-p", "mine")
    assert genctl("run", *flags, "Hi").out == " one two three four five six\n"


def test_a_preset_may_be_looked_at_whatever_it_sets(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENCTL_API_KEY", "sesame-sesame")
    write(project / "there.toml", 'backend = "openai:http://127.0.0.1:9"\n')
    assert genctl("presets", "check", "./there.toml").status == 0
    assert "127.0.0.1:9" in genctl("presets", "show", "./there.toml").out


def test_what_may_hold_text_is_refused_in_a_saved_file_unless_its_text_stays_in_the_run() -> None:
    """A new knob that takes text fails here until somebody decides what a saved file may do with it."""
    inside = {
        "dry_sequence_breakers", "negative_prompt", "watermarking_config", "bad_words", "logit_bias", "regex", "prefix",
        "force_words", "stop_strings", "stop_regex", "device", "device_map", "max_memory", "system", "grammar_after",
        "chat_template", "chat_template_kwargs", "tools", "thinking_tags", "thinking_end", "ban",
        "src_lang", "tgt_lang",
    }  # fmt: skip
    for kind in (params.Generation, params.Runtime):
        texts = {name for name, hint in params.hints(kind).items() if _may_be_text(hint)}
        assert {name for name in texts if not objection(name, "/home/me/secret.txt", SAVED)} <= inside


def _may_be_text(hint: object) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return False
    return hint is str or any(_may_be_text(one) for one in typing.get_args(hint))


def test_the_whole_order_from_defaults_to_the_row(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place sets its own knob and all those that stand above it: whoever wins has the number of its place."""
    keys = [
        "batch_size", "max_new_tokens", "repetition_penalty", "min_length", "no_repeat_ngram_size", "stop_repeat_ngram",
        "seed",
    ]  # fmt: skip

    def text(height: int) -> str:
        return "".join(f"{key} = {height + 1}\n" for key in keys[height:])

    def values(height: int) -> dict[str, int]:
        return {key: height + 1 for key in keys[height:] if key not in ("batch_size",)}

    write(user_file(), text(1))
    write(project / "genctl.toml", text(2))
    write(project / "job.toml", text(3))
    for key in keys[4:]:
        monkeypatch.setenv(f"GENCTL_{key.upper()}", "5")
    model = {key: 1 for key in keys if key not in ("batch_size", "seed")}
    job = resolve(
        [
            model_layer(model),
            *standing_layers(config_layers("genctl.toml"), ["job.toml"]),
            flags_layer(values(5)),
            row_layer(values(6)),
        ]
    )
    found = {**vars(job.generation), **vars(job.runtime)}
    assert [found[key] for key in keys] == [None, 2, 3, 4, 5, 6, 7]
    assert job.origins["no_repeat_ngram_size"] == "GENCTL_NO_REPEAT_NGRAM_SIZE"
    assert job.origins["repetition_penalty"] == "genctl.toml:1"


def test_a_settings_file_stands_above_the_preset_that_it_names(project: Path) -> None:
    write(project / "genctl.toml", 'preset = "creative"\ntemperature = 0.9\n')
    job = resolve(config_layers("genctl.toml"))
    assert (job.generation.temperature, job.generation.min_p) == (0.9, 0.05)
    write(project / "genctl.toml", 'preset = ["creative", "nucleus"]\n')
    assert resolve(config_layers("genctl.toml")).generation.top_p == 0.95


def test_a_settings_file_extends_none(project: Path) -> None:
    path = write(project / "genctl.toml", 'extends = "greedy"')
    with pytest.raises(PresetError, match=r"genctl.toml:1: unknown key extends: only a preset file extends another"):
        resolve(file_layers(path, key="preset"))


def test_a_variable_sets_its_knob_and_is_read_as_set_reads() -> None:
    layer = environment_layer(
        {
            "GENCTL_MODEL": "builtin:stories", "GENCTL_TEMPERATURE": "0.5", "GENCTL_DO_SAMPLE": "true",
            "GENCTL_REVISION": "1234567", "GENCTL_STOP_STRINGS": '["a", "b"]', "GENCTL_SEED": "",
            "GENCTL_TEST_UPDATE_SCREENS": "1", "GENCTL_TEST_SOMETHING": "1", "PATH": "/bin",
        }
    )  # fmt: skip
    assert layer.values == {
        "model": "builtin:stories",
        "temperature": 0.5,
        "do_sample": True,
        "revision": "1234567",
        "stop_strings": ["a", "b"],
    }
    assert layer.place("temperature") == "GENCTL_TEMPERATURE"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("GENCTL_TEMPRATURE", "environment: GENCTL_TEMPRATURE names no setting; did you mean GENCTL_TEMPERATURE?"),
        ("GENCTL_", "environment: GENCTL_ names no setting"),
        ("GENCTL_Seed", "environment: GENCTL_Seed names no setting; did you mean GENCTL_SEED?"),
        ("GENCTL_ABOUT", "environment: GENCTL_ABOUT names no setting"),
    ],
)
def test_a_variable_of_no_knob_is_told(name: str, sentence: str) -> None:
    with pytest.raises(PresetError) as caught:
        resolve([environment_layer({name: "1"})])
    assert caught.value.message == sentence
