"""The user's file, the file of --config and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.config.layers import flags_layer, model_layer, resolve, row_layer
from genctl.config.presets import file_layers, user_file
from genctl.config.settings import config_layers, environment_layer, standing_layers
from genctl.errors import PresetError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_whole_order_from_defaults_to_the_row(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    job = resolve(config_layers("genctl.toml"))
    assert (job.generation.temperature, job.generation.min_p) == (0.9, 0.05)
    write(project / "genctl.toml", 'preset = ["creative", "nucleus"]\n')
    assert resolve(config_layers("genctl.toml")).generation.top_p == 0.95


def test_nothing_stands_in_an_empty_project(project: Path) -> None:
    assert [layer for layer in standing_layers(config_layers()) if layer.values] == []


def test_a_settings_file_extends_none(project: Path) -> None:
    path = write(project / "genctl.toml", 'extends = "greedy"')
    with pytest.raises(PresetError, match=r"genctl.toml:1: unknown key extends: only a preset file extends another"):
        resolve(file_layers(path, key="preset"))


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
