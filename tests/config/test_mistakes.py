"""Hostile and mistyped presets, each with the sentence that a user should read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genctl.config import presets
from genctl.config.layers import Layer, flags_layer, resolve
from genctl.config.presets import user_file
from genctl.config.settings import config_layers, environment_layer, standing_layers
from genctl.errors import PresetError, reason_of

# One value each, and what is wrong with it: the sentence begins with `job.toml:1: ` and the line.
VALUES = [
    ("temperature = -1", "must be at least 0"),
    ("max_new_tokens = 0", "must be at least 1"),
    ("repetition_penalty = 0", "must be above 0"),
    ("epsilon_cutoff = 1", "must be below 1"),
    ("seed = -1", "must be at least 0"),
    ("seed = 18446744073709551616", "must be below 18446744073709551616"),
    ("temperature = nan", "must be a number, not nan"),
    ("max_new_tokens = 1" + "0" * 30, "is too large"),
    ("exponential_decay_length_penalty = [-1, 1.1]", "item 1 must be at least 0"),
    ('top_k = "5"', "must be a whole number, not a string"),
    ("top_k = true", "must be a whole number, not a boolean"),
    ("top_k = 5.0", "must be a whole number, not a decimal number"),
    ('temperature = "hot"', "must be a number, not a string"),
    ('do_sample = "true"', "must be true or false, not a string"),
    ("model = 5", "must be a string, not a whole number"),
    ("top_p = [0.9]", "must be a number, not a list"),
    ("top_p = 2024-01-01", "must be a number, not a date or time"),
    ("model = 07:32:00", "must be a string, not a date or time"),
    ('eos_token_id = [1, "a"]', "item 2 must be a whole number, not a string"),
    ('eos_token_id = "</s>"', "must be a whole number or a list of whole numbers, not a string"),
    ("bad_words_ids = [1, 2]", "item 1 must be a list of whole numbers, not a whole number"),
    ("exponential_decay_length_penalty = [5]", "has too few items; must be a list of 2 (a whole number, a number)"),
    ("sequence_bias = [[[1], 2.0, 3]]",
     "item 1 has too many items; must be a list of 2 (a list of whole numbers, a number)"),
    ('dtype = "int3"', "must be one of auto, float32, bfloat16, float16"),
    ('dtype = "floatt16"', "did you mean float16? It must be one of auto, float32, bfloat16, float16"),
    ('dtype = "fp16"', "did you mean float16? It must be one of auto, float32, bfloat16, float16"),
    ('about = ["a"]', "must be a string, not a list"),
    ('processors = "top_k"', "must be a list of tables ([[processors]])"),
    ("extends = 3", "must be the name of a preset, or a list of names"),
    ('extends = ""', "must be the name of a preset, or a list of names"),
    ('extends = "../other.toml"', "leads out of the folder of the file"),
    ('extends = "/etc/passwd"', "leads out of the folder of the file"),
]  # fmt: skip
# What the file holds, and every line of the error. The file is job.toml; `.toml` beside it may be extended.
MISTAKES: list[tuple[str, str | None]] = [
    ("do_sample = true\ntop_p = 1.5", "job.toml:2: top_p = 1.5: must be at most 1"),
    ("logit_bias = {a = nan}", "job.toml:1: logit_bias = { a = nan }: key a must be a number, not nan"),
    ("temperature = 1" + "0" * 400, None),
    ("top_k = " + "9" * 5000, "job.toml: not valid TOML: a number with too many digits"),
    ("[temperature]\nvalue = 1", "job.toml:1: temperature = { value = 1 }: must be a number, not a table"),
    ("watermarking_config = {when = 2024-01-01}",
     "job.toml:1: watermarking_config = { when = 2024-01-01 }: key when cannot be a date or time"),
    ('logit_bias = {yes = "a lot"}',
     'job.toml:1: logit_bias = { yes = "a lot" }: key yes must be a number, not a string'),
    ("temprature = 0.5", "job.toml:1: unknown key temprature; did you mean temperature?"),
    ("max-new-tokens = 5", "job.toml:1: unknown key max-new-tokens; did you mean max_new_tokens?"),
    ("Top_P = 0.9", "job.toml:1: unknown key Top_P; did you mean top_p?"),
    ("n_predict = 5", "job.toml:1: unknown key n_predict; did you mean max_new_tokens?"),
    ("repeat_penalty = 1.1", "job.toml:1: unknown key repeat_penalty; did you mean repetition_penalty?"),
    ("zzzzzz = 1", "job.toml:1: unknown key zzzzzz"),
    ('"" = 1', 'job.toml:1: unknown key ""'),
    ('"\\u001b[31m" = 1', 'job.toml: unknown key "\\u001B[31m"'),
    ('"a\\nb" = 1', 'job.toml: unknown key "a\\nb"'),
    ("[generation]\ntop_k = 5", "job.toml:1: unknown key generation: write settings as top-level keys, not in a table"),
    ("sampling.top_k = 5", "job.toml:1: unknown key sampling: write settings as top-level keys, not in a table"),
    ('preset = "greedy"', 'job.toml:1: unknown key preset: a preset says extends = "NAME"'),
    (
        "output_attentions = true",
        "job.toml:1: output_attentions is not supported: "
        "genctl does not return attention maps; use transformers for those",
    ),
    ('[processors]\nuse = "top_k"', "job.toml:1: processors must be a list of tables ([[processors]])"),
    ('processors = ["top_k"]', 'job.toml:1: processors, item 1: must be a table with use = "NAME", not "top_k"'),
    ('[[processors]]\nuse = "top_k"\n[[processors]]\ntop_k = 5', 'job.toml:1: processors, item 2: needs use = "NAME"'),
    ("[[processors]]\nuse = 5", 'job.toml:1: processors, item 1: needs use = "NAME", not a whole number'),
    ('[[stopping]]\nuse = " "', 'job.toml:1: stopping, item 1: needs use = "NAME"'),
    ('[[stopping]]\nuse = "mine:Own"\nuntil = 2024-01-01', "job.toml:1: stopping, item 1: cannot be a date or time"),
    ('[[processors]]\nuse = "typical"',
     'job.toml:1: processors, item 1: unknown processor "typical"; did you mean typical_p?'),
    ('[[stopping]]\nuse = "stop_string"',
     'job.toml:1: stopping, item 1: unknown stopping criterion "stop_string"; did you mean stop_strings?'),
    ('[[processors]]\nuse = "top_p"\ntemperature = 0.9',
     "job.toml:1: processors, item 1: top_p has no key temperature; it takes top_p"),
    ('[[processors]]\nuse = "dry"\ndry_bse = 2',
     "job.toml:1: processors, item 1: dry has no key dry_bse; did you mean dry_base?"),
    ('[[processors]]\nuse = "top_p"\ntop_p = 1.5',
     "job.toml:1: processors, item 1: top_p: top_p = 1.5: must be at most 1"),
    ('[[stopping]]\nuse = "stop_mean_logprob"\nmin_tokens = 2024-01-01',
     "job.toml:1: stopping, item 1: stop_mean_logprob: min_tokens = 2024-01-01: cannot be a date or time"),
    ('[[procesors]]\nuse = "top_p"', "job.toml:1: unknown key procesors; did you mean processors?"),
    ("top_k =", "job.toml:1:8: not valid TOML: invalid value at the end of the file"),
    ("model = gpt2", "job.toml:1:9: not valid TOML: invalid value"),
    ("top_k = 1\ntop_k = 2", "job.toml:2:10: not valid TOML: cannot overwrite a value at the end of the file"),
    ('system = "hi\ntop_k = 5', None),
    ("[[processors]", None),
    ('about = "\x07"', None),
    ('{"top_k": 5}', None),
    ("top_k: 5", None),
    ("a = " + "[" * 5000, "job.toml: not valid TOML: nested too deeply"),
    ('extends = "job.toml"', "job.toml: extends itself: job.toml -> job.toml"),
    ('extends = "none.toml"', "cannot read none.toml: no such file"),
    ('extends = "a\\u0000b.toml"', None),
    ('extends = "two words"', 'job.toml:1: extends: preset "two words": a name has only letters, digits, _, . and -'),
    ('extends = ".."', 'job.toml:1: extends: preset "..": a name has only letters, digits, _, . and -'),
    ("temperature = 0.7", "temperature = 0.7 (job.toml:1) has no effect while do_sample is false (default)"),
    ("do_sample = false\ntop_p = 0.9", "top_p = 0.9 (job.toml:2) has no effect while do_sample is false (job.toml:1)"),
    ("do_sample = true\ntemperature = 0\ntop_p = 0.9",
     "top_p = 0.9 (job.toml:3) has no effect while temperature is 0 (job.toml:2)"),
    ("max_new_tokens = 5\nmax_length = 9",
     "max_new_tokens = 5 (job.toml:1) cannot be combined with max_length = 9 (job.toml:2): both limit the length"),
    ("max_new_tokens = 5\nmin_new_tokens = 9",
     "min_new_tokens = 9 (job.toml:2) exceeds max_new_tokens = 5 (job.toml:1)"),
    ("max_length = 5\nmin_length = 9", "min_length = 9 (job.toml:2) exceeds max_length = 5 (job.toml:1)"),
    ("num_return_sequences = 3",
     "num_return_sequences = 3 (job.toml:1) would return identical sequences while do_sample is false (default)"),
    ("do_sample = true\nmirostat_eta = 0.2", "mirostat_eta = 0.2 (job.toml:2) has no effect without mirostat_tau"),
    ('negative_prompt = "a"', 'negative_prompt = "a" (job.toml:1) has no effect without guidance_scale'),
    (
        'system = "hi"\nchat = false',
        'system = "hi" (job.toml:1) cannot be combined with chat = false (job.toml:2): '
        "only a chat has a system message",
    ),
]  # fmt: skip
# Where the wording is another library's, or depends on its version: only where, in one line.
LOOSE = "job.toml"


def mistakes_of(text: str) -> PresetError:
    Path("job.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PresetError) as caught:
        resolve(presets.load(["job.toml"]))
    return caught.value


@pytest.mark.parametrize(("text", "words"), VALUES)
def test_a_wrong_value_is_one_sentence(project: Path, text: str, words: str) -> None:
    assert mistakes_of(text).message == f"job.toml:1: {text}: {words}"


@pytest.mark.parametrize(("text", "sentence"), MISTAKES, ids=[text[:30] for text, _ in MISTAKES])
def test_a_mistake_is_told_in_one_sentence(project: Path, text: str, sentence: str | None) -> None:
    message = mistakes_of(text).message
    assert "\n" not in message
    assert message.isprintable()
    if sentence is None:
        assert message.startswith(LOOSE)
        assert len(message) < 300
    else:
        assert message == sentence


def test_contradictions_are_told_beside_mistakes_but_not_about_the_mistaken(project: Path) -> None:
    message = mistakes_of('do_sample = "yes"\ntop_p = 0.5\nmax_new_tokens = 3\nmin_new_tokens = 4').message
    assert message.splitlines() == [
        'job.toml:1: do_sample = "yes": must be true or false, not a string',
        "min_new_tokens = 4 (job.toml:4) exceeds max_new_tokens = 3 (job.toml:3)",
    ]


def test_hints_marks_and_repetitions(project: Path) -> None:
    assert mistakes_of("temperature = 0.7").hint == "add do_sample = true"
    assert mistakes_of('[[processors]]\nuse = "top_k"\ntop_k = 3\n' * 3).message.count("top_k") == 1
    assert mistakes_of("do_sample = true\ntemperature = 0\ntop_p = 0.9").hint == "set a temperature above 0"
    Path("job.toml").write_bytes(b"\xef\xbb\xbftop_k = 50\r\nmax_new_tokens = 3\r\n")
    assert resolve(presets.load(["job.toml"])).generation.max_new_tokens == 3
    Path("job.toml").write_text("=")
    assert len(mistakes(presets.load(["job.toml", "job.toml"]))) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b"seed = 1\n'\xff'"), r"^job\.toml:2: not UTF-8 text \(byte 0xff\)$"),
        (lambda path: path.write_text("#" * (1 << 20) + "\n"), "larger than 1 MiB"),
        (lambda path: path.mkdir(), r"^cannot read job\.toml: a folder, not a file$"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to("job.toml"), r"^cannot read job\.toml: "),
    ],
)
def test_what_is_no_text_of_a_bounded_size_is_no_preset(
    project: Path, make: Callable[[Path], object], words: str
) -> None:
    make(Path("job.toml"))
    with pytest.raises(PresetError, match=words):
        resolve(presets.load(["job.toml"]))


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
