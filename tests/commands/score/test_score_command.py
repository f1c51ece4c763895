"""`genctl score` on a terminal and in a pipe."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genctl as package
from genctl.engines.protocol import ScoringOptions, TextToScore
from genctl.engines.scorer import Scorer
from genctl.engines.session import Session
from genctl.errors import GenctlError, ModelError
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.commands.score.oracle import loss, plain
from tests.tiny import EOS, checkpoint, tiny, tokenizer

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
CARD = Path(package.__file__).parent / "models" / "builtin" / "stories" / "README.md"
KEYS = ["schema", "id", "text", "token_ids", "nll", "tokens", "ppl", "bpb", "bits", "bytes", "model"]


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer()(text)["input_ids"]
    return found


def test_held_out_perplexity_equals_the_model_card() -> None:
    stated = re.search(
        r"perplexity: \*\*(\d+\.\d{4})\*\*[^(]*\(which.*?\(([\d,]+) tokens\)", CARD.read_text(), re.DOTALL
    )
    assert stated is not None
    held_out = str(DATA / "stories_heldout.txt")
    done = genctl("score", "-i", held_out, "--add-eos", "-v", "--format", "jsonl")
    assert done.status == 0, done.err
    nll = sum(record["nll"] for record in done.records)
    tokens = sum(record["tokens"] for record in done.records)
    assert tokens == int(stated[2].replace(",", ""))
    assert math.exp(nll / tokens) == pytest.approx(float(stated[1]), abs=1e-4)
    assert f"60 texts · perplexity {stated[1]} · " in done.err
    assert "runtime: native (llama)\n" in done.err
    lines = (DATA / "stories_heldout.txt").read_text(encoding="utf-8").splitlines()
    assert [record["text"] for record in done.records] == lines
    assert sum(record["bytes"] for record in done.records) == sum(len(line.encode()) for line in lines)


def test_a_record_has_the_loss_of_the_model(gpt2: Path) -> None:
    (record,) = genctl("score", "-m", str(gpt2), "the cat sat", "--format", "jsonl").records
    assert list(record) == KEYS
    text = ids("the cat sat")
    assert record["token_ids"] == text
    assert record["tokens"] == len(text) - 1
    assert record["nll"] / record["tokens"] == pytest.approx(loss(tiny("gpt2"), text), abs=1e-5)
    assert record["ppl"] == pytest.approx(math.exp(record["nll"] / record["tokens"]))
    assert record["bits"] == pytest.approx(record["nll"] / math.log(2))
    assert record["bpb"] == pytest.approx(record["bits"] / record["bytes"])


def test_scores_tell_of_every_scored_token(gpt2: Path) -> None:
    done = genctl("score", "-m", str(gpt2), "the cat sat", "--format", "jsonl", "--scores", "--top-logprobs", "2")
    (record,) = done.records
    assert list(record) == [*KEYS, "scores"]
    text = ids("the cat sat")
    assert [entry["id"] for entry in record["scores"]] == text[1:]
    assert [entry["logprob"] for entry in record["scores"]] == pytest.approx(plain(tiny("gpt2"), text), abs=1e-4)
    assert tokenizer().decode(text[:1]) + "".join(entry["text"] for entry in record["scores"]) == "the cat sat"
    for entry in record["scores"]:
        assert list(entry) == ["id", "text", "logprob", "rank", "entropy", "top"]
        assert len(entry["top"]) == 2
        assert entry["rank"] >= 1
        assert entry["entropy"] > 0


def test_a_pipe_gets_one_line_for_each_text_in_order(gpt2: Path) -> None:
    texts = ("the cat sat on the mat", "the\tdog\nran", "a b")
    stdin = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    done = genctl("score", "-m", str(gpt2), "--input-format", "jsonl", "--batch-size", "2", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert [line[3] for line in lines] == ["the cat sat on the mat", "the\\tdog\\nran", "a b"]
    for line in lines:
        assert re.fullmatch(r"\d+\.\d{4}", line[0])
        text = ids(line[3].replace("\\t", "\t").replace("\\n", "\n"))
        assert float(line[1]) == pytest.approx(loss(tiny("gpt2"), text) * (len(text) - 1), abs=1e-3)
        assert int(line[2]) == len(text) - 1


def test_batches_and_order_do_not_change_what_a_text_gets(gpt2: Path) -> None:
    stdin = "\n".join("the cat sat on the mat and the dog"[: 3 + 5 * n % 30] for n in range(23))
    one = genctl("score", "-m", str(gpt2), "--format", "jsonl", "--batch-size", "1", stdin=stdin).records
    many = genctl("score", "-m", str(gpt2), "--format", "jsonl", "--batch-size", "7", stdin=stdin).records
    assert [record["id"] for record in many] == [str(n) for n in range(23)]
    for left, right in zip(one, many, strict=True):
        assert left["text"] == right["text"]
        assert left["nll"] == pytest.approx(right["nll"], abs=1e-4)


def test_a_context_is_read_and_not_scored(gpt2: Path) -> None:
    (record,) = genctl("score", "-m", str(gpt2), " sat on", "--context", "the cat", "--format", "jsonl").records
    whole, head = ids("the cat sat on"), ids("the cat")
    assert whole[: len(head)] == head
    assert list(record) == [*KEYS, "context"]
    assert (record["context"], record["token_ids"]) == ("the cat", whole[len(head) :])
    assert record["nll"] / record["tokens"] == pytest.approx(loss(tiny("gpt2"), whole, len(head)), abs=1e-5)


def test_eos_is_scored_where_asked(gpt2: Path) -> None:
    (record,) = genctl("score", "-m", str(gpt2), "the cat", "--add-eos", "--format", "jsonl", "--scores").records
    text = [*ids("the cat"), EOS]
    assert record["token_ids"] == text
    assert record["nll"] == pytest.approx(-sum(plain(tiny("gpt2"), text)), abs=1e-4)
    assert record["scores"][-1]["text"] == "<eos>"


def test_a_target_is_scored_with_the_text_as_its_source(t5: Path) -> None:
    (record,) = genctl("score", "-m", str(t5), "the cat", "--target", "the dog ran", "--format", "jsonl").records
    assert list(record) == [*KEYS, "target"]
    assert (record["text"], record["target"], record["token_ids"]) == ("the cat", "the dog ran", ids("the dog ran"))
    expected = loss(tiny("t5"), [0, *ids("the dog ran")], 1, ids("the cat"))
    assert record["nll"] / record["tokens"] == pytest.approx(expected, abs=1e-5)
    assert record["bytes"] == len("the dog ran")


def test_numbers_are_spelled_with_confidence() -> None:
    right = genctl("score", "-m", "builtin:numbers", "1207", "--target", "one thousand two hundred seven")
    wrong = genctl("score", "-m", "builtin:numbers", "1207", "--target", "one thousand two hundred six")
    assert float(right.out.split("\t")[0]) < 1.01 < float(wrong.out.split("\t")[0])
    best, *others = genctl(
        "score", "-m", "builtin:numbers", "--context", "7", "--rank", "six", "seven", "eight", "--format", "jsonl"
    ).records
    assert (best["text"], best["rank"], best["candidate"]) == ("seven", 1, 1)
    assert [record["rank"] for record in others] == [2, 3]


@pytest.mark.parametrize("by", ["mean", "total", "bits-per-byte"])
def test_candidates_come_sorted_with_the_losses_of_the_model(gpt2: Path, by: str) -> None:
    candidates = [" sat on the mat", " dog", " ran after the ball and went home", "z"]
    arguments = ("score", "-m", str(gpt2), "--context", "the cat", "--rank", *candidates, "--by", by)
    records = genctl(*arguments, "--format", "jsonl").records
    head = ids("the cat")
    values = []
    for record in records:
        assert record["text"] == candidates[record["candidate"]]
        mean = loss(tiny("gpt2"), [*head, *record["token_ids"]], len(head))
        assert record["nll"] / record["tokens"] == pytest.approx(mean, abs=1e-5)
        total = mean * record["tokens"]
        values.append({"mean": mean, "total": total, "bits-per-byte": total / len(record["text"])}[by])
    assert values == sorted(values)
    assert [record["rank"] for record in records] == [1, 2, 3, 4]
    shown = genctl(*arguments)
    assert [line.split("\t")[3] for line in shown.out.splitlines()] == [record["text"] for record in records]


def test_candidates_may_be_the_lines_of_the_input(gpt2: Path) -> None:
    given = genctl("score", "-m", str(gpt2), "--context", "the", "--rank", " cat", " dog").out
    assert genctl("score", "-m", str(gpt2), "--context", "the", "--rank", stdin=" cat\n dog\n").out == given
    broken = genctl("score", "-m", str(gpt2), "--context", "the", "--rank", stdin=" cat\n\n dog\n")
    assert (broken.status, broken.out, broken.err) == (2, "", "error: line 2: empty prompt\n")


def test_rows_say_what_they_want_themselves(gpt2: Path, tmp_path: Path) -> None:
    rows = [
        {"id": "plain", "text": "the cat sat"},
        {"prompt": " sat", "context": "the cat"},
        {"id": "two", "context": "the", "candidates": [" cat", " dog"]},
        {"text": "x", "tekst": "y"},
        {"text": "x y", "target": "z"},
        {"context": "only"},
        {"text": "a b", "candidates": [""], "context": 3},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = genctl("score", "-m", str(gpt2), "-i", str(file), "--format", "jsonl")
    assert done.status == 1
    assert [record["id"] for record in done.records] == ["plain", "1", "two", "two", "3", "4", "5", "6"]
    (alone,) = genctl("score", "-m", str(gpt2), " sat", "--context", "the cat", "--format", "jsonl").records
    assert done.records[1]["nll"] == pytest.approx(alone["nll"], abs=1e-4)
    assert [record.get("rank") for record in done.records[2:4]] == [1, 2]
    messages = [record["error"]["message"] for record in done.records[4:]]
    assert done.records[4]["input"] == {"tekst": "y"}
    assert "the text is a single token" in messages[0]
    assert "a target is for encoder-decoders" in messages[1]
    assert "nothing to score: expected one of text, prompt, candidates" in messages[2]
    assert "text and candidates exclude each other" in messages[3]
    assert "context: expected a string, got an integer" in messages[3]
    assert "candidates: item 1: is empty" in messages[3]


def test_the_keys_of_score_are_columns_of_run(gpt2: Path) -> None:
    stdin = '{"prompt": "x", "context": "y"}'
    done = genctl("run", "-m", str(gpt2), "-n", "2", "--input-format", "jsonl", "--format", "jsonl", stdin=stdin)
    assert done.records[0]["input"] == {"context": "y"}


def test_a_row_goes_before_a_flag(t5: Path) -> None:
    stdin = '{"text": "the cat", "target": "the dog"}\n{"text": "the cat"}\n'
    arguments = ("score", "-m", str(t5), "--input-format", "jsonl", "--target", "the mat", "--format", "jsonl")
    assert [record["target"] for record in genctl(*arguments, stdin=stdin).records] == ["the dog", "the mat"]


def test_failed_texts_leave_the_others_and_say_so(gpt2: Path) -> None:
    done = genctl("score", "-m", str(gpt2), stdin="the cat\n\na\nthe dog\n")
    assert done.status == 1
    assert [line.split("\t")[3] for line in done.out.splitlines()] == ["the cat", "the dog"]
    assert "error: text 2: line 2: empty prompt" in done.err
    assert "error: text 3: the text is a single token" in done.err
    table = genctl("score", "-m", str(gpt2), "--format", "tsv", stdin="the cat\n\na\nthe dog\n").out.splitlines()
    assert table[0].split("\t")[:5] == ["id", "rank", "ppl", "nll", "tokens"]
    assert [line.split("\t")[0] for line in table[1:]] == ["0", "1", "2", "3"]
    assert table[2].split("\t")[-1] == "input: line 2: empty prompt"
    assert len(json.loads(genctl("score", "-m", str(gpt2), "--format", "json", stdin="the cat\n\n\nx y\n").out)) == 4


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("x y", "--stride", "0"), "--stride 0: must be at least 1"),
        (("x y", "--window", "9"), "there is no --stride"),
        (("x y", "--top-logprobs", "-1"), "--top-logprobs -1: must be at least 0"),
        (("x y", "--scores", "--format", "tsv"), "which do not fit --format tsv"),
        (("x y", "--rank", "--stride", "4"), "--stride slides over one text"),
        (("x y", "--rank", "--target", "z"), "the candidates are the targets"),
        (("x y", "--by", "total"), "--by total needs --rank"),
        (("x y", "--context", ""), "--context is empty"),
        (("x y", "--force"), "there is no --output"),
        (("x y", "--target", "z"), "--context gives the text before"),
        (("x y", "-i", "file.txt"), "give one of the two"),
        (("x y", "--temperature", "2"), "--temperature"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(gpt2: Path, arguments: tuple[str, ...], why: str) -> None:
    done = genctl("score", "-m", str(gpt2), *arguments)
    assert (done.status, done.out) == (2, "")
    assert why in done.err


def test_an_encoder_decoder_names_its_flag(t5: Path) -> None:
    done = genctl("score", "-m", str(t5), "the cat", "--context", "x")
    assert (done.status, "--target" in done.err) == (2, True)
    done = genctl("score", "-m", str(t5), "the cat")
    assert (done.status, "there is no target (--target)" in done.err) == (1, True)


def test_both_sides_of_an_encoder_decoder_must_fit(tmp_path: Path) -> None:
    bart, long = checkpoint("bart", tmp_path / "bart"), "the cat sat. " * 100
    for source, target, what in [(long, "x", "the source has"), ("x", long, "the target has")]:
        done = genctl("score", "-m", str(bart), source, "--target", target)
        assert done.status == 1
        assert what in done.err
        assert "context is 256" in done.err


def test_no_text_is_said() -> None:
    done = genctl("score")
    assert done.status == 2
    assert "No text" in done.err


def test_a_terminal_shows_the_text_its_digits_and_its_sums() -> None:
    done = genctl("score", "Once upon a time", "One day\x1b[2J", terminal=True, color="never")
    lines = done.out.splitlines()
    assert lines[0].startswith("── text 1 · Once upon a time ─")
    assert lines[1] == "Once upon a time"
    assert re.fullmatch(r"\d {4}\d {4}\d \d", lines[2])
    assert re.fullmatch(r"perplexity \S+ · \S+ nats · \S+ bits · \S+ bits/byte · 4 tokens", lines[3])
    assert "One day␛[2J" in done.out
    assert "\x1b" not in done.out
    assert lines[-1].startswith("digits: tenths of each token's probability, 0123456789")
    assert "2 texts · perplexity " in done.err


def test_a_terminal_shows_rankings_and_tables() -> None:
    rank = ("score", "--context", "Once upon a", "--rank", " day", " time")
    lines = genctl(*rank, terminal=True, color="never").out.splitlines()
    assert lines[0].split() == ["rank", "mean", "total", "perplexity", "bits/byte", "tokens", "text"]
    assert [line.split()[-1] for line in lines[1:3]] == ["time", "day"]
    assert lines[3] == "sorted by mean log-probability; log-probabilities in nats"
    done = genctl("score", "Once upon", "--scores", terminal=True, color="never")
    assert "step  token             probability" in done.out
    assert "▸1 Once" in done.out


def test_scores_of_a_pipe_go_beside_the_results() -> None:
    done = genctl("score", "Once upon", "--scores")
    assert done.out.count("\n") == 1
    assert "step  token" in done.err


def test_quiet_leaves_the_figures() -> None:
    done = genctl("score", "Once upon", "-q", terminal=True, color="never")
    assert done.err == ""
    assert "perplexity" in done.out
    assert "digits:" not in done.out


def test_texts_are_read_a_chunk_at_a_time_and_an_interrupt_ends_it(gpt2: Path) -> None:
    scorer = Scorer(Session.load(Runtime(model=str(gpt2))).planner, ScoringOptions(batch_size=2, chunk=4))
    read: list[int] = []

    def texts() -> Iterator[tuple[int, TextToScore]]:
        for number in range(100):
            read.append(number)
            yield number, TextToScore("the cat sat")

    stopped: list[int] = []
    outcomes = scorer.score(texts(), lambda: stopped)
    assert next(outcomes)[0] == 0
    assert len(read) == 4
    assert [next(outcomes)[0] for _ in range(4)] == [1, 2, 3, 4]
    assert len(read) == 8
    stopped.append(1)
    assert list(outcomes) == []


def test_a_text_is_not_failed_by_its_neighbour(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(Session.load(Runtime(model=str(gpt2))).planner, ScoringOptions())
    cat, dog = ids("the cat"), ids("a dog")
    original = scorer.passes.read

    def read(pieces: Any) -> Any:
        if any(piece.ids == tuple(dog) for piece in pieces):
            raise ModelError("no numbers")
        return original(pieces)

    monkeypatch.setattr(scorer.passes, "read", read)
    outcomes = dict(scorer.score([(0, TextToScore("the cat")), (1, TextToScore("a dog"))]))
    assert isinstance(outcomes[1], ModelError)
    assert not isinstance(outcomes[0], GenctlError)
    assert outcomes[0][0].nll == pytest.approx(-sum(plain(tiny("gpt2"), cat)), abs=1e-4)


def test_a_time_limit_for_requests_is_refused_where_none_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settings file may contain it for `genctl run`."""
    done = genctl("score", "--row-timeout", "5", "I drink tea")
    assert (done.status, done.err.splitlines()[0]) == (
        2,
        "error: --row-timeout is for requests to a server, and there is no --backend: a checkpoint here reads several "
        "texts in one pass",
    )
    (tmp_path / "genctl.toml").write_text("row_timeout = 5\n")
    monkeypatch.chdir(tmp_path)
    done = genctl("score", "--config", "genctl.toml", "I drink tea")
    assert done.status == 0, done.err
    assert "row_timeout (genctl.toml:1) is not used: genctl score reads every text as a whole" in done.err
