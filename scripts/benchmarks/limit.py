"""How fast a step could be: the bytes that it must read, over what the machine reads in a second.

A step with N rows reads every matrix once and N caches. Embeddings count as the tied head alone: as embeddings, a row
reads one line of them. Vectors (norms, biases) and activations are left out.
"""

from __future__ import annotations

from .checkpoints import Size
from .work import Work

# bytes for a number of a layer's matrix; 4 bits have a scale and a zero of 16 bits for each 32 numbers, Q8_0 and Q4_0 a
# scale, and K blocks 16 bytes for each 256
_FILES = {"Q8_0": 1 + 2 / 32, "Q4_0": 0.5 + 2 / 32, "Q4_K": 4.5 / 8, "Q5_K": 5.5 / 8}
_HALVES = dict.fromkeys(("bfloat16", "BF16", "F16"), 2.0)
BYTES = {"float32": 4.0, **_HALVES, "int8": 1.0, "int4": 0.5 + 4 / 32, **_FILES}
HEAD = {**BYTES, **dict.fromkeys(_FILES, _FILES["Q8_0"]), "int4": 1.0}
CACHE = {dtype: 2.0 if dtype in ("bfloat16", "BF16") else 4.0 for dtype in BYTES}  # others keep a float32 cache


def matrices(size: Size) -> tuple[int, int]:
    """Numbers in the matrices of all layers, and in the head; of GPT-2 and Qwen2."""
    hidden, ratio = size.hidden, size.kv_heads / size.heads
    attention = round(hidden * hidden * (2 + 2 * ratio))  # q and the output; k and v of fewer heads
    mlp = (2 if size.model_type == "gpt2" else 3) * hidden * size.inner
    return size.layers * (attention + mlp), size.vocabulary * hidden


def parameters(size: Size) -> int:
    """Numbers in a whole checkpoint, the tied head once."""
    hidden, (layers, head) = size.hidden, matrices(size)
    if size.model_type == "gpt2":
        vectors = 9 * hidden + size.inner  # biases (3 + 1 + 1 and the MLP's inner) and two norms of two
        return layers + head + size.layers * vectors + 2 * hidden + int(size.fields["n_positions"]) * hidden
    vectors = 3 * hidden + 2 * hidden * size.kv_heads // size.heads  # biases of q, k and v, and two norms
    return layers + head + size.layers * vectors + hidden


def bytes_read(size: Size, dtype: str, work: Work) -> float:
    """Bytes that one step of all prompts at once must read, with caches of their middle length."""
    layers, head = matrices(size)
    for_token = 2 * size.layers * size.hidden * size.kv_heads // size.heads  # keys and values
    cached = sum(len(ask.prompt) + ask.new / 2 for ask in work.asks)
    return layers * BYTES[dtype] + head * HEAD[dtype] + cached * for_token * CACHE[dtype]


def share(size: Size, dtype: str, work: Work, step_s: float, bandwidth: float) -> float:
    """The least time of a step as a share of the measured `step_s` seconds. `bandwidth` is in bytes a second.

    Per row both are divided by the rows that share the step, which cancels out.
    """
    return bytes_read(size, dtype, work) / bandwidth / step_s
