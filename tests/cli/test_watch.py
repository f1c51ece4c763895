"""`--watch` and `--explain`: figures of named tokens agree with the model's logits; what each processor did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.api import load
from genctl.commands.recording import read_recording
from genctl.errors import UsageError
from genctl.events import Stepped
from tests.cli.tool import genctl, ok
from tests.tiny import tiny, tokenizer

WATCHED = (" the", "id:7", " the", "<eos>")  # the second " the" changes nothing
PROMPT = "the cat sat on"
WAYS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "penalty": ("--repetition-penalty", "1.5"),  # watched numbers are those before processors
    "sample": ("--do-sample", "--seed", "3", "--num-return-sequences", "3", "--temperature", "0.7"),
    "beam": ("--num-beams", "4", "--num-return-sequences", "2"),
    "lookup": ("--prompt-lookup-num-tokens", "3"),
    "contrastive": ("--penalty-alpha", "0.6", "--top-k", "4"),
}


def flags(*tokens: str) -> list[str]:
    return [word for token in tokens for word in ("--watch", token)]


def ids() -> list[int]:
    known = tokenizer()
    return [known(" the")["input_ids"][0], 7, 2]


def oracle(arch: str, prompt: str, written: list[int]) -> torch.Tensor:
    """log_softmax of transformers' logits before each written token, f32 [T, V]."""
    model, given = tiny(arch), tokenizer()(prompt)["input_ids"]
    with torch.no_grad():
        if arch == "t5":
            start = [model.config.decoder_start_token_id]
            logits = model(torch.tensor([given]), decoder_input_ids=torch.tensor([start + written[:-1]])).logits[0]
        else:
            logits = model(torch.tensor([given + written[:-1]])).logits[0, len(given) - 1 :]
    scores: torch.Tensor = logits.log_softmax(-1)
    return scores


def check(arch: str, record: dict[str, Any]) -> None:
    """Compare a record's watched numbers with transformers'."""
    scores = oracle(arch, record["prompt"], record["token_ids"])
    assert len(record["tokens"]) == len(scores) > 1
    for entry, row in zip(record["tokens"], scores, strict=True):
        assert [one[0] for one in entry["watched"]] == ids()
        for id, _, logprob, rank in entry["watched"]:
            assert logprob == pytest.approx(row[id].item(), abs=1e-4)
            near = (row - row[id]).abs() < 1e-4  # tokens whose order rounding decides
            assert abs(rank - 1 - int((row > row[id]).sum())) <= int(near.sum()) - 1
            if id == entry["id"]:
                assert (logprob, rank) == (entry["logprob"], entry["rank"])


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize("way", WAYS)
def test_watched_numbers_are_those_of_transformers_logits(gpt2: Path, way: str, runtime: str) -> None:
    arguments = ("run", "-m", str(gpt2), "--runtime", runtime, "-n", "12", "--format", "jsonl", *WAYS[way])
    plain, watched = (
        genctl(*arguments, PROMPT, "a little girl"),
        genctl(*arguments, *flags(*WATCHED), "--batch-size", "2", PROMPT, "a little girl"),
    )
    assert watched.status == 0, watched.err
    assert [one["token_ids"] for one in watched.records] == [one["token_ids"] for one in plain.records]
    for record in watched.records:
        check("gpt2", record)
    assert [one[1] for one in watched.records[0]["tokens"][0]["watched"]][::2] == [" the", "<eos>"]


def test_watched_numbers_of_an_encoder_decoder(t5: Path) -> None:
    done = genctl("run", "-m", str(t5), "-n", "8", "--format", "jsonl", *flags(*WATCHED), PROMPT)
    check("t5", done.records[0])


def test_a_key_is_added_and_no_other_changes(gpt2: Path) -> None:
    arguments = ("run", "-m", str(gpt2), "-n", "4", "--format", "jsonl", "--scores", "--seed", "1", PROMPT)
    plain, watched = genctl(*arguments).records[0], genctl(*arguments, *flags(" the")).records[0]
    assert [list(entry)[-1] for entry in watched["tokens"]] == ["watched"] * 4
    for entry in watched["tokens"]:
        del entry["watched"]
    assert watched == plain


@pytest.mark.parametrize("terminal", [False, True])
def test_each_step_shows_the_watched_tokens(gpt2: Path, terminal: bool) -> None:
    done = genctl("run", "-m", str(gpt2), "-n", "3", *flags(" the", "id:7"), PROMPT, terminal=terminal, color="never")
    shown = done.out if terminal else done.err
    lines = [line for line in shown.splitlines() if "◦" in line]
    assert len(lines) >= 6  # a live region may have drawn them before
    record = genctl("run", "-m", str(gpt2), "-n", "3", "--format", "jsonl", *flags(" the", "id:7"), PROMPT).records[0]
    wanted = [f"logprob {logprob:.3f}  rank {rank}" for e in record["tokens"] for _, _, logprob, rank in e["watched"]]
    for line, words in zip(lines[-6:], wanted, strict=True):
        assert line.endswith(words)
    assert "·the" in lines[-6]


def test_beam_takes_it_too(gpt2: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = ok("beam", "-m", str(gpt2), "-n", "4", "--events", str(trace), *flags(*WATCHED), PROMPT)
    steps = [event for event in read_recording(str(trace)) if isinstance(event, Stepped)]
    for step in steps:
        for child in step.children:
            for token in child.written:
                assert [one[0] for one in token.watched] == ids()
    assert any("◦" in line for line in done.err.splitlines())


def test_compare_shows_and_records_them(gpt2: Path) -> None:
    runs = ("--strategy", "plain:num_beams=1", "--strategy", "wide:num_beams=3")
    arguments = ("compare", "-m", str(gpt2), *runs, "-n", "5", *flags(*WATCHED), PROMPT)
    records = genctl(*arguments, "--format", "jsonl").records
    assert [record["run"] for record in records] == ["plain", "wide"]
    for record in records:
        check("gpt2", record)
    text = genctl(*arguments)
    for record in records:
        assert f"watched in {record['run']}" in text.out
        assert f"{record['tokens'][0]['watched'][0][2]:.3f}" in text.out


@pytest.mark.parametrize("command", ["run", "beam", "compare"])
@pytest.mark.parametrize(
    ("token", "words"),
    [
        (" cat on", "is not one token of"),
        ("id:300", "the ids of"),
        ("", "the prompt tokenises to nothing"),
    ],
)
def test_what_is_no_token_is_refused(gpt2: Path, command: str, token: str, words: str) -> None:
    runs = ("--strategy", "a:num_beams=1", "--strategy", "b:num_beams=2") if command == "compare" else ()
    done = genctl(command, "-m", str(gpt2), *runs, "-n", "2", "--watch", token, PROMPT)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert "--watch" in done.err
    if token == " cat on":
        for id in tokenizer()(token)["input_ids"]:
            assert f"(id:{id})" in done.err


def test_a_checkpoint_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    given = ("--input-format", "jsonl", "--format", "jsonl", "-n", "2")
    rows = json.dumps({"prompt_ids": [5, 6, 7]})
    done = genctl("run", "-m", str(tmp_path), *given, *flags("id:7"), stdin=rows)
    assert [entry["watched"][0][:2] for entry in done.records[0]["tokens"]] == [[7, "<7>"]] * 2
    refused = genctl("run", "-m", str(tmp_path), *given, *flags(" the"), stdin=rows)
    assert refused.status == 2
    assert "has no tokenizer" in refused.err


def test_a_format_without_a_place_for_it_is_refused(gpt2: Path) -> None:
    for arguments in (("run", "--format", "tsv"), ("beam", "--tree-format", "json")):
        done = genctl(*arguments, "-m", str(gpt2), "--watch", " the", PROMPT)
        assert (done.status, done.out) == (2, "")
        assert "--watch" in done.err


def test_the_python_interface_watches_tokens_too(gpt2: Path) -> None:
    model = load(str(gpt2))
    (result,) = model.generate(PROMPT, watch=(" the", "id:7"), max_new_tokens=4)
    (sequence,) = result.sequences
    wanted = oracle("gpt2", PROMPT, list(sequence.token_ids))
    for token, row in zip(sequence.tokens, wanted, strict=True):
        assert [entry[0] for entry in token.watched] == ids()[:2]
        assert [entry[2] for entry in token.watched] == pytest.approx([row[id].item() for id in ids()[:2]], abs=1e-4)
    with pytest.raises(UsageError, match="is not one token"):
        model.generate(PROMPT, watch="the cat sat")


ASKED = ("run", "-m", "builtin:numbers", "1207", "--do-sample", "--top-p", "0.9", "--repetition-penalty", "1.3",
         "--seed", "4", "-n", "6", "--explain")  # fmt: skip


def test_a_record_holds_a_trace_for_each_token_in_the_order_of_the_processors() -> None:
    (record,) = genctl(*ASKED, "--format", "jsonl").records
    for token in record["tokens"]:
        assert [trace["processor"] for trace in token["trace"]] == ["repetition_penalty", "top_k", "top_p"]
        for trace in token["trace"]:
            assert set(trace) == {"processor", "removed", "moved", "changed", "before", "after"}
            assert 0 <= trace["moved"] <= 1
            assert trace["removed"] >= 0
    nucleus = record["tokens"][0]["trace"][-1]
    assert nucleus["removed"] > 0
    assert nucleus["after"] >= nucleus["before"]


def test_a_terminal_shows_each_step_and_a_table_over_the_run_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # no animation, so that the lines are what is seen
    done = ok(*ASKED, terminal=True)
    assert "top_p" in done.out
    assert "mass moved" in done.out
    assert "What the processors did" in done.err
    assert all(len(line) <= 80 for line in (done.out + done.err).splitlines())


def test_a_pipe_keeps_the_text_plain_and_tells_the_rest_on_stderr() -> None:
    done = genctl(*ASKED)
    plain = genctl(*ASKED[:-1])
    assert done.out == plain.out
    assert "top_p" in done.err
