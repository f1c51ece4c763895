"""How the products of `kernels.cuda` are cut into tiles and pieces: by kind and shape of a weight alone.

So the sums of a row have one order for any number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

from genctl.native.kernel_products import Product

# Chosen by measuring on an H100. Sums are cut where there are too few tiles of outputs for the processors of a GPU.
TOKENS, OUTPUTS = 16, 64  # of a tile of a product: wider tiles have other bits
PROGRAMS, LEAST_PIECE = 128, 512
INPUTS, STAGES = 256, 3  # of a tile, at most, and tiles that are loaded at once
GATED_INPUTS, GATED_STAGES = 128, 5  # with two weights
# Not measured yet: a processor computes more for each byte of these weights, by the instructions that were counted
ROUNDED_PROGRAMS = 2 * PROGRAMS
ROUNDED = {"int8": (256, 3), "int4": (256, 5)}  # two programs or more fit a processor, where one does above
GATED_ROUNDED = {"int8": (128, 4), "int4": (256, 4)}
BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight


class Tile(NamedTuple):
    """How a product is cut: sizes of a tile, pieces of its sum, and tiles that are loaded at once."""

    outputs: int
    tokens: int
    inputs: int
    splits: int
    piece: int  # inputs of a piece
    stages: int


def outputs_of(product: Product) -> int:
    """Of a tile: x is rounded for each."""
    return 2 * OUTPUTS if product.kind == "int4" else OUTPUTS


def cut(product: Product, tiles: int, outputs: int, *, x_bytes: int, shared: int, gated: bool = False) -> Tile:
    """`tiles` tiles of `outputs`; `x_bytes` are those of a number of x, `shared` those of memory that a program has."""
    width, kind = product.width, product.kind
    if kind == "floats":
        most, stages = (GATED_INPUTS, GATED_STAGES) if gated else (INPUTS * OUTPUTS // outputs, STAGES)
        most, bytes_, programs, tokens, least = 2 * most // x_bytes, float(x_bytes), PROGRAMS, TOKENS, 32
    else:
        most, stages = (GATED_ROUNDED if gated else ROUNDED)[kind]
        most = most * 2 * OUTPUTS // max(2 * OUTPUTS, outputs)
        bytes_, programs = BYTES[kind], ROUNDED_PROGRAMS
        tokens, least = (TOKENS // 2, 64) if kind == "int4" else (TOKENS, 32)  # a pair of groups at least
    sizes = [size for size in (256, 128, 64, 32) if least <= size <= max(least, most)]
    inputs = next(size for size in sizes if not width % size or size == least)
    splits = max(1, min(programs // tiles, width // LEAST_PIECE))
    piece = -(-width // (splits * inputs)) * inputs
    size = ((2 if gated else 1) * outputs * bytes_ + tokens * x_bytes) * inputs
    return Tile(outputs, tokens, inputs, -(-width // piece), piece, max(1, min(stages, int(shared // size))))
