"""GGUF files: one file with the config, the tokenizer and the weights.

The native runtime reads them (`gguf_config`, `native.gguf_names`, `native.gguf_file`), with the weights as they lie or
unpacked; transformers reads some more architectures, unpacked. Before either does, the header is checked
(`gguf_header`), and the sizes in it are compared with its tensors. transformers skips unknown tensors, so the tensors
that it has read are compared with those of the file (`check_read`).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import check, config_limits, gguf_config, gguf_header, libraries
from genctl.models.check import GenerationSettings
from genctl.models.fingerprint import stamps
from genctl.models.gguf_header import Header
from genctl.models.libraries import guarded
from genctl.models.weights import WeightFiles, few, shown
from genctl.native.gguf_names import ROPE_FACTORS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIST = "tokenizer.ggml.tokens"
_LAYER = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d{1,9})\.")
# Tensors without an effect: tables computed from the config, layers that predict further tokens, other modalities.
_UNREAD = re.compile(r".*(rot_embd|\.nextn\.|mtp).*|(v|a|mm)\..*|rope_factors_(short|long)\.weight")


def inspect(path: Path, *, need_tokenizer: bool) -> check.Checkpoint:
    """Check a GGUF file and read its config. Raises ModelError."""
    name = shown(path.name)
    header = tokenizer_header(path, needed=need_tokenizer)
    if not header.tensors:
        raise ModelError(f"{name} holds no tensors")
    _check_layers(name, header)
    factors = {tensor: _factors(header, tensor) for tensor in gguf_config.FACTORS}
    config = gguf_config.config_of(name, header, factors)
    has_tokenizer = _LIST in header.metadata
    if config is None:
        config = guarded(lambda: _their_config(path, header), f"the metadata of {name} cannot be used")
        if not has_tokenizer:  # transformers counts the tokens, and takes its class's default where there are none
            config["vocab_size"] = header.metadata.get(f"{header.architecture}.vocab_size", config.get("vocab_size"))
    # activations are in float32 where matrices have blocks or float16
    dtypes = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    weights = WeightFiles(
        header.files, {**header.tensors}, dtype="bfloat16" if "BF16" in dtypes - {"F32"} else "float32"
    )
    config_limits.check_numbers(config, source=name)
    config_limits.check_size(config, weights, source=name)
    files = stamps(path.parent, header.files, code=False)
    own = {file.name: files[file.name] for file in header.files}
    further = header.ends != (header.metadata.get("tokenizer.ggml.eos_token_id"),)  # which the config has
    settings = GenerationSettings({"eos_token_id": list(header.ends)} if header.ends and further else {}, name)
    return check.Checkpoint(path.parent, config, settings, weights, has_tokenizer, own, path.name)


def tokenizer_header(path: Path, *, needed: bool = True) -> Header:
    """The header of a GGUF file that holds a tokenizer, if one is `needed`. Raises ModelError."""
    name = shown(path.name)
    header = gguf_header.read(path)
    libraries.require(name, ("gguf",), "gguf")
    if needed and _LIST not in header.metadata:
        raise ModelError(
            f"{name} holds no tokenizer, so it cannot read text",
            hint='prompts in token ids need none: rows such as {"prompt_ids": [5, 60, 7]} in a JSONL input',
        )
    return header


def _their_config(path: Path, header: Header) -> dict[str, Any]:
    """The config as transformers reads it. Raises ModelError for a key that may mean something, and is not read."""
    from transformers import AutoConfig

    if len(header.files) > 1:
        raise ModelError(
            f"{shown(path.name)} is in {len(header.files)} parts, and transformers, which reads this architecture, "
            "reads one",
            hint="llama-gguf-split --merge joins them",
        )
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    fields = {**json.loads(config.to_json_string(use_diff=False)), "model_type": config.model_type}
    fields.pop("_model_name_or_path", None)  # general.name
    if header.architecture == "t5":  # transformers takes every one for gated, with the activation of those that are not
        is_gated = "enc.blk.0.ffn_gate.weight" in header.tensors
        left_out = ("is_gated_act", "dense_act_fn", "scale_decoder_outputs")
        fields = {key: value for key, value in fields.items() if key not in left_out}
        fields["feed_forward_proj"] = "gated-gelu" if is_gated else "relu"
        fields["tie_word_embeddings"] = "output.weight" not in header.tensors  # scales what the head reads
    _check_keys(shown(path.name), header, fields)
    return fields


# Keys that transformers leaves out, with the fields whose defaults they must equal.
_LEFT_OUT = {
    "attention.key_length": ("head_dim", "d_kv"),
    "attention.value_length": ("head_dim", "d_kv"),
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "decoder_block_count": ("num_decoder_layers",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
}


def _check_keys(name: str, header: Header, config: dict[str, Any]) -> None:
    """Raises ModelError for a key that transformers leaves out of the config, where it may mean something."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    begin, read = f"{header.architecture}.", GGUF_CONFIG_MAPPING.get(header.architecture.replace("-", "_"))
    for key, value in header.metadata.items():
        own = key.removeprefix(begin)
        if read is None or own == key or own in read or own in gguf_config.HARMLESS or own.startswith("rope.scaling."):
            continue  # of scalings see `_check_scaling`
        fields = [
            gguf_config.decimal(config[field]) for field in _LEFT_OUT.get(own, ()) if config.get(field) is not None
        ]
        if value and gguf_config.decimal(value) not in fields:
            raise ModelError(f"{name}: transformers does not read {shown(key, 60)} = {value!r:.40}")


def _check_layers(name: str, header: Header) -> None:
    """Compare the number of layers with the tensors, before a library makes lists of such lengths."""
    layers: dict[str, set[int]] = {}
    for tensor in header.tensors:
        if match := _LAYER.match(tensor):
            layers.setdefault(match[1], set()).add(int(match[2]))
    for kind, numbers in layers.items():
        own = f"{header.architecture}.block_count"
        key = f"{header.architecture}.decoder_block_count" if kind == "dec.blk" else own
        count = header.metadata.get(key, header.metadata.get(own))
        if count != max(numbers) + 1:
            raise ModelError(f"{name} holds {kind}.0 to {kind}.{max(numbers)}, but {key} is {count!r:.40}")
    if not layers:
        raise ModelError(f"{name} holds no layers (tensors named blk.0 and so on)")


_SHARED_GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.shared_expert_gate\.weight")


def read_gates(model: PreTrainedModel, mismatched: list[str], path: Path) -> list[str]:
    """Read Qwen2-MoE's gates [1, hidden], to which transformers gives one dimension more than they have.

    Returns the other names that are `mismatched`.
    """
    header = gguf_header.read(path)
    for name in mismatched:
        if match := _SHARED_GATE.fullmatch(name):
            import torch

            gate = torch.tensor(_factors(header, f"blk.{match[1]}.ffn_gate_inp_shexp.weight"))
            model.get_parameter(name).data.copy_(gate.view(1, -1))
    return [name for name in mismatched if not _SHARED_GATE.fullmatch(name)]


def check_read(model: PreTrainedModel, unexpected: list[str], path: Path) -> list[str]:
    """Apply the tensors that transformers skips. Returns the names of those without an effect.

    `unexpected` are the names that transformers reports. Raises ModelError for tensors that the model has no place for.
    """
    header = gguf_header.read(path)
    reads = reader_of(model, header.architecture)
    if header.architecture == "falcon" and getattr(model.config, "new_decoder_architecture", False):
        raise ModelError(
            f"{shown(path.name)}: transformers reads queries, keys and values of this Falcon in another order"
        )
    left = sorted(unexpected if reads is None else (name for name in header.tensors if not reads(name)))
    if ROPE_FACTORS in left and _scale_frequencies(model, header):
        left.remove(ROPE_FACTORS)
    missed = [name for name in left if not _UNREAD.fullmatch(name)]
    if missed:
        raise ModelError(
            f"{shown(path.name)} holds {len(missed)} tensors for which the model of its metadata has no place: "
            f"{few(missed)}"
        )
    if reads is not None and header.architecture not in gguf_config.ROWS:
        _check_scaling(shown(path.name), header)
    return left


def reader_of(model: Any, architecture: str) -> Callable[[str], bool] | None:
    """Whether a tensor of a GGUF file goes into `model`, by its name; None if transformers reports those left out."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):
            return None
    except ImportError:  # an older transformers has only the other reader
        pass
    try:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    except ImportError as error:
        raise ModelError(f"this transformers does not say which tensors of a GGUF file it reads: {error}") from error
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    names = {*get_gguf_hf_weights_map(model, processor)}

    def goes_in(name: str) -> bool:
        # stacked experts have no suffix in the map; GPT-2's head is read under its own name
        return (
            name in names or name.removesuffix(".weight") in names or (architecture, name) == ("gpt2", "output.weight")
        )

    return goes_in


def _scale_frequencies(model: PreTrainedModel, header: Header) -> bool:
    """Divide the rotary frequencies by the factors of the file (Llama 3.1); whether the model has such frequencies."""
    import torch

    factors = torch.tensor(_factors(header, ROPE_FACTORS))
    scaled = 0
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if isinstance(frequencies, torch.Tensor) and frequencies.shape == factors.shape:
                frequencies.div_(factors.to(frequencies))
                scaled += 1
    return scaled > 0


def rope_factors(checkpoint: check.Checkpoint) -> tuple[float, ...]:
    """By what the frequencies of the rotary positions are divided; () if the file does not say. Raises ModelError."""
    header = Header({}, checkpoint.weights.tensors, checkpoint.weights.files)  # type: ignore[arg-type]
    return _factors(header, ROPE_FACTORS)


def _factors(header: Header, name: str) -> tuple[float, ...]:
    """The numbers of a small tensor; () without it. Raises ModelError."""
    held = header.tensors.get(name)
    if held is None:
        return ()
    if held.numel > config_limits.MOST:
        raise ModelError(f"{shown(header.files[held.part].name)}: {name} holds {held.numel:,} factors")
    file = header.files[held.part]
    with file.open("rb") as opened:
        opened.seek(held.begin)
        data = opened.read(held.end - held.begin)
    if held.dtype != "F32" or not all(map(math.isfinite, factors := struct.unpack(f"<{held.numel}f", data))):
        raise ModelError(f"{shown(file.name)}: {name} holds no factors")
    return factors


def _check_scaling(name: str, header: Header) -> None:
    """Refuse a scaling of positions, which transformers does not read from the file."""
    begin = f"{header.architecture}.rope.scal"
    kind = header.metadata.get(f"{begin}ing.type", "none" if f"{begin}ing.factor" not in header.metadata else "linear")
    factor = header.metadata.get(f"{begin}ing.factor", header.metadata.get(f"{begin}e_linear", 1.0))
    if factor != 1.0 and kind != "none":
        raise ModelError(
            f"{name} scales positions ({kind!r:.40} by {factor!r:.20}), and transformers does not read that"
        )
