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
from genctl.models.tokenizer_files import UnsupportedTokenizer
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
    ours, theirs = plain(tmp_path, read(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
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


def read(folder: Path) -> dict[str, Any]:
    """config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changed(folder: Path, name: str, **fields: Any) -> Path:
    checkpoint("llama", folder)
    path = folder / name
    told = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**told, **fields}))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "BertTokenizerFast"},
        {"tokenizer_class": ""},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"split_special_tokens": "yes"},
        {"padding_side": "above"},
        {"eos_token": 3},
        {"extra_special_tokens": [3]},
        {"added_tokens_decoder": {"7": "<eos>"}},
        {"chat_template": [{"name": "default"}]},
        {"fast_tokenizer_files": ["tokenizer.4.json"]},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_what_is_not_known_is_left_to_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    changed(tmp_path, "tokenizer_config.json", **fields)
    with pytest.raises(UnsupportedTokenizer):
        plain(tmp_path, read(tmp_path))


def test_other_model_types_and_files_are_left_to_transformers(tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    with pytest.raises(UnsupportedTokenizer, match="model type"):
        plain(tmp_path, {"model_type": "mamba"})
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UnsupportedTokenizer, match="tekken"):
        plain(tmp_path, read(tmp_path))
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
        plain(tmp_path, read(tmp_path))
