"""Every mistake of every layer is reported in one error, and none in the words of a library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from genctl.config import presets
from genctl.config.layers import Layer, flags_layer, resolve
from genctl.config.presets import user_file
from genctl.config.settings import config_layers, environment_layer, standing_layers
from genctl.errors import PresetError, reason_of

# Words of pydantic, tomllib, json, Python and the command-line parser.
FOREIGN = re.compile(
    r"Value error|Input should|unable to parse|Expecting|codec|Errno|KeyError|Traceback|Invalid value for|pydantic"
    r"|list\[|<class|NoneType|'utf-8'|\bstr\b|\bint\b|\bdict\b"
)


def mistakes(layers: list[Layer]) -> list[str]:
    with pytest.raises(PresetError) as caught:
        resolve(layers)
    assert not FOREIGN.search(caught.value.message), caught.value.message
    assert caught.value.exit == 2
    return caught.value.message.splitlines()


def test_five_mistakes_of_one_preset_are_five_lines(project: Path) -> None:
    Path("job.toml").write_text(
        'extends = "nucleos"\ntemprature = 0.5\nzzz = 3\ntop_k = "ten"\n[[processors]]\nuse = "top_q"\n'
    )
    lines = mistakes(presets.load(["job.toml"]))
    assert len(lines) == 5
    assert lines[0].startswith("job.toml:1: extends: preset nucleos: no such preset; did you mean nucleus? (looked in")
    assert lines[1:] == [
        "job.toml:2: unknown key temprature; did you mean temperature?",
        "job.toml:3: unknown key zzz",
        'job.toml:4: top_k = "ten": must be a whole number, not a string',
        'job.toml:5: processors, item 1: unknown processor "top_q"; did you mean top_p?',
    ]


def test_every_layer_is_checked_whatever_is_wrong_with_the_others(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file().parent.mkdir(parents=True)
    user_file().write_text("sed = 3")
    Path("genctl.toml").write_text('preset = 3\ndtype = "bfloat15"')
    Path("a.toml").write_text("top_p = [\n")
    Path("b.toml").write_text('extends = ["a.toml", "greeedy"]\nmax_new_tokens = "ten"')
    monkeypatch.setenv("GENCTL_TPO_P", "1")
    monkeypatch.setenv("GENCTL_SEED", "x")
    lines = mistakes(
        [
            *standing_layers(config_layers("genctl.toml"), ["a.toml", "b.toml", "nope"]),
            flags_layer({"cache_implementation": "dinamic", "temperature": 0.5}),
            *presets.parse_sets(["top_k", "top_p=3"]),
        ]
    )
    for line, words in zip(
        lines,
        [
            "config.toml:1: unknown key sed; did you mean seed?",
            "genctl.toml:1: preset = 3: must be the name of a preset, or a list of names",
            'genctl.toml:2: dtype = "bfloat15": did you mean bfloat16? It must be one of auto, ',
            "a.toml:2:1: not valid TOML: ",
            "b.toml:1: extends: preset greeedy: no such preset; did you mean greedy?",
            'b.toml:2: max_new_tokens = "ten": must be a whole number, not a string',
            "preset nope: no such preset",
            "environment: GENCTL_TPO_P names no setting; did you mean GENCTL_TOP_P?",
            'GENCTL_SEED: seed = "x": must be a whole number, not a string',
            'flag --cache: cache_implementation = "dinamic": did you mean dynamic? It must be one of dynamic,',
            '--set "top_k": must be key=value',
            "--set top_p: top_p = 3: must be at most 1",
        ],
        strict=True,
    ):
        assert words in line


def test_what_a_lost_file_may_have_set_is_no_conflict(project: Path) -> None:
    """A preset that cannot be read may hold do_sample = true: its absence is not reported as a second mistake."""
    Path("job.toml").write_text("do_sample = true\n=")
    assert len(mistakes([*presets.load(["job.toml"]), flags_layer({"temperature": 0.5})])) == 1
    Path("job.toml").write_text("do_smaple = true\ntemperature = 0.5")
    assert mistakes(presets.load(["job.toml"])) == ["job.toml:1: unknown key do_smaple; did you mean do_sample?"]


def test_the_same_mistake_is_reported_once(project: Path) -> None:
    Path("job.toml").write_text("=")
    assert len(mistakes(presets.load(["job.toml", "job.toml"]))) == 1


def test_all_mistakes_of_a_list_are_reported(project: Path) -> None:
    Path("job.toml").write_text(
        '[[processors]]\nuse = "top_q"\n[[processors]]\nuse = "xtc"\nxtc_probability = 2\nthreshold = 1\n'
        '[[stopping]]\nus = "max_time"\n[[stopping]]\nuse = "qqq"'
    )
    assert mistakes(presets.load(["job.toml"])) == [
        'job.toml:1: processors, item 1: unknown processor "top_q"; did you mean top_p?',
        "job.toml:1: processors, item 2: xtc: xtc_probability = 2: must be at most 1",
        "job.toml:1: processors, item 2: xtc has no key threshold; did you mean xtc_threshold?",
        'job.toml:7: stopping, item 1: needs use = "NAME"; did you mean use?',
        'job.toml:7: stopping, item 2: unknown stopping criterion "qqq"; there are max_time, stop_strings, '
        "stop_token_ids, stop_regex, stop_mean_logprob, stop_repeat_ngram, and package.module:Class",
    ]


def test_a_mistake_in_a_list_has_the_line_of_the_list(project: Path) -> None:
    Path("job.toml").write_text(
        'seed = 1\n[[processors]]\nuse = "top_k"\n'
        '[[processors]]\nuse = "top_p"\n\ntop_p = 7\n[processors.deep]\na = 1\n'
    )
    assert mistakes(config_layers("job.toml")) == [
        "job.toml:2: processors, item 2: top_p: top_p = 7: must be at most 1",
        "job.toml:2: processors, item 2: top_p has no key deep; it takes top_p",
    ]


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("dtype", "bfloat15", "bfloat16"),
        ("dtype", "BF16", "bfloat16"),
        ("sampler", "inverse_cdf", "inverse-cdf"),
        ("batch_size", "atuo", "auto"),
        ("early_stopping", "nevver", "never"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_nearest_first(key: str, value: str, near: str) -> None:
    (line,) = mistakes([environment_layer({f"GENCTL_{key.upper()}": value})])
    assert line.startswith(f'GENCTL_{key.upper()}: {key} = "{value}": did you mean {near}? It must be ')


def test_an_installed_processor_needs_no_entry_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints([EntryPoint("loud", "mine:Loud", "genctl.processors")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: points.select(**wanted))
    job = resolve([Layer("a.toml", {"processors": [{"use": "loud", "by": 2}]})])
    assert job.processors == ({"use": "loud", "by": 2},)
    (line,) = mistakes([Layer("a.toml", {"processors": [{"use": "louder"}]})])
    assert line == 'a.toml: processors, item 1: unknown processor "louder"; did you mean loud?'


def test_values_in_a_list_have_the_types_of_their_knobs() -> None:
    job = resolve([Layer("a.toml", {"do_sample": True, "processors": [{"use": "temperature", "temperature": 2}]})])
    assert job.processors is not None
    assert type(job.processors[0]["temperature"]) is float


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("No such file: 'x'"), "no such file"),
        (OSError(13, "Permission denied"), "Permission denied"),
        (OSError("[Errno 5]"), "the system gives no reason"),
        (RecursionError("maximum recursion depth"), "nested too deeply"),
        (ValueError("embedded null byte"), "not a file name"),
        (ValueError("Exceeds the limit (4300 digits)"), "a number has too many digits"),
    ],
)
def test_the_reason_of_an_error_is_in_plain_words(error: Exception, words: str) -> None:
    assert reason_of(error) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON: expected a value at column 1"),
        ('{"a" 1}', "not JSON: expected a colon at column 6"),
        ('{"a": 1 "b"}', "not JSON: expected a comma or a closing bracket at column 9"),
        ("{a: 1}", "not JSON: expected a key in double quotes at column 2"),
        ('["a', "not JSON: a string is not closed; it begins at column 2"),
        ('"\t"', "not JSON: a control character in a string at column 2"),
        ('"\\q"', "not JSON: an invalid escape in a string at column 2"),
        ("1\n2", "not JSON: text after the end of the value at line 2, column 1"),
    ],
)
def test_what_is_wrong_with_json_is_in_plain_words(text: str, words: str) -> None:
    import json

    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(text)
    assert reason_of(caught.value) == words


LISTED = {"processors": [{"use": "top_p", "top_p": 0.9}, {"use": "dynatemp"}], "do_sample": True}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"top_k": 3}, "top_k = 3 (flag --top-k) has no effect: the list of processors (a.toml) leaves it out"),
        ({"thinking_budget": 3}, "leaves it out"),
        ({"dry_multiplier": 0.5}, "leaves it out"),
        ({"top_p": 0.5}, "top_p = 0.5 (flag --top-p) has no effect: the list of processors (a.toml) sets it"),
        ({"stop_strings": ["x"]}, "the list of stopping (a.toml) sets it"),
        ({"top_p": 0.9}, ""),
        ({"temperature": 2.0}, ""),
        ({"temperature": 0.0}, ""),
        ({"dry_multiplier": 0.0}, ""),
        ({"top_k": 3, "penalty_alpha": 0.6, "do_sample": False}, ""),
    ],
)
def test_what_a_list_leaves_out_or_sets_is_refused_beside_it(setting: dict[str, Any], words: str) -> None:
    stopping = {"stopping": [{"use": "stop_strings", "stop_strings": ["."]}]}
    layers = [Layer("a.toml", {**LISTED, **stopping}), Layer("flag", setting, {}, "command")]
    if words:
        (line,) = mistakes(layers)
        assert words in line
    else:
        resolve(layers)


def test_a_later_list_switches_off_what_it_leaves_out() -> None:
    resolved = resolve([Layer("base.toml", {"top_k": 3, "prefix": "x"}), Layer("a.toml", LISTED)])
    assert (resolved.generation.top_k, resolved.generation.prefix) == (50, None)
