"""GGUF files: unpacked, the tokens are those of transformers on the same file; damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from genctl.errors import ModelError
from genctl.models import libraries
from genctl.models.gguf import reader_of
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.tiny import tiny, tokenizer
from tests.versions import needs_newest

gguf = pytest.importorskip("gguf")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_gguf(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{end}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{NAMES[part]}.{end}"


def written(
    path: Path,
    *,
    arch: str = "qwen2",
    packed: bool = True,
    with_tokenizer: bool = True,
    more: Callable[[Any], object] = lambda writer: None,
    words: Mapping[int, str] | None = None,
    **changes: Any,
) -> Path:
    """A tiny model with matrices in Q8_0 where their rows are whole blocks, as llama.cpp would write it.

    `changes` are of its config, `more` adds to what is written, `words` are special tokens in place of others.
    """
    model = tiny(arch, **changes)
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if with_tokenizer:
        inner = tokenizer().backend_tokenizer
        held = json.loads(inner.to_str())["model"]
        tokens = sorted(held["vocab"], key=held["vocab"].get)
        for place, word in (words or {}).items():
            tokens[place] = word
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if word.startswith("<") and len(word) > 1 else 1 for word in tokens])
        writer.add_token_merges([" ".join(pair) for pair in held["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
    plain, eight = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        kind = eight if packed and tensor.ndim == 2 else plain
        numbers = numpy.ascontiguousarray(tensor.numpy())
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp's order of rotary pairs
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, width = numbers.shape
            numbers = numbers.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
        writer.add_tensor(name_in_gguf(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(path: Path, ids: list[int]) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    prompt = torch.tensor([ids])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("packed", [True, False])
def test_a_gguf_file_continues_as_with_transformers(packed: bool, tmp_path: Path) -> None:
    path, ids = written(tmp_path / "tiny.gguf", packed=packed), [5, 60, 250, 7]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": ids}))
    done = genctl(
        *("run", "-m", str(path), "-i", str(tmp_path / "rows.jsonl"), "--format", "jsonl"),
        *("--scores", "--max-new-tokens", "12", "--no-do-sample", "--dequantize"),
    )
    assert (done.status, done.err) == (0, ""), "a library's progress bar in a pipe?"
    assert [token["id"] for token in done.records[0]["tokens"]] == theirs(path, ids)


def test_a_gguf_file_brings_its_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf")
    found = load(Runtime(model=str(path)), need_tokenizer=True)
    assert found.tokenizer is not None
    assert found.tokenizer("the cat sat")["input_ids"] == tokenizer()("the cat sat")["input_ids"]
    assert found.runtime == "native (qwen2)"
    assert found.fingerprint().startswith("sha256:")


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize(
    ("more", "words", "ends"),
    [
        (lambda writer: None, {}, None),
        (lambda writer: writer.add_eot_token_id(250), {}, [2, 250]),
        (lambda writer: (writer.add_eot_token_id(250), writer.add_eom_token_id(60)), {}, [2, 250, 60]),
        (lambda writer: None, {250: "<|im_end|>", 60: "<|endoftext|>"}, [2, 60, 250]),
        (lambda writer: writer.add_eot_token_id(250), {250: "<|eot_id|>"}, [2, 250]),
        (lambda writer: None, {250: "<|end|>", 60: "<|return|>", 61: "<|call|>"}, [2, 60, 61]),
    ],
)
def test_every_end_token_of_a_gguf_file_ends_a_text(
    runtime: str, more: Any, words: dict[int, str], ends: list[int] | None, tmp_path: Path
) -> None:
    path = written(tmp_path / "tiny.gguf", more=more, words=words)
    found = load(Runtime(model=str(path), runtime=runtime), need_tokenizer=True)
    assert found.generation.values.get("eos_token_id") == ends
    row = json.dumps({"prompt_ids": [5, 60, 250, 7]})
    formats = ("--input-format", "jsonl", "--format", "jsonl")
    asked = ("run", "-m", str(path), "--runtime", runtime, "-n", "40", *formats)
    (record,) = genctl(*asked, stdin=row).records
    first = genctl(*asked, "--set", "eos_token_id=[]", stdin=row).records[0]["token_ids"]
    place = next((place for place, id in enumerate(first) if id in (ends or [2])), None)
    assert record["token_ids"] == first[: None if place is None else place + 1]


def test_gguf_files_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **options: Any) -> ModelError:
        with pytest.raises(ModelError) as said:
            load(Runtime(model=str(path), **options), need_tokenizer=True)
        return said.value

    (tmp_path / "text.gguf").write_text("GGML and more")
    assert "is no GGUF file" in refused(tmp_path / "text.gguf").message
    (tmp_path / "cut.gguf").write_bytes(written(tmp_path / "whole.gguf").read_bytes()[:500])
    assert "cut.gguf is damaged: it ends within its header" in refused(tmp_path / "cut.gguf").message
    assert "holds no tokenizer" in refused(written(tmp_path / "mute.gguf", with_tokenizer=False)).message
    monkeypatch.setattr(libraries, "is_missing", lambda module: module == "gguf")
    missing = refused(tmp_path / "whole.gguf")
    assert "whole.gguf needs gguf, which is not installed" in missing.message
    assert missing.hint == 'pip install "genctl[gguf]"'


def test_a_plan_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    done = genctl("inspect-cache", "--plan", "--length", "100", "-m", str(written(tmp_path / "tiny.gguf")))
    assert done.status == 3, done.err
    assert "is a GGUF file, and a plan is made of a config.json" in done.err


def test_transformers_says_which_tensors_it_reads() -> None:
    reads = reader_of(tiny("llama"), "llama")
    assert reads is not None, "transformers.modeling_gguf_pytorch_utils.get_gguf_hf_weights_map has moved"
    assert all(map(reads, ("token_embd.weight", "output.weight", "blk.1.ffn_down.weight")))
    assert not any(map(reads, ("blk.2.ffn_down.weight", "blk.1.attn_q.bias", "rope_freqs.weight")))


@needs_newest("read every architecture with that reader")
def test_transformers_reports_the_tensors_that_another_reader_left_out() -> None:
    assert reader_of(object(), "lfm2") is None


def test_the_progress_bar_of_the_reader_is_replaced() -> None:
    from transformers import modeling_gguf_pytorch_utils as reader

    assert hasattr(reader, "tqdm"), "the reader of GGUF files has another progress bar"
    before = reader.tqdm
    with libraries.weights_bar(None, "x"):
        assert reader.tqdm is not before
    assert reader.tqdm is before
