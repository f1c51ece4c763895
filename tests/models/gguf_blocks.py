"""Tiny GGUF files of random blocks, the same bits with every version of every library."""

from __future__ import annotations

from pathlib import Path

import numpy

# Where the float16 numbers of a block lie, and by what they are divided so that its numbers have the spread 1 about 0.
KINDS = {"Q4_K": {0: 305.0, 2: 41.0}, "Q5_K": {0: 620.0, 2: 40.0}, "Q6_K": {208: 1360.0}}
VOCABULARY, HIDDEN, INNER, HEADS, KV, LAYERS = 512, 256, 512, 4, 2, 2
PROMPTS = [[(7 * at * at + 31 * length) % VOCABULARY for at in range(1, length)] for length in (4, 12, 40)]


def written(path: Path, kind: str) -> Path:
    """A Llama without a tokenizer, whose matrices are blocks of one kind. Its head is its embedding."""
    import gguf

    random, type_ = numpy.random.Generator(numpy.random.PCG64(11)), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, width: int, spread: float) -> None:
        numbers, length = gguf.GGML_QUANT_SIZES[type_]
        raw = random.integers(0, 256, (rows, width // numbers, length), dtype=numpy.uint8)
        for at, factor in KINDS[kind].items():
            raw[..., at : at + 2] = numpy.array([spread / factor], dtype=numpy.float16).view(numpy.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=type_)

    def norm(name: str) -> None:
        writer.add_tensor(name, numpy.ones(HIDDEN, dtype=numpy.float32))

    matrix("token_embd.weight", VOCABULARY, HIDDEN, 0.2)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", HIDDEN, HIDDEN, 0.1)
        matrix(f"{block}.attn_k.weight", HIDDEN // HEADS * KV, HIDDEN, 0.1)
        matrix(f"{block}.attn_v.weight", HIDDEN // HEADS * KV, HIDDEN, 0.1)
        matrix(f"{block}.attn_output.weight", HIDDEN, HIDDEN, 0.1)
        norm(f"{block}.ffn_norm.weight")
        matrix(f"{block}.ffn_gate.weight", INNER, HIDDEN, 0.1)
        matrix(f"{block}.ffn_up.weight", INNER, HIDDEN, 0.1)
        matrix(f"{block}.ffn_down.weight", HIDDEN, INNER, 0.1)
    norm("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
