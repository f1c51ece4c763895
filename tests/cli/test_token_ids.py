"""A checkpoint without a tokenizer continues token ids; texts are refused, row by row or before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genctl as library
from tests.cli.tool import genctl
from tests.tiny import checkpoint, tiny

IDS = [5, 60, 250, 7]


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bare(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bare")
    tiny(arch).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(arch, tmp_path_factory.mktemp("whole")))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"prompt_ids": IDS}) + "\n")
    return str(file)


@pytest.mark.parametrize("more", [(), ("--do-sample", "--num-return-sequences", "2"), ("--num-beams", "3")])
def test_the_ids_are_those_of_the_checkpoint_with_its_tokenizer(
    more: tuple[str, ...], bare: str, whole: str, rows: str
) -> None:
    options = ("-i", rows, "-n", "6", "--seed", "3", "--format", "jsonl", "--top-logprobs", "2", *more)
    found, expected = genctl("run", "-m", bare, *options), genctl("run", "-m", whole, *options)
    assert (found.status, found.err) == (0, "")
    assert [one["token_ids"] for one in found.records] == [one["token_ids"] for one in expected.records]
    assert [one["logprob"] for one in found.records] == [one["logprob"] for one in expected.records]
    for one in found.records:
        assert (one["text"], one["prompt"]) == ("", "")
        assert [token["text"] for token in one["tokens"]] == [f"<{id}>" for id in one["token_ids"]]
        assert all(top[1] == f"<{top[0]}>" for token in one["tokens"] for top in token["top"])


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("command", ["run", "beam", "compare"])
def test_what_is_shown_are_ids(command: str, terminal: bool, bare: str, rows: str) -> None:
    ids = genctl("run", "-m", bare, "-i", rows, "-n", "4", "--num-beams", "5", "--format", "jsonl").records[0]
    options = ("-p", "greedy", "-p", "beam5") if command == "compare" else ("--num-beams", "5")
    done = genctl(command, "-m", bare, "-i", rows, "-n", "4", *options, terminal=terminal)
    assert done.status == 0, done.err
    assert "".join(f"<{id}>" for id in ids["token_ids"]) in done.out


def test_a_cache_is_looked_into(bare: str, rows: str) -> None:
    done = genctl("inspect-cache", "-m", bare, "-i", rows, "--steps", "2", "--format", "json")
    assert done.status == 0, done.err
    assert done.records[0]["prompt_tokens"] == 4


def test_the_library_takes_ids(bare: str) -> None:
    (result,) = library.load(bare).generate([IDS], max_new_tokens=3)
    assert (result.text, len(result.sequences[0].token_ids)) == ("", 3)


def test_texts_among_ids_fail_as_rows(bare: str, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    prompts = [{"prompt_ids": IDS}, {"prompt": "the cat"}, {"messages": [{"role": "user", "content": "x"}]}]
    file.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    done = genctl("run", "-m", bare, "-i", str(file), "-n", "3", "--format", "jsonl")
    assert done.status == 1
    assert len(done.records[0]["token_ids"]) == 3
    for one in done.records[1:]:
        assert one["error"]["code"] == "model"
        assert one["error"]["message"].endswith("has no tokenizer: give prompt_ids instead of text")


@pytest.mark.parametrize("command", ["run", "beam", "compare", "inspect-cache", "score"])
def test_a_text_alone_is_refused_at_once(command: str, bare: str) -> None:
    runs = ("-p", "greedy", "-p", "beam5") if command == "compare" else ()
    done = genctl(command, "the cat", "-m", bare, *runs)
    assert (done.status, done.out) == (3, "")
    error, *hint = done.err.splitlines()
    assert error.startswith(f"error: {bare} has no tokenizer")
    assert command == "score" or "prompt_ids" in hint[0]


def test_lines_of_a_pipe_are_texts(bare: str) -> None:
    assert genctl("run", "-m", bare, "-n", "2", stdin="5 60\n").status == 3
    done = genctl("run", "-m", bare, "-n", "2", "--input-format", "jsonl", stdin='{"prompt_ids": [5, 60]}\n')
    assert done.status == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--stop-strings", "x"),
        ("--bad-words", "x"),
        ("--json-schema", "{}"),
        ("--token-healing",),
        ("--do-sample", "--mbr-samples", "3"),
        ("--chat",),
    ],
)
def test_settings_that_need_a_text_are_refused(options: tuple[str, ...], bare: str, rows: str) -> None:
    done = genctl("run", "-m", bare, "-i", rows, "-n", "2", *options)
    assert done.status in (2, 3)
    assert "tokenizer" in done.err or "encoder-decoder" in done.err
    assert done.out == ""


def test_only_a_sequence_without_tokens_is_empty(bare: str, rows: str) -> None:
    assert genctl("run", "-m", bare, "-i", rows, "-n", "3", "--fail-on", "empty").status == 0
