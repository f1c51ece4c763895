"""Golden files: written by --save, read by --expect."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from genctl.commands.parity.golden_file import check, compare
from genctl.errors import CheckError, InputError
from genctl.parity.sides import LocalSide
from tests.cli.tool import Done, genctl

pytestmark = pytest.mark.usefixtures("clean_environment")

STORIES = "builtin:stories"
PROMPTS = ("Once upon a time", "The dog ran")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden file of the built-in model."""
    path = tmp_path_factory.mktemp("golden") / "stories.jsonl"
    done = genctl("parity", STORIES, "--save", str(path), *PROMPTS, "-n", "12")
    assert done.status == 0, done.err
    assert f"{path}: 2 texts, 24 positions, {path.stat().st_size:,} bytes" in " ".join(done.err.split())
    return path


@pytest.fixture
def copied(stories: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(stories, tmp_path / "golden.jsonl"))


def expect(path: Path, side: str = STORIES, *more: str) -> Done:
    return genctl("parity", side, "--expect", str(path), *more)


def changed(folder: Path, target: Path, change: Callable[[dict], None]) -> Path:  # type: ignore[type-arg]
    """A checkpoint with other weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def resealed(path: Path, change: Callable[[list[dict]], object]) -> None:  # type: ignore[type-arg]
    """Change the lines of a file, and give it the checksum of the new ones."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    change(lines)
    body = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    path.write_text(f"{body}{json.dumps(end)}\n")


def test_a_golden_file_is_lines_of_json_that_people_can_compare(stories: Path) -> None:
    head, *lines, end = [json.loads(line) for line in stories.read_text().splitlines()]
    assert (head["kind"], head["reference"], head["vocabulary"], head["dtype"]) == ("golden", STORIES, 1536, "float32")
    assert head["fingerprint"].startswith("sha256:")
    assert [line["prompt"] for line in lines if line.get("kind") == "text"] == [*PROMPTS]
    positions = [line for line in lines if "kind" not in line]
    assert len(positions) == 24
    for one in positions:
        assert one["top"][0] == [one["token"], one["logprob"]]  # the text is greedy
        assert 0 <= one["tail"] < 1
        assert len(one["top"]) <= 20
    assert end["kind"] == "end"


def test_the_same_side_gives_the_same_bytes_and_every_number_is_equal(stories: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    assert genctl("parity", STORIES, "--save", str(again), *PROMPTS, "-n", "12").status == 0
    assert again.read_bytes() == stories.read_bytes()
    done = expect(stories, STORIES, "--format", "jsonl", "--max-kl", "0")
    assert genctl("parity", str(stories), STORIES, "--format", "jsonl", "--max-kl", "0").raw == done.raw
    assert done.status == 0, done.err
    (pair,) = done.records
    assert (pair["verdict"], pair["reason"]) == ("tie", "every recorded number is equal")
    assert (pair["reference"], pair["positions"]) == (STORIES, 24)


@pytest.mark.parametrize("knobs", ["threads=2", "cache=static", "prompt_lookup_num_tokens=3", "runtime=transformers"])
def test_harmless_changes_are_ties(stories: Path, knobs: str) -> None:
    done = expect(stories, f"{STORIES}@{knobs}", "--format", "jsonl", "--min-agreement", "1")
    assert done.status == 0, done.err
    assert done.records[0]["verdict"] == "tie"


@pytest.mark.parametrize("runtimes", [("native", "transformers"), ("transformers", "native")])
@pytest.mark.parametrize("other", ["quantize=int8", "dtype=float32"])
def test_quantised_weights_of_either_runtime_are_drift_beside_a_recording(
    runtimes: tuple[str, str], other: str, tmp_path: Path
) -> None:
    recorded, now = runtimes
    golden = tmp_path / "golden.jsonl"
    saved = genctl("parity", f"{STORIES}@quantize=int8,runtime={recorded}", "--save", str(golden), *PROMPTS, "-n", "12")
    assert saved.status == 0, saved.err
    pair = expect(golden, f"{STORIES}@{other},runtime={now}", "--format", "jsonl").records[0]
    assert pair["verdict"] == "drift", pair["reason"]


def test_bounds_hold_the_kl_of_both_sides(stories: Path) -> None:
    side = f"{STORIES}@quantize=int8"
    given = ("--format", "jsonl", "--positions", "--allow-defect")
    bounded = expect(stories, side, *given).records
    exact = genctl("parity", STORIES, side, *PROMPTS, "-n", "12", *given).records
    pairs = [
        (next(one for one in bounded if one["kind"] == "position" and (one["id"], one["index"]) == place), one)
        for one in exact
        if one["kind"] == "position" and (place := (one["id"], one["index"]))
    ]
    assert len(pairs) == 24
    for bound, one in pairs:
        assert bound["kl_bounds"]["low"] <= one["kl"] * 1.001 + 1e-9
        assert one["kl"] <= bound["kl_bounds"]["high"] + 1e-9
        assert bound["same"] == one["same"]
        assert bound["logprob_other"] == pytest.approx(one["logprob_other"], abs=1e-6)
    assert bounded[0]["kl_high"]["mean"] >= bounded[0]["kl"]["mean"] > 0


def test_changed_weights_are_a_defect(llama: Path, tmp_path: Path) -> None:
    golden, before = tmp_path / "llama.jsonl", tmp_path / "page.html"
    assert genctl("parity", str(llama), "--save", str(golden), "the cat sat on", "-n", "8").status == 0
    other = changed(llama, tmp_path / "other", lambda weights: weights["model.norm.weight"].mul_(1.01))
    done = expect(golden, str(other), "--report", str(before))
    assert done.status == 4
    assert ": defect: " in done.err
    assert f"the recording was made with {llama} (" in done.out
    assert f"), and {other} is another checkpoint (" in done.out
    assert f"{other} against {golden} ({llama})" in done.out
    assert f"{other} against {golden} ({llama})" in before.read_text()
    assert expect(golden, str(other), "--allow-defect").status == 0


def test_given_texts_are_recorded_too(tmp_path: Path) -> None:
    texts, golden = tmp_path / "texts.txt", tmp_path / "golden.jsonl"
    texts.write_text("Once upon a time there was a fox.\nThe sea was blue.\n")
    assert genctl("parity", STORIES, "--texts", str(texts), "--save", str(golden)).status == 0
    assert expect(golden, STORIES, "--max-kl", "0").status == 0


def test_another_tokenizer_is_refused_with_the_first_difference(stories: Path, gpt2: Path) -> None:
    done = expect(stories, str(gpt2))
    assert done.status == 3
    assert "has 300 entries in a distribution, and the golden file 1536" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((foreign, "is no golden file of genctl/1") for foreign in (b"", b"\x00\xff", b'{"id": "0"}\n', b"[1]\n")),
        (lambda whole: whole.replace(b'"token": ', b'"token":  ', 1), "is cut off or damaged: its checksum is that of"),
        (lambda whole: whole[: len(whole) // 2], "is cut off or damaged"),
        (lambda whole: whole[: whole.rindex(b'{"kind": "end"')], "is cut off or damaged"),
        (lambda whole: whole.replace(b'"version": 1', b'"version": 2'), "is a golden file of version 2"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_by_name(copied: Path, content: Any, message: str) -> None:
    copied.write_bytes(content(copied.read_bytes()) if callable(content) else content)
    done = expect(copied)
    assert done.status == 2
    assert f"golden.jsonl {message}" in " ".join(done.err.split())


def test_other_prompts_of_the_same_length_of_vocabulary_are_found_out(copied: Path) -> None:
    resealed(copied, lambda lines: lines[1].update(prompt="Once upon a day"))
    done = expect(copied)
    assert done.status == 3
    assert "in other tokens than the golden file: token " in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((STORIES, "--update", "x y"), "--update was removed: ties pass as they are"),
        ((STORIES, "--expect", "g", "x y"), "--expect g has its prompts and texts, so there can be no other prompt"),
        ((STORIES, "--expect", "g", "-i", "f"), "so there can be no --input f"),
        ((STORIES, "--expect", "g", "--layers"), "so there can be no --layers"),
        ((STORIES, STORIES, "--expect", "g"), "and one side is compared with it, but there are: "),
        ((STORIES, "--expect", "g", "--save", "h"), "--save h and --expect g: a file is written, or compared with"),
        ((STORIES, "--save", "-", "x y"), "a golden file is a file; give it a name"),
        ((STORIES, "--expect", "nowhere.jsonl"), "--expect: cannot read nowhere.jsonl: no such file"),
        (("nowhere.jsonl", STORIES), "--expect: cannot read nowhere.jsonl: no such file"),
        ((STORIES, "nowhere.jsonl"), "a file of results is the reference: give one, first, as --expect does"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    done = genctl("parity", *words)
    assert done.status == 2
    assert message in " ".join(done.err.split())


def test_an_existing_file_is_kept_without_force(copied: Path) -> None:
    content = copied.read_bytes()
    done = genctl("parity", STORIES, "--save", str(copied), "The sea", "-n", "2")
    assert done.status == 2
    assert "exists already" in done.err
    assert copied.read_bytes() == content
    assert genctl("parity", STORIES, "--save", str(copied), "The sea", "-n", "2", "--force").status == 0
    assert copied.read_bytes() != content


def failing(monkeypatch: pytest.MonkeyPatch, ids: set[str]) -> None:
    """Make all sides fail to read these texts."""
    read = LocalSide.read

    def partly(self: LocalSide, texts: Any, receive: Any, **how: Any) -> dict[str, str]:
        failed = {text.id: "no room for it" for text in texts if text.id in ids}
        return failed | read(self, [text for text in texts if text.id not in ids], receive, **how)

    monkeypatch.setattr(LocalSide, "read", partly)


def test_no_text_that_can_be_read_is_no_verdict(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the verdict was a tie."""
    failing(monkeypatch, {"0", "1"})
    done = expect(copied, STORIES, "--format", "jsonl")
    assert done.status == 1, done.err
    assert (done.records[0]["verdict"], done.records[0]["reason"]) == (None, "no position was compared")


def test_a_gate_whose_text_cannot_be_read_does_not_pass(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one text of two failed, and the gate passed."""
    assert check(copied, STORIES, PROMPTS, 12)
    failing(monkeypatch, {"1"})
    with pytest.raises(CheckError, match=r"^golden golden: text 2 could not be read: no room for it; "):
        check(copied, STORIES, PROMPTS, 12)
    with pytest.raises(InputError, match="text 2 could not be compared: no room for it"):
        compare(STORIES, f"{STORIES}@batch_size=1", PROMPTS, 2)
