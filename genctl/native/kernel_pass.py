"""The launches of one pass by Triton kernels (see `kernel_decoder`).

The pieces of a product's sums depend only on the kind and shape of its weight, so a row is summed in the same order for
any number of rows.

N rows, F tokens fed to each, T = N · F, E features of the residual stream, H heads of queries, K heads of keys and
values, D features of a head, C columns of a cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from genctl.native.decoder import Decoder
from genctl.native.quantized import GROUP, Product

FEW = 64  # in passes with at most this many tokens, each token has its own attention programs, one for each piece
AHEAD = 512  # bytes of each output's weights that are prefetched while the previous kernel still runs
PIECE, COLUMNS = 128, 128  # columns of a piece of attention, and of a tile
QUERY_TILES = 2  # per program, for passes with many tokens: as many as fit in registers
AT_ONCE = 8  # pieces that are merged at once

# Chosen by measuring on an H100 and an H200. Sums are split if there are too few tiles of outputs to fill a GPU.
TOKENS, OUTPUTS = 16, 64  # of a tile of a product
PROGRAMS, LEAST_PIECE = {"floats": 128, "int8": 128, "int4": 384}, 512
# at most: tiles of tokens per program, and accumulators of all of them
MOST_TIMES, MOST_SUMS = 8, 128 * 128
# most inputs of a tile, and pipeline stages: for one weight, for two, and for tokens that fill more than four tiles
LOADED = {"floats": (256, 3), "int8": (256, 6), "int4": (256, 5)}
LOADED_GATED = {"floats": (128, 5), "int8": (256, 3), "int4": (256, 4)}
LOADED_MANY = {"floats": (64, 4), "int8": (128, 4), "int4": (128, 4)}
BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight

# For each window size: the column of the first fed token, int64 [1], and the first column of each row, int32 [N].
Columns: TypeAlias = Mapping[int | None, tuple[Tensor, Tensor]]


class Tile(NamedTuple):
    """The tiling of a product: sizes of a tile, pieces of its sum, and pipeline stages (tiles loaded at once).

    A program computes `times` tiles of tokens. `times` and `stages` do not change the result.
    """

    outputs: int
    tokens: int
    inputs: int
    splits: int
    piece: int  # inputs of a piece
    stages: int
    times: int


def cut(product: Product, tiles: int, outputs: int, *, x_bytes: int, shared: int, count: int, gated: bool) -> Tile:
    """Choose the tiling of a product into `tiles` tiles of `outputs`, for `count` tokens.

    `x_bytes` is the size of an element of x, `shared` that of a program's shared memory, both in bytes.
    """
    width, kind = product.width, product.kind
    least = 64 if kind == "int4" else 32  # two groups: a byte holds codes of both
    most, stages = (LOADED_GATED if gated else LOADED)[kind]
    if kind == "floats":
        most = 2 * most // x_bytes  # to fit in memory; tests in the interpreter use float32
    most = most if gated else most * OUTPUTS // outputs
    inputs = _inputs(width, least, most)
    splits = max(1, min(PROGRAMS[kind] // tiles, width // LEAST_PIECE))
    piece = -(-width // (splits * inputs)) * inputs
    times = min(MOST_TIMES, MOST_SUMS // (outputs * TOKENS), power(-(-count // TOKENS)))
    if count > 4 * TOKENS:
        most, stages = LOADED_MANY[kind]
        inputs = min(inputs, _inputs(width, least, most))
    bytes_ = BYTES.get(kind, float(x_bytes))
    size = ((2 if gated else 1) * outputs * bytes_ + times * TOKENS * x_bytes) * inputs
    return Tile(outputs, TOKENS, inputs, -(-width // piece), piece, max(1, min(stages, int(shared // size))), times)


def _inputs(width: int, least: int, most: int) -> int:
    """Inputs of a tile: the largest size from `least` to `most` that divides the width of a weight, else `least`."""
    sizes = [size for size in (256, 128, 64, 32) if least <= size <= max(least, most)]
    return next(size for size in sizes if not width % size or size == least)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


class KernelLayer(NamedTuple):
    """The weights and constants of a layer's launches."""

    qkv: Product
    o: Product
    up: Product
    down: Product
    act: str
    gains: tuple[Tensor, Tensor]  # of the norms before attention and before the MLP, f32 [E]
    after: tuple[Tensor | None, Tensor | None]  # of the norms on their outputs
    head_gains: Tensor | None  # of queries and keys, f32 [2, D]
    rope: Tensor | None  # radians per position, f32 [r / 2]; None: no rotation
    turn_scale: float


@dataclass(frozen=True)
class KernelParts:
    """The parts that all passes of a decoder share."""

    decoder: Decoder
    layers: list[KernelLayer]
    final: Tensor  # the gain of the last norm, f32 [E]
    head: Product
    kernels: Any  # `kernels.cuda`
    attention: Any  # `kernels.cuda_attention`
    forms: Any  # `kernels.forms`
    shared: int  # bytes of shared memory that a program has
    pdl: bool  # programmatic dependent launch: a kernel starts before the previous one ends

    def tile(self, product: Product, tiles: int, outputs: int, *, count: int, gated: bool = False) -> Tile:
        """See `cut`."""
        x_bytes = self.decoder.dtype.itemsize if product.kind == "floats" else 1
        return cut(product, tiles, outputs, x_bytes=x_bytes, shared=self.shared, count=count, gated=gated)


class _Normed(NamedTuple):
    """The parts of a norm of x: x · gain [T, E], and sums of squares of x f32 [parts, T].

    For products without a norm only `x` is used.
    """

    x: Tensor
    sums: Tensor


class _Launch(NamedTuple):
    """One kernel launch with its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # the current device is per thread
            self.kernel.warmup(*self.args, grid=self.grid, **self.options)

    @property
    def variant(self) -> tuple[Any, ...]:
        """Launches with equal variants share machine code, or differ little."""
        return self.kernel, *sorted(self.options.items())


class KernelPass:
    """The launches of one pass, in order, and their buffers."""

    def __init__(
        self,
        parts: KernelParts,
        tokens: Tensor,
        positions: Tensor,
        columns: Columns,
        buffers: Sequence[tuple[Tensor, Tensor]],
        keep: int | None = None,
    ) -> None:
        self.parts, self.decoder, self.spec = parts, parts.decoder, parts.decoder.spec
        self.positions = positions
        self.rows, self.fed = tokens.shape
        self.count = tokens.numel()
        self.many = self.count > FEW
        self.launches: list[_Launch] = []
        self.held: dict[tuple[Any, ...], Tensor] = {}
        sizes = [-(-product.size // 16) for product in (parts.layers[0].qkv, parts.layers[0].up, parts.layers[0].down)]
        counts = max(-(-self.count // TOKENS) * max(sizes), self.count * self.spec.kv_heads)
        self.counts = torch.zeros(counts, dtype=torch.int32, device=self.decoder.device)
        x = self.decoder.embed(tokens, positions).reshape(self.count, -1).contiguous()
        gains = [gain for layer in parts.layers for gain in layer.gains] + [parts.final]
        normed = self._enter(x, gains[0])
        for number, layer in enumerate(parts.layers):
            window = self.spec.windows[number]
            mixed = self._attention(layer, normed, *buffers[number], *columns[window], window or 0)
            normed = self._add(layer.o, mixed, x, gains[2 * number + 1], layer.after[0])
            inner = self._gated(layer, normed)
            normed = self._add(layer.down, inner, x, gains[2 * number + 2], layer.after[1])
        self.normed = self.last = normed
        if keep is not None and keep < self.fed:
            self.count = self.rows * keep
            self.many = self.count > FEW
            self.last = _Normed(*(part.new_empty(self._of_last(part, keep).shape) for part in normed))
        self.keep = keep
        # passes with equal sizes use the same kernels
        self.sizes = tuple(min(MOST_TIMES, power(-(-tokens // TOKENS))) for tokens in (positions.numel(), self.count))
        self.until_last = len(self.launches)
        self.logits = torch.empty(self.count, self.spec.vocab, dtype=torch.float32, device=self.decoder.device)
        if self.count:
            self._product(parts.head, self.last, self.logits, norm=True)

    def run(self) -> None:
        """Run all launches; before the head, select the last `keep` tokens of each row."""
        for launch in self.launches[: self.until_last]:
            launch.run()
        if self.last is not self.normed and self.keep:
            for target, part in zip(self.last, self.normed, strict=True):
                target.copy_(self._of_last(part, self.keep))
        for launch in self.launches[self.until_last :]:
            launch.run()

    def _of_last(self, part: Tensor, keep: int) -> Tensor:
        """x [T, E], or the sums [parts, T], of the last `keep` tokens of each row."""
        if part is self.normed.x:
            return part.view(self.rows, self.fed, -1)[:, self.fed - keep :].flatten(0, 1)
        return part.view(-1, self.rows, self.fed)[:, :, self.fed - keep :].flatten(1)

    def _space(self, name: str, *shape: int, wide: bool = False, kind: torch.dtype | None = None) -> Tensor:
        """A buffer that all layers reuse."""
        key = name, shape
        if key not in self.held:
            kind = torch.float32 if wide else kind or self.decoder.dtype
            self.held[key] = torch.empty(shape, dtype=kind, device=self.decoder.device)
        return self.held[key]

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, stages: int = 2, warps: int = 4, **flags: Any
    ) -> None:
        options = {**flags, "PDL": self.parts.pdl, "num_warps": warps, "num_stages": stages}
        if self.parts.pdl:
            options["launch_pdl"] = True
        self.launches.append(_Launch(kernel, grid, args, options))

    def _enter(self, x: Tensor, gain: Tensor, added: _Normed | None = None, after: Tensor | None = None) -> _Normed:
        """The norm of x. With `added`, its norm is first added to x, in place."""
        size = x.shape[1]
        made = self._made("normed", size, 1)
        added_x, sums = made if added is None else added
        self._launch(
            self.parts.kernels.enter, (self.count,), x, added_x, sums, gain if after is None else after, gain, made.x,
            made.sums, size, len(sums), self.spec.eps, self.spec.residual_scale,
            ADD=added is not None, P=power(len(sums)), E=power(size),
        )  # fmt: skip
        return made

    def _attention(
        self,
        layer: KernelLayer,
        normed: _Normed,
        keys: Tensor,
        values: Tensor,
        place: Tensor,
        starts: Tensor,
        window: int,
    ) -> _Normed:
        spec, product, columns = self.spec, layer.qkv, keys.shape[2]
        heads, kv, size, rope = spec.heads, spec.kv_heads, spec.head_dim, spec.rope
        q, row_stride = self._space("q", self.count, heads * size), keys.stride(0)
        # a tile covers whole heads if they are normed
        pairs = power(size // 2) if spec.qk_norm else next(n for n in (32, 16, 8) if size // 2 % n == 0 or n == 8)
        pairs = max(pairs, 8)
        each = -(-(size // 2) // pairs)
        tile = self.parts.tile(product, (heads + 2 * kv) * each, 2 * pairs, count=self.count)
        part = self._parts(tile, product.size)
        some = normed.sums  # a placeholder for arguments that are not read
        x, x_scales = self._rounded(product, normed)
        self._launch(
            self.parts.kernels.heads, (self._tiles(tile), (heads + 2 * kv) * each, tile.splits), x,
            product.weight, *_beside(product, some), normed.sums, x_scales, q, keys, values,
            some if layer.head_gains is None else layer.head_gains, some if layer.rope is None else layer.rope,
            self.positions, place, part, self.counts, self.count, self.fed, product.width, tile.piece,
            len(normed.sums), spec.eps, row_stride, columns, int(layer.rope is not None), layer.turn_scale,
            HEADS=heads, KV=kv, D=size, R=2 if rope is None else rope.size, PAIRS=rope is not None and rope.interleaved,
            TILES=each, QK_NORM=layer.head_gains is not None, **self._flags(tile, product, normed),
        )  # fmt: skip
        mixed, group = self._made("mixed", heads * size), heads // kv
        queries = max(16, power(group))
        shape: dict[str, Any] = {
            "KV": kv, "GROUP": group, "G": queries, "D": size, "W": max(16, power(size)), "PIECE": PIECE,
            "WINDOW": window, "CAP": spec.softcap or 0.0, "C": COLUMNS if size <= 128 else COLUMNS // 2,
        }  # fmt: skip
        if self.many:
            shared = 1 if window else queries // group
            tiles = 1 if window or size > 128 else min(QUERY_TILES, power(-(-self.fed // shared)))
            self._launch(
                self.parts.attention.attend_all, (-(-self.fed // (shared * tiles)), kv, self.rows), q, keys, values,
                starts, place, mixed.x, self.fed, row_stride, columns, spec.scaling, B=shared, TILES=tiles,
                **shape,
            )  # fmt: skip
            return mixed
        pieces = -(-columns // PIECE)
        parts = self._space("attention parts", self.count, kv, pieces, group, size, wide=True)
        most, mass = (self._space(name, self.count, kv, pieces, group, wide=True) for name in ("most", "mass"))
        self._launch(
            self.parts.attention.attend, (pieces, kv, self.count), q, keys, values, starts, place, mixed.x,
            parts, most, mass, self.counts, self.fed, row_stride, columns, pieces, spec.scaling,
            AT_ONCE=AT_ONCE, **shape,
        )  # fmt: skip
        return mixed

    def _add(self, product: Product, y: _Normed, x: Tensor, gain: Tensor, after: Tensor | None) -> _Normed:
        """x += product(y), or its norm if there is `after`; returns the norm of x."""
        made = self._made("normed", product.size, -(-product.size // OUTPUTS), "of tiles")
        if after is None:
            self._product(product, y, x, rest=x, made=made, gain=gain)
            return made
        added = self._space("added", self.count, product.size)
        self._product(product, y, added, made=made, gain=gain)
        return self._enter(x, gain, _Normed(added, made.sums), after)

    def _made(self, name: str, size: int, parts: int = 1, where: str = "") -> _Normed:
        sums = self._space(f"sums {name} {where}", parts, self.count, wide=True)
        return _Normed(self._space(name, self.count, size), sums)

    def _rounded(self, product: Product, y: _Normed) -> tuple[Tensor, Tensor]:
        """A product's input: x and a placeholder, or, for quantised weights, codes of x and scales from a launch."""
        if product.kind == "floats":
            return y.x, y.sums
        width, count = product.width, len(y.x)
        group, at_once = (GROUP, 32) if product.kind == "int4" else (width, 1)
        groups = width // group
        codes = self._space("codes", count, width, kind=torch.int8)
        scales = self._space("scales of codes", 2, count, groups, wide=True)
        self._launch(
            self.parts.forms.round_x, (count, -(-groups // at_once)), y.x, codes, scales, count, width,
            GROUP=group, W=power(group), B=at_once, FORM=product.kind, stages=1, warps=8,
        )  # fmt: skip
        return codes, scales

    def _product(
        self,
        product: Product,
        y: _Normed,
        out: Tensor,
        *,
        norm: bool = False,
        rest: Tensor | None = None,
        made: _Normed | None = None,
        gain: Tensor | None = None,
    ) -> None:
        tiles = -(-product.size // OUTPUTS)
        tile = self.parts.tile(product, tiles, OUTPUTS, count=self.count)
        x, x_scales = self._rounded(product, y)
        self._launch(
            self.parts.kernels.product, (self._tiles(tile), tiles, tile.splits), x, product.weight,
            *_beside(product, out), out if rest is None else rest, out if gain is None else gain, y.sums, x_scales, out,
            *(made or (out, y.sums)), self._parts(tile, product.size), self.counts,
            self.count, product.size, product.width, tile.piece, len(y.sums), self.spec.eps,
            1.0 if rest is None else self.spec.residual_scale,
            NORM=norm, REST=rest is not None, NEXT=made is not None, SHORT=self.parts.kernels.KINDS[self.decoder.dtype],
            **self._flags(tile, product, y),
        )  # fmt: skip

    def _gated(self, layer: KernelLayer, normed: _Normed) -> _Normed:
        product, size = layer.up, layer.up.size // 2
        tiles = -(-size // OUTPUTS)
        tile = self.parts.tile(product, tiles, OUTPUTS, count=self.count, gated=True)
        out = self._made("inner", size)
        x, x_scales = self._rounded(product, normed)
        self._launch(
            self.parts.kernels.gated, (self._tiles(tile), tiles, tile.splits), x, product.weight,
            *_beside(product, out.x), normed.sums, x_scales, out.x, self._parts(tile, product.size),
            self.counts, self.count, size, product.width, tile.piece, len(normed.sums), self.spec.eps,
            ACT=layer.act, **self._flags(tile, product, normed),
        )  # fmt: skip
        return out

    def _tiles(self, tile: Tile) -> int:
        return -(-self.count // (tile.tokens * tile.times))

    def _parts(self, tile: Tile, size: int) -> Tensor:
        return self.counts if tile.splits == 1 else self._space("parts", tile.splits, self.count, size, wide=True)

    def _flags(self, tile: Tile, product: Product, x: _Normed) -> dict[str, Any]:
        return {
            "FORM": product.kind, "BIAS": product.wide_bias is not None, "P": power(len(x.sums)),
            "S": tile.splits, "N": tile.outputs, "M": tile.tokens, "K": tile.inputs, "TIMES": tile.times,
            "EVEN": product.width % tile.inputs == 0,
            "AHEAD": AHEAD if self.parts.pdl else 0, "stages": tile.stages,
        }  # fmt: skip


def _beside(product: Product, some: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and bias of a product, with `some` tensor as a placeholder for one that it lacks."""
    scales, bias = (some if part is None else part for part in (product.scales, product.wide_bias))
    return scales, bias
