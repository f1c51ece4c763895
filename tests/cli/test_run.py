"""`genctl run` as a person or a pipe meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.tool import genctl
from tests.tiny import tiny

NUMBERS = ("-m", "builtin:numbers")


def test_lines_on_stdin_become_lines_of_words() -> None:
    done = genctl("run", *NUMBERS, stdin="12\n1207\n")
    assert (done.status, done.out) == (0, "twelve\none thousand two hundred seven\n")
    assert done.err == ""


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
    assert record["seed"] is None  # nothing is drawn
    assert record["score"] == pytest.approx(record["logprob"] / len(record["token_ids"]))
    assert record["usage"] == {"prompt_tokens": 4, "new_tokens": len(record["token_ids"])}


def test_equal_input_and_seed_give_equal_bytes_and_equal_tokens_whatever_the_batch_size(gpt2: Path) -> None:
    arguments = ("run", "-m", str(gpt2), "--do-sample", "--seed", "7", "--format", "jsonl", "-n", "12")
    stdin = "".join(f"line {number} of several\n" for number in range(5))
    first = genctl(*arguments, "--batch-size", "5", stdin=stdin)
    assert first.status == 0
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


def test_rows_of_jsonl_have_their_own_params_and_their_own_errors() -> None:
    rows = [
        {"id": "a", "prompt": "5"},
        {"id": "b", "prompt": "123", "params": {"max_new_tokens": 2}},
        {"id": "c", "prompt": "1", "params": {"temprature": 1}},
        {"prompt_ids": [1]},
        {"id": "e"},
    ]
    stdin = "\n".join(map(json.dumps, rows)) + "\nnot json\n"
    done = genctl("run", *NUMBERS, "--format", "jsonl", "--input-format", "jsonl", stdin=stdin)
    assert done.status == 1
    assert [record["id"] for record in done.records] == ["a", "b", "c", "3", "e", "5"]
    a, b, c, _, e, f = done.records
    assert a["text"] == "five"
    assert b["finish_reason"] == "length"
    assert b["usage"]["new_tokens"] == 2
    assert "did you mean temperature?" in c["error"]["message"]
    assert "prompt" in e["error"]["message"]
    assert "not JSON" in f["error"]["message"]


def test_text_errors_go_to_stderr_and_the_rest_goes_on() -> None:
    done = genctl("run", *NUMBERS, stdin="5\n\n6\n")
    assert done.status == 1
    assert done.out == "five\nsix\n"
    assert "empty" in done.err


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("text", "seven\neight\n"),
        ("json", None),
        ("tsv", None),
    ],
)
def test_formats(format: str, expected: str | None) -> None:
    done = genctl("run", *NUMBERS, "7", "8", "--format", format)
    assert done.status == 0
    if format == "json":
        assert [record["text"] for record in json.loads(done.out)] == ["seven", "eight"]
    elif format == "tsv":
        header, *lines = done.out.splitlines()
        assert header.split("\t")[0] == "id"
        assert [line.split("\t")[6] for line in lines] == ["seven", "eight"]
    else:
        assert done.out == expected


def test_output_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert genctl("run", *NUMBERS, "7", "-o", str(path), "--format", "jsonl").status == 0
    before = path.read_bytes()
    done = genctl("run", *NUMBERS, "8", "-o", str(path), "--format", "jsonl")
    assert done.status == 2
    assert "--force" in done.err
    assert path.read_bytes() == before
    assert genctl("run", *NUMBERS, "8", "-o", str(path), "--format", "jsonl", "--force").status == 0
    assert json.loads(path.read_bytes())["text"] == "eight"


def test_a_whole_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "number.txt"
    path.write_text("31")
    assert genctl("run", *NUMBERS, "-i", str(path), "--input-format", "text").out == "thirty one\n"


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
        (("run", "x", "--set", "num_beens=3"), 2, "did you mean num_beams?"),
        (("run", "x", "-p", "gredy"), 2, "did you mean greedy?"),
        (("run", "x", "-m", "builtin:novels"), 3, "numbers, stories"),
        (("run", "x", "-m", "./no/such/folder"), 3, "no such folder"),
        (("run", "x", "--no-such-flag"), 2, "--no-such-flag"),
        (("run", "-i", "missing.txt"), 2, "missing.txt"),
        (("run", "x", "-i", "missing.txt"), 2, "--input"),
        (("run", "x", "--force"), 2, "--output"),
        (("run", "x", "--top-logprobs", "-1"), 2, "at least 0"),
        (("run",), 2, "No prompt"),
        (("rum",), 2, "rum"),
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


def test_echo_begins_with_the_prompt(gpt2: Path) -> None:
    plain = genctl("run", "-m", str(gpt2), "hello", "-n", "5").out
    assert genctl("run", "-m", str(gpt2), "hello", "-n", "5", "--echo").out == f"hello{plain}"


def test_a_prompt_above_the_context_states_both_lengths(gpt2: Path) -> None:
    done = genctl("run", "-m", str(gpt2), "z " * 300)
    assert done.status == 1
    assert "tokens" in done.err
    assert "256" in done.err


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
    done = genctl("run", *NUMBERS, "42", "--seed", "9", terminal=True)
    assert done.status == 0
    assert "forty two" in done.out
    assert "tok/s" in done.err
    assert "seed" not in done.err  # greedy decoding draws nothing


def test_a_value_that_is_no_choice_is_an_error_of_one_sentence() -> None:
    done = genctl("run", "One day", "--quantize", "int5")
    assert done.status == 2
    assert done.err.splitlines()[0] == (
        'error: flag --quantize: quantize = "int5": did you mean int8? It must be one of int8, int4, gguf'
    )


def test_dry_prints_what_is_set_and_with_verbose_all_of_it() -> None:
    done = genctl("run", *NUMBERS, "--dry")
    assert "model = " in done.out
    assert "top_p" not in done.out
    assert done.out.endswith("\n# all other settings have their defaults: -v lists them\n")
    everything = genctl("run", *NUMBERS, "--dry", "-v").out
    assert "top_p = 1.0" in everything
    assert "-v lists" not in everything


def test_the_seed_of_a_resumed_run_is_the_one_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("One\nTwo\nThree\n")
    job = ("run", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl"), "--resume", "--seed", "5")
    job = (*job, "--do-sample", "-n", "2", "-v")
    assert " · seed 5 · " in genctl(*job).err.splitlines()[-1]
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(lines[:2]))
    journal = (tmp_path / "out.jsonl.journal").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl.journal").write_text("".join(journal[:-2]))
    again = genctl(*job)
    assert " · seed 5 · " in again.err.splitlines()[-1]
    assert (tmp_path / "out.jsonl").read_text() == "".join(lines)


def test_files_of_flags_may_begin_with_an_at_sign_as_those_of_template(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"enum": ["one"]}')
    plain = genctl("run", "x", "--json-schema", str(path), "-n", "9")
    assert plain.status == 0
    assert genctl("run", "x", "--json-schema", f"@{path}", "-n", "9").raw == plain.raw


def test_a_preset_in_the_working_directory_is_named_with_its_path() -> None:
    Path("mine.toml").write_text("top_k = 3\n")
    done = genctl("run", "x", "-p", "mine")
    assert (done.status, done.err.splitlines()[-1]) == (2, "hint: name the file: -p ./mine.toml")


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
        "run x --ban-file none",
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


def test_dry_prints_a_job_that_loads_again(tmp_path: Path) -> None:
    done = genctl("run", *NUMBERS, "--dry", "-p", "nucleus", "--set", "min_p=0.05", "--seed", "4")
    assert done.status == 0
    path = tmp_path / "job.toml"
    path.write_text(done.out)
    again = genctl("run", "--dry", "-p", str(path))
    strip = lambda text: [line.split("#")[0].strip() for line in text.splitlines() if "=" in line.split("#")[0]]  # noqa: E731
    assert strip(again.out) == strip(done.out)
    assert "min_p = 0.05" in done.out


def test_events_are_written_and_can_be_read_back(tmp_path: Path) -> None:
    from genctl import events

    path = tmp_path / "events.jsonl"
    assert genctl("run", *NUMBERS, "42", "--events", str(path)).status == 0
    found = [events.from_json(json.loads(line)) for line in path.read_text().splitlines()]
    assert isinstance(found[0], events.Began)
    assert isinstance(found[-1], events.Finished)
    assert found[-1].hypotheses[0].text == "forty two"


@pytest.mark.parametrize(
    "flags", [(), ("--num-beams", "3"), ("--prompt-lookup-num-tokens", "3"), ("--temperature", "0")]
)
def test_a_seed_that_nothing_draws_from_is_null_and_two_runs_are_equal(flags: tuple[str, ...]) -> None:
    runs = [genctl("run", "-n", "4", "--format", "jsonl", *flags, "Once", "Twice") for _ in range(2)]
    assert runs[0].raw == runs[1].raw
    assert [record["seed"] for record in runs[0].records] == [None, None]


def test_a_seed_that_something_draws_from_is_recorded_and_fits_every_reader_of_json() -> None:
    for flags in (("--do-sample",), ("-p", "nucleus"), ("--do-sample", "--num-beams", "2")):
        done = genctl("run", "-n", "3", "--format", "jsonl", *flags, "Once", "Twice")
        assert done.status == 0, done.err
        assert all(0 <= record["seed"] < 2**53 for record in done.records)
