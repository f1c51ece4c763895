"""A pass over few tokens as one call of the compiled library.

`decoder.Decoder` says what a pass computes. Where all that its layers do is done by the library, the calls are written
down here once for each shape, with buffers between them, and a pass runs the list. The calls are those of the decoder,
in its order, so every bit stays; what goes is the time that Python takes between them, a tenth to a third of a step.

N rows, F tokens fed to each, E features of the residual stream, H heads of queries, K heads of keys and values,
D features of a head, V vocabulary.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.native.compiled import CompiledProduct, CompiledProducts
from genctl.native.decoder import Decoder, LayerWeights, Pass
from genctl.native.linear import Joined
from genctl.native.mlp import MLP, Activation
from genctl.native.norms import LayerNorm, RMSNorm, same
from genctl.native.products import ops
from genctl.native.products.library import TYPES, Library, library

MOST_BYTES = 2**26  # of a list's buffers: the decoder's own code needs less for longer passes
KEPT_TOKENS = 64  # of all rows: lists of longer passes, which are seldom repeated, are not kept
MOST_LISTS = 8  # that are kept
_PRODUCTS, _RMS_NORM, _LAYER_NORM, _ACTIVATE, _SUM, _COPY, _TURN, _ATTENTION = range(8)  # as in products.h


class _Entry(ctypes.Structure):
    """`Call` of products.h."""

    _fields_: ClassVar[Any] = [
        *[(name, ctypes.c_int32) for name in ("kind", "type", "how")],
        *[(name, ctypes.c_float) for name in ("eps", "factor")],
        *[(name, ctypes.c_int64) for name in ("rows", "size", "period", "heads", "fed", "turned")],
        *[(name, ctypes.c_void_p) for name in ("x", "z", "w", "weight", "bias", "y")],
        *[(name, ctypes.c_int64) for name in ("x_row", "z_row", "y_row", "x_head", "y_head", "x_token", "y_token")],
    ]


class _Unsuited(Exception):
    """A part of a decoder that the library does not compute alone."""


class Steps:
    """The lists of one decoder. `taken` counts the passes that went through them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.taken = 0
        self._library = library() if decoder.device.type == "cpu" and decoder.dtype in TYPES else None
        # by N, F and how many tokens have logits, the one that was used last at the end
        self._lists: dict[tuple[int, int, int], _List] = {}
        self._busy = threading.Lock()  # the buffers are those of one pass

    def step(
        self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, *, keep: int = 0
    ) -> Tensor | None:
        """The pass over `feed` int64 [N, F], whose columns are added to `cache`: logits [N, `keep` or F, V].

        None if it has to be computed in another way; `cache` is unchanged then. mask [N, past + F] is 0 where a row has
        padding, positions int64 [N or 1, F].
        """
        rows, fed = feed.shape
        past, keep, spec = cache.length, keep or fed, self.decoder.spec
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer) and layer.extends]
        if self._library is None or cache.cross is not None or len(layers) < len(cache.layers):
            return None
        if self.decoder.dtype not in TYPES:  # activations of another type for a while (parity's float64 reading)
            return None
        if rows * fed * self._width > MOST_BYTES or (
            not past and any(spec.windows)
        ):  # a window stores less than it reads
            return None
        if not self._busy.acquire(blocking=False):
            return None
        try:
            calls = self._list(rows, fed, keep)
            if calls is None:
                return None
            decoder = self.decoder
            with torch.no_grad():
                for layer in layers:
                    if not layer.is_initialized:
                        layer.open(rows, spec.kv_heads, spec.head_dim, decoder.dtype, fed)
                shared = decoder.shared(fed, positions, mask, past)
                logits = calls.run(decoder.embed(feed, positions), shared, layers)
            self.taken += 1
            return decoder.scaled(logits)
        finally:
            self._busy.release()

    @property
    def _width(self) -> int:
        """Bytes of the buffers for each token, about."""
        spec = self.decoder.spec
        heads, inner = spec.head_dim * (3 * spec.heads + 4 * spec.kv_heads), spec.inner * (3 if spec.gated else 1)
        return (6 * spec.hidden + heads + inner) * self.decoder.dtype.itemsize

    def _list(self, rows: int, fed: int, keep: int) -> _List | None:
        key = rows, fed, keep
        found = self._lists.pop(key, None)
        if found is None:
            assert self._library is not None
            try:
                found = _List(self._library, self.decoder, rows, fed, keep)
            except _Unsuited:
                self._library = None
                return None
            while len(self._lists) >= MOST_LISTS:
                del self._lists[next(iter(self._lists))]
        if rows * fed <= KEPT_TOKENS:
            self._lists[key] = found
        return found


def _nothing() -> None:
    return None


class _Place:
    """Where the keys and values of a layer lie: what its attention and the calls that store new ones must know."""

    def __init__(self, fields: ops.Attention, stores: tuple[_Entry, ...]) -> None:
        self.fields, self.stores = fields, stores  # of keys and of values
        # the keys that were looked at last, and those of a prompt that rows share: not kept alive from here
        self.keys: Callable[[], Tensor | None] = _nothing
        self.prompt: Callable[[], Tensor | None] = _nothing
        self.part = 0  # which stretch of columns is in the buffers: a prompt that rows share comes before it
        self.before = 0  # columns of that prompt
        self.lies: list[tuple[int, int]] = []  # of keys and of values: where buffers begin, and the bytes of a column

    def extended(self, layer: GrowingLayer, count: int) -> int:
        """Make room for `count` new columns. Returns how many the new tokens see."""
        first, columns = layer.extend(count)
        if layer.buffers[0] is not self.keys() or (layer.prompt and layer.prompt[0]) is not self.prompt():
            self._look(layer)
        fields, part = self.fields, self.part
        fields.columns[part] = columns
        for held, store, (begin, step) in zip((fields.k, fields.v), self.stores, self.lies, strict=True):
            held[part] = begin + first * step
            store.y = begin + (first + columns - count) * step
        return self.before + columns

    def _look(self, layer: GrowingLayer) -> None:
        fields, (keys, values) = self.fields, layer.buffers
        self.keys, self.prompt = weakref.ref(keys), _nothing
        self.part = self.before = fields.columns[1] = 0
        if layer.prompt is not None:
            self.prompt = weakref.ref(layer.prompt[0])
            ops.point(fields, 0, *layer.prompt)
            self.part, self.before = 1, layer.prompt[0].shape[2]
            fields.columns[0] = self.before
        fields.each = fields.rows // len(keys)
        ops.point(fields, self.part, keys, values)
        self.lies = [(held.data_ptr(), held.stride(2) * held.itemsize) for held in (keys, values)]
        for store, held in zip(self.stores, (keys, values), strict=True):
            store.y_row, store.y_head, store.y_token, _ = held.stride()


class _List:
    """The calls of a pass over N rows of F tokens, in order, and the buffers from which and into which they compute."""

    def __init__(self, found: Library, decoder: Decoder, rows: int, fed: int, keep: int) -> None:
        """`keep` tokens of each row have logits. Raises _Unsuited."""
        self.library, self.decoder, self.rows, self.fed, self.keep = found, decoder, rows, fed, keep
        self.type = TYPES[decoder.dtype]
        self.calls: list[_Entry] = []
        self.held: list[Any] = []  # what calls point to
        self.spaces: dict[str, Tensor] = {}
        self.turns: list[tuple[_Entry, bool]] = []  # and whether its layer has a window
        self.places: list[_Place] = []
        spec, weights = decoder.spec, decoder.weights
        unsuited = spec.encoder or spec.experts or spec.relative or spec.sinks or spec.qkv == "blocks"
        if unsuited or spec.clip_qkv is not None or spec.head_scale != 1.0 or weights.project_out is not same:
            raise _Unsuited
        x = self.x = self._space("x + m", spec.hidden)
        for number in range(spec.layers):
            x = self._layer(x, number)
        if keep < fed:
            last = torch.empty(rows, keep, spec.hidden, dtype=decoder.dtype)
            self.held.append(last)
            x = self._moved(_COPY, x[:, -keep:].unsqueeze(2), last.unsqueeze(2)).squeeze(2)
        self._product(decoder.output, self._norm(weights.final_norm, x, "last"), None)
        self.array = (_Entry * len(self.calls))(*self.calls)
        # from here on the calls are those of the array
        place = {id(call): self.array[index] for index, call in enumerate(self.calls)}
        self.turns = [(place[id(call)], local) for call, local in self.turns]
        for layer in self.places:
            layer.stores = tuple(place[id(call)] for call in layer.stores)
        self.head = self.array[-1]

    def run(self, x: Tensor, shared: Pass, layers: Sequence[GrowingLayer]) -> Tensor:
        """x [N, F, E], what all layers share, and the cache -> logits [N, F, V]."""
        self.x.copy_(x)
        for call, local in self.turns:
            angles = shared.local_angles if local else shared.angles
            assert angles is not None
            cos, sin = angles
            call.z, call.w = cos.data_ptr(), sin.data_ptr()
            call.z_row = 0 if len(cos) == 1 else cos.stride(0)
        [visible], [bias] = shared.visible, shared.biases
        seen: dict[tuple[int, int | None], dict[str, Any]] = {}  # by the columns of a layer, and its window
        kept: list[Any] = []  # until the call has ended
        for layer, place, window in zip(layers, self.places, self.decoder.spec.windows, strict=True):
            count = place.extended(layer, self.fed)
            if (count, window) not in seen:
                part = None if bias is None else bias[..., -count:]
                seen[count, window] = {"bias": part, **visible.columns(count, window)}
            kept += ops.see(place.fields, **seen[count, window])
        logits = x.new_empty(self.rows, self.keep, self.decoder.spec.vocab)
        self.head.y = logits.data_ptr()
        self.library.run(self.array, len(self.array), torch.get_num_threads())
        return logits

    # -- the layers, as in `decoder.Stack.layer` -----------------------------------------------------------------------

    def _layer(self, x: Tensor, number: int) -> Tensor:
        spec, w = self.decoder.spec, self.decoder.weights.layers[number]
        if w.cross is not None or w.sinks is not None:
            raise _Unsuited
        h = self._norm(w.attn_norm, x, "h")
        a = self._norm(w.attn_out_norm, self._attention(h, w, number), "a norm")
        if spec.parallel:
            m = self._mlp(w, h if w.mlp_norm is None else self._norm(w.mlp_norm, x, "h mlp"))
            return self._sum(self._sum(x, a, 1.0, "x + a"), m, 1.0, "x + m")
        x = self._norm(w.attn_sum_norm, self._sum(x, a, spec.residual_scale, "x + a"), "x + a norm")
        m = self._mlp(w, x if w.mlp_norm is None else self._norm(w.mlp_norm, x, "h"))
        m = self._norm(w.mlp_out_norm, m, "a norm")
        return self._norm(w.mlp_sum_norm, self._sum(x, m, spec.residual_scale, "x + m"), "x + m norm")

    def _attention(self, h: Tensor, w: LayerWeights, number: int) -> Tensor:
        spec = self.decoder.spec
        rows, fed, heads, kv_heads, size = self.rows, self.fed, spec.heads, spec.kv_heads, spec.head_dim
        if spec.qkv == "grouped":
            each = heads // kv_heads
            if kv_heads > 1 and each > 1:  # the queries of a group are no even part of what the product makes
                raise _Unsuited
            together = self._joined(w.qkv, h, "qkv")[0].view(rows, fed, kv_heads, each + 2, size)
            q, k, v = torch.split(together, [each, 1, 1], 3)
            q = q[:, :, 0] if kv_heads == 1 else q[:, :, :, 0]
            k, v = k[:, :, :, 0], v[:, :, :, 0]
        else:
            q, k, v = self._joined(w.qkv, h, "qkv")
            if spec.qk_norm == "whole":
                q = self._norm(w.q_norm, self._even(q.unsqueeze(2), "q").squeeze(2), "q")
                k = self._norm(w.k_norm, self._even(k.unsqueeze(2), "k").squeeze(2), "k")
            q = q.view(rows, fed, heads, size)
            k, v = k.view(rows, fed, kv_heads, size), v.view(rows, fed, kv_heads, size)
        if spec.qk_norm in ("head", "each"):
            q = self._norm(w.q_norm, self._even(q, "q"), "q")
            k = self._norm(w.k_norm, self._even(k, "k"), "k")
        local = spec.windows[number] is not None
        rotary = self.decoder.local_rotary if local else self.decoder.rotary
        if rotary is not None and number not in spec.still:
            for part, name in ((q, "q turned"), (k, "k turned")):
                turned = self._moved(_TURN, part, self._space(name, *part.shape[2:]))
                self.calls[-1].turned, self.calls[-1].how = rotary.rope.size, rotary.rope.interleaved
                self.turns.append((self.calls[-1], local))
                if part is q:
                    q = turned
                else:
                    k = turned
        for part in (k, v):
            self._moved(_COPY, part, part)  # to the cache, which says where
        stores = self.calls[-2], self.calls[-1]
        scaling = spec.scaling / (number + 1) if spec.scaling_by_layer else spec.scaling
        mixed = self._space("mixed", heads * size)
        fields = ops.fields(q.transpose(1, 2), mixed, kv_heads, scaling=scaling, softcap=spec.softcap)
        self.places.append(_Place(fields, stores))
        self._add(_ATTENTION, w=ctypes.addressof(fields))
        return self._product(w.o, mixed, "a")

    def _mlp(self, w: LayerWeights, h: Tensor) -> Tensor:
        if type(w.mlp) is not MLP or type(w.mlp.activation) is not Activation:
            raise _Unsuited
        gate, *up = self._joined(w.mlp.up, h, "up")
        y = self._space("acted", gate.shape[-1]) if up or not gate.is_contiguous() else gate
        times = {"z": up[0].data_ptr(), "z_row": up[0].stride(1)} if up else {}
        how = ops.ACTIVATIONS[w.mlp.activation.name]
        rows, size = self.rows * self.fed, gate.shape[-1]
        self._add(
            _ACTIVATE, x=gate.data_ptr(), x_row=gate.stride(1), y=y.data_ptr(), how=how, rows=rows, size=size, **times
        )
        return self._product(w.mlp.down, y, "m" if self.decoder.spec.parallel else "a")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _space(self, name: str, *shape: int) -> Tensor:
        """A buffer [N, F, …]: every layer uses the same one."""
        found = self.spaces.get(name)
        if found is None or found.shape[2:] != shape:
            found = self.spaces[name] = torch.empty(self.rows, self.fed, *shape, dtype=self.decoder.dtype)
            self.held.append(found)
        return found

    def _add(self, kind: int, **fields: Any) -> None:
        self.calls.append(_Entry(kind=kind, type=self.type, **fields))

    def _product(self, product: Any, x: Tensor, name: str | None) -> Tensor:
        """x [N, F, …] -> a buffer; without a name the place is not known yet."""
        together = product.together if type(product) is CompiledProduct else product
        if type(together) is not CompiledProducts:
            raise _Unsuited
        y = x if name is None else self._space(name, together.size)
        weights, rows = ctypes.addressof(together.addresses), x.shape[0] * x.shape[1]
        self.held.append(together)
        self._add(_PRODUCTS, x=x.data_ptr(), y=y.data_ptr(), w=weights, how=together.count, rows=rows)
        return y

    def _joined(self, joined: Joined, x: Tensor, name: str) -> Sequence[Tensor]:
        if type(joined) is not Joined:
            raise _Unsuited
        if joined.one is not None:
            return torch.split(self._product(joined.one, x, name), joined.sizes, -1)
        return [self._product(part, x, f"{name} {place}") for place, part in enumerate(joined.parts)]

    def _norm(self, norm: Any, x: Tensor, name: str) -> Tensor:
        """x [N, F, …], without gaps."""
        if norm is same:
            return x
        if type(norm) not in (RMSNorm, LayerNorm):
            raise _Unsuited
        y, size = x if name == "last" else self._space(name, *x.shape[2:]), x.shape[-1]
        rows = x.numel() // size
        where = {"x": x.data_ptr(), "y": y.data_ptr(), "rows": rows, "size": size}
        weight = None if norm.weight is None else norm.weight.float().contiguous()
        bias = getattr(norm, "bias", None)
        bias = None if bias is None else bias.float().contiguous()
        self.held += [weight, bias]
        parts = {
            "weight": None if weight is None else weight.data_ptr(),
            "bias": None if bias is None else bias.data_ptr(),
        }
        if type(norm) is RMSNorm:
            self._add(_RMS_NORM, eps=norm.number, how=norm.late, **where, **parts)
        else:
            period = 1 if weight is None else weight.numel() // size
            self._add(_LAYER_NORM, eps=norm.eps, period=period, **where, **parts)
        return y

    def _sum(self, x: Tensor, added: Tensor, factor: float, name: str) -> Tensor:
        """x + added · factor."""
        y = self._space(name, x.shape[-1])
        self._add(_SUM, x=x.data_ptr(), z=added.data_ptr(), y=y.data_ptr(), size=x.numel(), factor=factor)
        return y

    def _even(self, x: Tensor, name: str) -> Tensor:
        """x [N, F, H, D] without gaps."""
        return x if x.is_contiguous() else self._moved(_COPY, x, self._space(f"{name} even", *x.shape[2:]))

    def _moved(self, kind: int, x: Tensor, y: Tensor) -> Tensor:
        """x [N, F, H, D] -> y of this shape."""
        rows, fed, heads, size = x.shape
        fields = {"x": x.data_ptr(), "y": y.data_ptr(), "rows": rows, "fed": fed, "heads": heads, "size": size}
        fields["x_row"], fields["x_token"], fields["x_head"], _ = x.stride()
        fields["y_row"], fields["y_token"], fields["y_head"], _ = y.stride()
        self._add(kind, **fields)
        return y
