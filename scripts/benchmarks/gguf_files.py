"""The same checkpoints as llama.cpp reads them, without a tokenizer: prompts are ids."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import Size

FORMS = {  # form -> (the type of its matrices, the type of the file)
    "gguf": ("F32", "ALL_F32"),
    "gguf-bfloat16": ("BF16", "MOSTLY_BF16"),
    "gguf-float16": ("F16", "MOSTLY_F16"),
    "gguf-int8": ("Q8_0", "MOSTLY_Q8_0"),
    "gguf-int4": ("Q4_0", "MOSTLY_Q4_0"),
    "gguf-4k": ("Q4_K", "MOSTLY_Q4_K_S"),
    "gguf-5k": ("Q5_K", "MOSTLY_Q5_K_S"),
}
_GPT2 = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_QWEN2 = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm": "output_norm",
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
NAMES = {"gpt2": _GPT2, "qwen2": _QWEN2}
TYPES = {  # every side reads the file
    "BF16": "gguf-bfloat16",
    "F16": "gguf-float16",
    "Q8_0": "gguf-int8",
    "Q4_0": "gguf-int4",
    "Q4_K": "gguf-4k",
    "Q5_K": "gguf-5k",
}


def form(dtype: str) -> str:
    """The form of a checkpoint that llama.cpp reads for a type."""
    return TYPES.get(dtype, "gguf" if dtype == "float32" else f"gguf-{dtype}")


def write(size: Size, source: Path, place: Path, form: str) -> None:
    """Write `place`/model.gguf from the safetensors in `source`. GPT-2 and Qwen2 only."""
    import numpy
    from safetensors.numpy import load_file

    gguf: Any = import_module("gguf")
    quants: Any = import_module("gguf.quants")
    matrix, file = FORMS[form]
    plain = gguf.GGMLQuantizationType.F32
    kind = gguf.GGMLQuantizationType[matrix]
    # the tied head keeps 8 bits, as genctl's does
    head = kind if matrix in ("F32", "BF16", "F16") else gguf.GGMLQuantizationType.Q8_0
    place.mkdir(parents=True)
    writer = gguf.GGUFWriter(place / "model.gguf", size.model_type)
    _describe(size, writer)
    writer.add_file_type(gguf.LlamaFileType[file])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(size.vocabulary)
    for name, tensor in load_file(source / "model.safetensors").items():
        turned = size.model_type == "gpt2" and tensor.ndim == 2 and ".h." in name  # [in, out] in the file
        wide = numpy.ascontiguousarray(tensor.T if turned else tensor)
        theirs = tensor_name(name, NAMES[size.model_type])
        held = plain if wide.ndim < 2 or "wpe" in name else head if theirs == "token_embd.weight" else kind
        bits = {"Q4_K": 4, "Q5_K": 5}.get(held.name)  # which gguf reads and does not write
        raw = quants.quantize(wide, held) if bits is None else k_blocks(wide, bits)
        writer.add_tensor(theirs, raw, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def k_blocks(rows: Any, bits: int) -> Any:
    """float32 [N, I] -> blocks of Q4_K or Q5_K, uint8 [N, bytes of a row]: ranges from least to largest."""
    import numpy

    groups, most = rows.reshape(-1, 8, 32), (1 << bits) - 1
    least = numpy.minimum(groups.min(-1), 0)
    ranges = numpy.stack([(groups.max(-1) - least) / most, -least], -1)  # [B, 8, 2]
    short = (ranges.max(1) / 63).astype(numpy.float16)
    wide = short.astype(numpy.float32)[:, None]
    sixes = numpy.rint(ranges / numpy.where(wide == 0, 1, wide)).clip(0, 63).astype(numpy.uint8)
    scale, offset = numpy.moveaxis(sixes * wide, -1, 0)[..., None]
    codes = numpy.rint((groups + offset) / numpy.where(scale == 0, 1, scale)).clip(0, most).astype(numpy.uint8)
    first, last = numpy.moveaxis(sixes, -1, 0)[..., :4], numpy.moveaxis(sixes, -1, 0)[..., 4:]
    parts = [
        short.view(numpy.uint8),
        *(first | last >> 4 << 6),
        last[0] & 15 | last[1] << 4,
        *([(codes >> 4 << numpy.arange(8, dtype=numpy.uint8)[:, None]).sum(1, dtype=numpy.uint8)] if bits == 5 else []),
        (codes[:, ::2] & 15 | codes[:, 1::2] << 4).reshape(-1, 128),
    ]
    return numpy.concatenate(parts, 1).reshape(len(rows), -1)


def _describe(size: Size, writer: Any) -> None:
    fields = size.fields
    writer.add_block_count(size.layers)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(size.heads)
    if size.model_type == "gpt2":
        writer.add_context_length(fields["n_positions"])
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_context_length(fields["max_position_embeddings"])
        writer.add_head_count_kv(size.kv_heads)
        writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
        writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])


def tensor_name(name: str, names: dict[str, str]) -> str:
    """The name of a tensor in a checkpoint -> its name in a GGUF file."""
    if name in names:
        return names[name]
    stem, _, end = name.rpartition(".")  # …, weight or bias
    if stem in names:
        return f"{names[stem]}.{end}"
    _, _, number, part = stem.split(".", 3)  # transformer.h.N.part or model.layers.N.part
    return f"blk.{number}.{names[part]}.{end}"
