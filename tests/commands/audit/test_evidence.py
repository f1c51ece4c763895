"""`genctl audit`: numbers that no model can compute, and which tokens were read."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from genctl.models.text import detokenizer
from tests.cli.tool import genctl
from tests.commands.audit.traces import MARKS, PROMPTS, STORIES, audit, causes, chosen, rollouts, tokenizer, written

pytestmark = MARKS


def _rows() -> list[dict[str, Any]]:
    return deepcopy([*rollouts(texts=PROMPTS[:4], most=12)])


def _with(number: float | None, count: int) -> list[dict[str, Any]]:
    """Rows of 48 tokens in total; the first `count` of them have another number."""
    rows = chosen(_rows())
    for place in range(count):
        rows[place // 12]["logprobs"][place % 12] = number
    return rows


@pytest.mark.parametrize(
    ("number", "count", "words"),
    [
        (-math.inf, 40, "probability 0 for 40 of 48 chosen tokens (the first: row 1, token 1, -inf)"),
        (-math.inf, 48, "probability 0 for 48 of 48 chosen tokens"),
        (-math.inf, 1, "probability 0 for 1 of 48 chosen tokens"),
        (-9999.0, 40, "probability 0 for 40 of 48 chosen tokens (the first: row 1, token 1, -9999)"),
        (math.nan, 40, "NaN or infinity for 40 of 48 tokens"),
        (math.inf, 2, "NaN or infinity for 2 of 48 tokens"),
        (3.0, 1, "a log-probability above 0 for 1 of 48 chosen tokens (the first: row 1, token 1, 3)"),
    ],
)
def test_a_number_that_no_model_gives_is_evidence(number: float, count: int, words: str, tmp_path: Path) -> None:
    """Regression: of 48 tokens, 40 with probability 0 were left out, and the verdict was "same"."""
    done = audit(written(tmp_path, _with(number, count)))
    one = done.records[0]
    assert (done.status, one["verdict"]) == (4, "unexplained"), done.err
    assert words in one["reason"]
    assert ("all else is same" in one["reason"]) == (number != 3.0 and count < 48)


def test_a_probability_is_above_0(tmp_path: Path) -> None:
    rows = chosen(_rows())
    for row in rows:
        row["logprobs"] = [math.exp(number) for number in row["logprobs"]]
    assert causes(audit(written(tmp_path, rows))) == ["probability"]


@pytest.mark.parametrize("place", ["completion_ids", "top_logprobs", "prompt_ids"])
def test_an_id_beyond_the_vocabulary_is_evidence(place: str, tmp_path: Path) -> None:
    rows = _rows()
    other = {"completion_ids": 5000, "top_logprobs": [[5000, -30.0]], "prompt_ids": 5000}[place]
    rows[1][place][-1] = other
    one = audit(written(tmp_path, rows)).records[0]
    assert one["verdict"] == "unexplained"
    assert "ids beyond the vocabulary (0 to 1535), 1 (the first: row 2, " in one["reason"]
    assert one["reason"].endswith("× rounding error")  # everything else is read


def test_openai_says_of_a_rare_token_that_it_is_not_listed(tmp_path: Path) -> None:
    """-9999 is evidence only if the list of the best tokens would have to contain the token."""
    rows = _rows()
    for row in rows:
        row["logprobs"][3] = -9999.0
        row["top_logprobs"][3] = [pair for pair in row["top_logprobs"][3] if pair[0] != row["completion_ids"][3]]
    one = audit(written(tmp_path, rows)).records[0]
    assert one["verdict"] == "same"
    assert "4 chosen tokens have -9999, OpenAI's number of a token that its list lacks" in one["notes"]


@pytest.mark.parametrize("lists", [True, False])
def test_a_shift_may_fill_its_first_place_with_0(lists: bool, tmp_path: Path) -> None:
    """Regression: its first token left every row unexplained."""
    rows = _rows()
    for row in rows:
        row["logprobs"] = [0, *row["logprobs"][:-1]]
        row["top_logprobs"] = [[], *row["top_logprobs"][:-1]]
    done = audit(written(tmp_path, rows if lists else chosen(rows)))
    assert causes(done) == ["shifted"]
    assert done.records[0]["rows_left"] == 0


# -- which tokens were read --------------------------------------------------------------------------------------------

INPUT = (
    {"id": "chat", "messages": [{"role": "user", "content": "Once upon a time"}]},
    {"id": "system", "messages": [{"role": "user", "content": "the dog"}], "params": {"system": "One day, "}},
    {"id": "ids", "prompt_ids": [437, 285, 261]},
    {"id": "twice", "prompt_ids": [1, 1, 580]},
    {"id": "text", "prompt": "Lily had"},
    {"id": "bos", "prompt": "<bos>Lily had"},
    {"id": "short", "prompt": "The cat sat on it. " * 100, "params": {"truncate": "middle"}},
    {"id": "healed", "prompt": "Once upon a ti", "params": {"token_healing": True}},
)


def test_records_of_genctl_say_what_was_read(tmp_path: Path) -> None:
    """Regression: the prompt's text was tokenised again, with a second BOS or without the given tokens."""
    path, old = tmp_path / "records.jsonl", tmp_path / "old.jsonl"
    words = ("-i", written(tmp_path, [*INPUT], "in.jsonl"), "-n", "6", "--scores", "-q", "-o", str(path))
    assert genctl("run", "-m", str(STORIES), *words).status == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    given = {record["id"]: record["prompt_ids"] for record in records if "prompt_ids" in record}
    assert [*given] == ["chat", "system", "ids", "twice", "short", "healed"]
    assert (given["ids"], given["twice"]) == ([437, 285, 261], [1, 1, 580])
    assert audit(str(path)).records[0]["verdict"] == "same"
    again = genctl("run", "-m", str(STORIES), "-i", str(path), "-n", "6", "--scores", "-q", "--format", "jsonl")
    assert [record["token_ids"] for record in again.records] == [record["token_ids"] for record in records]
    # records of older versions are checked by the number of tokens that were read
    rows = [{key: value for key, value in record.items() if key != "prompt_ids"} for record in records[:-1]]
    done = audit(written(old.parent, rows, old.name))
    assert (done.status, done.records[0]["verdict"]) == (1, "same")
    assert sorted(done.records[0]["failed_rows"]) == ["short", "twice"]
    assert "which tokens were read is not known: 3 tokens, and its prompt is the text of 2" in done.err


def test_records_of_genctl_name_the_reference(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    assert genctl("run", "-m", "builtin:stories", "Lily", "-n", "4", "-q", "-o", path).status == 0
    events = str(tmp_path / "events.jsonl")
    assert genctl("run", "-m", "builtin:stories", "Lily", "-n", "4", "-q", "--events", events).status == 0
    err = genctl("audit", events).err
    assert "line 1: an event of a run, in place of its record with log-probabilities" in err
    assert "hint: genctl writes them with --scores" in err
    err = genctl("audit", path).err
    assert "line 1: the record has no log-probabilities of its tokens\nhint: genctl writes them with --scores" in err
    assert (
        genctl("run", "-m", "builtin:stories", "Lily", "-n", "4", "--scores", "-q", "-o", path, "--force").status == 0
    )
    done = genctl("audit", path)
    assert (done.status, "the reference is builtin:stories, which the records name" in done.err) == (0, True)
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows = [*records, {**records[0], "model": "someone/else"}]
    assert "hint: the records name builtin:stories and someone/else" in genctl("audit", written(tmp_path, rows)).err
    assert "someone/else, which is not on this machine" in genctl("audit", written(tmp_path, rows[1:])).err


def _llama_server(tmp_path: Path) -> list[dict[str, Any]]:
    """Honest answers of llama-server, which does not list tokens that end within a character."""
    piece, answers = detokenizer(tokenizer()).piece, []
    for prompt, text in (("Once upon a time", " 😀 there was é – 😀"), ("Lily had", " a 🐶 dog, naïve")):
        words = ("score", "-m", str(STORIES), prompt + text, "--scores", "--top-logprobs", "5", "--format", "jsonl")
        (record,) = genctl(*words).records
        read = len(tokenizer()(prompt)["input_ids"])
        ids, entries, written = record["token_ids"][read:], [], b""
        for token in record["scores"][-len(ids) :]:
            own = bytes(int(part, 16) for part in re.findall("<0x(..)>", piece(token["id"])))
            written += own or piece(token["id"]).encode()
            tops = [{"id": id, "token": piece(id), "logprob": logprob} for id, _, logprob in token["top"]]
            if "\ufffd" not in written.decode(errors="replace"):
                entries.append({"id": token["id"], "token": own.decode(errors="ignore") or piece(token["id"]),
                                "logprob": token["logprob"], "top_logprobs": tops})  # fmt: skip
        assert len(entries) < len(ids)
        answers.append({"index": 0, "content": text, "tokens": ids, "stop": True, "prompt": f"<bos>{prompt}",
                        "tokens_evaluated": read, "completion_probabilities": entries})  # fmt: skip
    return answers


@pytest.mark.parametrize("shape", ["completion", "without tokens", "v1"])
def test_honest_answers_of_llama_server_are_the_same(shape: str, tmp_path: Path) -> None:
    """Its prompt begins with BOS, and its lists lack tokens that end within a character."""
    rows = _llama_server(tmp_path)
    if shape != "completion":
        rows = [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
    if shape == "v1":
        rows = [{"prompt": row["prompt"], "choices": [{"text": row["content"], "logprobs": {
            "content": row["completion_probabilities"]}}]} for row in rows]  # fmt: skip
    one = audit(written(tmp_path, rows)).records[0]
    assert (one["verdict"], one["failed_rows"]) == ("same", {}), one["reason"]
    for row in rows:  # now nothing tells which tokens are missing
        holder, key = (row["choices"][0], "text") if shape == "v1" else (row, "content")
        holder[key] = holder[key].replace("é", "è").replace("ï", "î")
    done = audit(written(tmp_path, rows))
    assert (done.status, "tokens that end within a character are left out" in done.err) == (
        (0, False) if shape == "completion" else (2, True))  # fmt: skip
