"""`genctl run --backend`: the requests, the output, and what is refused before anything is sent."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tool import genctl
from tests.engines.server.stand_in import Failure, StandIn, running


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


def test_a_record_says_where_it_comes_from_and_that_it_is_not_exact(server: StandIn) -> None:
    done = genctl("run", "--backend", server.url, "--format", "jsonl", "--seed", "3", "Hi")
    assert done.status == 0, done.err
    assert done.err == ""
    assert done.records == [
        {
            "schema": "genctl/1",
            "id": "0",
            "sequence": 0,
            "prompt": "Hi",
            "text": " one two three four five six",
            "token_ids": [],
            "finish_reason": "eos",
            "logprob": -3.0,
            "score": -0.5,
            "strategy": "greedy",
            "seed": None,
            "model": "tiny",
            "usage": {"prompt_tokens": 3, "new_tokens": 6},
            "backend": server.url,
            "exact": False,
        }
    ]


SAMPLING = (
    *("--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.05", "--seed", "11"),
    *("--repetition-penalty", "1.2", "--presence-penalty", "0.5", "--frequency-penalty", "0.25"),
    *("--min-new-tokens", "2", "--stop-strings", " five", "--set", "stop_token_ids=[7]"),
    *("--set", 'logit_bias={"#5" = -1.0}'),
)
SENT = {
    **{"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11, "repetition_penalty": 1.2},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 2, "stop_token_ids": [7]},
    **{"stop": [" five"], "logit_bias": {"5": -1.0}, "n": None},
}
GREEDY = {
    **{"model": "tiny", "prompt": "Hi", "max_tokens": 4, "temperature": 0.0, "stream": True},
    **dict.fromkeys(("top_p", "top_k", "min_p", "seed", "n")),
}


@pytest.mark.parametrize(
    ("owner", "arguments", "fields"),
    [
        ("vllm", ("-n", "4"), GREEDY),
        ("vllm", SAMPLING, SENT),
        ("llamacpp", ("--repetition-penalty", "1.2"), {"repeat_penalty": 1.2, "repetition_penalty": None}),
    ],
)
def test_settings_are_sent_in_the_fields_that_the_server_has(
    owner: str, arguments: tuple[str, ...], fields: dict[str, object]
) -> None:
    with running(owner=owner) as server:
        done = genctl("run", "--backend", server.url, *arguments, "Hi")
        assert done.status == 0, done.err
        (body,) = server.rows
        assert {key: body.get(key) for key in fields} == fields


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-beams", "3"), "num_beams = 3 (flag --num-beams): the server has no field for it"),
        (("--no-repeat-ngram-size", "2"), "no_repeat_ngram_size = 2 (flag --no-repeat-ngram-size): the server has no"),
        (("--device", "cpu"), 'device = "cpu" (flag --device): the server has loaded its model already'),
        (("--truncate", "left"), 'truncate = "left" (flag --truncate): the server has no field for it'),
        (("--prefix", "Once"), 'prefix = "Once" (flag --prefix): the server has no field for it'),
        (("--set", 'logit_bias={" yes" = 2.0}'), 'logit_bias = { " yes" = 2.0 } (--set logit_bias): the server knows'),
        (("--set", 'processors=[{use="top_k", top_k=3}]'), "the server runs no processors of its callers"),
    ],
)
def test_what_the_server_cannot_do_is_refused_before_the_first_request(
    server: StandIn, arguments: tuple[str, ...], words: str
) -> None:
    done = genctl("run", "--backend", server.url, *arguments, "Hi")
    assert done.status == 3, done.err
    assert words in done.err
    assert done.err.count("error:") == 1
    assert server.rows == []


@pytest.mark.parametrize(
    ("flags", "words"), [(("--explain",), "each logits processor"), (("--watch", "a"), "not chosen")]
)
def test_views_that_need_a_checkpoint_here_are_refused(server: StandIn, flags: tuple[str, ...], words: str) -> None:
    done = genctl("run", *flags, "--backend", server.url, "Hi")
    assert (done.status, words in done.err, server.asked) == (2, True, [])
    assert "servers do not report this" in done.err


def test_other_commands_have_no_backend(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "genctl run has --backend" in genctl("beam", "--backend", server.url, "Hi").err
    monkeypatch.setenv("GENCTL_BACKEND", server.url)
    assert "genctl beam shows the beams of a search" in genctl("beam", "Hi").err
    assert "this needs a checkpoint on this machine" in genctl("inspect-cache", "Hi").err
    assert genctl("run", "--format", "jsonl", "Hi").records[0]["backend"] == server.url


def test_servers_and_workers_exclude_each_other(server: StandIn) -> None:
    for command in ("run", "score"):
        done = genctl(command, "--backend", server.url, "--workers", "2", "Hi")
        expected = "--workers computes in processes of this program, but flag --backend leaves that to a server"
        assert (done.status, done.err) == (2, f"error: {expected}\n")


def test_dry_asks_no_server(server: StandIn) -> None:
    done = genctl("run", "--backend", server.url, "--dry", "Hi")
    assert done.status == 0
    assert f'backend = ["{server.url}"]  # flag --backend' in " ".join(done.out.split()).replace("] #", "]  #")
    assert server.asked == []


def test_a_default_that_the_server_lacks_is_no_problem() -> None:
    with running(owner="somebody") as server:
        done = genctl("run", "--backend", server.url, "--do-sample", "--seed", "1", "Hi")
        assert (done.status, done.err) == (0, "")
        refused = genctl("run", "--backend", server.url, "--do-sample", "--top-k", "50", "Hi")
        assert (refused.status, "top_k = 50 (flag --top-k): the server has no field for it" in refused.err) == (3, True)


def test_several_sequences_are_several_requests_where_the_server_ignores_the_number() -> None:
    with running(several=False) as server:
        words = f"run --backend {server.url} --do-sample --seed 1 --num-return-sequences 3 --format jsonl Hi".split()
        done = genctl(*words)
        assert len(done.records) == len(server.rows) == 3
        seeds = [body["seed"] for body in server.rows]
        assert seeds[0] == 1
        assert len(set(seeds)) == 3
        assert [body.get("n", 1) for body in server.rows] == [3, 1, 1]  # it is known to return one by then
        assert [record["seed"] % (2**31 - 1) for record in done.records] == seeds
        assert genctl(*words).out == done.out


def test_scores_are_those_of_the_server(server: StandIn) -> None:
    done = genctl("run", "--backend", server.url, "-n", "2", "--top-logprobs", "2", "--format", "jsonl", "Hi")
    first = done.records[0]["tokens"][0]
    assert first == {
        "id": None,
        "text": " one",
        "logprob": -0.5,
        "rank": 1,
        "entropy": None,
        "top": [[None, " one", -0.5], [None, "0?", -1.0]],
    }


def test_without_log_probabilities_their_place_is_null_and_scores_are_refused() -> None:
    with running(logprobs=False) as server:
        done = genctl("run", "--backend", server.url, "--format", "jsonl", "Hi")
        assert done.status == 0
        assert (done.records[0]["logprob"], done.records[0]["score"]) == (None, None)
        assert done.records[0]["usage"] == {"prompt_tokens": 3, "new_tokens": 6}
        refused = genctl("run", "--backend", server.url, "--scores", "Hi")
        assert refused.status == 3
        assert refused.err == (
            f"error: {server.url}: --scores needs log-probabilities, which the server does not give\n"
        )
        assert len(server.rows) == 2  # both from the first run, which repeated its request without log-probabilities


def rows_file(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_token_ids_are_sent_where_they_are_taken(server: StandIn, tmp_path: Path) -> None:
    rows = rows_file(tmp_path, {"prompt_ids": [5, 6]}, {"prompt": "Hi"})
    assert genctl("run", "--backend", server.url, "-i", rows).status == 0
    assert sorted((body["prompt"] for body in server.rows), key=str) == ["Hi", [5, 6]]


def test_token_ids_that_are_not_taken_are_the_error_of_their_row(tmp_path: Path) -> None:
    rows = rows_file(tmp_path, {"prompt_ids": [5, 6]}, {"prompt": "Hi"})
    with running(ids=False) as server:
        done = genctl("run", "--backend", server.url, "-i", rows, "--format", "jsonl")
        assert done.status == 1
        assert done.records[0]["error"] == {
            "code": "input",
            "message": f"{server.url} takes no token ids as a prompt; --tokenizer makes a text of them",
        }
        assert done.records[1]["text"].startswith(" one")


def test_a_tokenizer_here_makes_the_ids_of_prompts(server: StandIn) -> None:
    import tokenizers

    import genctl as package

    path = Path(package.__file__).parent / "models" / "builtin" / "stories" / "tokenizer.json"
    ids = tokenizers.Tokenizer.from_file(str(path)).encode("One day").ids
    words = ("run", "--backend", server.url, "--tokenizer", "builtin:stories", "--format", "jsonl", "One day")
    done = genctl(*words)
    assert (done.status, done.records[0]["prompt"]) == (0, "One day"), done.err
    assert server.rows[0]["prompt"] == ids
    with running(ids=False) as other:
        assert genctl(*(other.url if word == server.url else word for word in words)).status == 0
        assert [body["prompt"] for body in other.rows] == [ids, "One day"]


def test_a_tokenizer_is_for_servers(server: StandIn) -> None:
    done = genctl("run", "--tokenizer", "builtin:stories", "Hi")
    assert (done.status, "a checkpoint here has its own" in done.err) == (2, True)
    assert genctl("run", "--backend", server.url, "--tokenizer", "nowhere", "Hi").status == 3
    assert server.rows == []


def test_chats_are_sent_as_messages(server: StandIn, tmp_path: Path) -> None:
    rows = rows_file(tmp_path, {"messages": [{"role": "user", "content": "Why?"}]})
    assert genctl("run", "--backend", server.url, "-i", rows).status == 0
    done = genctl("run", "--backend", server.url, "--system", "Be short.", "--format", "jsonl", "--scores", "What?")
    assert done.status == 0, done.err
    assert [(body["path"], body["messages"]) for body in server.rows] == [
        ("/v1/chat/completions", [{"role": "user", "content": "Why?"}]),
        (
            "/v1/chat/completions",
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What?"}],
        ),
    ]
    assert done.records[0]["text"] == " one two three four five six"
    assert done.records[0]["logprob"] == -3.0


def test_structured_output_is_asked_for_as_the_server_has_it(server: StandIn, tmp_path: Path) -> None:
    schema = {"type": "object"}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    done = genctl("run", "--backend", server.url, "--json-schema", str(tmp_path / "schema.json"), "-n", "2", "Hi")
    assert done.status == 0
    assert server.rows[-1]["structured_outputs"] == {"json": schema}
    assert "json_schema: the text is incomplete, cut by length after 2 tokens" in done.err
    genctl("run", "--backend", server.url, "--regex", "[a-z ]+", "Hi")
    assert server.rows[-1]["structured_outputs"] == {"regex": "[a-z ]+"}
    long = {"type": "object", "properties": {f"field {place}": {"type": "string"} for place in range(40)}}
    genctl("run", "--backend", server.url, "--json-schema", json.dumps(long), "Hi")
    assert server.rows[-1]["structured_outputs"] == {"json": long}
    missing = genctl("run", "--backend", server.url, "--json-schema", "nowhere.json", "Hi")
    assert (missing.status, missing.err) == (2, "error: json_schema: cannot read nowhere.json: no such file\n")
    with running(owner="openai") as plain:
        genctl("run", "--backend", plain.url, "--chat", "--json-schema", json.dumps(schema), "Hi")
        assert plain.rows[-1]["response_format"]["json_schema"]["schema"] == schema
        refused = genctl("run", "--backend", plain.url, "--regex", "a+", "Hi")
        assert (refused.status, "regex" in refused.err) == (3, True)


def test_a_stop_is_told_apart_from_an_end_where_that_is_known(server: StandIn) -> None:
    ended = genctl("run", "--backend", server.url, "--format", "jsonl", "Hi").records[0]
    perhaps = genctl("run", "--backend", server.url, "--stop-strings", "zz", "--format", "jsonl", "Hi").records[0]
    cut = genctl("run", "--backend", server.url, "-n", "2", "--format", "jsonl", "Hi").records[0]
    assert [one["finish_reason"] for one in (ended, perhaps, cut)] == ["eos", "stop", "length"]


def test_requests_in_flight_are_bounded_and_spread_over_servers(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {place}\n" for place in range(12)))
    with running() as one, running() as two:
        done = genctl(
            *("run", "--backend", one.url, "--backend", two.url, "--batch-size", "3"),
            *("-i", str(prompts), "--format", "jsonl"),
        )
        assert done.status == 0, done.err
        assert [record["prompt"] for record in done.records] == prompts.read_text().splitlines()
        assert [record["backend"] for record in done.records] == [one.url, two.url] * 6
        assert len(one.rows) == len(two.rows) == 6
        assert max(one.most, two.most) <= 3


def test_servers_with_different_models_are_refused() -> None:
    with running() as one, running(models=("other",)) as two:
        done = genctl("run", "--backend", one.url, "--backend", two.url, "Hi")
        assert done.status == 3
        assert f"the servers have different models: {one.url} has tiny; {two.url} has other" in done.err


def test_an_interrupted_output_goes_on_where_it_stopped(server: StandIn, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\nb\nc\n")
    words = ("run", "--backend", server.url, "-i", str(prompts), "-o", str(output), "--resume", "--seed", "1")
    assert genctl(*words).status == 0
    whole = output.read_bytes()
    asked = len(server.rows)
    again = genctl(*words)
    assert "is complete: 3 rows, nothing to do" in again.err
    assert len(server.rows) == asked
    # the number of requests in flight does not change the rows
    assert genctl(*words, "--batch-size", "2").status in (0, 2)
    assert output.read_bytes() == whole
    with running() as other:
        changed = genctl(*(other.url if word == server.url else word for word in words))
        assert changed.status == 2
        assert "backend" in changed.err


def test_a_text_may_hold_any_character() -> None:
    """Line separators other than LF do not end a line of the stream."""
    words = (" a\u2028b", "\x85", "\u2029\r", "\n\n", "\x0b\x1c", "é\U0001f600")
    with running(words=words) as server:
        assert genctl("run", "--backend", server.url, "--format", "jsonl", "Hi").records[0]["text"] == "".join(words)


def test_text_is_shown_as_it_comes(server: StandIn) -> None:
    done = genctl("run", "--backend", server.url, "-n", "3", "Hi", terminal=True, color="never")
    assert done.status == 0
    assert done.out.splitlines()[0] == "Hi one two three"
    assert genctl("run", "--backend", server.url, "--stream", "Hi", "You").out.split()[:2] == ["one", "two"]


@pytest.mark.parametrize("logprobs", [True, False])
def test_events_are_those_of_a_run(logprobs: bool, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with running(logprobs=logprobs) as server:
        assert genctl("run", "--backend", server.url, "--events", str(events), "-n", "3", "Hi").status == 0
    lines = [json.loads(line, parse_constant=pytest.fail) for line in events.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["began", "prefilled", "stepped", "stepped", "stepped", "finished"]
    (token,) = lines[2]["rows"][0]["written"]
    assert (token["id"], token["logprob"], token["text"]) == (-1, -0.5 if logprobs else None, " one")


def test_time_that_is_over_ends_a_text() -> None:
    with running(fault=lambda server, body: Failure(slow_s=0.15)) as server:
        done = genctl("run", "--backend", server.url, "--max-time", "0.4", "--format", "jsonl", "Hi")
        assert done.status == 0
        assert done.records[0]["finish_reason"] == "time"
        assert 1 <= len(done.records[0]["text"].split()) <= 3


def test_the_key_is_sent_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-0123456789abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("GENCTL_API_KEY", key)
    output, events = tmp_path / "out.jsonl", tmp_path / "events.jsonl"
    with running(key=key) as server:
        done = genctl("run", "--backend", server.url, "-o", str(output), "--events", str(events), "-v", "Hi")
        assert done.status == 0, done.err
        assert server.rows[0]["key"] == f"Bearer {key}"
        assert key not in done.err + done.out + output.read_text() + events.read_text()


def test_no_torch_is_imported(server: StandIn) -> None:
    code = (
        "import sys; from genctl.commands.app import run; status = run(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'{status}, imported {heavy}' if heavy or status else 0)"
    )
    words = ["run", "--backend", server.url, "--format", "jsonl", "Hi"]
    heavy = "'torch', 'transformers', 'numpy', 'huggingface_hub'"
    alone = code.replace("'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub'", heavy)
    ids = [sys.executable, "-c", alone, *words, "--tokenizer", "builtin:stories"]
    assert subprocess.run(ids, capture_output=True, check=False).returncode == 0
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "tiny"
    assert math.isclose(json.loads(done.stdout)["score"], -0.5)


def test_what_is_missing_is_said_in_one_line(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    done = genctl("run", "--backend", server.url, "Hi")
    assert (done.status, done.err.splitlines()) == (
        3,
        ["error: --backend needs httpx2, which is not installed", 'hint: pip install "genctl[server]"'],
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost", "backend http://localhost: expected openai:URL"),
        ("openai:localhost", "backend openai:localhost: not a URL of http or https"),
        ("openai:http://me:secret@localhost", "a URL may not hold a password"),
        ("openai:http://localhost/v1?key=1", "a URL ends with its path, such as /v1"),
    ],
)
def test_a_backend_is_a_url(url: str, words: str) -> None:
    done = genctl("run", "--backend", url, "Hi")
    assert done.status == 2
    assert words in done.err
    assert "secret@" not in done.err
