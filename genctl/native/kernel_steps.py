"""A decoding step by the kernels of `kernels.cuda`: what `decoder.Decoder.step` computes, in five launches a layer.

Where a part of a decoder is not one of theirs, `KernelStep` is not made, and torch's operations compute the step.

N rows, F tokens fed to each, T = N · F, E features of the residual stream, H heads of queries, K heads of keys and
values, D features of a head, C columns of a cache, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from genctl.native.decoder import Decoder, LayerWeights
from genctl.native.kernel_products import OUTPUTS, Product, Tile, cut, outputs_of
from genctl.native.linear import Joined
from genctl.native.mlp import MLP, Activation
from genctl.native.norms import RMSNorm, same

MOST_TOKENS = 64  # of a step: beyond, weights are read too often
MOST_ROUNDED = 256  # where torch would unpack all weights for a step; not measured
AHEAD = 512  # bytes of each output that are asked for while the kernel before still runs
PIECE, COLUMNS = 128, 128  # of attention, and of its tile
AT_ONCE = 8  # pieces that are read at once
SHARED = 99 * 1024  # bytes of shared memory that every GPU since 2020 has for a program
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", "quick_gelu")
# GPUs (compute capabilities) on which the kernels were compared with torch, with their shared memory: others use torch
TRIED = {(9, 0): 227 * 1024}


def unusable(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels do not run on a CUDA device, whatever the decoder; "" if they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) in TRIED else f"the kernels have not run on compute capability {major}.{minor} yet"


# For each kind of window: the column of each row's first token, int64 [1], and a row's first column, int32 [N].
Columns: TypeAlias = Mapping[int | None, tuple[Tensor, Tensor]]


class NotForKernels(Exception):
    """A part of a decoder that the kernels do not compute; the message names it."""


class _Layer(NamedTuple):
    """What the launches of a layer read."""

    qkv: Product
    o: Product
    up: Product
    down: Product
    act: str
    gains: tuple[Tensor, Tensor]  # before attention and before the MLP, f32 [E]
    after: tuple[Tensor | None, Tensor | None]  # of what each adds
    head_gains: Tensor | None  # of queries and keys, f32 [2, D]
    rope: Tensor | None  # radians for each position, f32 [r / 2]; None: nothing turns
    turn_scale: float


class KernelStep:
    """The steps of one decoder. `launches` counts the kernels that were launched."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises NotForKernels."""
        spec, weights = decoder.spec, decoder.weights
        angles = [rotary for rotary in (decoder.rotary, decoder.local_rotary) if rotary is not None]
        for part, wrong in {
            "another norm than RMS": spec.norm != "rms", "sublayers at once": spec.parallel, "experts": spec.experts,
            "an MLP without gate": not spec.gated, "an encoder": spec.encoder, "clipped queries": spec.clip_qkv,
            "linear biases": spec.alibi, "relative positions": spec.relative, "attention sinks": spec.sinks,
            "scaling by layer": spec.scaling_by_layer, "a scaled head": spec.head_scale != 1.0,
            "embeddings of another width": spec.embed_size, "attention to later tokens": not spec.causal,
            "another order of queries, keys and values": spec.qkv not in ("split", "joined"),
            "such norms of queries and keys": spec.qk_norm not in ("", "head"),
            "angles that depend on the length": any(rotary.fixed is None for rotary in angles),
        }.items():  # fmt: skip
            if wrong:
                raise NotForKernels(part)
        from genctl.kernels import cuda

        self.decoder, self.launches, self.kernels = decoder, 0, cuda
        self.layers = [self._layer(number, layer) for number, layer in enumerate(weights.layers)]
        self.final = _gain(weights.final_norm)
        self.head = _product(decoder.output)
        self.rounded = self.head.kind != "floats"
        self.most_tokens = MOST_ROUNDED if self.rounded else MOST_TOKENS
        capability = torch.cuda.get_device_capability(decoder.device) if decoder.device.type == "cuda" else (0, 0)
        self.shared = TRIED.get(capability, SHARED)
        self.pdl = capability >= (9, 0)  # programmatic dependent launch: a kernel begins before the one before ends

    def tile(self, product: Product, tiles: int, outputs: int, *, gated: bool = False) -> Tile:
        """See `kernel_products.cut`."""
        return cut(product, tiles, outputs, x_bytes=self.decoder.dtype.itemsize, shared=self.shared, gated=gated)

    def _layer(self, number: int, w: LayerWeights) -> _Layer:
        spec, decoder = self.decoder.spec, self.decoder
        if type(w.mlp) is not MLP or w.mlp_norm is None or w.attn_sum_norm is not same or w.mlp_sum_norm is not same:
            raise NotForKernels("norms at other places")
        if not isinstance(w.mlp.activation, Activation) or w.mlp.activation.name not in ACTIVATIONS:
            raise NotForKernels("another activation")
        after = tuple(None if norm is same else _gain(norm) for norm in (w.attn_out_norm, w.mlp_out_norm))
        head_gains = None
        if spec.qk_norm:
            head_gains = torch.stack([_gain(w.q_norm), _gain(w.k_norm)])
        rotary = decoder.rotary if spec.windows[number] is None else decoder.local_rotary
        rotary = rotary if number not in spec.no_rope_layers else None
        assert len(after) == 2
        return _Layer(
            _product(w.qkv),
            _product(w.o),
            _product(w.mlp.up),
            _product(w.mlp.down),
            w.mlp.activation.name,
            (_gain(w.attn_norm), _gain(w.mlp_norm)),
            after,
            head_gains,
            None if rotary is None else rotary.fixed,
            1.0 if rotary is None else rotary.rope.attention_factor,
        )

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor, columns: Columns, buffers: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Tokens and positions int64 [N, F] -> logits f32 [N, F, V]; keys and values of each layer [N, K, C, D]."""
        step = _Pass(self, tokens, positions, columns, buffers)
        for launch in step.launches:
            launch.run()
        self.launches += len(step.launches)
        return self.decoder.scaled(step.logits).view(*tokens.shape, -1)

    @torch.no_grad()
    def compile(self) -> float:
        """Compile all kernels, or find them in Triton's cache, and run each; returns the seconds that this took.

        They are the same for any number of rows, tokens and columns. Most of the time is spent outside Python.
        """
        spec, device, began = self.decoder.spec, self.decoder.device, time.perf_counter()
        number = torch.zeros(1, 1, dtype=torch.long, device=device)
        cache = torch.zeros(1, spec.kv_heads, 64, spec.head_dim, dtype=self.decoder.dtype, device=device)
        start = torch.zeros(1, dtype=torch.int32, device=device)
        columns = dict.fromkeys(spec.windows, (number[0], start))
        step = _Pass(self, number, number, columns, [(cache, cache)] * spec.layers)
        different = {launch.variant: launch for launch in step.launches}.values()
        with ThreadPoolExecutor(len(different)) as pool:
            list(pool.map(lambda launch: launch.compile(device), different))
        with torch.cuda.device(device):
            for launch in step.launches:
                launch.run()
            torch.cuda.synchronize(device)
        return time.perf_counter() - began


def kernel_step(decoder: Decoder) -> tuple[KernelStep | None, str]:
    """The steps of a decoder by the kernels, if its products are for them; and what is to be said of them, if anything.

    Without a C compiler, or in an environment without Triton's tools, torch's operations compute the steps.
    """
    if not isinstance(decoder.output, Product) or not decoder.output.by_kernels:
        return None, ""
    try:
        step = KernelStep(decoder)
        seconds = step.compile() if decoder.device.type == "cuda" else 0.0
    except NotForKernels as part:
        return None, f"torch's operations compute the steps: the kernels do not compute {part}"
    except Exception as error:  # whatever a compiler, a driver or the file system says
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        return None, f"torch's operations compute the steps: the kernels cannot be compiled ({reason})"
    slow = seconds > 1
    return step, f"compiled the kernels of a step in {seconds:.1f} s, which Triton keeps for later runs" if slow else ""


def _gain(norm: Any) -> Tensor:
    if type(norm) is not RMSNorm:
        raise NotForKernels("another norm than RMS")
    return norm.weight.float().contiguous()


def _product(product: Any) -> Product:
    if type(product) is Joined:
        product = product.one
    if not isinstance(product, Product):
        raise NotForKernels("biases of some of queries, keys and values alone")
    return product


class _Normed(NamedTuple):
    """What a norm makes of x: x · gain [T, E], sums of squares of x f32 [parts, T], and the largest of x · gain.

    These are int32 [parts, T], the bits of a float. Inputs of products without a norm have only these.
    """

    x: Tensor
    sums: Tensor
    tops: Tensor


class _Launch(NamedTuple):
    """One kernel and what it is given."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # each thread has its own
            self.kernel.warmup(*self.args, grid=self.grid, **self.options)

    @property
    def variant(self) -> tuple[Any, ...]:
        """Launches with equal ones share machine code, or differ in little."""
        return self.kernel, *sorted(self.options.items())


class _Pass:
    """The launches of one step, in order, and their buffers."""

    def __init__(
        self,
        step: KernelStep,
        tokens: Tensor,
        positions: Tensor,
        columns: Columns,
        buffers: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.step, self.decoder, self.spec = step, step.decoder, step.decoder.spec
        self.positions = positions
        self.count, self.fed = tokens.numel(), tokens.shape[1]
        self.launches: list[_Launch] = []
        self.held: dict[tuple[Any, ...], Tensor] = {}
        sizes = [-(-product.size // 16) for product in (step.layers[0].qkv, step.layers[0].up, step.layers[0].down)]
        counts = max(-(-self.count // 8) * max(sizes), self.count * self.spec.kv_heads)  # tiles of 8 tokens at least
        self.counts = torch.zeros(counts, dtype=torch.int32, device=self.decoder.device)
        x = self.decoder.embed(tokens, positions).reshape(self.count, -1).contiguous()
        gains = [gain for layer in step.layers for gain in layer.gains] + [step.final]
        normed = self._enter(x, gains[0])
        for number, layer in enumerate(step.layers):
            window = self.spec.windows[number]
            mixed = self._attention(layer, normed, *buffers[number], *columns[window], window or 0)
            normed = self._add(layer.o, mixed, x, gains[2 * number + 1], layer.after[0])
            inner = self._gated(layer, normed)
            normed = self._add(layer.down, inner, x, gains[2 * number + 2], layer.after[1])
        self.logits = torch.empty(self.count, self.spec.vocab, dtype=torch.float32, device=self.decoder.device)
        self._product(step.head, normed, self.logits, norm=True)

    def _space(self, name: str, *shape: int, wide: bool = False) -> Tensor:
        """A buffer that all layers use in turn."""
        key = name, shape
        if key not in self.held:
            kind = torch.float32 if wide else self.decoder.dtype
            self.held[key] = torch.empty(shape, dtype=kind, device=self.decoder.device)
        return self.held[key]

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, stages: int = 2, **flags: Any) -> None:
        options = {**flags, "PDL": self.step.pdl, "num_warps": 4, "num_stages": stages}
        if self.step.pdl:
            options["launch_pdl"] = True
        self.launches.append(_Launch(kernel, grid, args, options))

    def _enter(self, x: Tensor, gain: Tensor, added: _Normed | None = None, after: Tensor | None = None) -> _Normed:
        """The norm of x; first of x + the norm of what is `added`, which is written to x."""
        size = x.shape[1]
        made = self._made("normed", size, 1)
        added_x, sums, _ = made if added is None else added
        self._launch(
            self.step.kernels.enter, (self.count,), x, added_x, sums, gain if after is None else after, gain, made.x,
            made.sums, made.tops, size, len(sums), self.spec.eps, self.spec.residual_scale,
            ADD=added is not None, P=_power(len(sums)), E=_power(size), TOPS=self.step.rounded,
        )  # fmt: skip
        return made

    def _attention(
        self, layer: _Layer, normed: _Normed, keys: Tensor, values: Tensor, place: Tensor, starts: Tensor, window: int
    ) -> _Normed:
        spec, product, columns = self.spec, layer.qkv, keys.shape[2]
        heads, kv, size, rope = spec.heads, spec.kv_heads, spec.head_dim, spec.rope
        q, row_stride = self._space("q", self.count, heads * size), keys.stride(0)
        # a tile has whole heads where these are normed
        pairs = _power(size // 2) if spec.qk_norm else next(n for n in (32, 16, 8) if size // 2 % n == 0 or n == 8)
        pairs = max(pairs, 8)
        each = -(-(size // 2) // pairs)
        tile = self.step.tile(product, (heads + 2 * kv) * each, 2 * pairs)
        part = self._parts(tile, product.size)
        some = normed.sums  # in the place of what is not read
        self._launch(
            self.step.kernels.heads, (self._tiles(tile), (heads + 2 * kv) * each, tile.splits), normed.x,
            product.weight, *_beside(product, some), normed.sums, normed.tops, q, keys, values,
            some if layer.head_gains is None else layer.head_gains, some if layer.rope is None else layer.rope,
            self.positions, place, part, self.counts, self.count, self.fed, product.width, tile.piece,
            len(normed.sums), spec.eps, row_stride, columns, int(layer.rope is not None), layer.turn_scale,
            HEADS=heads, KV=kv, D=size, R=2 if rope is None else rope.size, PAIRS=rope is not None and rope.interleaved,
            TILES=each, QK_NORM=layer.head_gains is not None, **self._flags(tile, product, normed),
        )  # fmt: skip
        mixed, group, pieces = self._made("mixed", heads * size, kv), heads // kv, -(-columns // PIECE)
        parts = self._space("attention parts", self.count, kv, pieces, group, size, wide=True)
        most, mass = (self._space(name, self.count, kv, pieces, group, wide=True) for name in ("most", "mass"))
        self._launch(
            self.step.kernels.attend, (pieces, kv, self.count), q, keys, values, starts, place, mixed.x, mixed.tops,
            parts, most, mass, self.counts, self.fed, row_stride, columns, pieces, spec.scaling,
            KV=kv, GROUP=group, G=max(16, _power(group)), D=size, W=max(16, _power(size)), PIECE=PIECE,
            WINDOW=window, CAP=spec.softcap or 0.0,
            C=COLUMNS if size <= 128 else COLUMNS // 2, AT_ONCE=AT_ONCE, TOPS=self.step.rounded,
        )  # fmt: skip
        return mixed

    def _add(self, product: Product, y: _Normed, x: Tensor, gain: Tensor, after: Tensor | None) -> _Normed:
        """x += product(y), or the norm of it; returns the norm of x."""
        made = self._made("normed", product.size, -(-product.size // outputs_of(product)), "of tiles")
        if after is None:
            self._product(product, y, x, rest=x, made=made, gain=gain)
            return made
        added = self._space("added", self.count, product.size)
        self._product(product, y, added, made=made, gain=gain)
        return self._enter(x, gain, _Normed(added, made.sums, made.tops), after)

    def _made(self, name: str, size: int, parts: int, where: str = "") -> _Normed:
        sums, tops = (self._space(f"{what} {name} {where}", parts, self.count, wide=True) for what in ("sums", "tops"))
        return _Normed(self._space(name, self.count, size), sums, tops.view(torch.int32))

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
        tiles = -(-product.size // outputs_of(product))
        tile = self.step.tile(product, tiles, outputs_of(product))
        self._launch(
            self.step.kernels.product, (self._tiles(tile), tiles, tile.splits), y.x, product.weight,
            *_beside(product, out), out if rest is None else rest, out if gain is None else gain, y.sums, y.tops, out,
            *(made or (out, y.sums, y.tops)), self._parts(tile, product.size), self.counts,
            self.count, product.size, product.width, tile.piece, len(y.tops), self.spec.eps,
            1.0 if rest is None else self.spec.residual_scale,
            NORM=norm, REST=rest is not None, NEXT=made is not None, TOPS=self.step.rounded,
            **self._flags(tile, product, y),
        )  # fmt: skip

    def _gated(self, layer: _Layer, normed: _Normed) -> _Normed:
        product, size = layer.up, layer.up.size // 2
        tiles = -(-size // OUTPUTS)
        tile, out = self.step.tile(product, tiles, OUTPUTS, gated=True), self._made("inner", size, tiles)
        self._launch(
            self.step.kernels.gated, (self._tiles(tile), tiles, tile.splits), normed.x, product.weight,
            *_beside(product, out.x), normed.sums, normed.tops, out.x, out.tops, self._parts(tile, product.size),
            self.counts, self.count, size, product.width, tile.piece, len(normed.sums), self.spec.eps,
            ACT=layer.act, TOPS=self.step.rounded, **self._flags(tile, product, normed),
        )  # fmt: skip
        return out

    def _tiles(self, tile: Tile) -> int:
        return -(-self.count // tile.tokens)

    def _parts(self, tile: Tile, size: int) -> Tensor:
        return self.counts if tile.splits == 1 else self._space("parts", tile.splits, self.count, size, wide=True)

    def _flags(self, tile: Tile, product: Product, x: _Normed) -> dict[str, Any]:
        return {
            "FORM": product.kind, "BIAS": product.wide_bias is not None, "P": _power(len(x.tops)),
            "S": tile.splits, "N": tile.outputs, "M": tile.tokens, "K": tile.inputs,
            "EVEN": product.width % tile.inputs == 0,
            "AHEAD": AHEAD if self.step.pdl else 0, "stages": tile.stages,
        }  # fmt: skip


def _beside(product: Product, some: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and bias of a product, and `some` tensor in the place of what is not read."""
    scales, bias = (some if part is None else part for part in (product.scales, product.wide_bias))
    return scales, bias


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
