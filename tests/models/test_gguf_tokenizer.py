"""The tokenizer of a GGUF file is that of transformers on the same file: ids, texts, offsets, special tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import ModelError
from genctl.models import gguf_tokenizer
from genctl.models.tokenizer_alone import LoneTokenizer
from genctl.models.tokenizer_files import UnsupportedTokenizer
from tests.tiny import tokenizer
from tests.versions import needs_newest

gguf = pytest.importorskip("gguf")
WORDS = "▁the ▁cat ▁sat ▁ t h e c a s n o f x ▁t he ▁the▁ ca at ▁c ▁s th ▁▁ ▁▁▁ . , é 日本 日".split()  # noqa: SIM905
OWN = [("<|begin|>", 3), ("<|end|>", 3), ("<tool>", 4), ("  ", 4), ("é à", 4), ("<é ü>", 3), ("cat", 3), ("日本語", 1)]
TEXTS = [
    "",
    " ",
    "the cat  sat",
    " the cat ",
    "naïve 🦊 日本語",
    "a  b\tc\n\nd",
    "<s>the<|end|>cat<tool></s>",
    "<unk><mask><pad><|endoftext|>",
    "e\u0301 é à",
    "WE'RE I'll 12345 don't",
    "\0\u200b\ufeff",
    "▁the ▁▁cat",
    "Ġthe Ċ",
    "\r\n \r",
    "x = [1, 2]/\n\n// HTMLParser",
]


def written(path: Path, architecture: str, kind: str, *, pre: str = "", ids: str = "bos eos", **more: Any) -> Path:
    """A file without weights. `ids` names the special tokens with a key; `more` are further keys."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("none")
    for add in ("block_count", "embedding_length", "feed_forward_length", "head_count", "head_count_kv"):
        getattr(writer, f"add_{add}")(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    if kind == "gpt2":
        held = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
        typed = [(token, 1) for token in sorted(held["vocab"], key=held["vocab"].get)] + OWN
        writer.add_token_merges([" ".join(pair) for pair in held["merges"]])
    else:
        bytes_ = [(f"<0x{byte:02X}>", 6) for byte in range(256)]
        typed = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *bytes_, *((word, 1) for word in WORDS), *OWN]
        writer.add_token_scores([-float((7 * at) % 19) for at in range(len(typed))])
    writer.add_token_list([token for token, _ in typed])
    writer.add_token_types([kind for _, kind in typed])
    named = {"bos": 1, "eos": 2, "unknown": 0, "padding": len(typed) - 6}  # the last is user-defined
    for name in ids.split():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", named[name])
    for name, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


FLAGS = {"ggml.add_bos_token": False, "ggml.add_eos_token": True}
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"bytes, {pre}": (arch, "gpt2", {"pre": pre, "ids": "bos eos padding", "chat_template": "{{ messages }}"})
        for pre, arch in zip(
            ("", "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"),
            ("gpt2", "starcoder2", "llama", "qwen2", "stablelm", "gpt-oss"),
            strict=True,
        )
    },
    "bytes, ends": ("qwen3", "gpt2", {"pre": "qwen2", "ggml.add_bos_token": True, "ggml.add_eos_token": True}),
    "bytes, no ids": ("falcon", "gpt2", {"ids": "", "ggml.add_bos_token": True}),
    **{f"pieces, {arch}": (arch, "llama", {}) for arch in ("llama", "gemma2", "gemma3", "phi3", "qwen2")},
    "pieces, ends": ("llama", "llama", {"ids": "bos eos unknown padding", **FLAGS}),
    "pieces, no ids": ("gemma3", "llama", {"ids": ""}),
}


@needs_newest("build the tokenizers of GGUF files in other ways")
@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_has_the_tokens_that_transformers_reads(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    architecture, kind, more = FILES[name]
    path, rng = written(tmp_path / "words.gguf", architecture, kind, **more), random.Random(3)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), gguf_tokenizer.plain(path)
    assert (ours.get_vocab(), len(ours)) == (theirs.get_vocab(), len(theirs))
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    added = ours.backend_tokenizer.get_added_tokens_decoder()
    assert {id: repr(token) for id, token in added.items()} == {
        id: repr(token) for id, token in theirs.added_tokens_decoder.items()
    }
    letters = [*"".join(WORDS), " ", "\n", "<tool>", "é", "🦊", "the", "1"]
    for text in [*TEXTS, *("".join(rng.choices(letters, k=rng.randrange(30))) for _ in range(150))]:
        their = theirs(text, return_offsets_mapping=True)
        our = ours(text, return_offsets_mapping=True)
        assert our == {key: their[key] for key in ("input_ids", "offset_mapping")}, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for _ in range(150):
        ids = rng.choices(range(len(theirs)), k=rng.randrange(1, 8))
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_prompts_for_a_server_can_have_the_ids_of_a_gguf_file(tmp_path: Path) -> None:
    lone, text = LoneTokenizer(str(written(tmp_path / "words.gguf", "llama", "llama"))), "the cat <tool>"
    assert lone.ids(text) == gguf_tokenizer.plain(tmp_path / "words.gguf").encode(text)


def test_what_may_be_read_otherwise_is_left_to_transformers(tmp_path: Path) -> None:
    def why(path: Path) -> str:
        with pytest.raises(UnsupportedTokenizer) as said:
            gguf_tokenizer.plain(path)
        return str(said.value)

    assert "'t5'" in why(written(tmp_path / "a.gguf", "llama", "t5"))
    assert "'mamba'" in why(written(tmp_path / "b.gguf", "mamba", "gpt2"))
    assert "'smollm'" in why(written(tmp_path / "c.gguf", "llama", "gpt2", pre="smollm"))
    with pytest.raises(ModelError, match=r"cannot be loaded without its model: .* is 'smollm'"):
        LoneTokenizer(str(tmp_path / "c.gguf"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert why(written(tmp_path / "d.gguf", "llama", "gpt2")) == "tokenizer_config.json beside the file may change it"
