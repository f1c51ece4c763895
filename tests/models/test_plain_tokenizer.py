"""A tokenizer without transformers: the same ids, texts and special tokens, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from genctl.models.tokenizer import plain
from tests.tiny import checkpoint, tokenizer

TEXTS = ("the cat sat on the mat.", " a  dog\n", "<eos>the<bos> ", "ü 🦄 x , y 's", "")


def word_piece() -> Any:
    vocabulary = {
        name: n for n, name in enumerate(["[UNK]", "the", "cat", "##s", ".", ",", "'", "s", "[CLS]", "[SEP]"])
    }
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 8), ("[SEP]", 9)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=True,
    )


def metaspace() -> Any:
    vocabulary = {name: n for n, name in enumerate(["<unk>", "<s>", "</s>", "▁", "t", "h", "e", "▁t", "he", "▁the"])}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<tool>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", extra_special_tokens=["<tool>"]
    )


MADE: dict[str, Callable[[], Any]] = {"bytes": tokenizer, "WordPiece": word_piece, "metaspace": metaspace}


@pytest.mark.parametrize("kind", MADE)
def test_it_does_what_transformers_does(kind: str, tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    MADE[kind]().save_pretrained(tmp_path)
    ours, theirs = plain(tmp_path, "llama"), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert (ours.eos_token_id, ours.unk_token_id) == (theirs.eos_token_id, theirs.unk_token_id)
    assert ours.clean_up_tokenization_spaces == theirs.clean_up_tokenization_spaces
    for text in TEXTS:
        for special in (True, False):
            assert (
                ours(text, add_special_tokens=special)["input_ids"]
                == theirs(text, add_special_tokens=special).input_ids
            )
        offsets = ours(text, return_offsets_mapping=True)["offset_mapping"]
        assert offsets == theirs(text, return_offsets_mapping=True).offset_mapping
    ids = list(range(len(ours)))
    for clean in (True, False, None):
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": clean}
        assert ours.decode(ids, **options) == theirs.decode(ids, **options)
    assert ours.batch_decode([[id] for id in ids]) == theirs.batch_decode([[id] for id in ids])
    assert [ours.convert_ids_to_tokens(id) for id in ids] == theirs.convert_ids_to_tokens(ids)


def changed(folder: Path, name: str, **fields: Any) -> Path:
    checkpoint("llama", folder)
    path = folder / name
    told = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**told, **fields}))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": None},
        {"add_bos_token": True},
        {"split_special_tokens": True},
        {"sep_token": "<sep>"},
        {"eos_token": {"content": "<eos>", "lstrip": True}},
        {"extra_special_tokens": ["<more>"]},
        {"added_tokens_decoder": {"7": {"content": "<eos>"}}},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_what_transformers_would_change_is_left_to_it(fields: dict[str, Any], tmp_path: Path) -> None:
    assert plain(changed(tmp_path, "tokenizer_config.json", **fields), "llama") is None


def test_other_files_are_heeded(tmp_path: Path) -> None:
    assert plain(changed(tmp_path, "special_tokens_map.json", eos_token="<pad>"), "llama") is None
    assert plain(changed(tmp_path, "special_tokens_map.json", eos_token="<eos>"), "llama") is not None
    assert plain(tmp_path, "qwen2") is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = plain(tmp_path, "llama")
    assert found is not None
    assert found.get_chat_template() == "{{ messages }}"
    (tmp_path / "added_tokens.json").write_text("{}")
    assert plain(tmp_path, "llama") is None
