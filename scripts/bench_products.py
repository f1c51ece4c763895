"""How fast a step could be with its products alone: all matrices of a step, nothing between.

    python scripts/bench_products.py [--size gpt2 qwen2] [--threads N] [--rows N]

For each dtype, each way in which torch can compute its products (the one that the native runtime chooses is marked):
milliseconds for all products of a step, GiB of weights read a second, and that as a share of what a plain sum reads,
in turns with it. No step is faster than its products: where their share of the read limit is below a target, the kernel
is what stands in the way. Matrices are random, each is its own memory, and together they are larger than any cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benchmarks import host, limit
from scripts.benchmarks.checkpoints import Size, gpt2, qwen2

SIZES = {"gpt2": gpt2, "qwen2": qwen2}
ROUNDS = 7


def shapes(size: Size) -> list[tuple[int, int]]:
    """[O, I] of each matrix that one token meets, those of one input as one; of GPT-2 and Qwen2."""
    hidden, inner = size.hidden, size.inner
    qkv = hidden + 2 * hidden * size.kv_heads // size.heads
    up = inner if size.model_type == "gpt2" else 2 * inner
    layer = [(qkv, hidden), (hidden, hidden), (up, hidden), (hidden, inner)]
    return [*layer * size.layers, (size.vocabulary, hidden)]


def ways(dtype: str, *, transposed: bool) -> dict[str, Callable[[Any], Callable[[Any], Any]]]:
    """Ways to multiply with a weight [O, I] in a dtype: name -> (weight -> (x -> y)). One row takes the first."""
    import torch

    from genctl.kernels.ops import library
    from genctl.native import linear, quantized
    from genctl.native.blocks import BlocksPlain, int4_blocks
    from genctl.native.linear import CompiledProduct

    found, own = library(), {}
    if found is not None:
        quantize = dtype if dtype in ("int8", "int4") else None

        def made(weight: torch.Tensor) -> Callable[[Any], Any]:
            lies = weight.t().contiguous().t() if transposed and quantize is None else weight
            return CompiledProduct(found, lies, None, quantize)

        own = {f"genctl, {found.variant}": made}
    torchs: dict[str, Any] = {"int8": quantized.Int8Plain, "int4": lambda weight: BlocksPlain(int4_blocks(weight))}
    return {**own, "plain": torchs.get(dtype, linear.Plain)}


def measured(size: Size, rows: int) -> Iterator[str]:
    """Lines of the table."""
    import torch

    much = torch.ones(1 << 26)
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        held = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        number = limit.BYTES[dtype]
        known = ways(dtype, transposed=size.model_type == "gpt2")
        ours = next(iter(known))
        for name, way in known.items():
            *layers, head = shapes(size)
            products = [(way(torch.randn(shape, dtype=held)), shape) for shape in layers]
            last = next(iter(ways("int8", transposed=False).values())) if dtype == "int4" else way
            products.append((last(torch.randn(head, dtype=held)), head))
            inputs = {width: torch.randn(rows, 1, width, dtype=held) for _, (_, width) in products}
            seconds, reading = (
                min(turns) for turns in zip(*(_turn(products, inputs, much) for _ in range(ROUNDS)), strict=True)
            )
            read = sum(o * i for o, i in layers) * number + head[0] * head[1] * limit.HEAD[dtype]
            mark = " (ours)" if name == ours else ""
            yield (
                f"| {size.name} | {dtype} | {name}{mark} | {seconds * 1e3:.1f} | {read / seconds / 2**30:.1f} "
                f"| {much.nbytes / reading / 2**30:.1f} | {read / seconds / (much.nbytes / reading):.0%} |"
            )
            del products
            gc.collect()


def _turn(products: list[Any], inputs: dict[int, Any], much: Any) -> tuple[float, float]:
    """Seconds for all products, and for a plain sum over `much`."""
    began = time.perf_counter()
    for product, (_, width) in products:
        product(inputs[width])
    between = time.perf_counter()
    much.sum()
    return between - began, time.perf_counter() - between


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", type=int, default=len(host.cores()))
    parser.add_argument("--rows", type=int, default=1, help="that share a step (default: 1)")
    asked = parser.parse_args()
    os.environ.update(host.environment(asked.threads))
    print(f"{host.cpu_model()}, {asked.threads} threads, {asked.rows} row(s)\n")
    print("| checkpoint | dtype | products | ms | GiB/s | a sum reads GiB/s | share |\n|---|---|---|--:|--:|--:|--:|")
    import torch

    torch.set_num_threads(asked.threads)
    with torch.no_grad():
        for name in asked.size:
            for line in measured(SIZES[name](), asked.rows):
                print(line, flush=True)


if __name__ == "__main__":
    main()
