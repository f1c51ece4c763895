"""`genctl audit`: how it reads traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from genctl.models.text import detokenizer
from genctl.parity import traces
from genctl.parity.trace_rows import TraceRow
from genctl.parity.traces import rows_of
from tests.cli.tool import genctl
from tests.commands.audit.traces import MARKS, PROMPTS, STORIES, audit, rollouts, tokenizer, written

pytestmark = MARKS


def _row() -> dict[str, Any]:
    return rollouts(texts=PROMPTS[:1], most=4)[0]


def shapes() -> dict[str, Any]:
    """One row in every shape."""
    row, piece = _row(), detokenizer(tokenizer()).piece
    ids, values, tops = row["completion_ids"], row["logprobs"], [top[:3] for top in row["top_logprobs"]]
    texts, prompt = [*map(piece, ids)], "Once upon a time"
    content = [
        {"token": text, "logprob": value, "top_logprobs": [{"token": piece(id), "logprob": each} for id, each in top]}
        for text, value, top in zip(texts, values, tops, strict=True)
    ]
    logprobs = {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [{piece(id): value for id, value in top} for top in tops],
    }
    body = {"prompt": prompt, "choices": [{"index": 0, "text": "".join(texts), "logprobs": logprobs}]}
    named = {**logprobs, "tokens": [f"token_id:{id}" for id in ids], "top_logprobs": [
        {f"token_id:{id}": value for id, value in top} for top in tops]}  # fmt: skip
    return {
        "a completion": body,
        "token ids as texts": {"prompt": prompt, "choices": [{"text": "", "logprobs": named}]},
        "a line of a batch file": {"custom_id": "a", "response": {"status_code": 200, "body": body}},
        "llama-server": {"prompt": prompt, "content": "".join(texts), "completion_probabilities": [
            {"id": id, **entry} for id, entry in zip(ids, content, strict=True)]},
        "llama-server, drawn": {"prompt": prompt, "content": "".join(texts), "completion_probabilities": [
            {"token": entry["token"], "prob": math.exp(entry["logprob"]), "top_probs": [
                {"token": one["token"], "prob": math.exp(one["logprob"])} for one in entry["top_logprobs"]]}
            for entry in content]},
        "SGLang": {"prompt": prompt, "text": "".join(texts), "meta_info": {
            "output_token_logprobs": [[value, id, None] for value, id in zip(values, ids, strict=True)],
            "output_top_logprobs": [[[value, id, None] for id, value in top] for top in tops]}},
        "Ollama": {"prompt": prompt, "response": "".join(texts), "logprobs": content},
        "a trainer": {"prompt_ids": row["prompt_ids"], "response_ids": ids, "rollout_log_probs": values},
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "a completion", "token ids as texts", "a line of a batch file", "llama-server", "SGLang", "Ollama", "a trainer",
])  # fmt: skip
def test_a_shape_is_read(name: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, [shapes()[name]]))
    assert (done.records[0]["verdict"], done.records[0]["positions"]) == ("same", 4), done.err


def test_chats_are_read_with_the_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Once upon a time"}]
    content = [{"token": "x", "id": 5, "logprob": -1.0, "top_logprobs": []}]
    row = {"messages": messages, "choices": [{"message": {"content": "x"}, "logprobs": {"content": content}}]}
    (found,) = rows_of(row, "row 1", "1")
    assert found.messages == tuple(messages)
    assert found.is_chat


def test_names_of_fields_are_given(tmp_path: Path) -> None:
    row = _row()
    nested = {"in": {"ids": row["prompt_ids"]}, "out": [{"ids": row["completion_ids"], "lp": row["logprobs"]}]}
    names = ("prompt_ids=in.ids", "completion_ids=out.0.ids", "logprobs=out.0.lp")
    path = written(tmp_path, [nested])
    assert audit(path, *(word for name in names for word in ("--field", name))).records[0]["verdict"] == "same"
    done = audit(path, "--field", "completion=out.ids", "--field", "logprob=x")
    assert (done.status, done.err.splitlines()[-1]) == (2, "hint: did you mean logprobs?")


def test_prompts_come_from_a_file_by_id_or_in_order(tmp_path: Path) -> None:
    rows = [dict(shapes()["a completion"], id=f"r{place}") for place in range(2)]
    bare = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
    path = written(tmp_path, bare)
    assert "--prompts FILE" in audit(path).err
    lines = written(tmp_path, [{"id": id, "prompt": "Once upon a time"} for id in ("r1", "r0")], "by-id.jsonl")
    assert audit(path, "--prompts", lines).records[0]["verdict"] == "same"
    (tmp_path / "plain.txt").write_text("Once upon a time\n")
    assert "has 1 prompts, and the trace 2 rows" in audit(path, "--prompts", str(tmp_path / "plain.txt")).err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "no numbers of tokens: it has text"),
        ({"choices": [{"text": "x", "logprobs": None}]}, "choices.0.logprobs: expected an object, got null"),
        ({"completion_ids": [1, "a"], "logprobs": [0, 0]}, "completion_ids.1: expected a whole number, got a string"),
        ({"completion_ids": [5, 6], "logprobs": [-1.0]}, "logprobs: expected 2 items, one for each token, got 1"),
        ([1], "the row: expected an object, got an integer"),
    ],
)
def test_an_unknown_shape_is_refused_with_the_first_path(row: Any, words: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, [row]))
    assert done.status == 2
    assert words in done.err
    assert "hint: fits: OpenAI" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "genctl audit reads one trace"),
        (("a.jsonl", "b.jsonl"), "there are: a.jsonl, b.jsonl"),
        (("a.jsonl@temperature=1",), "only dtype and quantize are declared"),
        (("a.jsonl", "--allow", "bos-double"), "did you mean bos-doubled?"),
        (("a.jsonl", "-i", "x.txt"), "--prompts gives those of a file"),
        (("a.jsonl", "--positions"), "--positions adds records"),
        (("a.jsonl", "--rows", "0"), "--rows 0: must be at least 1"),
    ],
)
def test_mistakes_are_said_before_anything_is_read(words: tuple[str, ...], message: str) -> None:
    done = genctl("audit", *words, "-m", str(STORIES))
    assert done.status == 2
    assert message in done.err


def test_a_row_that_cannot_be_read_costs_no_other_one(tmp_path: Path) -> None:
    good = _row()
    bad = [{**good, "completion_ids": [-1] * 4}, {**good, "logprobs": [None] * 4}, {**good, "prompt_ids": []}]
    done = audit(written(tmp_path, [good, *bad]))
    assert (done.status, done.records[0]["verdict"], len(done.records[0]["failed_rows"])) == (1, "same", 3)
    assert "line 2: completion_ids.0: expected at least 0" in done.records[0]["failed_rows"]["2"]
    done = audit(written(tmp_path, bad))
    assert done.status == 2
    assert done.err.splitlines()[-1].endswith("trace.jsonl: no row can be audited")
    assert "needs the checkpoint that the engine should have run" in genctl("audit", written(tmp_path, [good])).err


def test_rows_are_spread_over_a_long_file(tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "completion_ids": [5], "logprobs": [-1.0]}
    found = traces.read(written(tmp_path, [{**row, "id": str(place)} for place in range(100)]), 5)
    assert found.total == 100
    assert [type(one) for one in found.rows] == [TraceRow] * 5
    places = [int(one.id) for one in found.rows]
    assert places[0] == 0
    assert places[-1] >= 75
