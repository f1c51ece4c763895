"""`genctl batch`: rows to OpenAI's batch requests, and its results to records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import genctl

ROWS = [
    {"id": "a", "prompt": "Hi"},
    {"id": "b", "messages": [{"role": "user", "content": "Why?"}], "params": {"max_new_tokens": 4}},
    {"id": "c", "prompt_ids": [5, 6]},
]


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def completion(id: str, *choices: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "gpt", "choices": list(choices), **more}
    return {"id": f"batch_{id}", "custom_id": id, "response": {"status_code": 200, "body": body}, "error": None}


def test_a_row_is_a_request(tmp_path: Path) -> None:
    rows, output = lines(tmp_path / "rows.jsonl", *ROWS), tmp_path / "requests.jsonl"
    knobs = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "0", "--seed", "7", "--top-logprobs", "2", "-n", "9")
    # OpenAI has no top_k, and 0 asks for none
    done = genctl("batch", "export", "-m", "gpt", "-i", rows, "-o", str(output), *knobs)
    assert (done.status, done.err) == (0, "")
    a, b, c = map(json.loads, output.read_text().splitlines())
    assert a == {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {
            **{"model": "gpt", "prompt": "Hi", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7},
            "logprobs": 2,
        },
    }
    assert b["url"] == "/v1/chat/completions"
    assert b["body"]["messages"] == ROWS[1]["messages"]
    assert (b["body"]["max_completion_tokens"], b["body"]["logprobs"], b["body"]["top_logprobs"]) == (4, True, 2)
    assert c["body"]["prompt"] == [5, 6]
    assert len({a["body"]["seed"], b["body"]["seed"], c["body"]["seed"]}) == 3


def test_what_no_request_can_say_is_refused(tmp_path: Path) -> None:
    rows = lines(tmp_path / "rows.jsonl", *ROWS)
    done = genctl("batch", "export", "-m", "gpt", "-i", rows, "--num-beams", "3")
    assert (done.status, done.err) == (2, "error: num_beams = 3 (flag --num-beams): the server has no field for it\n")
    (tmp_path / "phrases.txt").write_text("was\n")
    done = genctl("batch", "export", "-m", "gpt", "-i", rows, "--ban-file", str(tmp_path / "phrases.txt"))
    assert (done.status, done.err) == (2, 'error: ban = ["was"] (flag --ban-file): the server has no field for it\n')
    done = genctl("batch", "export", "-m", "gpt", "-i", rows, "--do-sample", "--top-k", "9")
    assert (done.status, done.err) == (2, "error: top_k = 9 (flag --top-k): the server has no field for it\n")
    taken = genctl("batch", "export", "-m", "gpt", "-i", rows, "--do-sample", "--top-k", "9", "--kind", "vllm")
    assert json.loads(taken.out.splitlines()[0])["body"]["top_k"] == 9
    assert "give it with --model" in genctl("batch", "export", "-i", rows).err
    assert "top_k = 50 (default) is not used" in genctl("batch", "export", "-m", "g", "-i", rows, "--do-sample").err


def test_a_row_that_cannot_be_a_request_is_said_and_left_out(tmp_path: Path) -> None:
    rows = lines(tmp_path / "rows.jsonl", ROWS[0], {"id": "x"}, {"id": "y", "prompt": "a", "params": {"num_beams": 2}})
    done = genctl("batch", "export", "-m", "gpt", "-i", rows)
    assert done.status == 1
    assert [json.loads(line)["custom_id"] for line in done.out.splitlines()] == ["a"]
    assert done.err.splitlines() == [
        "error: prompt x: line 2: no prompt: expected one of prompt, prompt_ids, messages",
        f"error: prompt y: num_beams = 2 (params of {rows}, line 3): the server has no field for it",
    ]


def test_results_are_records_in_the_order_of_the_requests(tmp_path: Path) -> None:
    rows, requests = lines(tmp_path / "rows.jsonl", *ROWS), str(tmp_path / "requests.jsonl")
    assert genctl("batch", "export", "-m", "gpt", "-i", rows, "-o", requests, "--seed", "3").status == 0
    logprobs = {"content": [{"token": " you", "logprob": -0.25, "top_logprobs": []}]}
    results = lines(
        tmp_path / "results.jsonl",
        completion("b", {"index": 0, "message": {"content": " you"}, "finish_reason": "stop", "logprobs": logprobs}),
        completion(
            "a",
            {"index": 1, "text": " two", "finish_reason": "length"},
            {"index": 0, "text": " one", "finish_reason": "stop"},
            usage={"prompt_tokens": 1, "completion_tokens": 2},
        ),
    )
    failed = {"custom_id": "c", "response": {"status_code": 400, "body": {"error": {"message": "too long"}}}}
    errors = lines(tmp_path / "errors.jsonl", failed)
    done = genctl("batch", "import", "-i", results, "-i", errors, "--requests", requests)
    assert (done.status, done.err) == (1, "")
    one, two, you, none = done.records
    assert one == {
        **{"schema": "genctl/1", "id": "a", "sequence": 0, "prompt": "Hi", "text": " one", "token_ids": []},
        **{"finish_reason": "eos", "logprob": None, "score": None, "strategy": "greedy", "seed": None, "model": "gpt"},
        **{"usage": {"prompt_tokens": 1, "new_tokens": None}, "backend": "openai:batch", "exact": False},
    }
    assert (two["sequence"], two["text"], two["finish_reason"]) == (1, " two", "length")
    assert you["usage"] == {"prompt_tokens": None, "new_tokens": 1}
    assert (you["id"], you["prompt"], you["logprob"], you["tokens"][0]["text"]) == ("b", "Why?", -0.25, " you")
    assert none == {"schema": "genctl/1", "id": "c", "error": {"code": "backend", "message": "400 too long"}}


def test_a_request_without_a_result_is_an_error_record(tmp_path: Path) -> None:
    requests = str(tmp_path / "requests.jsonl")
    genctl("batch", "export", "-m", "gpt", "-i", lines(tmp_path / "rows.jsonl", *ROWS[:2]), "-o", requests)
    results = lines(tmp_path / "results.jsonl", completion("b", {"index": 0, "message": {"content": "x"}}))
    done = genctl("batch", "import", "-i", results, "--requests", requests, "-o", str(tmp_path / "out.jsonl"))
    assert done.status == 1
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["error"]["message"] == "the results have no line for this request"
    assert second["text"] == "x"


def test_columns_come_back_from_the_rows_that_were_exported(tmp_path: Path) -> None:
    table, requests = tmp_path / "rows.csv", tmp_path / "requests.jsonl"
    table.write_text("id,prompt,label\na,Hi,x\nb,,y\nc,Ho,\n")
    done = genctl("batch", "export", "-m", "gpt", "-i", str(table), "-o", str(requests))
    assert (done.status, done.err.splitlines()[-1]) == (
        1,
        "note: a request has no place for columns ('label'): import --rows brings them back",
    )
    results = lines(tmp_path / "results.jsonl", completion("a", {"index": 0, "text": "!", "finish_reason": "stop"}))
    read = ("batch", "import", "-i", results, "--requests", str(requests))
    first, second = genctl(*read, "--rows", str(table)).records
    assert (first["id"], first["input"]) == ("a", {"label": "x"})
    assert (second["id"], second["error"]["code"], second["input"]) == ("c", "backend", {"label": ""})
    assert ["input" in record for record in genctl(*read).records] == [False, False]
    other = lines(tmp_path / "other.jsonl", {"id": "a", "prompt": "Hi", "label": 1})
    done = genctl(*read, "--rows", other)
    assert (done.status, done.out, done.err) == (2, "", f"error: {other} has no row with the id c\n")


def test_without_requests_the_prompt_is_unknown(tmp_path: Path) -> None:
    results = lines(
        tmp_path / "results.jsonl",
        completion("b", {"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}),
        {"custom_id": "d", "response": None, "error": {"code": "batch_expired", "message": "too late"}},
        completion("e"),
    )
    done = genctl("batch", "import", "-i", results)
    assert done.status == 1
    assert (done.records[0]["prompt"], done.records[0]["seed"], done.records[0]["text"]) == (None, None, "x")
    assert [one["error"]["message"] for one in done.records[1:]] == ["too late", "the result has no choices"]
    assert genctl("batch", "import", "-i", results, "--format", "text").out == "x\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{oops", "line 1: not JSON"),
        ("[1]", "line 1: no line of a batch file: it has no custom_id"),
        ('{"custom_id": "a"}\n{"custom_id": "a"}', "line 2: the custom_id a was used before"),
        ('{"custom_id": "zzz"}', "line 1: the custom_id zzz is not in"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_line(content: str, words: str, tmp_path: Path) -> None:
    requests = lines(tmp_path / "requests.jsonl", {"custom_id": "a", "body": {"prompt": "x"}})
    (tmp_path / "results.jsonl").write_text(content)
    output = tmp_path / "out.jsonl"
    done = genctl(
        *("batch", "import", "-i", str(tmp_path / "results.jsonl"), "--requests", requests, "-o", str(output)),
    )
    assert done.status == 2
    assert words in done.err
    assert not output.exists()


def test_a_file_that_is_missing_is_said() -> None:
    done = genctl("batch", "import", "-i", "nowhere.jsonl")
    assert (done.status, done.err) == (2, "error: cannot read nowhere.jsonl: No such file or directory\n")
    assert "give them with --input FILE" in genctl("batch", "import").err


def test_batches_need_neither_torch_nor_a_network(tmp_path: Path) -> None:
    code = (
        "import sys; from genctl.commands.app import run; status = run(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'httpx2'} & set(sys.modules);"
        "sys.exit(f'{status}, imported {heavy}' if heavy or status else 0)"
    )
    words = ["batch", "export", "-m", "gpt", "Hi"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["body"]["prompt"] == "Hi"


def test_a_result_that_cannot_be_true_costs_no_other_row(tmp_path: Path) -> None:
    def scored(*logprobs: object) -> dict[str, object]:
        told = {"tokens": [" a", " b"], "token_logprobs": list(logprobs)}
        return {"index": 0, "text": " a b", "finish_reason": "stop", "logprobs": told}

    many = completion("count", {"index": 0, "text": "x", "finish_reason": "stop"})
    many["response"]["body"]["usage"] = {"prompt_tokens": True, "completion_tokens": 10**400}
    results = lines(
        tmp_path / "results.jsonl",
        completion("inf", scored(float("inf"), float("-inf"))),
        completion("low", scored(-1.7e308, -1.7e308)),
        many,
        completion("index", {"index": 10**400, "text": "x"}),
        completion("text", {"index": 0, "text": "lone \ud800", "finish_reason": "stop"}),
        completion("good", scored(-0.5, -0.5)),
    )
    done = genctl("batch", "import", "-i", results, "-o", str(tmp_path / "out.jsonl"))
    assert done.status == 1
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record.get("logprob") for record in records] == [None] * 5 + [-1.0]
    assert records[2]["usage"] == {"prompt_tokens": None, "new_tokens": None}
    assert [record["id"] for record in records if "error" in record] == ["index"]
    assert records[4]["text"] == "lone \ufffd"
    assert done.err == (
        f"note: {results}, line 1: a log-probability that is not a number up to 0 counts as unknown\n"
        f"note: {results}, line 3: a number of tokens that is not a whole number from 0 counts as unknown\n"
    )


def test_more_tokens_than_a_request_allows_are_reported(tmp_path: Path) -> None:
    requests = lines(tmp_path / "requests.jsonl", {"custom_id": "a", "body": {"prompt": "x", "max_tokens": 8}})
    long = completion("a", {"index": 0, "text": "x", "finish_reason": "length"})
    long["response"]["body"]["usage"] = {"completion_tokens": 50}
    results = lines(tmp_path / "results.jsonl", long)
    done = genctl("batch", "import", "-i", results, "--requests", requests)
    assert done.err == f"note: {results}, line 1: the text has more tokens than were asked for\n"
