"""Against llama.cpp's server: greedy texts are equal, and what it does not support is refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from genctl.models.tokenizer_alone import LoneTokenizer
from tests.cli.tool import genctl
from tests.engines.server.llama_server import serving

NEEDED = ("llama_cpp", "gguf", "fastapi", "uvicorn")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs llama-cpp-python[server] and gguf: no {MISSING}")

PROMPTS = ("Once upon a time", "The little fox", "One day, Lily")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("llama")) as address:
        yield address


def test_greedy_text_is_that_of_the_same_weights_here(address: str) -> None:
    shared = ("run", "-n", "24", "--seed", "1", "--format", "jsonl", "--scores", *PROMPTS)
    here = genctl(*shared)
    there = genctl(*shared, "--backend", address)
    assert (here.status, there.status) == (0, 0), there.err
    for ours, theirs in zip(here.records, there.records, strict=True):
        assert theirs["text"] == ours["text"]
        assert theirs["finish_reason"] == ours["finish_reason"]
        assert [token["text"] for token in theirs["tokens"]] == [token["text"] for token in ours["tokens"]]
        assert theirs["logprob"] == pytest.approx(ours["logprob"], abs=1e-3)
        for token, other in zip(ours["tokens"], theirs["tokens"], strict=True):
            assert other["logprob"] == pytest.approx(token["logprob"], abs=1e-4)
            assert other["rank"] == 1
        assert theirs["usage"] == {"prompt_tokens": None, "new_tokens": 24}  # while streaming it reports no counts
        assert (theirs["backend"], theirs["exact"], theirs["model"]) == (address, False, "stories")


def test_a_seed_draws_the_same_text_again_and_each_sequence_another(address: str) -> None:
    words = ("run", "--backend", address, "-n", "12", "--do-sample", "--num-return-sequences", "2", "--format", "jsonl")
    first = genctl(*words, "--seed", "5", PROMPTS[0])
    assert first.status == 0, first.err
    texts = [record["text"] for record in first.records]
    assert len(set(texts)) == 2
    assert [record["text"] for record in genctl(*words, "--seed", "5", PROMPTS[0]).records] == texts
    assert [record["text"] for record in genctl(*words, "--seed", "6", PROMPTS[0]).records] != texts


def test_a_stop_string_ends_the_text_before_it(address: str) -> None:
    whole = genctl("run", "-n", "24", "--backend", address, "--format", "jsonl", PROMPTS[0]).records[0]["text"]
    stop = whole.split()[3]
    done = genctl("run", "-n", "24", "--backend", address, "--format", "jsonl", "--stop-strings", stop, PROMPTS[0])
    assert done.records[0]["text"] == whole[: whole.index(stop)]
    assert done.records[0]["finish_reason"] == "stop"


def test_what_this_server_takes_is_known_from_the_owner_of_its_models(address: str, tmp_path: Path) -> None:
    taken = ("--min-p", "0.1", "--top-k", "20", "--repetition-penalty", "1.1", "--do-sample", "-n", "4")
    assert genctl("run", "--backend", address, *taken, "--seed", "1", PROMPTS[0]).status == 0
    for words, knob in ((("--typical-p", "0.5", "--do-sample"), "typical_p"), (("--regex", "a+"), "regex")):
        refused = genctl("run", "--backend", address, *words, PROMPTS[0])
        assert refused.status == 3
        assert f"error: {address}: {knob} = " in refused.err
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt_ids": [1, 5]}) + "\n")
    done = genctl("run", "--backend", address, "-i", str(rows), "--format", "jsonl")
    assert done.records[0]["error"]["message"].startswith(f"{address} takes no token ids as a prompt")


def test_ids_become_the_text_that_has_them(address: str, tmp_path: Path) -> None:
    (here,) = genctl("run", "-n", "12", "--format", "jsonl", PROMPTS[0]).records
    rows = tmp_path / "rows.jsonl"
    ids = LoneTokenizer("builtin:stories").ids(PROMPTS[0])
    rows.write_text(json.dumps({"prompt_ids": ids}) + "\n" + json.dumps({"prompt_ids": ids[1:]}) + "\n")
    words = ("run", "--backend", address, "--tokenizer", "builtin:stories", "-n", "12", "--format", "jsonl")
    done = genctl(*words, "-i", str(rows))
    assert done.records[0]["text"] == here["text"]
    # without BOS, which the server would add, no text has these ids
    assert done.records[1]["error"]["message"] == "the token ids are not those of any text, and the server takes no ids"


def test_chats_and_schemas(address: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    words = ("--json-schema", json.dumps(schema), "-n", "40", "--format", "jsonl", "--scores")
    done = genctl("run", "--backend", address, "--chat", *words, "How many?")
    assert done.status == 0, done.err
    record = done.records[0]
    assert set(json.loads(record["text"])) == {"n"}
    assert record["finish_reason"] == "eos"


def test_a_grammar_is_sent_as_it_is(address: str) -> None:
    grammar = 'root ::= " yes" | " no"'
    done = genctl("run", "--backend", address, "--grammar", grammar, "-n", "9", "--format", "jsonl", "Is it?")
    assert done.records[0]["text"] in (" yes", " no"), done.err


def test_scores_are_those_of_the_same_weights_here(address: str) -> None:
    """llama.cpp's server returns no number for the first token after BOS; all other numbers are equal."""
    text = "Once upon a time there was a little fox."
    words = ("score", "--format", "jsonl", "--scores", text)
    (here,) = genctl(*words).records
    there = genctl(*words, "--backend", address)
    assert there.status == 0, there.err
    (record,) = there.records
    assert record["tokens"] == here["tokens"] - 1
    for token, other in zip(here["scores"][1:], record["scores"], strict=True):
        assert other["text"] == token["text"]
        assert other["logprob"] == pytest.approx(token["logprob"], abs=1e-3)
    context = ("score", "--format", "jsonl", "--context", "Once upon a time", " there was a fox.")
    assert genctl(*context, "--backend", address).records[0]["nll"] == pytest.approx(
        genctl(*context).records[0]["nll"], abs=1e-2
    )
