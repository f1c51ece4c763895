"""GGUF files as checkpoints: one file with the config, the tokenizer and the weights.

The native runtime reads them (`native.gguf_names`, `native.gguf_file`), with the weights as they lie or unpacked, or
transformers, unpacked. Before either does, the header is checked (`gguf_header`) and becomes a config (`gguf_config`).
transformers skips tensors without a word, so what it has read is compared with the file (`check_read`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import check, config_limits, gguf_config, gguf_header, libraries
from genctl.models.check import GenerationSettings
from genctl.models.fingerprint import stamps
from genctl.models.gguf_header import Header
from genctl.models.weights import WeightFiles, few, shown
from genctl.native.gguf_names import ROPE_FACTORS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,9})\.")
# Tensors without an effect: tables computed from the config, layers that predict further tokens, other modalities.
_UNREAD = re.compile(r".*(rot_embd|\.nextn\.|mtp).*|(v|a|mm)\..*|rope_factors_(short|long)\.weight")
_SHARED_GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.shared_expert_gate\.weight")


def inspect(path: Path, *, need_tokenizer: bool) -> check.Checkpoint:
    """Check a GGUF file and read its config. Raises ModelError."""
    name, header = shown(path.name), tokenizer_header(path, needed=need_tokenizer)
    if not header.tensors:
        raise ModelError(f"{name} holds no tensors")
    _check_layers(name, header)
    config = gguf_config.config_of(name, header)
    # activations are in float32 where matrices have blocks or float16
    dtypes = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    weights = WeightFiles(
        header.files, {**header.tensors}, dtype="bfloat16" if "BF16" in dtypes - {"F32"} else "float32"
    )
    config_limits.check_numbers(config, source=name)
    config_limits.check_size(config, weights, source=name)
    files = stamps(path.parent, header.files, code=False)
    own, ends = {file.name: files[file.name] for file in header.files}, header.ends()
    further = ends and ends != (header.metadata.get("tokenizer.ggml.eos_token_id"),)  # which the config has
    settings = GenerationSettings({"eos_token_id": list(ends)} if further else {}, name)
    return check.Checkpoint(path.parent, config, settings, weights, bool(header.tokens), own, path.name)


def tokenizer_header(path: Path, *, needed: bool = True) -> Header:
    """The header of a GGUF file that holds a tokenizer, if one is `needed`. Raises ModelError."""
    name, header = shown(path.name), gguf_header.read(path)
    libraries.require(name, ("gguf",), "gguf")
    if needed and not header.tokens:
        raise ModelError(
            f"{name} holds no tokenizer, so it cannot read text",
            hint='prompts in token ids need none: rows such as {"prompt_ids": [5, 60, 7]} in a JSONL input',
        )
    return header


def _check_layers(name: str, header: Header) -> None:
    """Compare the number of layers with the tensors, before a library makes lists of such lengths."""
    layers = {int(match[1]) for match in map(_LAYER.match, header.tensors) if match}
    if not layers:
        raise ModelError(f"{name} holds no layers (tensors named blk.0 and so on)")
    key = f"{header.architecture}.block_count"
    if (count := header.metadata.get(key)) != max(layers) + 1:
        raise ModelError(f"{name} holds blk.0 to blk.{max(layers)}, but {key} is {count!r:.40}")


def rope_factors(checkpoint: check.Checkpoint) -> tuple[float, ...]:
    """By what the frequencies of the rotary positions are divided; () if the file does not say. Raises ModelError."""
    return Header({}, checkpoint.weights.tensors, checkpoint.weights.files).factors(ROPE_FACTORS)  # type: ignore[arg-type]


# -- what transformers has read ----------------------------------------------------------------------------------------


def read_gates(model: PreTrainedModel, mismatched: list[str], path: Path) -> list[str]:
    """Read Qwen2-MoE's gates [1, hidden], to which transformers gives one dimension more than they have.

    Returns the other names that are `mismatched`.
    """
    import torch

    header = gguf_header.read(path)
    for match in filter(None, map(_SHARED_GATE.fullmatch, mismatched)):
        gate = torch.tensor(header.factors(f"blk.{match[1]}.ffn_gate_inp_shexp.weight"))
        model.get_parameter(match[0]).data.copy_(gate.view(1, -1))
    return [name for name in mismatched if not _SHARED_GATE.fullmatch(name)]


def check_read(model: PreTrainedModel, path: Path) -> list[str]:
    """Apply the tensors that transformers skips. Returns the names of those without an effect.

    Raises ModelError for tensors that the model has no place for.
    """
    header = gguf_header.read(path)
    if header.architecture == "falcon" and getattr(model.config, "new_decoder_architecture", False):
        raise ModelError(
            f"{shown(path.name)}: transformers reads queries, keys and values of this Falcon in another order"
        )
    reads = reader_of(model, header.architecture)
    left = sorted(name for name in header.tensors if not reads(name))
    if ROPE_FACTORS in left and _scale_frequencies(model, header):
        left.remove(ROPE_FACTORS)
    if missed := [name for name in left if not _UNREAD.fullmatch(name)]:
        raise ModelError(
            f"{shown(path.name)} holds {len(missed)} tensors for which the model of its metadata has no place: "
            f"{few(missed)}"
        )
    return left


def reader_of(model: Any, architecture: str) -> Callable[[str], bool]:
    """Whether transformers reads a tensor of a GGUF file into `model`, by its name. Raises ModelError."""
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    except ImportError as error:
        raise ModelError(f"this transformers does not say which tensors of a GGUF file it reads: {error}") from error
    names = {*get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={}))}
    if architecture == "gpt2":
        names.add("output.weight")  # read under its own name
    return lambda name: name in names or name.removesuffix(".weight") in names  # stacked experts have no suffix there


def _scale_frequencies(model: PreTrainedModel, header: Header) -> bool:
    """Divide the rotary frequencies by the factors of the file (Llama 3.1); whether the model has such frequencies."""
    import torch

    factors, scaled = torch.tensor(header.factors(ROPE_FACTORS)), False
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if isinstance(frequencies, torch.Tensor) and frequencies.shape == factors.shape:
                frequencies.div_(factors.to(frequencies))
                scaled = True
    return scaled
