"""Vocabularies that libraries make far larger tables of: refused before, with the bound, wherever a file lists them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import ModelError
from genctl.models import tokenizer_limits

Vocabulary = Callable[[Path, int], object]


def _json(name: str, make: Callable[[int], Any]) -> Vocabulary:
    return lambda folder, count: (folder / name).write_text(json.dumps(make(count)))


def _added(count: int) -> list[dict[str, Any]]:
    return [{"id": place, "content": "a"} for place in range(count)]


TOKENS = {
    "vocabulary": _json("tokenizer.json", lambda n: {"model": {"vocab": {f"{i}": i for i in range(n)}}}),
    "added": _json("tokenizer.json", lambda n: {"added_tokens": _added(n)}),
    "decoder": _json("tokenizer_config.json", lambda n: {"added_tokens_decoder": {f"{i}": {} for i in range(n)}}),
    "vocab.json": _json("vocab.json", lambda n: {f"{i}": i for i in range(n)}),
    "added_tokens.json": _json("added_tokens.json", lambda n: {f"{i}": i for i in range(n)}),
    "tekken": _json("tekken.json", lambda n: {"vocab": [{}] * n}),
}
MERGES = {
    "tokenizer.json": _json("tokenizer.json", lambda n: {"model": {"merges": ["a b"] * n}}),
}
ADDED = {
    "added": _json("tokenizer.json", lambda n: {"added_tokens": _added(n)}),
    "not ASCII": _json(
        "tokenizer.json", lambda n: {"added_tokens": [{"id": 0, "content": "é" * (n // 2) + "a" * (n % 2)}]}
    ),
    "decoder": _json(
        "tokenizer_config.json",
        lambda n: {"added_tokens_decoder": {f"{i}": {"content": "a"} for i in range(n)}, "chat_template": "x" * 99},
    ),
    "a token": _json("tokenizer_config.json", lambda n: {"bos_token": {"content": "a" * n}}),
    "a list": _json("tokenizer_config.json", lambda n: {"extra_special_tokens": ["a"] * n}),
    "added_tokens.json": _json("added_tokens.json", lambda n: {"a" * n: 0}),
    "special_tokens_map.json": _json("special_tokens_map.json", lambda n: {"additional_special_tokens": ["a"] * n}),
}
PIECES = {
    "tokenizer.json": _json("tokenizer.json", lambda n: {"model": {"vocab": [[chr(65 + i), 0.0] for i in range(n)]}}),
}
EVERY = [
    *[("MOST_TOKENS", "tokens", name, make) for name, make in TOKENS.items()],
    *[("MOST_MERGES", "merges", name, make) for name, make in MERGES.items()],
    *[("MOST_ADDED", "bytes of added tokens and settings", name, make) for name, make in ADDED.items()],
    *[("MOST_PIECES", "bytes of pieces", name, make) for name, make in PIECES.items()],
]


@pytest.mark.parametrize(("bound", "what", "name", "make"), EVERY, ids=[f"{one[1]}-{one[2]}" for one in EVERY])
def test_more_than_the_bound_is_refused_with_the_bound(
    bound: str, what: str, name: str, make: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, bound, 21)
    make(tmp_path, 21)
    tokenizer_limits.check(tmp_path)
    make(tmp_path, 22)
    with pytest.raises(ModelError, match=f"has 22 {what}, and at most 21 are read"):
        tokenizer_limits.check(tmp_path)


@pytest.mark.parametrize("name", [*tokenizer_limits.LISTS, *tokenizer_limits.SENTENCEPIECES])
def test_a_file_that_is_not_json_is_refused_by_its_length(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "LARGEST_LIST", 21)
    (tmp_path / name).write_bytes(b"x" * 21)
    tokenizer_limits.check(tmp_path)
    (tmp_path / name).write_bytes(b"x" * 22)
    with pytest.raises(ModelError, match="has 22 bytes, and at most 21 are read"):
        tokenizer_limits.check(tmp_path)


def test_a_sentencepiece_model_beside_a_tokenizer_json_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "LARGEST_LIST", 21)
    (tmp_path / "tokenizer.model").write_bytes(b"x" * 22)
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizer_limits.check(tmp_path)


@pytest.mark.parametrize(
    ("bound", "what", "types", "model"),
    [("MOST_TOKENS", "tokens", 1, "gpt2"), ("MOST_ADDED", "bytes of added tokens and settings", 3, "gpt2"),
     ("MOST_ADDED", "bytes of added tokens and settings", 4, "llama"), ("MOST_PIECES", "bytes of pieces", 1, "t5")],
)  # fmt: skip
def test_the_tokens_of_a_gguf_file_have_the_same_bounds(
    bound: str, what: str, types: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from genctl.models import gguf
    from tests.models.test_gguf_tokenizer import write

    monkeypatch.setattr(tokenizer_limits, bound, 3)
    gguf.read(write(tmp_path / "fits.gguf", model, [(letter, types) for letter in "abc"]))
    path = write(tmp_path / "more.gguf", model, [(letter, types) for letter in "abcd"])
    with pytest.raises(ModelError, match=f"has 4 {what}, and at most 3 are read"):
        gguf.read(path)


def test_usual_steps_pass(tmp_path: Path) -> None:
    """T5's normaliser, a decoder of SentencePiece's, and a template with a special token on both sides."""
    ends = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    around, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    data = {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
            {"type": "Prepend", "prepend": "▁"},
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True},
            {"type": "TemplateProcessing", "single": [around, text, around], "pair": [], "special_tokens": ends},
        ]},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer_limits.check(tmp_path)


def test_a_real_vocabulary_fits() -> None:
    """262,144 tokens, 6,242 of them added, and 514,906 merges: Gemma 3's. 28,672 more are added by speech models."""
    tokenizer_limits.check_vocabulary("x", tokens=262_144 + 28_672, merges=514_906, added=(6_242 + 28_672) * 24)
