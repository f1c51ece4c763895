"""Tokenizers of transformers' classes, read without transformers: equal in every part, or left to `AutoTokenizer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from genctl.models import chat
from genctl.models.architectures import ARCHITECTURES, BACKEND, LEFT_TO_TRANSFORMERS, NO_CLASS
from genctl.models.text import encode
from genctl.models.tokenizer import RECIPES, UnsupportedTokenizer, plain
from tests.models import tokenizers_made as made
from tests.tiny import checkpoint
from tests.versions import needs_newest

TEXTS = (
    "the cat sat on the mat, didn't it?",
    " a  dog\n\n  sat 1234 \t x",
    "</s>the<s> <a word>ł€ <tool>cat<tool> dog",
    "naïve café, 你好世界 👩‍👩‍👧 \x00\x7f",
    "é e\u0301 ﬁ ▁the",
    "",
    " ",
)
REGISTERED = {  # model type -> the class that is registered for it; None for none
    row.name: None if row.tokenizer == NO_CLASS else row.tokenizer
    for row in ARCHITECTURES.values()
    if row.tokenizer not in ("", LEFT_TO_TRANSFORMERS)
}
TOOL = {"content": "<tool>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": False}


def byte_level() -> dict[str, Any]:
    """GPT-2's file, with its post-processor."""
    found = json.loads(made.byte_level().backend_tokenizer.to_str())
    return {**found, "post_processor": json.loads(part(processors.ByteLevel(trim_offsets=False)))}


def part(processor: Any) -> str:
    bare = Tokenizer(models.BPE())
    bare.post_processor = processor
    return json.dumps(json.loads(bare.to_str())["post_processor"])


def llama() -> dict[str, Any]:
    """Llama 2's file: spaces by the normalizer, <s> by the post-processor, merges as text."""
    found = json.loads(made.llama().backend_tokenizer.to_str())
    found["model"]["merges"] = [" ".join(pair) for pair in found["model"]["merges"]]
    begin = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return {**found, "post_processor": json.loads(part(begin))}


def unigram() -> dict[str, Any]:
    """T5's file, where <unk> has the id 2, with a normalizer of SentencePiece."""
    found = json.loads(made.metaspace().backend_tokenizer.to_str())
    pieces = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["<s>", 0.0]]
    pieces += [piece for piece in found["model"]["vocab"] if piece[0] not in ("<unk>", "<s>", "</s>")]
    found["model"] |= {"vocab": pieces, "unk_id": 2}
    for token in found["added_tokens"]:
        token["id"] = [piece for piece, _ in pieces].index(token["content"])
    return found


def word_piece() -> dict[str, Any]:
    """BERT's file."""
    tokens = ["[UNK]", "the", "cat", "##s", ".", ",", "'", "s", "[CLS]", "[SEP]"]
    bare = Tokenizer(models.WordPiece({name: n for n, name in enumerate(tokens)}, unk_token="[UNK]"))
    bare.normalizer = normalizers.BertNormalizer()
    bare.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bare.decoder = decoders.WordPiece(cleanup=False)
    bare.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 8), ("[SEP]", 9)])
    return dict(json.loads(bare.to_str()))


FILES = {"bytes": byte_level, "llama": llama, "unigram": unigram, "WordPiece": word_piece}
NATIVE = {
    "GPT2Tokenizer": ("bytes", "gpt2"),
    "GPTNeoXTokenizer": ("bytes", "gpt_neox"),
    "Qwen2Tokenizer": ("bytes", "qwen2"),
    "BloomTokenizer": ("bytes", "bloom"),
    "LlamaTokenizer": ("llama", "llama"),
    "GemmaTokenizer": ("llama", "gemma2"),
    "PreTrainedTokenizerFast": ("WordPiece", "llama"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "none": {},
    "named": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<new pad>"},
    "described": {"eos_token": {"__type": "AddedToken", "content": "</s>", **FLAGS}, "pad_token": None},
    "extra": {"additional_special_tokens": ["<tool>", "<a word>"], "eos_token": "</s>"},
    "both extra": {"additional_special_tokens": ["<tool>"], "extra_special_tokens": ["<s>"]},
    "described extra": {"extra_special_tokens": [{"__type": "AddedToken", **TOOL}]},
    "own names": {"image_token": "<image>", "extra_special_tokens": {"boi_token": "<boi>"}},
    "added": {
        "added_tokens_decoder": {"2": {"content": "</s>", **FLAGS}, "600": {**FLAGS, **TOOL}},
        "eos_token": "</s>",
    },
    "spaces": {"add_prefix_space": True, "trim_offsets": False, "clean_up_tokenization_spaces": True},
    "no spaces": {"add_prefix_space": False, "legacy": True, "clean_up_tokenization_spaces": False},
    "legacy": {"legacy": True, "sp_model_kwargs": {}, "errors": "replace", "use_default_system_prompt": False},
    "add": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"},
    "split": {"split_special_tokens": True, "bos_token": "<s>"},
    "cohere": {"mask_token": "<m>", "cls_token": "<s>", "sep_token": "</s>", "model_max_length": 9},
}  # fmt: skip


def folder(
    path: Path, file: dict[str, Any], model_type: str, fields: dict[str, Any] | None, **config: Any
) -> dict[str, Any]:
    """A checkpoint's folder without weights; its config.json."""
    path.mkdir(exist_ok=True)
    told = {"model_type": model_type, **config}
    (path / "config.json").write_text(json.dumps(told))
    (path / "tokenizer.json").write_text(json.dumps(file))
    if fields is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return told


def assert_equal(path: Path, config: dict[str, Any]) -> None:
    """Ours is theirs: every part of the backend, and what is asked of it."""
    ours, theirs = plain(path, config), AutoTokenizer.from_pretrained(path)
    theirs.backend_tokenizer.no_padding()
    theirs.backend_tokenizer.no_truncation()
    assert json.loads(ours.backend_tokenizer.to_str()) == json.loads(theirs.backend_tokenizer.to_str())
    assert ours.backend_tokenizer.encode_special_tokens == theirs.backend_tokenizer.encode_special_tokens
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    every = list(range(len(ours)))
    assert [ours.convert_ids_to_tokens(id) for id in every] == theirs.convert_ids_to_tokens(every)
    assert ours.batch_decode([[id] for id in every]) == theirs.batch_decode([[id] for id in every])
    assert list(ours.special_tokens_map.items()) == list(theirs.special_tokens_map.items())
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    for name in ("bos_token", "eos_token_id", "unk_token_id", "pad_token", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.chat_template == theirs.chat_template
    kind = type(ours.backend_tokenizer.model).__name__
    for text in TEXTS:
        for special in (True, False):
            options: dict[str, Any] = {"add_special_tokens": special, "return_offsets_mapping": True}
            mine, other = ours(text, **options), theirs(text, **options)
            assert mine["input_ids"] == other.input_ids
            assert mine["offset_mapping"] == other.offset_mapping
        for skip in (True, False):
            for clean in (True, False, None)[kind != "BPE" :]:
                options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
                assert ours.decode(mine["input_ids"], **options) == theirs.decode(mine["input_ids"], **options)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("name", NATIVE)
def test_a_class_and_its_fields(name: str, fields: str, tmp_path: Path) -> None:
    kind, model_type = NATIVE[name]
    told = {"tokenizer_class": name, **FIELDS[fields]}
    config = folder(tmp_path / "a", FILES[kind](), model_type, told)
    if told.get("clean_up_tokenization_spaces") and kind == "WordPiece":
        with pytest.raises(UnsupportedTokenizer, match="cleans up spaces"):
            plain(tmp_path / "a", config)
        return
    assert_equal(tmp_path / "a", config)
    if fields in ("none", "extra"):  # as transformers writes them today
        AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
        (tmp_path / "b" / "config.json").write_text(json.dumps(config))
        assert_equal(tmp_path / "b", config)
        (tmp_path / "b" / "tokenizer_config.json").unlink()
        assert_equal(tmp_path / "b", config)


def test_every_class_is_tested() -> None:
    assert set(NATIVE) >= set(RECIPES)


@needs_newest("register other classes for some architectures, and tokens would depend on the version")
def test_what_is_registered_is_what_transformers_has_registered() -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for model_type, name in REGISTERED.items():
        theirs = names.get(model_type)
        assert theirs in ({name, "MistralCommonBackend"} if model_type == "mistral" else {name}), model_type
        wins = model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert wins == ARCHITECTURES[model_type].tokenizer_wins


@needs_newest("believe some names of classes that the checkpoint's tokenizer.json contradicts")
@pytest.mark.parametrize("model_type", REGISTERED)
@pytest.mark.parametrize(
    "name", [None, "GPT2TokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast", BACKEND]
)
def test_the_class_depends_on_the_model_type_too(name: str | None, model_type: str, tmp_path: Path) -> None:
    fields = {} if name is None else {"tokenizer_class": name}
    config = folder(tmp_path, byte_level(), model_type, fields)
    if name is None and REGISTERED[model_type] not in (None, BACKEND, *RECIPES):
        with pytest.raises(UnsupportedTokenizer, match=f"{REGISTERED[model_type]} is not known to genctl"):
            plain(tmp_path, config)
    else:
        assert_equal(tmp_path, config)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_an_older_file_counts_where_no_added_tokens_are_named(name: str, tmp_path: Path) -> None:
    kind, model_type = NATIVE[name]
    fields = {"tokenizer_class": name, "pad_token": "<p>"}
    older = {"eos_token": {"content": "<end>", "lstrip": True}, "bos_token": "<s>"}
    for decoder in ({}, {"added_tokens_decoder": {"1": {"content": "<x>", **FLAGS}}}):
        path = tmp_path / f"{len(decoder)}"
        config = folder(path, FILES[kind](), model_type, {**fields, **decoder})
        (path / "special_tokens_map.json").write_text(json.dumps(older))
        assert_equal(path, config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", {"additional_special_tokens": ["<x>"]}),
        ("added_tokens.json", {"<new>": 900}),
        ("special_tokens_map.json", {"image_token": "<i>"}),
    ],
)
def test_older_files_with_further_tokens_are_left_to_transformers(
    name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    config = folder(tmp_path, llama(), "llama", {"tokenizer_class": "LlamaTokenizer"})
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UnsupportedTokenizer, match=name):
        plain(tmp_path, config)


def test_padding_names_a_token(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<of padding>"}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    for name in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
        file = {**llama(), "padding": padding, "truncation": truncation}
        config = folder(tmp_path, file, "llama", {"tokenizer_class": name})
        assert_equal(tmp_path, config)
        assert plain(tmp_path, config).pad_token == "<of padding>"


def test_a_class_with_another_vocabulary_is_left_to_transformers(tmp_path: Path) -> None:
    for name, kind in (("Qwen2Tokenizer", "unigram"), ("GPT2Tokenizer", "unigram"), ("LlamaTokenizer", "WordPiece")):
        config = folder(tmp_path, FILES[kind](), "llama", {"tokenizer_class": name})
        with pytest.raises(UnsupportedTokenizer, match="vocabulary"):
            plain(tmp_path, config)


TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}{{ image_token }}>"
)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("where", ["config", "list", "file"])
def test_a_chat(where: str, name: str, tmp_path: Path) -> None:
    kind, _ = NATIVE[name]
    fields: dict[str, Any] = {"tokenizer_class": name, "bos_token": "<s>", "image_token": "<image>"}
    if where in ("config", "file"):
        fields["chat_template"] = TEMPLATE if where == "config" else "another"
    if where == "list":
        fields["chat_template"] = [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    config = folder(tmp_path, FILES[kind](), "llama", fields)
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert_equal(tmp_path, config)
    ours: Any = plain(tmp_path, config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "the cat </s> 你好"}, {"role": "assistant", "content": " <image>"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode(ours, chat.render_chat_text(ours, messages), add_special_tokens=False) == ids


# -- left to transformers ----------------------------------------------------------------------------------------------


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_class": "BertTokenizerFast"},
        {"tokenizer_class": ""},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"split_special_tokens": "yes"},
        {"eos_token": 3},
        {"image_token": {"__type": "AddedToken", **TOOL}},
        {"extra_special_tokens": [3]},
        {"added_tokens_decoder": {"7": "<eos>"}},
        {"chat_template": [{"name": "default"}]},
        {"fast_tokenizer_files": ["tokenizer.4.json"]},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_unknown_fields_are_left_to_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint("llama", tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(UnsupportedTokenizer):
        plain(tmp_path, config_of(tmp_path))


def test_other_model_types_and_files_are_left_to_transformers(tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    with pytest.raises(UnsupportedTokenizer, match="model type"):
        plain(tmp_path, {"model_type": "mamba"})
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UnsupportedTokenizer, match="tekken"):
        plain(tmp_path, config_of(tmp_path))
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    with pytest.raises(UnsupportedTokenizer, match="additional chat templates"):
        plain(tmp_path, config_of(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
        plain(tmp_path, config_of(tmp_path))
