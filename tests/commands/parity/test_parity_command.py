"""`genctl parity` on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from genctl.commands.parity import golden_file
from genctl.errors import UsageError
from genctl.models.resolve import BUILTIN
from genctl.parity.forms import rounded
from genctl.parity.sides import LocalSide
from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import running
from tests.pages.pages import Parts
from tests.tiny import checkpoint

pytestmark = pytest.mark.usefixtures("clean_environment")

INT4 = "builtin:stories@quantize=int4"
PROMPTS = ("Once upon a time", "The dog ran")


def parity(*words: str, n: int = 12, **how: str | bool) -> Done:
    return genctl("parity", *words, "-n", str(n), **how)  # type: ignore[arg-type]


def test_equal_sides_are_equal_and_the_status_is_0() -> None:
    done = parity("builtin:stories", "builtin:stories@batch_size=1", *PROMPTS, "--format", "jsonl", "--max-kl", "0")
    assert done.status == 0, done.err
    (pair,) = done.records
    assert (pair["kind"], pair["verdict"], pair["positions"], pair["texts"]) == ("pair", "tie", 24, 2)
    assert pair["kl"]["max"] == 0.0
    assert pair["agreement"]["value"] == 1.0
    assert pair["reference"] == "builtin:stories"
    assert pair["other"] == "builtin:stories@batch_size=1"
    assert pair["perplexity_reference"]["value"] == pytest.approx(pair["perplexity_other"]["value"])


@pytest.mark.parametrize("arch", ["mixtral", "jamba"])
def test_the_noise_of_experts_is_measured(arch: str, tmp_path: Path) -> None:
    """Regression: experts' fused product takes no float64, so no rounding was measured: the verdict was a defect."""
    folder = str(checkpoint(arch, tmp_path))
    plain = f"{folder}@runtime=transformers"
    done = parity(plain, f"{plain},dtype=bfloat16", "a b c d", "--format", "jsonl", n=6)
    assert (done.status, done.records[0]["verdict"]) == (0, "drift"), done.err


def test_texts_follow_a_truncated_prompt(tmp_path: Path) -> None:
    """Regression: the uncut prompt was read, beyond the context, for which GPT-2 has no positions."""
    folder = str(checkpoint("gpt2", tmp_path))
    long = " ".join("abcdefgh" * 60)
    words = ("--truncate", "left", "--format", "jsonl", "--positions")
    done = parity(folder, f"{folder}@batch_size=1", long, *words, n=6)
    assert (done.status, done.records[0]["kl"]["max"]) == (0, 0.0), done.err
    assert [record["index"] for record in done.records[1:]] == [*range(6)]


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (("--max-kl", "1e-9"), r"--max-kl 1e-09: the mean KL of builtin:stories@quantize=int4 is 0\.\d+ nats"),
        (("--max-regret", "0"), r"--max-regret 0: the largest regret of builtin:stories@quantize=int4 is \S+ nats"),
        (("--min-agreement", "1"), r"--min-agreement 1: 0\.\d+ of the first choices of \S+ agree"),
    ],
)
def test_beyond_a_limit_the_status_is_4(limit: tuple[str, ...], sentence: str) -> None:
    texts = [*PROMPTS, "A little girl", "One day Tom"]
    done = parity("builtin:stories", INT4, *texts, "--format", "jsonl", *limit, n=40)
    assert done.status == 4
    assert re.search(f"^error: {sentence}", done.err, re.MULTILINE)
    assert re.search(sentence, done.records[0]["failed_checks"][0])


def test_sides_are_told_apart_in_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: names were cut at the end, so all of them were builtin:stories@quan…"""
    for width, names in (("60", ["…ories@quantize=int4", "…ories@quantize=int8"]), ("120", [INT4, f"{INT4[:-1]}8"])):
        monkeypatch.setenv("COLUMNS", width)
        sides = ("builtin:stories", INT4, f"{INT4[:-1]}8")
        done = parity(*sides, *PROMPTS, terminal=True)
        assert done.status == 0, done.err
        lines = re.sub(r"\x1b\[[0-9;]*m", "", done.out).splitlines()
        found = [line.split()[0] for line in lines if line.split()[1:] and "quantize" in line.split()[0]]
        assert found[:2] == names


def test_tsv_has_the_columns_of_its_head_in_every_line() -> None:
    done = parity("builtin:stories", INT4, *PROMPTS, "--format", "tsv")
    head, *lines = [line.split("\t") for line in done.out.splitlines()]
    assert {len(line) for line in lines} == {len(head)}
    row = dict(zip(head, lines[0], strict=True))
    assert (row["kind"], row["reference"], row["other"], row["positions"]) == ("pair", "builtin:stories", INT4, "24")
    assert float(row["kl_mean"]) > 0
    assert float(row["agreement"]) <= 1


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("60", "140"):
        monkeypatch.setenv("COLUMNS", width)
        shown = parity("builtin:stories", INT4, *PROMPTS, "--layers", terminal=True, color="never").out
        assert max(map(len, shown.splitlines())) <= int(width)


def test_given_texts_are_read_and_have_no_prompts(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Once upon a time there was a fox.\nThe sea was blue.\n")
    other = "builtin:stories@runtime=transformers"
    done = parity("builtin:stories", other, "--texts", str(texts), "--format", "jsonl", "--positions")
    assert done.status == 0, done.err
    scored = genctl("score", "-i", str(texts), "--format", "jsonl").records
    kinds = [record["kind"] for record in done.records]
    assert done.records[0]["positions"] == kinds.count("position") == sum(record["tokens"] for record in scored)
    mean = sum(record["nll"] for record in scored) / sum(record["tokens"] for record in scored)
    assert done.records[0]["perplexity_reference"]["value"] == pytest.approx(2.718281828459045**mean, rel=1e-5)


def test_other_vocabularies_are_refused(gpt2: Path) -> None:
    refused = parity("builtin:stories", str(gpt2), "the cat sat on")
    assert refused.status == 3
    assert f"builtin:stories and {gpt2} have different vocabularies: id " in refused.err
    assert "hint: genctl score -m MODEL has the bits per byte of each: they are comparable" in refused.err


def test_a_server_is_no_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        done = parity("builtin:stories", server.url, "x y")
        assert done.status == 2
        assert "a server cannot be a side: it reports only its most probable tokens" in done.err
        assert f"hint: genctl audit {server.url} -m MODEL compares what a server computes" in done.err
        with pytest.raises(UsageError, match="a server cannot be a side"):
            golden_file.compare("builtin:stories", server.url, ["x y"])
        monkeypatch.setenv("GENCTL_BACKEND", server.url)
        done = parity("builtin:stories", "builtin:stories@threads=1", "x y")
        assert done.status == 2
        assert "side builtin:stories: backend (GENCTL_BACKEND): a server cannot be a side" in done.err
        assert server.asked == []


def test_a_report_shows_the_texts_of_all_sides_as_runs_of_a_comparison(tmp_path: Path) -> None:
    path, third = tmp_path / "page.html", "builtin:stories@quantize=int8"
    done = parity("builtin:stories", INT4, third, *PROMPTS, "--report", str(path), "--format", "jsonl", "--positions")
    assert done.status == 0, done.err
    data = Parts(path.read_text()).data
    assert data["comparison"]["runs"] == ["builtin:stories", INT4, third]
    assert [lane["run"] for lane in data["lanes"]] == [*data["comparison"]["runs"]] * len(PROMPTS)
    assert all(("figures" in lane) == (lane["run"] != "builtin:stories") for lane in data["lanes"])
    positions = [
        record["logprob_other"] for record in done.records if record.get("other") == INT4 and "token" in record
    ]
    total = sum(lane["sequences"][0]["logprob"] for lane in data["lanes"] if lane["run"] == INT4)
    assert total == pytest.approx(sum(positions), rel=1e-3)


def test_bad_rows_are_said_and_the_others_compared(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    given = [
        {"id": "a", "prompt": "Once upon a time"},
        {"id": "b", "prompt": "The dog", "params": {"top_k": 3}},
        {"id": "c"},
    ]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    done = parity("builtin:stories", INT4, "-i", str(rows), "--format", "jsonl")
    assert done.status == 1
    assert "settings belong to a side (MODEL@setting=value), so a row has no top_k" in done.err
    assert done.records[0]["texts"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("builtin:stories", "The sea"), "needs a reference and another side, but there is only builtin:stories"),
        (("The sea",), "needs a reference and another side, but there is none"),
        (("a", "b", "--min-agreement", "2", "x y"), "--min-agreement 2: must be a share from 0 to 1"),
        (("a", "b", "--max-kl", "-1", "x y"), "--max-kl -1: must be at least 0"),
        (("a", "b", "--positions", "x y"), "--positions adds records of each position, which --format text has no"),
        (
            ("a", "b", "--layers", "--format", "tsv", "x y"),
            "--layers adds records of each part of the model, which --format",
        ),
        (("a", "b", "--texts", "t", "x y"), "texts are read as they are, so there can be no prompt"),
        (("a", "b", "--texts", "t", "-i", "p"), "--texts t and --input p"),
        (("a", "b", "--by-text", "x y"), "--by-text was removed: use genctl score -m MODEL -i FILE for each"),
        (("a", "b", "c", "a", "x y"), "the side a is given twice"),
        (("a", "b", "--texts", "t", "--force"), "--force replaces an existing"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(words: tuple[str, ...], message: str) -> None:
    done = genctl("parity", *words)
    assert done.status in (2, 3)
    assert message in " ".join(done.err.split())
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err


def test_a_side_that_is_missing_is_found_before_any_is_compared() -> None:
    """Regression: the first pair was compared, and then its table was lost."""
    done = parity("builtin:stories", "builtin:stories@batch_size=1", "./nowhere", "The sea", "--format", "jsonl")
    assert (done.status, done.out) == (3, "")
    assert "no such folder: ./nowhere" in done.err


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_is_compared_is_shown_where_a_later_side_fails(format: str) -> None:
    sides = ("builtin:stories", "builtin:stories@batch_size=1", "builtin:numbers")
    done = parity(*sides, "The sea", "--format", format, n=3)
    assert done.status == 3
    assert "builtin:numbers" in done.err
    if format == "text":
        assert "tie: every logit is equal" in done.out
    else:
        assert [record["verdict"] for record in json.loads(done.out)] == ["tie"]


def test_settings_in_which_checkpoints_differ_are_named(llama: Path, tmp_path: Path) -> None:
    """Regression: the effect of another epsilon was attributed to the weights and the dtype."""
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    before = config["rms_norm_eps"]
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.05, "use_cache": False}))
    done = parity(str(llama), str(other), "the cat sat", "--format", "jsonl", n=6)
    pair = done.records[0]
    differs = f"config.json differs in rms_norm_eps ({before} and 0.05)"
    assert (pair["verdict"], done.status) == ("other weights", 4)
    assert pair["reason"] == f"{differs}, and the weights are equal"
    assert pair["notes"][0].startswith(f"{differs}: ")
    narrow = parity(str(llama), f"{other}@dtype=bfloat16", "the cat sat", "--format", "jsonl", n=6).records[0]
    assert narrow["verdict"] == "drift"  # the dtype, too
    assert narrow["reason"].startswith("weights, dtype and config.json explain this; the rest is ")


def test_an_encoder_decoder_is_compared(tmp_path: Path) -> None:
    done = parity("builtin:numbers", "builtin:numbers@quantize=int8", "forty two", "nine hundred", "--format", "jsonl")
    assert done.status == 0, done.err
    assert done.records[0]["positions"] > 4
    other = checkpoint("t5", tmp_path / "t5")
    refused = parity("builtin:stories", str(other), "the cat sat")
    assert refused.status == 3
    assert "is a causal model, and" in refused.err


def test_an_interrupted_run_leaves_no_half_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Once upon a time {number}\n" for number in range(400)))
    words = ["parity", "builtin:stories", INT4, "-i", str(prompts), "-n", "200", "-o", "out.jsonl"]
    command = [sys.executable, "-m", "genctl", *words, "--save", "golden.jsonl", "--report", "page.html"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "work"
    folder.mkdir()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        limit = time.monotonic() + 40
        while not any(folder.iterdir()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert any(folder.iterdir())
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert out == b""
    assert b"Traceback" not in err
    assert [path.name for path in folder.iterdir() if path.stat().st_size or path.name != "out.jsonl"] == []


def test_a_pair_without_a_position_has_no_verdict_and_the_status_of_its_failures(tmp_path: Path) -> None:
    """Regression: the verdict was a tie."""
    other = "builtin:stories@batch_size=1"
    long = "the cat sat " * 400
    done = parity("builtin:stories", other, long, "--format", "jsonl")
    assert done.status == 1, done.err
    (pair,) = done.records
    assert (pair["verdict"], pair["reason"], pair["positions"]) == (None, "no position was compared", 0)
    assert list(pair["failed_texts"]) == ["0"]
    shown = parity("builtin:stories", other, long)
    assert "no verdict: no position was compared" in shown.out
    assert "failed text 1: " in shown.out
    assert "tie" not in shown.out
    tsv = [line.split("\t") for line in parity("builtin:stories", other, long, "--format", "tsv").out.splitlines()]
    assert dict(zip(*tsv, strict=True))["verdict"] == ""
    limited = parity("builtin:stories", other, long, "--max-kl", "1", "--format", "jsonl")
    assert limited.status == 4
    assert f"error: --max-kl, {other}: no position was compared" in limited.err
    page = tmp_path / "page.html"
    assert parity("builtin:stories", other, long, "--report", str(page)).status == 1
    assert "no verdict: no position was compared" in page.read_text()


def test_given_texts_that_all_fail_are_nothing_to_compare(tmp_path: Path) -> None:
    """Regression: the verdict was a tie of no positions, and the status was 1."""
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat " * 400)
    done = parity("builtin:stories", INT4, "--texts", str(texts), "--format", "jsonl")
    assert (done.status, done.out) == (2, "")
    assert "there is nothing to compare the sides on" in done.err


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Record from now on what the side of this name does: "write" or "read"."""
    done: list[str] = []

    def count(what: str, before: Callable[..., Any]) -> None:
        def wrapped(self: LocalSide, *arguments: Any, **how: Any) -> Any:
            if self.name == name:
                done.append(what)
            return before(self, *arguments, **how)

        monkeypatch.setattr(LocalSide, what, wrapped)

    count("read", LocalSide.read)
    count("write", LocalSide.write)
    return done


def test_a_reference_is_written_and_read_once_for_all_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its texts were written and read again for each further side, for the page and for the golden file."""
    done = counted(monkeypatch, "builtin:stories")
    others = ("builtin:stories@batch_size=1", "builtin:stories@use_cache=false")
    words = ("--report", str(tmp_path / "page.html"), "--save", str(tmp_path / "golden.jsonl"), "--format", "jsonl")
    found = parity("builtin:stories", *others, *PROMPTS, *words)
    assert found.status == 0, found.err
    assert [record["verdict"] for record in found.records] == ["tie", "tie"]
    assert done == ["write", "read"]


def test_the_figures_of_a_third_side_are_those_that_it_has_as_the_second(tmp_path: Path) -> None:
    alone = parity("builtin:stories", INT4, *PROMPTS, "--format", "jsonl", "--positions").records
    both = parity(
        "builtin:stories", "builtin:stories@quantize=int8", INT4, *PROMPTS, "--format", "jsonl", "--positions"
    )
    assert [record for record in both.records if record["other"] == INT4] == alone


def test_a_row_may_have_a_length_of_its_own(tmp_path: Path) -> None:
    """Regression: all settings of rows were refused."""
    rows, golden = tmp_path / "rows.jsonl", tmp_path / "golden.jsonl"
    given = [{"prompt": PROMPTS[0], "params": {"max_new_tokens": 3}}, {"prompt": PROMPTS[1]}]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    other = "builtin:stories@batch_size=1"
    done = parity("builtin:stories", other, "-i", str(rows), "--format", "jsonl", "--positions", "--save", str(golden))
    assert done.status == 0, done.err
    assert done.records[0]["parted"] == 0
    assert [record["id"] for record in done.records[1:]] == ["0"] * 3 + ["1"] * 12
    assert (
        genctl("parity", "builtin:stories", "--expect", str(golden), "--format", "jsonl").records[0]["positions"] == 15
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0.5}, "a row has no temperature"),
        ({"dtype": "bfloat16"}, "settings belong to a side (MODEL@setting=value), so a row has no dtype"),
        ({"max_new_tokens": "few"}, 'max_new_tokens = "few": must be a whole number, not a string'),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
    ],
)
def test_settings_of_a_row_are_refused_with_the_reason(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": PROMPTS[0], "params": params}))
    done = parity("builtin:stories", INT4, "-i", str(rows))
    assert done.status == 2
    assert message in " ".join(done.err.split())
    assert "rows.jsonl, line 1" in " ".join(done.err.split())


def _int8(name: str, tensor: Tensor, spoilt: str = " ") -> Tensor:
    tensor = tensor * 0.6 if spoilt in name else tensor
    return rounded(tensor, "int8") if tensor.dim() > 1 else tensor


def _int4(name: str, tensor: Tensor) -> Tensor:
    return rounded(tensor, "int4") if tensor.dim() > 1 else tensor


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (lambda name, tensor: tensor.bfloat16(), "drift", ""),
        (_int8, "drift", ""),
        (_int4, "drift", ""),
        (lambda name, tensor: tensor * 1.001 if "1.mlp.up" in name else tensor, "other weights", "weight by 0.1%"),
        (
            lambda name, tensor: _int8(name, tensor, "2.mlp.down"),
            "other weights",
            "1 of 38 tensors are neither rounded nor quantised copies: model.layers.2.mlp.down_proj.weight by 40.0%",
        ),
    ],
    ids=["bfloat16", "int8", "int4", "tuned", "a quantised copy with a spoilt layer"],
)
def test_other_weights_are_named_and_fail(
    change: Callable[[str, Tensor], Tensor], verdict: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(BUILTIN / "stories", folder)
    tensors = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sides = ("builtin:stories", f"{folder}@dtype=float32")
    done = parity(*sides, "Once upon a time", "--format", "jsonl", n=4)
    assert done.records[0]["verdict"] == verdict
    assert words in done.records[0]["reason"]
    assert done.status == (4 if words else 0), done.err
    if words:
        assert done.err.splitlines()[-1] == "hint: --allow-other-weights passes it"
        assert re.search(r"other weights: KL [\d.e-]+, regret up to [\d.e-]+: ", done.err)
    else:
        assert parity(*sides, "Once upon a time", "--allow-other-weights", n=4).status == 0
