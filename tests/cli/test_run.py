"""`genctl run` on a terminal and in a pipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.models import runtime_choice
from tests.cli.tool import genctl, ok
from tests.tiny import tiny

NUMBERS = ("-m", "builtin:numbers")


def test_lines_files_and_echoes(tmp_path: Path, gpt2: Path) -> None:
    done = genctl("run", *NUMBERS, stdin="12\n1207\n")
    assert (done.status, done.out) == (0, "twelve\none thousand two hundred seven\n")
    assert done.err == ""
    done = genctl("run", *NUMBERS, stdin="5\n\n6\n")
    assert done.status == 1
    assert done.out == "five\nsix\n"
    assert "empty" in done.err
    path = tmp_path / "number.txt"
    path.write_text("31")
    assert genctl("run", *NUMBERS, "-i", str(path), "--input-format", "text").out == "thirty one\n"
    plain = genctl("run", "-m", str(gpt2), "hello", "-n", "5").out
    assert genctl("run", "-m", str(gpt2), "hello", "-n", "5", "--echo").out == f"hello{plain}"


def test_a_record_has_the_documented_fields_in_order() -> None:
    done = genctl("run", *NUMBERS, "21", "--format", "jsonl", "--seed", "7")
    (record,) = done.records
    assert list(record) == [
        "schema", "id", "sequence", "prompt", "text", "token_ids", "finish_reason", "logprob", "score", "strategy",
        "seed", "model", "usage",
    ]  # fmt: skip
    assert record["schema"] == "genctl/1"
    assert record["text"] == "twenty one"
    assert record["finish_reason"] == "eos"
    assert record["seed"] is None  # nothing is sampled
    assert record["score"] == pytest.approx(record["logprob"] / len(record["token_ids"]))
    assert record["usage"] == {"prompt_tokens": 4, "new_tokens": len(record["token_ids"])}


def test_equal_input_and_seed_give_equal_bytes_and_equal_tokens_whatever_the_batch_size(gpt2: Path) -> None:
    arguments = ("run", "-m", str(gpt2), "--do-sample", "--seed", "7", "--format", "jsonl", "-n", "12")
    stdin = "".join(f"line {number} of several\n" for number in range(5))
    first = ok(*arguments, "--batch-size", "5", stdin=stdin)
    assert len(first.records) == 5
    assert genctl(*arguments, "--batch-size", "5", stdin=stdin).raw == first.raw
    told = ("id", "sequence", "text", "token_ids", "finish_reason", "seed")
    for size in ("1", "2", "3"):
        again = genctl(*arguments, "--batch-size", size, stdin=stdin)
        for record, same in zip(again.records, first.records, strict=True):
            assert [record[key] for key in told] == [same[key] for key in told]
            assert record["logprob"] == pytest.approx(same["logprob"], abs=1e-4)


def test_a_recorded_seed_repeats_a_row_alone(gpt2: Path) -> None:
    arguments = ("run", "-m", str(gpt2), "--do-sample", "--format", "jsonl", "-n", "12")
    rows = genctl(*arguments, "--seed", "3", stdin="one\ntwo\nthree\n").records
    alone = genctl(*arguments, "--seed", str(rows[2]["seed"]), "three").records[0]
    assert alone["token_ids"] == rows[2]["token_ids"]


def test_the_ids_are_those_of_generate(gpt2: Path) -> None:
    drawn = ["--do-sample", "--seed", "5", "--temperature", "0.8", "--top-p", "0.95"]
    shape = ["-n", "15", "--num-return-sequences", "2", "--format", "jsonl"]
    done = genctl("run", "-m", str(gpt2), *drawn, *shape, "hello there")
    record = done.records[0]
    model = tiny("gpt2")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(gpt2)("hello there", return_tensors="pt").input_ids
    torch.manual_seed(5)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.8, top_p=0.95,
                          max_new_tokens=15, num_return_sequences=2)  # fmt: skip
    expected = made[0, ids.shape[1] :].tolist()
    assert record["token_ids"] == expected[: len(record["token_ids"])]
    assert len(done.records) == 2


def test_scores_and_alternatives_as_data() -> None:
    done = genctl("run", *NUMBERS, "90", "--format", "jsonl", "--top-logprobs", "3")
    tokens = done.records[0]["tokens"]
    assert [token["id"] for token in tokens] == done.records[0]["token_ids"]
    for token in tokens:
        assert token["rank"] == 1
        assert token["entropy"] >= 0
        assert len(token["top"]) == 3
        assert token["top"][0][0] == token["id"]
    assert "".join(token["text"] for token in tokens) == "ninety"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("run", "x", "--temperature", "0.7", "--no-do-sample"), 2, "do_sample"),
        (("run", "x", "--num-return-sequences", "3"), 2, "num_return_sequences"),
        (("run", "x", "--do-sample", "--top-p", "1.5"), 2, "at most 1"),
        (("run", "x", "-m", "builtin:novels"), 3, "numbers, stories"),
        (("run", "x", "-m", "./no/such/folder"), 3, "no such folder"),
        (("run", "x", "-i", "missing.txt"), 2, "--input"),
        (("run", "x", "--force"), 2, "--output"),
        (("run", "x", "--top-logprobs", "-1"), 2, "at least 0"),
        (("run",), 2, "No prompt"),
    ],
)
def test_mistakes_get_one_clear_line_and_the_right_status(
    arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    done = genctl(*arguments)
    assert done.status == status, done.err
    assert sentence.lower() in done.err.lower()
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_chat_needs_a_template_and_uses_it(gpt2: Path) -> None:
    done = genctl("run", "-m", str(gpt2), "--chat", "hello")
    assert (done.status, done.out) == (3, "")
    assert "no chat template" in done.err
    assert genctl("run", *NUMBERS, "--chat", "12").out == "twelve\n"
    row = {"messages": [{"role": "user", "content": "three"}, {"role": "user", "content": "31"}]}
    done = genctl("run", *NUMBERS, "--input-format", "jsonl", "--format", "jsonl", stdin=json.dumps(row))
    assert done.records[0]["text"] == "thirty one"
    assert done.records[0]["prompt"] == "31</s>"


def test_fail_on_length_exits_with_4() -> None:
    done = genctl("run", *NUMBERS, "123456", "-n", "2", "--fail-on", "length")
    assert done.status == 4
    assert done.out
    assert "--fail-on" in done.err
    assert genctl("run", *NUMBERS, "1", "--fail-on", "length").status == 0


def test_a_text_that_fills_the_context_says_so_and_one_that_reaches_its_limit_does_not(gpt2: Path) -> None:
    rows = [json.dumps({"id": str(length), "prompt_ids": [5] * length}) for length in (240, 256, 9)]
    asked = ("run", "-m", str(gpt2), "--input-format", "jsonl", "--set", "eos_token_id=[]", "-n", "20")
    done = genctl(*asked, "--format", "jsonl", stdin="\n".join(rows))
    found = [(one["id"], one["finish_reason"], one["usage"]["new_tokens"]) for one in done.records]
    assert found == [("240", "context", 16), ("256", "context", 1), ("9", "length", 20)]
    note = "the text ends at the context of 256 tokens, before max_new_tokens (finish_reason: context)"
    assert done.err == f'note: prompt "256": {note}\n'  # it ends first
    assert genctl(*asked, "-q", stdin=rows[0]).err == ""
    assert genctl(*asked, "--fail-on", "length", stdin=rows[0]).status == 4
    assert genctl(*asked, "--fail-on", "context", stdin=rows[0]).status == 4
    assert genctl(*asked, "--fail-on", "context", stdin=rows[2]).status == 0
    assert "cut at the context of 256 tokens" in genctl(*asked, stdin=rows[0], terminal=True).err


def test_a_terminal_shows_the_text_and_a_summary() -> None:
    done = ok("run", *NUMBERS, "42", "--seed", "9", terminal=True)
    assert "forty two" in done.out
    assert "tok/s" in done.err
    assert "seed" not in done.err  # greedy decoding samples nothing


def test_dry_prints_what_is_set_and_with_verbose_all_of_it() -> None:
    done = genctl("run", *NUMBERS, "--dry")
    assert "model = " in done.out
    assert "top_p" not in done.out
    assert done.out.endswith("\n# all other settings have their defaults: -v lists them\n")
    everything = genctl("run", *NUMBERS, "--dry", "-v").out
    assert "top_p = 1.0" in everything
    assert "-v lists" not in everything


def test_files_of_flags_may_begin_with_an_at_sign_as_those_of_template(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"enum": ["one"]}')
    plain = ok("run", "x", "--json-schema", str(path), "-n", "9")
    assert genctl("run", "x", "--json-schema", f"@{path}", "-n", "9").raw == plain.raw


@pytest.mark.parametrize(
    "words",
    [
        "run -i none",
        "score -i none",
        "report none",
        "run x -p none.toml",
        "run x --config none",
        "run x --json-schema none",
        "run x --grammar none.lark",
        "run x --template @none",
        "run x --draft-corpus none",
        "run x -m none.gguf",
        "chat --open none",
        "audit none -m builtin:stories",
        "parity builtin:stories --expect none",
        "compare x -p greedy -p nucleus --references none",
        "presets check none.toml",
    ],
)
def test_a_missing_file_is_the_same_sentence_everywhere(words: str) -> None:
    done = genctl(*words.split())
    assert done.status in (2, 3)
    name = next(word.removeprefix("@") for word in words.split() if "none" in word)
    assert f"cannot read {name}: no such file\n" in done.err


@pytest.mark.parametrize(
    "flags", [(), ("--num-beams", "3"), ("--prompt-lookup-num-tokens", "3"), ("--temperature", "0")]
)
def test_a_seed_that_nothing_draws_from_is_null_and_two_runs_are_equal(flags: tuple[str, ...]) -> None:
    runs = [genctl("run", "-n", "4", "--format", "jsonl", *flags, "Once", "Twice") for _ in range(2)]
    assert runs[0].raw == runs[1].raw
    assert [record["seed"] for record in runs[0].records] == [None, None]


def test_a_seed_that_something_draws_from_is_recorded_and_fits_every_reader_of_json() -> None:
    for flags in (("--do-sample",), ("-p", "nucleus"), ("--do-sample", "--num-beams", "2")):
        done = ok("run", "-n", "3", "--format", "jsonl", *flags, "Once", "Twice")
        assert all(0 <= record["seed"] < 2**53 for record in done.records)


needs_compiler = pytest.mark.skipif(runtime_choice.cpp_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the step uncompiled."""

    def same(step: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return step

    monkeypatch.setattr(torch, "compile", same)


@needs_compiler
@pytest.mark.usefixtures("uncompiled")
def test_compiling_is_said_aloud_and_the_text_is_the_same(gpt2: Path) -> None:
    plain = genctl("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu")
    aloud = ok("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu", "--compile")
    assert aloud.raw == plain.raw
    lines = aloud.err.splitlines()
    assert lines[0] == "note: compiling the step for several rows …"
    assert len(lines) == len(plain.err.splitlines()) + 1
    quiet = genctl("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu", "--compile", "-q")
    assert (quiet.raw, quiet.err) == (plain.raw, "")


@needs_compiler
def test_an_encoder_decoder_is_refused(t5: Path) -> None:
    done = genctl("run", "the cat", "-m", str(t5), "--device", "cpu", "--compile")
    assert done.status == 3
    assert done.err.startswith("error: --compile: T5ForConditionalGeneration is an encoder-decoder")


def test_contradictions_are_found_before_anything_is_loaded() -> None:
    done = genctl("run", "the cat", "-m", "nowhere/at-all", "--compile", "--cache", "quantized")
    assert done.status == 2
    first, second = "compile = true (flag --compile)", 'cache_implementation = "quantized" (flag --cache)'
    assert f"{first} cannot be combined with {second}" in done.err


def test_score_has_no_steps_to_compile(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert genctl("score", "the cat", "-m", str(gpt2), "--compile").status == 2
    monkeypatch.setenv("GENCTL_COMPILE", "true")
    done = ok("score", "the cat", "-m", str(gpt2), "--device", "cpu")
    assert done.err == "note: compile (GENCTL_COMPILE) is not used: genctl score reads every text as a whole\n"
