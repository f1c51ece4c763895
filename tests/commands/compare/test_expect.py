"""`--save` and `--expect`: a smoke test that passes on what is unchanged and says what has changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from genctl.commands.compare.expectations import changed_settings, compare, differences
from tests.cli.tool import Done, genctl

RUNS = ("-p", "greedy", "-p", "nucleus", "--strategy", "beam:num_beams=3,num_return_sequences=2,early_stopping=never")


@pytest.fixture
def folder(gpt2: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(gpt2, tmp_path / "checkpoint"))


def save(model: Path, file: Path, *more: str) -> Done:
    arguments = ("-m", str(model), "-n", "10", "--save", str(file), "--format", "jsonl")
    return genctl("compare", "hello there", "again", *RUNS, *arguments, *more)


def change(folder: Path, row: int, by: float) -> None:
    """Change the weights with which one token is scored."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][row] *= by
    save_file(tensors, path, metadata={"format": "pt"})


def test_an_unchanged_checkpoint_passes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    saved = save(folder, file, "--seeds", "2")
    assert saved.status == 0, saved.err
    done = genctl("compare", "--expect", str(file))
    assert (done.status, done.err) == (0, "")
    assert done.out == f"16 outputs as recorded in {file}\n"
    again = genctl("compare", "--expect", str(file), "--format", "jsonl")
    assert again.raw == saved.raw
    assert "16 outputs as recorded" in again.err


def test_a_recording_is_a_side_too_and_a_golden_file_is_none(tmp_path: Path) -> None:
    file, golden = tmp_path / "expected.json", tmp_path / "golden.jsonl"
    saved = genctl("compare", "One day", "-p", "greedy", "-p", "nucleus", "-n", "3", "--save", str(file))
    assert saved.status == 0, saved.err
    done = genctl("compare", "--strategy", str(file))
    assert (done.status, done.out) == (0, f"2 outputs as recorded in {file}\n")
    both = genctl("compare", "--strategy", str(file), "--expect", "other.json")
    assert (both.status, "outputs are compared with one file of results" in both.err) == (2, False)
    assert genctl("parity", "builtin:stories", "One day", "-n", "2", "--save", str(golden)).status == 0
    for words, hint in (
        (("compare", "--strategy", str(golden)), "it is a golden file: genctl parity MODEL --expect"),
        (("parity", str(file), "builtin:stories"), "it is a recording: genctl compare --expect"),
    ):
        done = genctl(*words)
        assert done.status == 2
        assert hint in " ".join(done.err.split())


def test_the_report_replaces_an_old_file(folder: Path, tmp_path: Path) -> None:
    """The sink of a text report was never closed, so --force left the old file."""
    file, report = tmp_path / "expected.json", tmp_path / "report.txt"
    save(folder, file)
    report.write_text("old\n")
    done = genctl("compare", "--expect", str(file), "-o", str(report), "--force")
    assert (done.status, done.out) == (0, "")
    assert report.read_text() == f"8 outputs as recorded in {file}\n"


def test_a_recording_says_what_it_was_made_on(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    save(folder, file, "--seed", "9")
    data = json.loads(file.read_text())
    assert data["schema"] == "genctl-compare/1"
    assert set(data["versions"]) == {"genctl", "torch", "transformers"}
    assert re.fullmatch("sha256:[0-9a-f]{64}", data["checkpoints"][str(folder)])
    assert (data["seed"], data["seeds"]) == (9, 1)
    assert [prompt["prompt"] for prompt in data["prompts"]] == ["hello there", "again"]
    beam = data["runs"][2]
    assert beam["settings"] == {
        "num_beams": 3, "num_return_sequences": 2, "early_stopping": "never", "max_new_tokens": 10,
        "model": str(folder), "seed": 9,
    }  # fmt: skip
    assert beam["resolved"]["temperature"] == 1.0
    assert all("tokens" in record for record in data["records"])


def test_one_changed_weight_fails_with_a_readable_difference(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(folder, file).status == 0
    recorded = json.loads(file.read_text())["records"][0]
    second = recorded["token_ids"][1]
    change(folder, second, -4.0)
    done = genctl("compare", "--expect", str(file))
    assert done.status == 4
    assert re.search(r"error: --expect .*: \d of 8 outputs are not as recorded\n", done.err)
    first = done.out.split("\n\n")[0].splitlines()
    assert first[0].startswith("run greedy · prompt 1")
    assert first[1].startswith("    - ")
    assert first[2].startswith("    + ")
    assert first[3].startswith("  first different token: number ")
    number = int(first[3].split()[-1])
    old = recorded["tokens"][number - 1]
    assert re.match(r"      before .* \d+\.\d\d% \(-\d", first[4])
    assert f"({old['logprob']:.3f})" in first[4]
    assert re.match(r"      now    .* \d+\.\d\d% \(-?\d", first[5])
    assert "Traceback" not in done.err


def test_a_changed_checkpoint_that_writes_the_same_is_a_note(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(folder, file).status == 0
    change(folder, 0, 1.0001)
    data = json.loads(file.read_text())
    data["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(data))
    done = genctl("compare", "--expect", str(file))
    assert done.status == 0
    assert re.search(r"note: the checkpoint .* has changed \([0-9a-f]{12}… → [0-9a-f]{12}…\)", done.out)
    assert "note: torch 1.0 → " in done.out


def test_a_recording_that_sampled_its_checkpoint_cannot_tell(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    save(folder, file)
    data = json.loads(file.read_text())
    data["checkpoints"] = dict.fromkeys(data["checkpoints"], "f" * 64)
    file.write_text(json.dumps(data))
    done = genctl("compare", "--expect", str(file))
    assert done.status == 0
    assert "the recording was made by a version of genctl that did not look at all bytes of a checkpoint" in done.out


def test_scores_that_move_more_than_the_tolerance_fail(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(folder, file).status == 0
    unused = set(range(300)) - {id for one in json.loads(file.read_text())["records"] for id in one["token_ids"]}
    change(folder, min(unused - {0, 1, 2}), 1.01)
    strict = genctl("compare", "--expect", str(file), "--tolerance", "1e-7")
    assert strict.status == 4
    assert "the same text, but" in strict.out
    assert re.search(r"log-probabilities changed by more than 1e-07; the most at token \d+, by", strict.out)
    loose = genctl("compare", "--expect", str(file), "--tolerance", "2")
    assert loose.status == 0


def test_prompts_and_runs_may_be_given_anew(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(folder, file, "--seed", "9").status == 0
    same = ("hello there", "again", *RUNS, "-m", str(folder), "-n", "10", "--seed", "9")
    assert genctl("compare", *same, "--expect", str(file)).status == 0
    fewer = genctl(
        "compare", "hello there", "again", "-p", "greedy", "-p", "nucleus", *same[-6:], "--expect", str(file)
    )
    assert fewer.status == 4
    assert "run beam · prompt 1" in fewer.out
    assert "missing: it was recorded before" in fewer.out
    shorter = genctl("compare", "--expect", str(file), "-n", "4")
    assert shorter.status == 4
    assert "now    nothing: the text had ended" in shorter.out


def test_another_checkpoint_is_compared_with_a_note(gpt2: Path, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(gpt2, file).status == 0
    done = genctl("compare", "--expect", str(file), "-m", str(folder))
    assert done.status == 0
    assert f"note: checkpoint {folder} is not in the recording" in done.out


def test_failures_are_recorded_and_expected_too(gpt2: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    runs = ("--strategy", "short:max_length=3", "--strategy", "long:max_new_tokens=3")
    done = genctl("compare", "hello there", "-m", str(gpt2), *runs, "--save", str(file), "-q")
    assert done.status == 1
    assert genctl("compare", "--expect", str(file)).status == 0


def test_rows_of_any_kind_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    rows = [
        {"id": "a", "prompt_ids": [4, 5], "params": {"max_new_tokens": 2}},
        {"messages": [{"role": "user", "content": "31"}], "reference": "thirty one"},
    ]
    stdin = "\n".join(map(json.dumps, rows))
    runs = ("-m", "builtin:numbers", "-p", "greedy", "-p", "nucleus", "--input-format", "jsonl")
    saved = genctl("compare", *runs, "--save", str(file), "--format", "jsonl", stdin=stdin)
    assert saved.status == 0, saved.err
    done = genctl("compare", "--expect", str(file), "--format", "jsonl")
    assert (done.status, done.raw) == (0, saved.raw)
    bad = genctl("compare", *runs, "--save", str(tmp_path / "new.json"), stdin=stdin + "\nnot json\n")
    assert bad.status == 2
    assert "line 3" in bad.err
    assert not (tmp_path / "new.json").exists()


def test_a_recording_is_not_replaced_without_force(gpt2: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    assert save(gpt2, file).status == 0
    before = file.read_bytes()
    done = save(gpt2, file, "-n", "3")
    assert done.status == 2
    assert "--force" in done.err
    assert file.read_bytes() == before
    assert save(gpt2, file, "--force").status == 0


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "not json", '{"schema": "genctl-compare/2"}', '{"schema": "genctl-compare/1"}',
        '{"schema": "genctl-compare/1", "seed": 1, "seeds": 1, "versions": {}, "checkpoints": {}, "runs": [{}],'
        ' "prompts": [], "records": []}',
        '{"schema": "genctl-compare/1", "seed": 1, "seeds": 1, "versions": {}, "checkpoints": {}, "runs": [],'
        ' "prompts": [], "records": [{"id": "0"}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    done = genctl("compare", "--expect", str(file))
    assert (done.status, done.out) == (2, "")
    assert "--expect" in done.err
    assert "Traceback" not in done.err
    assert "bug" not in done.err


# -- the differences themselves ----------------------------------------------------------------------------------------


def record(*tokens: tuple[int, str, float], **changed: Any) -> dict[str, Any]:
    total = sum(logprob for _, _, logprob in tokens)
    return {
        "id": "0", "run": "a", "sequence": 0, "seed": 1, "finish_reason": "eos", "logprob": total,
        "text": "".join(text for _, text, _ in tokens), "token_ids": [id for id, _, _ in tokens],
        "score": total / len(tokens),
        "tokens": [{"id": id, "text": text, "logprob": logprob} for id, text, logprob in tokens],
        **changed,
    }  # fmt: skip


def test_the_old_token_is_told_as_it_is_now() -> None:
    before = record((1, "a", -0.1), (2, " b", -0.693147))
    after = record((1, "a", -0.1), (3, " c", -0.5))
    after["tokens"][1]["top"] = [[3, " c", -0.5], [2, " b", -1.5]]
    assert differences(before, after, 1e-3) == [
        "  - a b",
        "  + a c",
        "first different token: number 2",
        '    before " b" 50.00% (-0.693)',
        '    now    " c" 60.65% (-0.500); the old token has 22.31% (-1.500) now, 1.000 nats less',
    ]


def test_within_the_tolerance_nothing_is_different() -> None:
    before, after = record((1, "a", -0.1), (2, "b", -0.2)), record((1, "a", -0.1005), (2, "b", -0.2005))
    assert differences(before, after, 1e-3) == []
    assert len(differences(before, after, 1e-4)) == 4


def test_a_sum_as_score_has_the_tolerance_of_all_its_tokens() -> None:
    tokens = [(n, "x", -0.1) for n in range(50)]
    moved = [(n, "x", -0.1008) for n in range(50)]
    before = record(*tokens)
    after = record(*moved)
    before["score"], after["score"] = before["logprob"], after["logprob"]
    assert differences(before, after, 1e-3) == []


def test_reasons_texts_and_errors_are_compared() -> None:
    before = record((1, "a", -0.1))
    assert differences(before, record((1, "a", -0.1), finish_reason="stop"), 1e-3) == [
        "ended by eos before, by stop now"
    ]
    assert differences(before, record((1, "A", -0.1)), 1e-3)[0] == "the same tokens are another text"
    failed = {"id": "0", "run": "a", "error": {"code": "input", "message": "too long"}}
    assert differences(before, failed, 1e-3) == ["fails now: too long"]
    assert differences(failed, before, 1e-3)[0] == "failed before: too long"
    assert differences(failed, failed, 1e-3) == []


def test_outputs_that_only_one_side_has_are_differences() -> None:
    one = record((1, "a", -0.1))
    outcome = compare([one], [one, {**one, "id": "1"}], 1e-3)
    assert outcome.compared == 2
    assert [found.heading("1") for found in outcome.differences] == ["run a · prompt 1 · seed 1"]
    assert outcome.differences[0].lines == ("only now: it is not in the file",)


def test_settings_that_changed_are_named(tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    words = ("-p", "greedy", "-p", "nucleus", "-n", "4", "--seed", "1", "--save", str(file))
    assert genctl("compare", "Once upon", *words).status == 0
    done = genctl("compare", "--expect", str(file), "-n", "5")
    assert done.status == 4
    assert "note: max_new_tokens 4 → 5" in done.out.splitlines()
    assert "note" not in genctl("compare", "--expect", str(file)).out
    before = {"name": "a", "resolved": {"top_k": 5, "stop_strings": ["x"], "seed": 1}}
    now = {"name": "a", "resolved": {"top_p": 0.5, "stop_strings": ("x",), "seed": 2, "typical_p": 1.0}}
    other = {"name": "b", "resolved": {}}
    assert changed_settings([before, other], [now, other]) == [
        "run a: top_k 5 → unset",
        "run a: top_p unset → 0.5",
    ]
