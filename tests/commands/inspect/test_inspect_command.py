"""`genctl inspect-cache` on the command line: its output, what it refuses, and its notes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import Done, genctl
from tests.tiny import checkpoint

PROMPT = "the cat sat on the mat"


def inspect(*arguments: str, **options: Any) -> Done:
    return genctl("inspect-cache", *arguments, **options)


def report(*arguments: str, status: int = 0, **options: Any) -> dict[str, Any]:
    done = inspect(*arguments, "--format", "json", **options)
    assert done.status == status, done.err
    (found,) = done.records
    return found


@pytest.fixture
def mamba(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("mamba")


@pytest.fixture
def mistral(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("mistral")


def test_a_prompt_that_is_cut_is_said(gpt2: Path) -> None:
    done = inspect("z" * 300, "-m", str(gpt2), "--steps", "6", "--truncate", "right", "--format", "json")
    assert done.status == 0, done.err
    assert done.err.count("tokens were taken from the prompt (--truncate right)") == 1


# -- output ------------------------------------------------------------------------------------------------------------


def test_json_is_one_object(gpt2: Path) -> None:
    found = report(PROMPT, "-m", str(gpt2), "--steps", "3", "--seed", "7")
    assert list(found) == [
        "schema", "model", "id", "prompt", "prompt_tokens", "reused_tokens", "strategy", "seed", "ended", "sequences",
        "cache", "layers", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token", "bytes_per_row",
        "share_of_weights", "steps", "tokens_agree",
    ]  # fmt: skip
    assert (found["schema"], found["model"], found["prompt"], found["seed"]) == ("genctl/1", str(gpt2), PROMPT, None)
    assert found["strategy"] == "greedy"
    assert found["cache"] == "dynamic"
    assert found["ended"] == {"reason": "steps", "steps": 3}
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
    assert list(found["steps"][0]) == [
        "step", "rows", "input_ids", "cache_position", "position_ids", "attention_mask", "past_length", "layers",
        "total_bytes", "reserved_bytes", "growth_bytes", "reordered", "cross_attention", "without_cache",
    ]  # fmt: skip
    assert found["layers"] == found["steps"][-1]["layers"]
    assert found["total_bytes"] == sum(layer["bytes"] for layer in found["layers"])
    assert found["layers"][0] == {
        "layer": 0, "kind": "full", "shape": [1, 4, found["prompt_tokens"] + 3, 8], "dtype": "float32",
        "device": "cpu", "bytes": 2 * 4 * (found["prompt_tokens"] + 3) * 8 * 4, "new": 1,
    }  # fmt: skip
    assert found["tokens_agree"] is True


def test_equal_input_gives_equal_bytes(gpt2: Path) -> None:
    asked = (PROMPT, "-m", str(gpt2), "--steps", "2", "--do-sample", "--seed", "5", "--format", "json")
    assert inspect(*asked).raw == inspect(*asked).raw


def test_the_text_is_that_of_a_run(gpt2: Path) -> None:
    found = report(PROMPT, "-m", str(gpt2), "--steps", "4", "--num-beams", "3", "--seed", "1")
    plain = genctl("beam", PROMPT, "-m", str(gpt2), "-n", "5", "--num-beams", "3", "--seed", "1", "--format", "jsonl")
    assert [one["token_ids"] for one in found["sequences"]] == [one["token_ids"] for one in plain.records]


def test_tsv_has_a_line_for_each_layer_of_each_pass(gpt2: Path) -> None:
    done = inspect(PROMPT, "-m", str(gpt2), "--steps", "2", "--format", "tsv", "--num-beams", "2")
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert lines[0] == ["step", "rows", "layer", "kind", "shape", "dtype", "device", "bytes", "new"]
    assert [(line[0], line[2]) for line in lines[1:]] == [(str(s), str(layer)) for s in range(3) for layer in range(2)]
    assert json.loads(lines[-1][1]) == [0, 0]
    assert json.loads(lines[-1][4])[0] == 2


def test_several_prompts_are_one_object_and_one_batch(gpt2: Path) -> None:
    found = report("the cat", PROMPT, "-m", str(gpt2), "--steps", "2")
    assert [prompt["prompt"] for prompt in found["prompts"]] == ["the cat", PROMPT]
    assert found["steps"][-1]["rows"] == [0, 1]
    assert found["bytes_per_row"] * 2 == found["total_bytes"]


def test_prompts_come_from_a_file_or_a_pipe(gpt2: Path, tmp_path: Path) -> None:
    asked = ("-m", str(gpt2), "--steps", "1", "--seed", "1")
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n")
    wanted = report(PROMPT, *asked)
    assert report("-i", str(tmp_path / "prompts.txt"), *asked) == wanted
    assert report(*asked, stdin=f"{PROMPT}\n") == wanted
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": PROMPT, "id": "0", "params": {"num_beams": 3}}))
    assert len(report("-i", str(tmp_path / "rows.jsonl"), *asked)["steps"][-1]["rows"]) == 3


def test_no_prompt_on_a_terminal_is_a_short_help(gpt2: Path) -> None:
    done = inspect("-m", str(gpt2))
    assert done.status == 2
    assert "No prompt" in done.err


def test_a_pipe_gets_a_plain_table(gpt2: Path) -> None:
    done = inspect(PROMPT, "-m", str(gpt2), "--steps", "2", "--inputs", stdin="")
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert "layer  kind" in done.out
    assert "with and without a cache the same tokens were written" in done.out


def test_an_output_file_is_not_replaced_unasked(gpt2: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    asked = (PROMPT, "-m", str(gpt2), "--steps", "1", "--format", "json", "-o", str(file))
    assert inspect(*asked).status == 0
    assert json.loads(file.read_text())["schema"] == "genctl/1"
    again = inspect(*asked)
    assert (again.status, "exists already" in again.err) == (2, True)
    assert inspect(*asked, "--force").status == 0


def test_a_prompt_that_fails_leaves_the_others(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the cat"}\n{"prompt_ids": [9999]}\n')
    found = report("-i", str(tmp_path / "rows.jsonl"), "-m", str(gpt2), "--steps", "1", status=1)
    assert len(found["prompts"]) == 1
    assert found["errors"][0]["id"] == "1"
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [9999]}\n')
    done = inspect("-i", str(tmp_path / "rows.jsonl"), "-m", str(gpt2), "--format", "json")
    assert (done.status, done.out) == (1, "")
    assert "9999" in done.err


# -- saved prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "beam", "inspect-cache"])
def test_a_saved_prompt_serves_the_commands(command: str, gpt2: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    done = inspect(PROMPT, "-m", str(gpt2), "--steps", "0", "--save-cache", file)
    assert done.status == 0, done.err
    assert "saved 10 tokens" in done.err
    assert f"{Path(file).stat().st_size:,} bytes" in done.err
    longer = f"{PROMPT} and the dog"
    asked = ["-m", str(gpt2), "--seed", "3", "--format", "json" if command == "inspect-cache" else "jsonl"]
    asked += ["--steps", "4"] if command == "inspect-cache" else ["-n", "5"]
    plain = genctl(command, longer, *asked).records[0]
    reusing = genctl(command, longer, *asked, "--prompt-cache", file, "-v")
    found = reusing.records[0]
    assert "note: reused 10 of" in reusing.err
    if command == "inspect-cache":
        assert found["reused_tokens"] == 10
        assert found["sequences"] == plain["sequences"]
        assert found["steps"][0]["past_length"] == 10
        assert found["steps"][0]["total_bytes"] == plain["steps"][0]["total_bytes"]
    else:
        assert found["usage"].pop("reused_tokens") == 10
        assert found["token_ids"] == plain["token_ids"]
        assert found["usage"] == plain["usage"]
        assert "reused" not in genctl(command, longer, *asked, "--prompt-cache", file).err


def test_a_saved_prompt_serves_every_run_of_a_comparison(gpt2: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    inspect(PROMPT, "-m", str(gpt2), "--steps", "0", "--save-cache", file)
    asked = ["compare", f"{PROMPT} and the dog", "-m", str(gpt2), "-n", "5", "--seed", "3", "--format", "jsonl"]
    asked += ["-p", "greedy", "-p", "beam5", "--strategy", "static:cache_implementation=static"]
    plain, reusing = genctl(*asked), genctl(*asked, "--prompt-cache", file, "-v")
    assert [one["token_ids"] for one in reusing.records] == [one["token_ids"] for one in plain.records]
    assert {one["usage"]["reused_tokens"] for one in reusing.records} == {10}
    assert "note: reused" in reusing.err
    mixed = genctl(*asked[:2], "-m", str(gpt2), "-p", "greedy", "--strategy", f"other:prompt_cache={json.dumps(file)}")
    assert mixed.status == 2
    assert "run greedy: prompt_cache = none" in mixed.err


def test_two_equal_prompts_tell_of_the_same_reuse(gpt2: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "prompt.safetensors")
    inspect(PROMPT, "-m", str(gpt2), "--steps", "0", "--save-cache", file)
    records = [
        genctl(
            "run", PROMPT, PROMPT, "-m", str(gpt2), "-n", "2", "--prompt-cache", file, "--format", "jsonl", *size
        ).records
        for size in ((), ("--batch-size", "1"))
    ]
    usages = [[one["usage"] for one in found] for found in records]
    assert usages[0] == usages[1]
    assert usages[0][0]["reused_tokens"] == 9


def test_a_prompt_cache_does_not_outlive_any_change_of_the_weights(gpt2: Path, tmp_path: Path) -> None:
    model, file = Path(shutil.copytree(gpt2, tmp_path / "model")), tmp_path / "saved"
    assert inspect(PROMPT, "-m", str(model), "--steps", "1", "--save-cache", str(file)).status == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1000] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    done = genctl("run", PROMPT, "-m", str(model), "-n", "1", "--prompt-cache", str(file))
    assert done.status == 2
    assert f"the checkpoint {model} has changed (" in done.err


def test_a_prompt_cache_of_no_use_is_told_of(gpt2: Path, mamba: Path, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("gpt2", "mamba")]
    for model, file in zip((gpt2, mamba), files, strict=True):
        inspect("a dog", "-m", str(model), "--steps", "0", "--save-cache", file)
    done = genctl("run", PROMPT, "-m", str(gpt2), "-n", "1", "--prompt-cache", files[0])
    assert f"note: nothing of the prompt cache {files[0]} could be reused: the prompts have no beginning" in done.err
    assert "nothing" not in genctl("run", PROMPT, "-m", str(gpt2), "-n", "1", "--prompt-cache", files[0], "-q").err
    done = inspect("a cat", "-m", str(mamba), "--steps", "1", "--prompt-cache", files[1])
    assert "a recurrent state cannot be cropped" in done.err
    done = genctl("run", "a dog and", PROMPT, "-m", str(gpt2), "-n", "1", "--prompt-cache", files[0], stdin="")
    assert "for 1 of 2 prompts nothing" in done.err


def test_a_prompt_cache_that_does_not_fit_is_refused(gpt2: Path, t5: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    inspect(PROMPT, "-m", str(gpt2), "--steps", "0", "--save-cache", str(file))

    def refusal(*arguments: str) -> str:
        done = genctl(*arguments, "--prompt-cache", str(file))
        assert (done.status, done.out) == (2, "")
        (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        return line

    assert "another checkpoint" in refusal("run", PROMPT, "-m", str(t5))
    assert "dtype float32 → bfloat16" in refusal("run", PROMPT, "-m", str(gpt2), "--dtype", "bfloat16")
    assert "needs a cache" in refusal("run", PROMPT, "-m", str(gpt2), "--set", "use_cache=false")
    assert "needs a cache" in refusal("run", PROMPT, "-m", str(gpt2), "--cache", "off")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    assert "is damaged" in refusal("beam", PROMPT, "-m", str(gpt2))
    file.write_bytes(data[:400])
    assert "is damaged" in refusal("inspect-cache", PROMPT, "-m", str(gpt2))
    file.unlink()
    assert "no such file" in refusal("run", PROMPT, "-m", str(gpt2))


def test_saving_refuses_what_it_would_destroy(gpt2: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    file.write_bytes(b"something of mine")
    asked = (PROMPT, "-m", str(gpt2), "--steps", "0", "--save-cache", str(file))
    done = inspect(*asked)
    assert (done.status, done.out) == (2, "")
    assert "exists already" in done.err
    assert file.read_bytes() == b"something of mine"
    assert inspect(*asked, "--force").status == 0
    assert b"genctl-prompt-cache/1" in file.read_bytes()
    # after a failure no file is left behind
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [9999]}\n')
    other = tmp_path / "other"
    assert inspect("-i", str(tmp_path / "rows.jsonl"), "-m", str(gpt2), "--save-cache", str(other)).status == 1
    assert not other.exists()


def test_a_row_cannot_choose_a_prompt_cache() -> None:
    row = json.dumps({"prompt": "a", "params": {"prompt_cache": "x"}})
    done = genctl("run", "--input-format", "jsonl", "--format", "jsonl", stdin=row)
    assert "belongs to the whole run" in done.records[0]["error"]["message"]


def test_score_says_that_it_uses_no_prompt_cache(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such option" in genctl("score", "a b", "--prompt-cache", "x").err
    monkeypatch.setenv("GENCTL_PROMPT_CACHE", "x")
    done = genctl("score", "a b", "-m", str(gpt2), stdin="")
    assert done.status == 0
    assert "prompt_cache (GENCTL_PROMPT_CACHE) is not used" in done.err


# -- forms of cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "beam"])
def test_every_form_of_cache_writes_the_same(command: str, gpt2: Path, t5: Path) -> None:
    for model in (gpt2, t5):
        found = {
            form: genctl(
                command, PROMPT, "-m", str(model), "-n", "8", "--cache", form, "--format", "jsonl", "--seed", "1"
            )
            for form in ("dynamic", "static", "offloaded", "off", "quantized")
        }
        wanted = found["dynamic"].records[0]["token_ids"]
        for form, done in found.items():
            assert done.status == 0, done.err
            assert done.records[0]["token_ids"] == wanted or form == "quantized"
            assert done.err.count("is lossy") == (form == "quantized")
            assert ("nowhere to offload to" in done.err) == (form == "offloaded")


def test_a_comparison_tells_of_each_form(gpt2: Path) -> None:
    forms = ("dynamic", "static", "offloaded", "off", "quantized")
    runs = [part for form in forms for part in ("--strategy", f"{form}:cache_implementation={form}")]
    done = genctl("compare", PROMPT, "-m", str(gpt2), "-n", "8", "--seed", "1", "--format", "jsonl", *runs)
    assert done.status == 0, done.err
    tokens = {one["run"]: one["token_ids"] for one in done.records}
    assert len({tuple(tokens[form]) for form in forms[:-1]}) == 1
    assert done.err.count("note: run quantized: cache_implementation = quantized") == 1


def test_inspect_shows_each_form(gpt2: Path) -> None:
    found = {
        form: report(PROMPT, "-m", str(gpt2), "--steps", "3", "--cache", form)
        for form in ("static", "quantized", "off")
    }
    static = found["static"]["layers"][0]
    assert static["kind"] == "static"
    assert {step["layers"][0]["shape"][2] for step in found["static"]["steps"][1:]} == {static["shape"][2]}
    assert [step["layers"][0]["filled"] for step in found["static"]["steps"]] == [10, 11, 12, 13]
    quantized = found["quantized"]["layers"][0]
    assert (quantized["kind"], quantized["dtype"]) == ("quantised", "int8")
    assert quantized["bytes"] == 2 * 4 * 13 * (8 + 4)  # codes and a float32 scale for each token and head
    assert found["off"]["layers"] == []
    assert found["off"]["cache"] == "off"
    assert [len(step["input_ids"][0]) for step in found["off"]["steps"]] == [10, 11, 12, 13]


def test_a_form_that_changes_nothing_is_told_of(mamba: Path, mistral: Path) -> None:
    done = genctl("run", PROMPT, "-m", str(mamba), "-n", "2", "--cache", "quantized")
    assert "changes nothing" in done.err
    assert "keeps only recurrent states" in done.err
    assert "lossy" not in done.err
    done = inspect(PROMPT, "-m", str(mistral), "--steps", "1", "--cache", "static")
    assert "keeps only sliding windows" in done.err
    assert "changes nothing" not in genctl("run", PROMPT, "-m", str(mistral), "-n", "1").err


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["-n", "20"],
            "max_new_tokens = 20 (flag --max-new-tokens) contradicts --steps 8, the default, which writes 9",
        ),
        (["--steps", "4", "-n", "5"], "contradicts --steps 4 which writes 5 tokens"),
        (["--max-length", "20"], "max_length = 20 (flag --max-length) contradicts --steps 8"),
        (["--set", "max_new_tokens=3"], "max_new_tokens = 3 (--set max_new_tokens) contradicts --steps 8"),
        (
            ["--set", "batch_size=2"],
            "batch_size = 2 (--set batch_size): prompts given together are decoded in one batch",
        ),
        (["--steps", "-1"], "--steps -1: must be at least 0"),
        (
            ["--min-new-tokens", "30"],
            "min_new_tokens = 30 (flag --min-new-tokens) exceeds max_new_tokens = 9 (--steps 8)",
        ),
        (["--memory", "3GiB"], "--memory 3GiB belongs to --plan"),
        (["--batch", "3"], "--batch 3 belongs to --plan"),
        (["--length", "3"], "--length 3 belongs to --plan"),
        (["--source-length", "3"], "--source-length 3 belongs to --plan"),
        (["--plan"], "a prompt belongs to a measurement, and --plan decodes nothing"),
        (["--format", "tsv", "--inputs"], "--inputs has no place in --format tsv"),
        (["--force"], "--force replaces an existing --output or --save-cache file"),
        (["--save-cache", "-"], "a prompt cache is a file"),
        (["--save-cache", "x", "-o", "x"], "--output names the same file"),
        (["the dog", "--save-cache", "x"], "--save-cache takes exactly one prompt; there are 2"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str, gpt2: Path) -> None:
    done = inspect(PROMPT, "-m", str(gpt2), *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err


@pytest.mark.parametrize("option", ["--steps=1", "--inputs", "--save-cache=x", "--input=x"])
def test_a_plan_takes_nothing_of_a_measurement(option: str) -> None:
    done = inspect("--plan", option)
    assert done.status == 2
    assert f"{option.partition('=')[0]} belongs to a measurement" in done.err


def test_a_preset_yields_to_the_steps(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text('about = "long"\nmax_length = 200\nnum_beams = 2\n')
    found = report(PROMPT, "-m", str(gpt2), "-p", str(tmp_path / "long.toml"), "--steps", "2")
    assert found["ended"] == {"reason": "steps", "steps": 2}
    assert len(found["steps"][-1]["rows"]) == 2


def test_the_context_may_end_it_early(tmp_path: Path) -> None:
    small = checkpoint("gpt2", tmp_path / "small", n_positions=14)
    found = report(PROMPT, "-m", str(small))
    assert found["ended"] == {"reason": "context", "steps": 3, "stop": "context of 14 tokens"}
    assert "ended after 3 steps by the context of 14 tokens" in " ".join(
        inspect(PROMPT, "-m", str(small), stdin="").out.replace("ended     ", "ended ").split("\n")
    )
