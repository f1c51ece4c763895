"""The text of a run is what decode(prompt + new) adds to decode(prompt), for every kind of tokenizer and everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genctl.models.text import Detokenizer
from tests import tiny
from tests.cli.tool import Done, ok
from tests.models.test_detokenizer import added
from tests.models.tokenizers_made import FAMILIES

DRAWN = ("--do-sample", "--temperature", "3", "--top-k", "0", "--seed")
PROMPTS = ("the cat", "the dog sat on the mat and")
family = pytest.mark.parametrize("family", FAMILIES)
Checkpoint = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model with a tokenizer of each family, whose vocabulary is padded: it writes ids without a token."""
    folder = tmp_path_factory.mktemp("families")

    def made(family: str, arch: str = "llama") -> str:
        path = folder / f"{arch}-{family}"
        if not path.exists():
            tokenizer = FAMILIES[family]()
            tiny.tiny(arch, vocab_size=len(tokenizer) + 40).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return str(path)

    return made


def spaced(family: str) -> tuple[int, str]:
    """A token that writes a blank and a letter, and its text."""
    words = Detokenizer(FAMILIES[family]())
    pieces = ((id, words.piece(id)) for id in range(3, len(FAMILIES[family]())))
    return next((id, text) for id, text in pieces if text[:1] == " " and text[1:].isalpha() and text.isascii())


def run(*arguments: str, **how: Any) -> Done:
    return ok(*arguments, **how)


def expected(family: str, prompt: str, ids: list[int]) -> str:
    tokenizer = FAMILIES[family]()
    return added(tokenizer, list(tokenizer(prompt)["input_ids"]), ids)


@family
@pytest.mark.parametrize("seed", ["1", "2"])
def test_records_pieces_streams_and_echoes_have_one_text(family: str, seed: str, checkpoint: Checkpoint) -> None:
    command = ("run", "-m", checkpoint(family), "-n", "24", *DRAWN, seed)
    records = run(*command, "--format", "jsonl", "--scores", *PROMPTS).records
    texts = [record["text"] for record in records]
    assert texts == [expected(family, record["prompt"], record["token_ids"]) for record in records]
    assert ["".join(token["text"] for token in record["tokens"]) for record in records] == texts
    prompt, text = PROMPTS[0], texts[0]
    for options in ((), ("--stream",)):
        assert run(*command, *options, prompt).out == f"{text}\n"
        assert run(*command, *options, "--echo", prompt).out == f"{prompt}{text}\n"


@family
def test_the_text_of_an_encoder_decoder_begins_from_nothing(family: str, checkpoint: Checkpoint) -> None:
    command = ("run", "-m", checkpoint(family, "t5"), "-n", "12", *DRAWN, "4", "--format", "jsonl", "--scores")
    record = run(*command, PROMPTS[0]).records[0]
    assert record["text"] == added(FAMILIES[family](), [], record["token_ids"])
    assert "".join(token["text"] for token in record["tokens"]) == record["text"]


@family
def test_a_tree_has_the_same_text(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("generate 6\nsample 2 5\ntext\n")
    script = ("--script", str(tmp_path / "script"), "--format", "jsonl", "--seed", "3")
    records = run("explore", "-m", checkpoint(family), *script, PROMPTS[0]).records
    wrote = [record for record in records if "text" in record and "token_ids" in record]
    for record in wrote:
        assert record["text"] == expected(family, PROMPTS[0], record["token_ids"])
    assert json.dumps(records)


@family
def test_the_pieces_of_a_scored_text_are_its_text(family: str, checkpoint: Checkpoint) -> None:
    tokenizer = FAMILIES[family]()
    if family in ("undecoded", "suffixes", "rewritten"):
        pytest.skip("these tokenizers do not keep a text")
    for options in (("the cat sat on",), ("--context", "the cat", " sat on")):
        records = run("score", "-m", checkpoint(family), "--format", "jsonl", "--scores", *options).records
        pieces = "".join(token["text"] for token in records[0]["scores"])
        whole = tokenizer.decode(tokenizer("the cat sat on")["input_ids"], skip_special_tokens=True)
        assert whole.endswith(pieces)
        if len(options) > 1:
            assert pieces == " sat on"


@pytest.mark.parametrize("family", ["llama", "llama_first", "metaspace", "word_piece"])
def test_stops_prefixes_grammars_and_watched_tokens_see_the_blank(family: str, checkpoint: Checkpoint) -> None:
    command = ("run", "-m", checkpoint(family), "-n", "12", "--format", "jsonl", PROMPTS[0])
    for options in (("--prefix", " the"), ("--regex", " the( dog)+"), ("--set", 'grammar=start: " the" " dog"+')):
        record = run(*command, *options).records[0]
        assert record["text"].startswith(" the")
        assert record["text"] == expected(family, PROMPTS[0], record["token_ids"])
    stopped = run(*command, "--prefix", " the dog", "--stop-strings", " dog").records[0]
    assert (stopped["text"], stopped["finish_reason"]) == (" the", "stop")
    begun = run(*command, "--prefix", " the", "--stop-strings", " the").records[0]
    assert (begun["text"], begun["finish_reason"]) == ("", "stop")
    regex = run(*command, "--prefix", " the", "--stop-regex", "^ the").records[0]
    assert (regex["text"], regex["finish_reason"]) == ("", "stop")
    id, text = spaced(family)
    watched = run(*command, "--watch", text).records[0]["tokens"][0]["watched"]
    assert [tuple(one[:2]) for one in watched] == [(id, text)]


@pytest.mark.parametrize("family", ["llama", "llama_first", "metaspace_first", "metaspace_never", "byte_level"])
def test_a_chat_without_a_template_reads_what_it_wrote(family: str, checkpoint: Checkpoint) -> None:
    tokenizer = FAMILIES[family]()
    options = ("-n", "1", "--prefill", " the dog", "--format", "jsonl")
    done = run("chat", "-m", checkpoint(family), *options, stdin="the cat\n the\n")
    first, second = done.records
    assert second["prompt"] == f"the cat the dog{first['text']} the the dog"
    read = tokenizer(first["prompt"])["input_ids"] + first["token_ids"]
    again = tokenizer(f"{first['prompt']}{first['text']}")["input_ids"]
    assert tokenizer.decode(again, skip_special_tokens=True) == tokenizer.decode(read, skip_special_tokens=True)
