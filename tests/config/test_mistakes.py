"""Hostile and mistyped presets, each with the sentence that a user should read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genctl.config import presets
from genctl.config.layers import resolve
from genctl.errors import PresetError

# One value each, and what is wrong with it: the sentence begins with `job.toml:1: ` and the line.
VALUES = [
    ("temperature = -1", "must be at least 0"),
    ("top_k = -5", "must be at least 0"),
    ("max_new_tokens = 0", "must be at least 1"),
    ("repetition_penalty = 0", "must be above 0"),
    ("epsilon_cutoff = 1", "must be below 1"),
    ("num_return_sequences = 0", "must be at least 1"),
    ("seed = -1", "must be at least 0"),
    ("seed = 18446744073709551616", "must be below 18446744073709551616"),
    ("temperature = -inf", "must be at least 0"),
    ("temperature = nan", "must be a number, not nan"),
    ("max_new_tokens = 1" + "0" * 30, "is too large"),
    ("exponential_decay_length_penalty = [-1, 1.1]", "item 1 must be at least 0"),
    ('top_k = "5"', "must be a whole number, not a string"),
    ("top_k = true", "must be a whole number, not a boolean"),
    ("top_k = 5.0", "must be a whole number, not a decimal number"),
    ('temperature = "hot"', "must be a number, not a string"),
    ("temperature = true", "must be a number, not a boolean"),
    ('do_sample = "true"', "must be true or false, not a string"),
    ("do_sample = 1", "must be true or false, not a whole number"),
    ("model = 5", "must be a string, not a whole number"),
    ("top_p = [0.9]", "must be a number, not a list"),
    ("top_p = 2024-01-01", "must be a number, not a date or time"),
    ("model = 07:32:00", "must be a string, not a date or time"),
    ('eos_token_id = [1, "a"]', "item 2 must be a whole number, not a string"),
    ('eos_token_id = "</s>"', "must be a whole number or a list of whole numbers, not a string"),
    ("bad_words_ids = [1, 2]", "item 1 must be a list of whole numbers, not a whole number"),
    ("bad_words = [3]", "item 1 must be a string, not a whole number"),
    ("exponential_decay_length_penalty = [5]", "has too few items; must be a list of 2 (a whole number, a number)"),
    (
        "sequence_bias = [[[1], 2.0, 3]]",
        "item 1 has too many items; must be a list of 2 (a list of whole numbers, a number)",
    ),
    ('dtype = "int3"', "must be one of auto, float32, bfloat16, float16"),
    ('dtype = "floatt16"', "did you mean float16? It must be one of auto, float32, bfloat16, float16"),
    ('dtype = "fp16"', "did you mean float16? It must be one of auto, float32, bfloat16, float16"),
    ("about = 3", "must be a string, not a whole number"),
    ('about = ["a"]', "must be a string, not a list"),
    ('processors = "top_k"', "must be a list of tables ([[processors]])"),
    ("extends = 3", "must be the name of a preset, or a list of names"),
    ('extends = ""', "must be the name of a preset, or a list of names"),
    ('extends = "../other.toml"', "leads out of the folder of the file"),
    ('extends = "/etc/passwd"', "leads out of the folder of the file"),
]
# What the file holds, and every line of the error. The file is job.toml; `.toml` beside it may be extended.
MISTAKES: list[tuple[str, str, str | None]] = [
    # -- bounds ----------------------------------------------------------------------------------------------------
    ("above a bound", "do_sample = true\ntop_p = 1.5", "job.toml:2: top_p = 1.5: must be at most 1"),
    (
        "nan in a table",
        "logit_bias = {a = nan}",
        "job.toml:1: logit_bias = { a = nan }: key a must be a number, not nan",
    ),
    ("huge number", "temperature = 1" + "0" * 400, None),
    ("number of 5000 digits", "top_k = " + "9" * 5000, "job.toml: not valid TOML: a number with too many digits"),
    # -- types -----------------------------------------------------------------------------------------------------
    (
        "table for a number",
        "[temperature]\nvalue = 1",
        "job.toml:1: temperature = { value = 1 }: must be a number, not a table",
    ),
    (
        "date inside a table",
        "watermarking_config = {when = 2024-01-01}",
        "job.toml:1: watermarking_config = { when = 2024-01-01 }: key when cannot be a date or time",
    ),
    (
        "string for a bias",
        'logit_bias = {yes = "a lot"}',
        'job.toml:1: logit_bias = { yes = "a lot" }: key yes must be a number, not a string',
    ),
    # -- keys ------------------------------------------------------------------------------------------------------
    ("misspelt key", "temprature = 0.5", "job.toml:1: unknown key temprature; did you mean temperature?"),
    ("dashes", "max-new-tokens = 5", "job.toml:1: unknown key max-new-tokens; did you mean max_new_tokens?"),
    ("capitals", "Top_P = 0.9", "job.toml:1: unknown key Top_P; did you mean top_p?"),
    ("another tool's name", "n_predict = 5", "job.toml:1: unknown key n_predict; did you mean max_new_tokens?"),
    (
        "another tool's penalty",
        "repeat_penalty = 1.1",
        "job.toml:1: unknown key repeat_penalty; did you mean repetition_penalty?",
    ),
    ("nothing near", "zzzzzz = 1", "job.toml:1: unknown key zzzzzz"),
    ("empty key", '"" = 1', 'job.toml:1: unknown key ""'),
    ("key with an escape sequence", '"\\u001b[31m" = 1', 'job.toml: unknown key "\\u001B[31m"'),
    ("key with a line end", '"a\\nb" = 1', 'job.toml: unknown key "a\\nb"'),
    (
        "knobs in a table",
        "[generation]\ntop_k = 5",
        "job.toml:1: unknown key generation: write settings as top-level keys, not in a table",
    ),
    (
        "dotted key",
        "sampling.top_k = 5",
        "job.toml:1: unknown key sampling: write settings as top-level keys, not in a table",
    ),
    ("settings key in a preset", 'preset = "greedy"', 'job.toml:1: unknown key preset: a preset says extends = "NAME"'),
    (
        "refused key",
        "output_attentions = true",
        "job.toml:1: output_attentions is not supported: "
        "genctl does not return attention maps; use transformers for those",
    ),
    # -- lists of processors ---------------------------------------------------------------------------------------
    (
        "processors is one table",
        '[processors]\nuse = "top_k"',
        "job.toml:1: processors must be a list of tables ([[processors]])",
    ),
    (
        "processors of strings",
        'processors = ["top_k"]',
        'job.toml:1: processors, item 1: must be a table with use = "NAME", not "top_k"',
    ),
    (
        "processor without use",
        '[[processors]]\nuse = "top_k"\n[[processors]]\ntop_k = 5',
        'job.toml:1: processors, item 2: needs use = "NAME"',
    ),
    (
        "use is a number",
        "[[processors]]\nuse = 5",
        'job.toml:1: processors, item 1: needs use = "NAME", not a whole number',
    ),
    ("use is empty", '[[stopping]]\nuse = " "', 'job.toml:1: stopping, item 1: needs use = "NAME"'),
    (
        "date in a processor",
        '[[stopping]]\nuse = "mine:Own"\nuntil = 2024-01-01',
        "job.toml:1: stopping, item 1: cannot be a date or time",
    ),
    (
        "misspelt processor",
        '[[processors]]\nuse = "typical"',
        'job.toml:1: processors, item 1: unknown processor "typical"; did you mean typical_p?',
    ),
    (
        "misspelt criterion",
        '[[stopping]]\nuse = "stop_string"',
        'job.toml:1: stopping, item 1: unknown stopping criterion "stop_string"; did you mean stop_strings?',
    ),
    (
        "key of another processor",
        '[[processors]]\nuse = "top_p"\ntemperature = 0.9',
        "job.toml:1: processors, item 1: top_p has no key temperature; it takes top_p",
    ),
    (
        "misspelt key of a processor",
        '[[processors]]\nuse = "dry"\ndry_bse = 2',
        "job.toml:1: processors, item 1: dry has no key dry_bse; did you mean dry_base?",
    ),
    (
        "value of a processor",
        '[[processors]]\nuse = "top_p"\ntop_p = 1.5',
        "job.toml:1: processors, item 1: top_p: top_p = 1.5: must be at most 1",
    ),
    (
        "date for a criterion",
        '[[stopping]]\nuse = "stop_mean_logprob"\nmin_tokens = 2024-01-01',
        "job.toml:1: stopping, item 1: stop_mean_logprob: min_tokens = 2024-01-01: cannot be a date or time",
    ),
    (
        "misspelt list",
        '[[procesors]]\nuse = "top_p"',
        "job.toml:1: unknown key procesors; did you mean processors?",
    ),
    # -- TOML ------------------------------------------------------------------------------------------------------
    ("no value", "top_k =", "job.toml:1:8: not valid TOML: invalid value at the end of the file"),
    ("bare word", "model = gpt2", "job.toml:1:9: not valid TOML: invalid value"),
    ("twice", "top_k = 1\ntop_k = 2", "job.toml:2:10: not valid TOML: cannot overwrite a value at the end of the file"),
    ("open string", 'system = "hi\ntop_k = 5', None),
    ("open table", "[[processors]", None),
    ("control character", 'about = "\x07"', None),
    ("JSON", '{"top_k": 5}', None),
    ("YAML", "top_k: 5", None),
    ("nested without end", "a = " + "[" * 5000, "job.toml: not valid TOML: nested too deeply"),
    # -- extends ---------------------------------------------------------------------------------------------------
    ("extends itself", 'extends = "job.toml"', "job.toml: extends itself: job.toml -> job.toml"),
    ("extends what is not there", 'extends = "none.toml"', "cannot read none.toml: no such file"),
    ("extends with a NUL", 'extends = "a\\u0000b.toml"', None),
    (
        "extends a name with a space",
        'extends = "two words"',
        'job.toml:1: extends: preset "two words": a name has only letters, digits, _, . and -',
    ),
    ("extends dots", 'extends = ".."', 'job.toml:1: extends: preset "..": a name has only letters, digits, _, . and -'),
    # -- contradictions --------------------------------------------------------------------------------------------
    (
        "sampling knob alone",
        "temperature = 0.7",
        "temperature = 0.7 (job.toml:1) has no effect while do_sample is false (default)",
    ),
    (
        "sampling knob with do_sample false",
        "do_sample = false\ntop_p = 0.9",
        "top_p = 0.9 (job.toml:2) has no effect while do_sample is false (job.toml:1)",
    ),
    (
        "sampling knob at temperature zero",
        "do_sample = true\ntemperature = 0\ntop_p = 0.9",
        "top_p = 0.9 (job.toml:3) has no effect while temperature is 0 (job.toml:2)",
    ),
    (
        "two lengths",
        "max_new_tokens = 5\nmax_length = 9",
        "max_new_tokens = 5 (job.toml:1) cannot be combined with max_length = 9 (job.toml:2): both limit the length",
    ),
    (
        "least above most",
        "max_new_tokens = 5\nmin_new_tokens = 9",
        "min_new_tokens = 9 (job.toml:2) exceeds max_new_tokens = 5 (job.toml:1)",
    ),
    (
        "least length above most",
        "max_length = 5\nmin_length = 9",
        "min_length = 9 (job.toml:2) exceeds max_length = 5 (job.toml:1)",
    ),
    (
        "equal sequences",
        "num_return_sequences = 3",
        "num_return_sequences = 3 (job.toml:1) would return identical sequences while do_sample is false (default)",
    ),
    (
        "refines nothing",
        "do_sample = true\nmirostat_eta = 0.2",
        "mirostat_eta = 0.2 (job.toml:2) has no effect without mirostat_tau",
    ),
    (
        "guidance away from nothing",
        'negative_prompt = "a"',
        'negative_prompt = "a" (job.toml:1) has no effect without guidance_scale',
    ),
    (
        "a system message outside a chat",
        'system = "hi"\nchat = false',
        'system = "hi" (job.toml:1) cannot be combined with chat = false (job.toml:2): '
        "only a chat has a system message",
    ),
]
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


@pytest.mark.parametrize(("text", "sentence"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
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


def test_the_hint_is_how_to_mend_it_where_it_was_said(project: Path) -> None:
    assert mistakes_of("temperature = 0.7").hint == "add do_sample = true"


def test_a_byte_order_mark_and_windows_line_ends_are_fine(project: Path) -> None:
    Path("job.toml").write_bytes(b"\xef\xbb\xbftop_k = 50\r\nmax_new_tokens = 3\r\n")
    assert resolve(presets.load(["job.toml"])).generation.max_new_tokens == 3


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
