"""`--resume`: a run killed anywhere continues to the bytes of an uninterrupted one, or says what has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genctl.commands import job
from genctl.io import resumable
from genctl.kernels.ops import library
from tests.cli.tool import Done, genctl

SETTINGS = ("--do-sample", "--seed", "5", "-n", "7")


def prompts(folder: Path, *, rows: int = 12, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = []
    for number in range(rows):
        row: dict[str, Any] = {"id": f"r{number}", "prompt": f"prompt {number} " * (1 + number % 3)}
        row["params"] = {"max_new_tokens": 2 + number % 6, **({"num_return_sequences": 2} if number % 4 == 1 else {})}
        lines.append(json.dumps(row))
    lines[3] = "{not json"
    lines[6] = json.dumps({"id": "r1", "prompt": "again"})
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return prompts(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SPAN", 2)
    monkeypatch.setattr(resumable, "EVERY_S", 0.0)


def run(model: Path, given: Path, out: Path, *more: str, settings: Sequence[str] = SETTINGS) -> Done:
    return genctl("run", "-m", str(model), "-i", str(given), "-o", str(out), "--batch-size", "2", *settings, *more)


def beside(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


def cut_off(model: Path, given: Path, out: Path, lines: int, *more: str) -> None:
    """Run, and leave files as after a kill: the first `lines` lines of the journal, the output cut mid-line."""
    run(model, given, out, "--resume", *more)
    kept = beside(out).read_bytes().splitlines(keepends=True)[:lines]
    beside(out).write_bytes(b"".join(kept))
    size = json.loads(kept[-1])["bytes"] + 40
    os.truncate(out, min(size, out.stat().st_size))


def test_it_ends_with_what_an_undisturbed_run_writes(gpt2: Path, given: Path, out: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    assert run(gpt2, given, whole).status == 1
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert sum("error" in record for record in records) == 2
    done = run(gpt2, given, out, "--resume")
    assert (done.status, out.read_bytes()) == (1, whole.read_bytes())
    assert json.loads(beside(out).read_text().splitlines()[-1])["done"]
    for lines in (2, 3, 7, 11, 13):
        cut_off(gpt2, given, out, lines)
        assert out.read_bytes() != whole.read_bytes()
        done = run(gpt2, given, out, "--resume")
        assert (done.status, out.read_bytes()) == (1, whole.read_bytes()), lines
        assert "differently" not in done.err
        out.unlink()
        beside(out).unlink()


@pytest.mark.parametrize(("format", "suffix"), [("tsv", ".tsv"), ("text", ".txt")])
def test_tables_and_texts_can_be_gone_on_with_too(
    gpt2: Path, given: Path, tmp_path: Path, format: str, suffix: str
) -> None:
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    assert run(gpt2, given, whole).status == 1
    cut_off(gpt2, given, out, 8)
    assert run(gpt2, given, out, "--resume").status == 1
    assert out.read_bytes() == whole.read_bytes()
    assert (out.read_text().splitlines()[0].split("\t")[0] == "id") == (format == "tsv")


def test_a_seed_that_nobody_asked_for_is_that_of_the_beginning(gpt2: Path, given: Path, out: Path) -> None:
    settings = ("--do-sample", "-n", "7")
    run(gpt2, given, out, "--resume", settings=settings)
    whole = out.read_bytes()
    seed = json.loads(beside(out).read_text().splitlines()[0])["seed"]
    kept = beside(out).read_bytes().splitlines(keepends=True)[:6]
    beside(out).write_bytes(b"".join(kept))
    assert run(gpt2, given, out, "--resume", settings=settings).status == 1
    assert out.read_bytes() == whole
    done = run(gpt2, given, out, "--resume", "--seed", "99", settings=settings)
    assert done.status == 2
    assert f"seed {seed} → 99" in done.err


def test_only_rows_that_are_done_must_stay_as_they_were(gpt2: Path, out: Path, tmp_path: Path) -> None:
    def go(path: Path, rows: Sequence[str]) -> Done:
        arguments = ("run", "-m", str(gpt2), "-o", str(path), "--batch-size", "1", *SETTINGS, "--resume")
        return genctl(*arguments, stdin="".join(rows))

    rows = [f"row {number}\n" for number in range(6)]
    assert go(out, rows).status == 0
    kept = beside(out).read_bytes().splitlines(keepends=True)[:5]  # three rows are done
    beside(out).write_bytes(b"".join(kept))
    for changed, sentence in (
        ([rows[0], "other\n", *rows[2:]], "row 2 is not what was read"),
        ([rows[1], rows[0], *rows[2:]], "row 1 is not what was read"),
        (rows[1:], "row 1 is not what was read"),
        (rows[:2], "it had at least 3 rows, now 2"),
        ([], "it had at least 3 rows, now 0"),
    ):
        done = go(out, changed)
        assert (done.status, f"the input has changed: {sentence}" in done.err) == (2, True), done.err
    new = [*rows[:4], "other\n", "one more\n", "and more\n"]
    assert go(out, new).status == 0
    assert go(tmp_path / "whole.jsonl", new).status == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_finished_job_is_not_taken_for_one_with_another_input(gpt2: Path, out: Path, tmp_path: Path) -> None:
    """Input from a pipe, or read in another format, is recognised by its rows alone."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.write_text("one\n\ntwo\n")
    other.write_text("one\n\nthree\n")
    arguments = ("run", "-m", str(gpt2), "-o", str(out), "--resume", *SETTINGS)
    assert genctl(*arguments, stdin=first.read_text()).status == 1
    done = genctl(*arguments, "-i", str(other))
    assert (done.status, "row 3 is not what was read" in done.err) == (2, True), done.err
    assert "nothing to do" in genctl(*arguments, "-i", str(first)).err
    done = genctl(*arguments, "-i", str(first), "--input-format", "text")
    assert (done.status, "row 1 is not what was read" in done.err) == (2, True), done.err


def test_a_finished_job_does_nothing_and_says_so(tmp_path: Path, gpt2: Path, out: Path) -> None:
    given = tmp_path / "rows.txt"
    given.write_text("one\ntwo\nthree\n")
    assert run(gpt2, given, out, "--resume").status == 0
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (out, beside(out))}
    done = run(gpt2, given, out, "--resume")
    assert (done.status, done.out) == (0, "")
    assert done.err == f"{out} is complete: 3 rows, nothing to do\n"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--temperature", "0.5"), "temperature 1.0 → 0.5 (flag --temperature)"),
        (("-n", "8"), "max_new_tokens 7 → 8"),
        (("--seed", "6"), "seed 5 → 6"),
        (("--echo",), "--echo false → true"),
        (("--top-logprobs", "2"), "--top-logprobs 0 → 2"),
        (("--format", "tsv"), "--format jsonl → tsv"),
        (("--fail-on", "length"), "--fail-on [] → "),
        (("-p", "min-p"), "min_p unset → "),
        (("--watch", "id:7"), "--watch"),
        (("--template", "1{prompt}"), "--template unset → 1{prompt}"),
    ],
)
def test_what_is_asked_otherwise_is_told(
    gpt2: Path, given: Path, out: Path, more: Sequence[str], sentence: str
) -> None:
    cut_off(gpt2, given, out, 5)
    before = out.read_bytes(), beside(out).read_bytes()
    done = run(gpt2, given, out, "--resume", *more)
    assert done.status == 2
    assert sentence in done.err
    assert done.err.startswith(f"error: {out} cannot be resumed: ")
    assert (out.read_bytes(), beside(out).read_bytes()) == before


def test_every_setting_is_kept_but_those_that_are_kept_elsewhere() -> None:
    from genctl.commands.run.options import RunOptions
    from genctl.commands.run.resume import Grouping, identity
    from genctl.config.layers import Resolved
    from genctl.config.settings import settings_of
    from genctl.params import Generation, Runtime, knobs

    # settings without a value are not saved: here each has one
    generation, runtime = (kind(**{key: "1" for key in knobs(kind)}) for kind in (Generation, Runtime))
    resolved = Resolved(generation, runtime, {})
    alone = Grouping(1, 1, None, None, invariant_by="", shared=False)
    kept = identity(RunOptions(), resolved, seed=1, checkpoints={}, grouping=alone, top=0)["settings"]
    assert settings_of(resolved).keys() - kept.keys() == {"seed", "offline", "threads", "draft", "draft_corpus"}


def test_a_changed_input_checkpoint_or_grammar_is_told(gpt2: Path, given: Path, out: Path, tmp_path: Path) -> None:
    from tests.tiny import checkpoint

    model = checkpoint("gpt2", tmp_path / "model")
    grammar = tmp_path / "some.lark"
    grammar.write_text("start: /[a-z ]+/\n")
    settings = (*SETTINGS, "--grammar", str(grammar))

    def again() -> Done:
        return run(model, given, out, "--resume", settings=settings)

    assert again().status == 1
    kept = beside(out).read_bytes().splitlines(keepends=True)[:4]
    beside(out).write_bytes(b"".join(kept))

    grammar.write_text("start: /[a-z]+/\n")
    done = again()
    assert (done.status, "the file that grammar names has changed" in done.err) == (2, True)
    grammar.write_text("start: /[a-z ]+/\n")

    text, written = given.read_text(), out.read_bytes()
    first = text.splitlines()[0]
    given.write_text(text.replace(first, first.replace("Once", "Twice").replace("r0", "r99")))
    assert given.read_text() != text
    done = again()
    assert (done.status, "the input has changed: row 1 is not what was read" in done.err) == (2, True)
    assert written.startswith(out.read_bytes())
    given.write_text(text)

    config = model / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "repetition_penalty": 1.5}))
    done = again()
    assert done.status == 2
    assert "repetition_penalty 1.0 → 1.5" in done.err
    assert "the checkpoint" in done.err
    assert "has changed (" in done.err


def test_a_weight_changed_anywhere_is_told(gpt2: Path, given: Path, out: Path, tmp_path: Path) -> None:
    """The first version checked three places of each tensor: rows of two checkpoints ended up in one file."""
    model = Path(shutil.copytree(gpt2, tmp_path / "model"))
    cut_off(model, given, out, 5)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    before = out.read_bytes()
    done = run(model, given, out, "--resume")
    assert done.status == 2
    assert f"{out} cannot be resumed: the checkpoint {model} has changed (" in done.err
    assert out.read_bytes() == before


def test_a_journal_whose_checkpoint_was_only_sampled_is_refused(gpt2: Path, given: Path, out: Path) -> None:
    cut_off(gpt2, given, out, 5)
    header, *marks = beside(out).read_bytes().splitlines(keepends=True)
    told = json.loads(header)
    told["checkpoints"] = dict.fromkeys(told["checkpoints"], "f" * 64)
    beside(out).write_bytes(json.dumps(told).encode() + b"\n" + b"".join(marks))
    done = run(gpt2, given, out, "--resume")
    assert done.status == 2
    assert "made by a version of genctl that did not look at all bytes of a checkpoint" in done.err


def test_another_version_is_told(gpt2: Path, given: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(gpt2, given, out, 5)
    monkeypatch.setattr("genctl.process.__version__", "9.9")
    done = run(gpt2, given, out, "--resume")
    assert (done.status, "→ 9.9" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--resume",), "no --output"),
        (("--resume", "-o", "-"), "standard output"),
        (("--resume", "-o", "x.jsonl", "--force"), "--force"),
        (("--resume", "-o", "x.json"), "--format json"),
        (("--resume", "-o", "x.jsonl", "--format", "json"), "--format json"),
        (("--resume", "-o", "x.jsonl", "--unordered"), "--unordered"),
        (("--resume", "-o", "x.jsonl", "--events", "e.jsonl"), "--events"),
        (("--resume", "-o", "x.jsonl", "--timing"), "--timing"),
        (("--resume", "-o", "x", "--stream"), "--output"),
    ],
)
def test_what_cannot_be_gone_on_with_names_both_sides(more: Sequence[str], sentence: str) -> None:
    done = genctl("run", "-m", "builtin:numbers", "7", *more)
    assert done.status == 2
    assert sentence in done.err
    assert "--resume" in done.err or "--stream" in done.err
    assert list(Path.cwd().iterdir()) == []


def test_the_journal_tells_no_secret_and_no_prompt(
    gpt2: Path, given: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ThisIsSecret")
    assert run(gpt2, given, out, "--resume").status == 1
    text = beside(out).read_text()
    assert "hf_" not in text
    assert "prompt 1" not in text
    assert beside(out).stat().st_mode & 0o777 == 0o600


def test_checks_and_failures_of_the_first_run_count_in_the_last(gpt2: Path, given: Path, out: Path) -> None:
    more = ("--fail-on", "length")
    cut_off(gpt2, given, out, 6, *more)
    done = run(gpt2, given, out, "--resume", *more)
    assert done.status == 4
    whole = done.err
    done = run(gpt2, given, out, "--resume", *more)
    assert done.status == 4  # nothing to do, and --fail-on still applies
    assert whole.splitlines()[-1] == done.err.splitlines()[-1]


@pytest.mark.parametrize("taken", ["output", "journal"])
def test_a_run_whose_file_was_replaced_says_so(
    gpt2: Path, given: Path, out: Path, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, rows = resumable.ResumedOutput._written, 0

    def replaced(self: resumable.ResumedOutput, *arguments: Any) -> None:
        nonlocal rows
        rows += 1
        if rows == 4:
            path = out if taken == "output" else beside(out)
            path.unlink()
            path.write_bytes(b"theirs\n")
        write(self, *arguments)

    monkeypatch.setattr(resumable.ResumedOutput, "_written", replaced)
    done = run(gpt2, given, out, "--resume")
    path = out if taken == "output" else beside(out)
    assert done.status == 2
    assert done.err.endswith(f"error: {path} was replaced by another program while this run was writing it\n")
    assert path.read_bytes() == b"theirs\n"


@pytest.fixture
def compiled() -> None:
    if library() is None:
        pytest.skip("the products are not compiled here")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("beams", [(), ("--num-beams", "3")])
def test_another_batch_size_and_other_threads_go_on_to_the_same_bytes(
    beams: Sequence[str], gpt2: Path, given: Path, out: Path, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed.jsonl"
    run(gpt2, given, undisturbed, "--top-logprobs", "2", *beams)
    for lines in (3, 8):
        for file in (out, beside(out)):
            file.unlink(missing_ok=True)
        cut_off(gpt2, given, out, lines, "--top-logprobs", "2", *beams)
        more = ("--resume", "--top-logprobs", "2", "--batch-size", "5", "--threads", "2", "--no-draft")
        run(gpt2, given, out, *more, *beams)
        assert out.read_bytes() == undisturbed.read_bytes()


@pytest.mark.usefixtures("compiled")
def test_an_output_that_was_begun_in_groups_goes_on_in_them(gpt2: Path, given: Path, out: Path, tmp_path: Path) -> None:
    """Written as by a version that recorded batch size and threads: rows of a group are decoded again."""
    undisturbed = tmp_path / "undisturbed.jsonl"
    run(gpt2, given, undisturbed)
    cut_off(gpt2, given, out, 7)
    lines = beside(out).read_text().splitlines()
    header = json.loads(lines[0])
    assert header["batch"] == {"numbers": "float32"}
    assert header["threads"] is None
    assert "batch_size" not in header["settings"]
    header |= {"batch": {"width": 2}, "threads": 1, "settings": {**header["settings"], "batch_size": 2}}
    beside(out).write_text("\n".join([json.dumps(header), *lines[1:], ""]))
    refused = run(gpt2, given, out, "--resume", "--batch-size", "3")
    assert refused.status == 2
    assert "batch_size 2 → 3" in refused.err
    run(gpt2, given, out, "--resume")
    assert out.read_bytes() == undisturbed.read_bytes()


@pytest.mark.usefixtures("compiled")
def test_products_of_torch_do_not_go_on_with_an_output_of_compiled_ones(gpt2: Path, given: Path, out: Path) -> None:
    cut_off(gpt2, given, out, 5)
    done = run(gpt2, given, out, "--resume", "--no-pack", "-v")
    assert done.status == 2
    assert "pack" in done.err
