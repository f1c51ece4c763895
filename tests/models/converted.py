"""Tiny GGUF files as llama.cpp's converter writes them: its metadata, its names, its order of rows.

The metadata are those that the converter wrote (`tests/goldens/gguf_metadata.json`, by
`scripts/make_goldens_converter.py`, which also checks that the tensors here are its tensors); the names are those of
the package gguf. conversion/*.py of llama.cpp says what is done to each family's tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from genctl.models.resolve import BUILTIN
from tests.native import variations
from tests.tiny import BOS, CONTEXT, EOS, HEADS, HIDDEN, INNER, LAYERS, PAD, VOCABULARY, sharpen, tokenizer
from tests.versions import as_loaded

GOLDEN = Path(__file__).parent.parent / "goldens" / "gguf_metadata.json"
_FULL = {"layer_types": None}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_rope = variations._rope
# name -> family, what is different. Each has what a file can say: llama.cpp's code knows the rest of a family.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "stories": ("llama", {}),  # the built-in checkpoint
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 12}),
    "llama, linear rope": ("llama", _rope("linear", factor=4.0)),
    "llama, llama3 rope": variations.VARIATIONS["llama, llama3 rope"],
    "llama, yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, yarn with a factor of attention": variations.VARIATIONS["llama, yarn with a factor of attention"],
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 3, **_FULL, **_CAPS},
    ),
    "gemma2, of 46 layers": (
        "gemma2",
        {"query_pre_attn_scalar": 8, "tie_word_embeddings": True, "num_hidden_layers": 46, **_FULL},
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 7, **_FULL},
    ),
    "gemma3, linear rope": (
        "gemma3_text",
        {
            **{"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 7, **_FULL},
            "rope_parameters": _LINEAR,
        },
    ),
    "gemma3, of 62 layers": (
        "gemma3_text",
        {"query_pre_attn_scalar": 8, "tie_word_embeddings": True, "num_hidden_layers": 62, **_FULL},
    ),
    "granite": ("granite", {}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, **_FULL, "rope_scaling": {**_YARN}}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "phi": ("phi", {"intermediate_size": 128}),
    "phi3": ("phi3", {"sliding_window": variations.WINDOW}),
    "phi3, longrope": variations.VARIATIONS["phi3, longrope"],
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True}),
    "cohere2": (
        "cohere2",
        {"tie_word_embeddings": True, "num_hidden_layers": 5, **_FULL, "logit_scale": 0.25},
    ),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "mpt": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "falcon": ("falcon", {}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, new with one norm": variations.VARIATIONS["falcon, new with one norm"],
}
# architectures that transformers' classes run
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {"qwen2_moe": ("qwen2_moe", {})}
_QWEN2_MOE = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"num_key_value_heads": 2, "intermediate_size": INNER, "max_position_embeddings": CONTEXT, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    **{"tie_word_embeddings": False, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS},
}
_PERMUTED = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3")


@cache
def model(name: str) -> Any:
    """transformers' model of a case, float32, in eval mode."""
    if name == "stories":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(BUILTIN / name)
    family, changes = {**CASES, **OTHERS}[name]
    if name == "qwen2_moe":
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found: Any = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**_QWEN2_MOE))
            sharpen(as_loaded(found))
        return found.eval()
    return variations.made(family, json.dumps(changes, sort_keys=True))


def metadata(name: str) -> list[tuple[str, str, str, Any]]:
    """Keys with their types, types of items ("" if they are no arrays) and values, without the lists of a tokenizer."""
    return [tuple(entry) for entry in json.loads(GOLDEN.read_text())[name]]  # type: ignore[misc]


def written(
    path: Path,
    name: str,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] = MappingProxyType({}),
    vocabulary: bool = False,
    change: Callable[[dict[str, tuple[str, str, Any]]], object] = lambda metadata: None,
    more: Callable[[Any], object] = lambda writer: None,
    words: Mapping[int, str] | None = None,
) -> Path:
    """The file of a case. Matrices are of a `kind` where their rows are whole blocks, and some of other `kinds`.

    `change` edits the metadata, `more` adds to what is written. Without `vocabulary` it has no tokens, so that prompts
    are ids; `words` are tokens in place of others.
    """
    import gguf

    held = {key: (type_, items, value) for key, type_, items, value in metadata(name)}
    change(held)
    writer = gguf.GGUFWriter(path, held.pop("general.architecture")[2])
    for key, (type_, items, value) in held.items():
        types = (gguf.GGUFValueType[type_], gguf.GGUFValueType[items] if items else None)
        writer.add_key_value(key, value, *types)
    if vocabulary:
        own_file = BUILTIN / name / "tokenizer.json"
        text = own_file.read_text() if own_file.is_file() else tokenizer().backend_tokenizer.to_str()
        held_tokens = json.loads(text)["model"]
        tokens = sorted(held_tokens["vocab"], key=held_tokens["vocab"].get)
        for place, word in (words or {}).items():
            tokens[place] = word
        writer.add_token_list(tokens)
        writer.add_token_types([3 if word.startswith("<") and len(word) > 1 else 1 for word in tokens])
        writer.add_token_merges([" ".join(pair) for pair in held_tokens["merges"]])
    for tensor, values in tensors(name):
        is_matrix = values.ndim > 1 and not tensor.endswith(("ffn_gate_inp.weight", "position_embd.weight"))
        own = gguf.GGMLQuantizationType[kinds.get(tensor, kind)]
        if not is_matrix or values.shape[-1] % gguf.GGML_QUANT_SIZES[own][0]:
            own = gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor, _quantized(values.contiguous().numpy(), own), raw_dtype=own)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantized(values: Any, kind: Any) -> Any:
    """Values in a form; in one that the package does not make: zeros."""
    import gguf
    import numpy

    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        return numpy.zeros((*values.shape[:-1], values.shape[-1] // numbers * size), dtype=numpy.uint8)


def tensors(name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, float32."""
    import gguf

    family, found = {**CASES, **OTHERS}[name][0], model(name)
    config = found.config
    arch = next(value for key, _, _, value in metadata(name) if key == "general.architecture")
    kind = next(kind for kind, own in gguf.MODEL_ARCH_NAMES.items() if own == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    held = {name: tensor.detach().float() for name, tensor in saved(found).items()}
    if config.tie_word_embeddings or family.startswith("gemma"):
        held.pop("lm_head.weight", None)
    stacked: dict[str, dict[int, Tensor]] = {}
    for own, tensor in held.items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", own):
            stacked.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
            continue
        changed = _changed(family, config, own, tensor)
        own = own.removeprefix("transformer.") if family == "bloom" else own
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, own
        yield theirs, changed
    for own, parts in stacked.items():
        if "block_sparse_moe" in own:  # as the converter calls them
            own = own.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        theirs = names.get_name(own, try_suffixes=(".weight",))
        assert theirs is not None, own
        yield theirs, torch.stack([parts[number] for number in sorted(parts)])
    yield from _factors(config)


def saved(found: Any) -> dict[str, Tensor]:
    """The tensors of a model as its checkpoint names them."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        found.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def _changed(family: str, config: Any, name: str, tensor: Tensor) -> Tensor:
    heads = config.num_attention_heads
    if family in _PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        count = heads if "q_proj" in name else config.num_key_value_heads
        return tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.t()
    if "query_key_value" in name:
        groups = heads if family in ("bloom", "gpt_neox") else getattr(config, "num_kv_heads", heads)
        groups = 1 if family == "falcon" and not config.new_decoder_architecture else groups
        rows = tensor.view(groups, heads // groups + 2, -1, *tensor.shape[1:])
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])
    return tensor


def _factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """What divides the frequencies of rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for part in ("long", "short"):
            yield f"rope_factors_{part}.weight", torch.tensor(rope[f"{part}_factor"])
    if rope.get("rope_type") == "llama3":
        size, old = config.head_dim, rope["original_max_position_embeddings"]
        wave = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = (old / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        yield (
            "rope_freqs.weight",
            torch.where(wave < old / high, 1.0, torch.where(wave > old / low, factor, between)),
        )
