"""Vocabularies that libraries make far larger tables of: refused before, with the bound, wherever a file lists them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import ModelError
from genctl.models import tokenizer_limits

WHAT = {
    "MOST_TOKENS": "tokens",
    "MOST_MERGES": "merges",
    "MOST_ADDED": "bytes of added tokens and settings",
    "MOST_PIECES": "bytes of pieces",
}


def _added(count: int) -> dict[str, Any]:
    return {"added_tokens": [{"id": place, "content": "a"} for place in range(count)]}


EVERY: list[tuple[str, str, Callable[[int], Any]]] = [
    ("MOST_TOKENS", "tokenizer.json", lambda n: {"model": {"vocab": {f"{i}": i for i in range(n)}}}),
    ("MOST_TOKENS", "tokenizer.json", _added),
    ("MOST_TOKENS", "tokenizer_config.json", lambda n: {"added_tokens_decoder": {f"{i}": {} for i in range(n)}}),
    ("MOST_TOKENS", "vocab.json", lambda n: {f"{i}": i for i in range(n)}),
    ("MOST_TOKENS", "added_tokens.json", lambda n: {f"{i}": i for i in range(n)}),
    ("MOST_TOKENS", "tekken.json", lambda n: {"vocab": [{}] * n}),
    ("MOST_MERGES", "tokenizer.json", lambda n: {"model": {"merges": ["a b"] * n}}),
    ("MOST_ADDED", "tokenizer.json", _added),
    ("MOST_ADDED", "tokenizer.json", lambda n: {"added_tokens": [{"content": "é" * (n // 2) + "a" * (n % 2)}]}),
    ("MOST_ADDED", "tokenizer_config.json", lambda n: {"bos_token": {"content": "a" * n}, "chat_template": "x" * 99}),
    ("MOST_ADDED", "tokenizer_config.json", lambda n: {"extra_special_tokens": ["a"] * n}),
    ("MOST_ADDED", "added_tokens.json", lambda n: {"a" * n: 0}),
    ("MOST_ADDED", "special_tokens_map.json", lambda n: {"additional_special_tokens": ["a"] * n}),
    ("MOST_PIECES", "tokenizer.json", lambda n: {"model": {"vocab": [[chr(65 + i), 0.0] for i in range(n)]}}),
]


@pytest.mark.parametrize(("bound", "name", "make"), EVERY)
def test_more_than_the_bound_is_refused_with_the_bound(
    bound: str, name: str, make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, bound, 21)
    (tmp_path / name).write_text(json.dumps(make(21)))
    tokenizer_limits.check(tmp_path)
    (tmp_path / name).write_text(json.dumps(make(22)))
    with pytest.raises(ModelError, match=f"has 22 {WHAT[bound]}, and at most 21 are read"):
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
    if name in tokenizer_limits.SENTENCEPIECES:  # not read beside this one
        (tmp_path / "tokenizer.json").write_text("{}")
        tokenizer_limits.check(tmp_path)


@pytest.mark.parametrize(
    ("bound", "types", "model"),
    [("MOST_TOKENS", 1, "gpt2"), ("MOST_ADDED", 3, "gpt2"), ("MOST_ADDED", 4, "llama"), ("MOST_PIECES", 1, "t5")],
)
def test_the_tokens_of_a_gguf_file_have_the_same_bounds(
    bound: str, types: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from genctl.models import gguf
    from tests.models.test_gguf_tokenizer import write

    monkeypatch.setattr(tokenizer_limits, bound, 3)
    gguf.read(write(tmp_path / "fits.gguf", model, [(letter, types) for letter in "abc"]))
    path = write(tmp_path / "more.gguf", model, [(letter, types) for letter in "abcd"])
    with pytest.raises(ModelError, match=f"has 4 {WHAT[bound]}, and at most 3 are read"):
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
