"""The user file, the project file and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.config.layers import flags_layer, model_layer, resolve, row_layer
from genctl.config.settings import environment_layer, file_layers, project_file, standing_layers, user_file
from genctl.errors import PresetError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_whole_order_from_defaults_to_the_row(project: Path, tmp_path: Path) -> None:
    """Each place sets its own knob and all those that stand above it: whoever wins has the number of its place."""
    keys = [
        "batch_size",
        "max_new_tokens",
        "repetition_penalty",
        "min_length",
        "no_repeat_ngram_size",
        "stop_repeat_ngram",
        "seed",
    ]

    def text(height: int) -> str:
        return "".join(f"{key} = {height + 1}\n" for key in keys[height:])

    def values(height: int) -> dict[str, int]:
        return {key: height + 1 for key in keys[height:] if key not in ("batch_size",)}

    write(user_file(), text(1))
    write(project / "genctl.toml", text(2))
    write(project / "job.toml", text(3))
    environment = {f"GENCTL_{key.upper()}": str(5) for key in keys[4:]} | {
        "XDG_CONFIG_HOME": str(tmp_path / "home/config")
    }
    model = {key: 1 for key in keys if key not in ("batch_size", "seed")}
    job = resolve(
        [
            model_layer(model),
            *standing_layers(["job.toml"], environment=environment),
            flags_layer(values(5)),
            row_layer(values(6)),
        ]
    )
    found = {**vars(job.generation), **vars(job.runtime)}
    assert {key: found[key] for key in keys} == {
        "batch_size": None,
        "max_new_tokens": 2,
        "repetition_penalty": 3,
        "min_length": 4,
        "no_repeat_ngram_size": 5,
        "stop_repeat_ngram": 6,
        "seed": 7,
    }
    assert job.origins["no_repeat_ngram_size"] == "GENCTL_NO_REPEAT_NGRAM_SIZE"
    assert job.origins["repetition_penalty"] == "genctl.toml:1"


def test_a_settings_file_stands_above_the_preset_that_it_names(project: Path) -> None:
    write(project / "genctl.toml", 'preset = "creative"\ntemperature = 0.9\n')
    job = resolve(standing_layers())
    assert (job.generation.temperature, job.generation.min_p) == (0.9, 0.05)
    write(project / "genctl.toml", 'preset = ["creative", "nucleus"]\n')
    assert resolve(standing_layers()).generation.top_p == 0.95


def test_nothing_stands_in_an_empty_project(project: Path) -> None:
    assert [layer for layer in standing_layers() if layer.values] == []


# -- the project file ----------------------------------------------------------------------------------------------
def test_the_nearest_file_up_to_the_root_of_the_repository_counts(project: Path, tmp_path: Path) -> None:
    deep = project / "a/b"
    deep.mkdir(parents=True)
    write(tmp_path / "genctl.toml", "seed = 0")
    (project / ".git").mkdir()
    assert project_file(deep) is None
    write(project / "genctl.toml", "seed = 1")
    assert project_file(deep) == project / "genctl.toml"
    write(project / "a/genctl.toml", "seed = 2")
    assert project_file(deep) == project / "a/genctl.toml"


def test_outside_a_repository_and_the_home_folder_only_the_current_folder_counts(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "genctl.toml", "seed = 0")
    assert project_file(project) is None
    assert project_file(tmp_path) == tmp_path / "genctl.toml"


def test_below_the_home_folder_the_search_ends_there(tmp_path: Path, project: Path) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir()
    write(tmp_path / "genctl.toml", "seed = 0")
    assert project_file(home / "work") is None
    write(home / "genctl.toml", "seed = 1")
    assert project_file(home / "work") == home / "genctl.toml"


def test_a_table_in_pyproject_counts_with_its_lines(project: Path) -> None:
    write(project / "pyproject.toml", '[project]\nname = "genctl-user"\n\n[tool.genctl]\nseed = 4\ntop_k = "x"\n')
    with pytest.raises(PresetError, match=r"^pyproject\.toml:6: top_k"):
        resolve(standing_layers())
    write(project / "pyproject.toml", "[tool.genctl]\nseed = 4\n")
    assert resolve(standing_layers()).runtime.seed == 4


@pytest.mark.parametrize("text", ["[project]\nname = 'x'", "[tool.other]\nseed = 4", "not toml at all", "# genctl\n"])
def test_a_pyproject_that_is_not_about_genctl_is_left_alone(project: Path, text: str) -> None:
    write(project / "pyproject.toml", text)
    assert project_file() is None


def test_a_pyproject_whose_table_is_none_is_told(project: Path) -> None:
    write(project / "pyproject.toml", "[tool]\ngenctl = 3")
    with pytest.raises(PresetError, match=r"^pyproject\.toml: tool\.genctl must be a table$"):
        resolve(standing_layers())


def test_two_project_files_in_one_folder_are_one_too_many(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.genctl]\nseed = 4\n")
    write(project / "genctl.toml", "seed = 5\n")
    with pytest.raises(PresetError, match=r"genctl\.toml and \[tool\.genctl\] in pyproject\.toml both hold settings"):
        resolve(standing_layers())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("preset = 3", "genctl.toml:1: preset = 3: must be the name of a preset, or a list of names"),
        (
            'extends = "greedy"',
            "genctl.toml:1: unknown key extends: "
            'only a preset file extends another (a settings file says preset = "NAME")',
        ),
        (
            "trust_remote_code = false",
            "genctl.toml:1: trust_remote_code runs code that others wrote; "
            "only the flag --trust-remote-code can enable it",
        ),
        ("seed = ", "genctl.toml:1:8: not valid TOML: invalid value at the end of the file"),
    ],
)
def test_a_wrong_settings_file_is_told(project: Path, text: str, sentence: str) -> None:
    path = write(project / "genctl.toml", text)
    with pytest.raises(PresetError) as caught:
        resolve(file_layers(path))
    assert caught.value.message == sentence


def test_the_mistakes_of_all_files_are_told_at_once(project: Path) -> None:
    write(user_file(), "seed = ")
    write(project / "genctl.toml", "= 5")
    with pytest.raises(PresetError) as caught:
        resolve(
            standing_layers(
                ["nuclues", "none.toml"],
                environment={"GENCTL_TPO_K": "5", "XDG_CONFIG_HOME": str(user_file().parent.parent)},
            )
        )
    lines = caught.value.message.splitlines()
    assert len(lines) == 5
    assert lines[0].endswith("config.toml:1:8: not valid TOML: invalid value at the end of the file")
    assert lines[1].startswith("genctl.toml:1:1: not valid TOML")
    assert lines[2].startswith("preset nuclues: no such preset; did you mean nucleus?")
    assert lines[3] == "none.toml: no such file"
    assert lines[4] == "environment: GENCTL_TPO_K names no setting; did you mean GENCTL_TOP_K?"


# -- the environment -----------------------------------------------------------------------------------------------
def test_a_variable_sets_its_knob_and_is_read_as_set_reads() -> None:
    layer = environment_layer(
        {
            "GENCTL_MODEL": "builtin:stories",
            "GENCTL_TEMPERATURE": "0.5",
            "GENCTL_DO_SAMPLE": "true",
            "GENCTL_REVISION": "1234567",
            "GENCTL_STOP_STRINGS": '["a", "b"]',
            "GENCTL_SEED": "",
            "GENCTL_TEST_UPDATE_SCREENS": "1",
            "GENCTL_TEST_SOMETHING": "1",
            "PATH": "/bin",
        }
    )
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


def test_a_wrong_value_names_the_variable() -> None:
    with pytest.raises(PresetError, match=r'^GENCTL_TOP_K: top_k = "many": must be a whole number, not a string$'):
        resolve([environment_layer({"GENCTL_TOP_K": "many"})])


def test_the_environment_cannot_make_us_run_code() -> None:
    with pytest.raises(PresetError, match=r"^GENCTL_TRUST_REMOTE_CODE: .*only the flag"):
        resolve([environment_layer({"GENCTL_TRUST_REMOTE_CODE": "true"})])
