"""Help: a short page, a long page with every option, no word cut; for an unknown name, the nearest is suggested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from genctl import params
from genctl.commands.app import COMMANDS
from genctl.commands.help import ALIASES, ELSEWHERE
from genctl.config.check import describe, known
from genctl.config.removed import REMOVED, Removed
from tests.cli.tool import genctl, ok

TABLES = [name for name in COMMANDS if name not in ("presets", "report", "models")]

OTHERS = ("report", "models", "presets", "presets list", "presets check")


@pytest.fixture(params=[60, 80, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    columns: int = request.param
    monkeypatch.setenv("COLUMNS", str(columns))
    return columns


@pytest.mark.parametrize("command", TABLES)
def test_the_short_help_is_a_screen_and_a_half(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = genctl(command, "--help")
    lines = done.out.splitlines()
    assert (done.status, done.err) == (0, "")
    assert len(lines) <= 42, len(lines)
    assert sum(line.startswith(f"  genctl {command} ") for line in lines) in (2, 3)
    assert lines[-1].startswith(f"genctl {command} --help-all shows all ")


@pytest.mark.parametrize("command", ["run", "beam", "compare"])
def test_the_long_help_has_every_flag_and_every_common_setting(command: str) -> None:
    words = genctl(command, "--help-all").out.replace(",", " ").split()
    wanted = ["--input", "--quiet", "--trust-remote-code", "--help-all", "-m"]
    for kind in (params.Generation, params.Runtime):
        knobs = params.knobs(kind).items()
        wanted += [f"--{params.spelled(name)}" for name, knob in knobs if not knob.metadata["rare"]]
        rare = {f"--{params.spelled(name)}" for name, knob in knobs if knob.metadata["rare"]}
        assert rare & set(words) <= {"--eos-token-id"}, "words of another option's help"
    if command == "beam":
        wanted = [flag for flag in wanted if flag not in ("--backend", "--tokenizer")]  # no server shows its beams
    assert len(wanted) > 80
    assert set(wanted) <= set(words), set(wanted) - set(words)


@pytest.mark.parametrize("command", [*TABLES, *OTHERS, ""])
def test_no_line_is_too_long_and_no_word_is_cut(command: str, width: int) -> None:
    for flag in ("--help", "--help-all") if command in TABLES else ("--help",):
        done = ok(*command.split(), flag)
        for line in done.out.splitlines():
            assert len(line) <= min(width, 100) - 2 or (width == 60 and line.startswith("  --cache,")), line
        assert "..." not in done.out.replace("]...", "").replace("}...", "")
        assert not re.search(r"\s-[\w-]+-\n", done.out), "a flag is cut"


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["runn"], 'no such command "runn"', 'did you mean "run"?'),
        (["presets", "lst"], 'no such command "lst"', 'did you mean "list"?'),
        (["a\nb\x1b[31m"], 'no such command "a\\nb\\x1b[31m"', "see genctl --help"),
        ([""], 'no such command ""', "see genctl --help"),
        (["run", "--temprature", "1"], 'no such option "--temprature"', 'did you mean "--temperature"?'),
        (["compare", "--strategi", "x"], 'no such option "--strategi"', 'did you mean "--strategy"?'),
        (["presets", "list", "--fromat", "json"], 'no such option "--fromat"', 'did you mean "--format"?'),
        (["--verison"], 'no such option "--verison"', 'did you mean "--version"?'),
        (["run", "--zzz"], 'no such option "--zzz"', "see genctl run --help"),
        (["run", "--tree"], 'no such option "--tree"', "genctl beam has --tree; see genctl run --help"),
        (["score", "--seed", "1"], 'no such option "--seed"', "genctl run has --seed; see genctl score --help"),
        (["run", "-Z"], 'no such option "-Z"', "see genctl run --help"),
        (["run", "--smothing-curve", "1"], 'no such option "--smothing-curve"', 'did you mean "--smoothing-curve"?'),
        (["run", "--No_Sample"], 'no such option "--No_Sample"', 'did you mean "--no-do-sample"?'),
        (["run", "--greedy"], 'no such option "--greedy"', 'did you mean "--strategy greedy"?'),
        (["run", "-t", "1"], 'no such option "-t"', "did you mean --threads, --temperature or --template?"),
        (["score", "--n-predict"], 'no such option "--n-predict"',
         "genctl run has --max-new-tokens; see genctl score --help"),
        (["help", "runn"], 'no such command "runn"', 'did you mean "run"?'),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(arguments: list[str], error: str, hint: str) -> None:
    done = genctl(*arguments)
    assert (done.status, done.out, done.err) == (2, "", f"error: {error}\nhint: {hint}\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run", "--reverse-prompt", "x"), 'did you mean "--stop-strings"?'),
        (("run", "x", "-ngl", "33"), "did you mean --device cuda, or --device-map auto?"),
        (("run", "x", "-cnv"), 'did you mean "--chat"?'),
        (("run", "-p", "Once upon a time"), '-p is --preset; a prompt is an argument: genctl run "Once upon'),
        (("run", "-p", "What is 1/2? " + 300 * "x"), '-p is --preset; a prompt is an argument: genctl run "Wh'),
        (("run", "--prompt", "x"), 'arguments: genctl run "Once upon a time"'),
        (("run", "--json", "x"), "did you mean --format jsonl for records, --json-schema true for a text"),
        (("chat", "--num-ctx", "99"), "the context is the checkpoint's; --max-length N"),
        (("Once upon a time",), 'genctl run "Once upon a time" continues it as a prompt'),
        (('say "no"',), "genctl run 'say \"no\"' continues it as a prompt"),
        (("run", "-m", "builtin:story", "x"), "did you mean builtin:stories?"),
        (("run", "-m", "builtin:stories@dtype=bfloat16", "x"), "-m builtin:stories --dtype bfloat16"),
        (("run", "-m", "nothing.gguf", "x"), "genctl models lists the checkpoints on this machine"),
        (("run", "-m", "./nothing", "x"), "genctl models lists the checkpoints on this machine"),
        (("run", "-m", "owner/name", "--offline", "x"), "`hf download owner/name` downloads it"),
    ],
)
def test_a_hint_names_what_was_meant(words: tuple[str, ...], hint: str) -> None:
    done = genctl(*words)
    assert done.status in (2, 3)
    assert hint in done.err.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("--top_p=0.5", "top_p = 0.5"),
        ("--top_p 0.5", "top_p = 0.5"),
        ("--do_sample", "do_sample = true"),
        ("--no-do_sample", "do_sample = false"),
        ("--max-tokens 3", "max_new_tokens = 3"),
        ("--max_tokens=3", "max_new_tokens = 3"),
        ("--stop x --stop y", 'stop_strings = ["x", "y"]'),
        ("--temp 0.5 --repeat-penalty 1.5", "repetition_penalty = 1.5"),
    ],
)
def test_underscores_and_flags_of_other_tools_work(words: str, setting: str) -> None:
    done = ok("run", "x", "--dry", *words.split())
    assert setting in re.sub(" +#.*", "", done.out)


def test_words_of_other_tools_are_answered_and_the_short_help_names_the_views() -> None:
    assert "--do-sample takes no value, but true follows it" in genctl("run", "x", "--do_sample", "true").err
    for flag, ours in ALIASES.items():
        assert "no such option" not in genctl("run", f"--{flag}", "--help").err, (flag, ours)
    text = genctl("run", "--help").out
    for flag in ("--report", "--explain", "--json-schema", "--watch", "--top-k", "-q", "-v"):
        assert flag in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("batch export -m x -i rows.jsonl", "genctl batch was removed: genctl run -i FILE"),
        ("help batch", "genctl batch was removed: genctl run -i FILE"),
        ("presets schema", "genctl presets schema was removed: genctl run --dry -v"),
        ("run x --check-batch", "--check-batch was removed: use genctl parity MODEL MODEL@batch_size=1 -i FILE"),
        ("run -m builtin:numbers 12 --check-batch",
         "--check-batch was removed: use genctl parity builtin:numbers builtin:numbers@batch_size=1 -i FILE"),
        ("beam --check-runtime -m ./a x", 'use genctl parity ./a ./a@runtime=transformers "A PROMPT"'),
        ("run --fsdp x", "--fsdp was removed: use --device-map auto, --tensor-parallel or --workers N"),
        ("run --raw x", "--raw was removed: use `| cat`: a pipe gets texts as they are"),
        ("beam --trace=run.jsonl x", "--trace was removed: use --events FILE"),
        ("run x --format nul", "--format nul was removed: use --format jsonl"),
        ("compare x --format=md -p greedy", "--format md was removed: use --format jsonl"),
        ("run --input-format nul", "--input-format nul was removed: use --input-format jsonl"),
    ],
)  # fmt: skip
def test_a_removed_name_is_answered_with_what_does_its_job(words: str, sentence: str) -> None:
    done = genctl(*words.split())
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: ")
    assert sentence in done.err


def test_a_row_of_the_table_is_all_that_a_removal_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = (
        Removed("setting", "warmth", "use temperature"),
        Removed("flag", "score --rows", "use --input FILE"),
        Removed("format", "--format html", "use --report FILE"),
    )
    monkeypatch.setattr("genctl.config.removed.REMOVED", rows)
    (tmp_path / "old.toml").write_text("warmth = 1\n")
    for words, sentence in {
        "run x --warmth 2": "--warmth was removed: use temperature",
        "run x --set warmth=2": "--set warmth: warmth was removed: use temperature",
        f"run x -p {tmp_path}/old.toml": "old.toml:1: warmth was removed: use temperature",
        "score x --rows 3": "score --rows was removed: use --input FILE",
        "run x --format html": "--format html was removed: use --report FILE",
        "run x --format=html": "--format html was removed: use --report FILE",
    }.items():
        done = genctl(*words.split())
        assert (done.status, done.out) == (2, "")
        assert done.err.endswith(f"{sentence}\n"), words
    assert "no such option" in genctl("run", "x", "--rows", "3").err, "the flag of another command"


def test_no_removed_name_is_still_there() -> None:
    assert not [row for row in REMOVED if row.kind == "command" and row.name in COMMANDS]
    assert not [row for row in REMOVED if row.kind == "setting" and row.name in known()]
    for row in (row for row in REMOVED if row.kind == "flag"):
        command, _, flag = row.name.rpartition(" ")
        assert f"{flag} " not in genctl(command or "run", "--help-all").out, row


@pytest.mark.parametrize("words", ["", "run", "presets list"])
def test_help_before_a_command_is_its_help(words: str) -> None:
    assert genctl("help", *words.split()) == genctl(*words.split(), "--help")
    assert genctl("help", *words.split()).status == 0


def test_flags_of_other_tools_lead_to_flags_that_are_there() -> None:
    listed = "".join(genctl(command, "--help-all").out for command in ("run", "score"))
    for foreign, ours in ELSEWHERE.items():
        for flag in re.findall(r"--[a-z-]+", ours):
            assert re.search(rf"{flag}\b", listed) or "no such" not in genctl("run", flag, "--help").err, (
                foreign,
                flag,
            )
    for flag in ("max-tokens", "n-predict", "num-predict", "repeat-penalty", "num-ctx", "max-model-len", "prompt-file"):
        assert flag in ELSEWHERE


VALUES = {
    "suppress_tokens": "[5, 6]",
    "begin_suppress_tokens": "[5]",
    "stop_token_ids": "[5]",
    "bad_words_ids": "[[5, 6]]",
    "sequence_bias": "[[[5], 2.0]]",
    "logit_bias": '{"#5" = 2.0}',
    "watermarking_config": "{bias = 2.0}",
    "exponential_decay_length_penalty": "[3, 1.5]",
    "force_words_ids": "[[5]]",
    "dry_sequence_breakers": '["a"]',
}


@pytest.mark.parametrize("name", [name for kind in (params.Generation, params.Runtime) for name in params.knobs(kind)])
def test_every_key_of_a_preset_is_an_option(name: str) -> None:
    """For each setting: `--smoothing-curve 1.2` acts like `--set smoothing_curve=1.2`, or fails like it."""
    kind = describe(known()[name][1])
    value = VALUES.get(name, "0.5" if "a number" in kind else "7")
    if kind.startswith("one of "):
        value = kind.split(" or ")[0].split(" ")[-1]
    is_switch = kind == "true or false"
    words = [f"--{name.replace('_', '-')}"] + ([] if is_switch else [value])
    if name == "dry_sequence_breakers":
        words = ["--dry-sequence-breakers", "a"]
    as_option = genctl("run", "x", "--dry", "--force", *words)
    as_set = genctl("run", "x", "--dry", "--force", "--set", f"{name}={'true' if is_switch else value}")
    assert "no such option" not in as_option.err
    plain = [re.sub(r"--[a-z-]+( [a-z_]+)?", "", out.out + out.err) for out in (as_option, as_set)]
    assert as_option.status == as_set.status, (as_option, as_set)
    assert re.sub(r"\s+|flag", "", plain[0]) == re.sub(r"\s+|flag", "", plain[1])
