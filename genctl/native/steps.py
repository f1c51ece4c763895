"""A pass as one call of the compiled library.

`decoder.Decoder` says what a pass computes. Where all that its layers do is done by the library, the calls are written
down here once, with buffers between them, and a pass runs the list. The calls are those of the decoder, in its order,
so every bit stays; what goes is the time that Python takes between them, a tenth to a third of a step.

A call says what is done with each token, so one list serves any number of rows and tokens for which its buffers have
room.

N rows, F tokens fed to each, E features of the residual stream, H heads of queries, K heads of keys and values,
D features of a head, V vocabulary; S tokens of a source, B tokens for which the buffers have room.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.kernels import ops
from genctl.kernels.ops import TYPES, Library, library
from genctl.native.decoder import CrossWeights, Decoder, LayerWeights, Pass, of_layer
from genctl.native.linear import CompiledProduct, CompiledProducts, Joined
from genctl.native.mlp import MLP, Activation
from genctl.native.norms import LayerNorm, RMSNorm, same

MOST_BYTES = 2**26  # of a list's buffers: the decoder's own code needs less for longer passes
ROOM = 64  # tokens of the list that is kept; one for a longer pass, which is seldom repeated, is not
_PRODUCTS, _RMS_NORM, _LAYER_NORM, _ACTIVATE, _SUM, _COPY, _TURN, _ATTENTION = range(8)  # as in products.h


class _Entry(ctypes.Structure):
    """`Call` of products.h."""

    _fields_: ClassVar[Any] = [
        *[(name, ctypes.c_int32) for name in ("kind", "type", "how", "kept")],
        *[(name, ctypes.c_float) for name in ("eps", "factor")],
        *[(name, ctypes.c_int64) for name in ("count", "size", "period", "heads", "turned")],
        *[(name, ctypes.c_void_p) for name in ("x", "z", "w", "weight", "bias", "y")],
        *[(name, ctypes.c_int64) for name in ("x_token", "z_token", "y_token", "x_head", "y_head", "z_row", "y_row")],
    ]


class _Unsuited(Exception):
    """A part of a decoder that the library does not compute alone."""


class Steps:
    """The list of one decoder. `taken` counts the passes that went through it."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.taken = 0
        self._library = library() if decoder.device.type == "cpu" and decoder.dtype in TYPES else None
        self._list: _List | None = None
        self._busy = threading.Lock()  # the buffers are those of one pass

    def step(
        self,
        feed: Tensor,
        cache: Cache,
        mask: Tensor | None,
        positions: Tensor,
        past: int,
        *,
        keep: int = 0,
        source_mask: Tensor | None = None,
    ) -> Tensor | None:
        """The pass over `feed` int64 [N, F], added to the `past` columns of `cache`: logits [N, `keep` or F, V].

        None if it has to be computed in another way; `cache` is unchanged then. mask [N, past + F] is 0 where a row has
        padding, positions int64 [N or 1, F], source_mask [N, S].
        """
        rows, fed = feed.shape
        spec = self.decoder.spec
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer) and layer.extends]
        cross = cache.cross or ()
        if self._library is None or len(layers) < len(cache.layers) or not all(map(_is_read, cross)):
            return None
        if self.decoder.dtype not in TYPES:  # activations of another type for a while (parity's float64 reading)
            return None
        if rows * fed * self._width > MOST_BYTES:
            return None
        if not past and any(spec.windows):  # a window stores less than it reads
            return None
        if not self._busy.acquire(blocking=False):
            return None
        try:
            calls = self._with_room(rows * fed)
            if calls is None:
                return None
            decoder = self.decoder
            with torch.no_grad():
                for layer in layers:
                    if not layer.is_initialized:
                        layer.open(rows, spec.kv_heads, spec.head_dim, decoder.dtype, fed)
                shared = decoder.shared(fed, positions, mask, past)
                shared.source_mask = None if source_mask is None else source_mask.bool()
                logits = calls.run(decoder.embed(feed, positions), shared, layers, cross, keep or fed)
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

    def _with_room(self, tokens: int) -> _List | None:
        """The list, or one of its own for a long pass; None if a part of the decoder is unsuited."""
        assert self._library is not None
        if self._list is not None and tokens <= ROOM:
            return self._list
        try:
            calls = _List(self._library, self.decoder, max(tokens, ROOM))
        except _Unsuited:
            self._library = None
            return None
        if tokens <= ROOM:
            self._list = calls
        return calls


def _is_read(layer: GrowingLayer) -> bool:
    """Whether a layer of cross-attention holds the source's keys and values."""
    return layer.extends and layer.is_initialized


def _held(reference: weakref.ref[Tensor] | None) -> Tensor | None:
    return None if reference is None else reference()


class _Place:
    """Where the keys and values of a layer lie: what its attention and the calls that store new ones must know."""

    def __init__(self, fields: ops.Attention, stores: tuple[_Entry, ...] = ()) -> None:
        self.fields, self.stores = fields, stores  # of keys and of values
        # the keys that were looked at last, and those of a prompt that rows share: not kept alive from here
        self.keys: weakref.ref[Tensor] | None = None
        self.prompt: weakref.ref[Tensor] | None = None
        self.part = 0  # which stretch of columns is in the buffers: a prompt that rows share comes before it
        self.before = 0  # columns of that prompt
        self.sources = 1  # rows of a source's keys
        self.lies: list[tuple[int, int]] = []  # of keys and of values: where buffers begin, and the bytes of a column

    def write(self, layer: GrowingLayer, where: tuple[int, int], count: int) -> int:
        """Attend to columns (the first, how many), of which the last `count` are new. Returns how many are seen."""
        first, columns = where
        if layer.buffers[0] is not _held(self.keys) or (layer.prompt and layer.prompt[0]) is not _held(self.prompt):
            self._look(layer)
        fields, part = self.fields, self.part
        fields.columns[part] = columns
        for held, store, (begin, step) in zip((fields.k, fields.v), self.stores, self.lies, strict=True):
            held[part] = begin + first * step
            store.y = begin + (first + columns - count) * step
        return self.before + columns

    def _look(self, layer: GrowingLayer) -> None:
        fields, (keys, values) = self.fields, layer.buffers
        self.keys, self.prompt = weakref.ref(keys), None
        self.part = self.before = fields.columns[1] = 0
        fields.each = 1
        if layer.prompt is not None:
            self.prompt = weakref.ref(layer.prompt[0])
            ops.point(fields, 0, *layer.prompt)
            self.part, self.before = 1, layer.prompt[0].shape[2]
            fields.columns[0] = self.before
        ops.point(fields, self.part, keys, values)
        self.lies = [(held.data_ptr(), held.stride(2) * held.itemsize) for held in (keys, values)]
        for store, held in zip(self.stores, (keys, values), strict=True):
            store.y_row, store.y_head, store.y_token, _ = held.stride()

    def read(self, layer: GrowingLayer, rows: int) -> None:
        """Attend to a source, whose columns stay as they are."""
        if layer.buffers[0] is not _held(self.keys):
            keys, values = layer.content()
            self.keys = weakref.ref(layer.buffers[0])
            if keys.stride(0) == 0:  # one row, viewed as many
                keys, values = keys[:1], values[:1]
            ops.point(self.fields, 0, keys, values)
            self.fields.columns[0], self.sources = keys.shape[2], len(keys)
        self.fields.each = rows // self.sources


class _List:
    """The calls of a pass, in order, and the buffers from which and into which they compute."""

    def __init__(self, found: Library, decoder: Decoder, room: int) -> None:
        """`room` tokens of all rows fit. Raises _Unsuited."""
        self.library, self.decoder, self.room = found, decoder, room
        self.type = TYPES[decoder.dtype]
        self.calls: list[_Entry] = []
        self.held: list[Any] = []  # what calls point to
        self.spaces: dict[str, Tensor] = {}
        self.turns: dict[bool, list[_Entry]] = {False: [], True: []}  # by whether their layers have a window
        self.places: list[_Place] = []
        self.sources: list[_Place] = []
        spec, weights = decoder.spec, decoder.weights
        unsuited = spec.experts or spec.sinks or spec.qkv == "blocks"
        if unsuited or spec.clip_qkv is not None or weights.project_out is not same:
            raise _Unsuited
        x = self.x = self._space("x + m", spec.hidden)
        for number in range(spec.layers):
            x = self._layer(x, number)
        self._head(x)
        self.array = (_Entry * len(self.calls))(*self.calls)
        # from here on the calls are those of the array
        place = {id(call): self.array[index] for index, call in enumerate(self.calls)}
        self.turns = {local: [place[id(call)] for call in calls] for local, calls in self.turns.items()}
        for layer in self.places:
            layer.stores = tuple(place[id(call)] for call in layer.stores)
        self.last = self.array[-1]

    def run(
        self,
        x: Tensor,
        shared: Pass,
        layers: Sequence[GrowingLayer],
        cross: Sequence[GrowingLayer],
        keep: int,
    ) -> Tensor:
        """x [N, F, E], what all layers share, and the cache -> logits [N, `keep`, V]."""
        rows, fed, _ = x.shape
        self.x[: rows * fed] = x.flatten(0, 1)
        for calls, angles in ((self.turns[False], shared.angles), (self.turns[True], shared.local_angles)):
            if angles is not None:
                cos, sin = angles
                where = cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.stride(0)
                for call in calls:
                    call.z, call.w, call.z_row = where
        kept: list[Any] = []  # until the call has ended
        grown = [layer.extend(fed) for layer in layers]
        counts = [place.write(layer, new, fed) for place, layer, new in zip(self.places, layers, grown, strict=True)]
        seen: dict[tuple[int, int, int | None], dict[str, Any]] = {}  # by mask, columns and window of a layer
        for number, (place, count) in enumerate(zip(self.places, counts, strict=True)):
            window, which = self.decoder.spec.windows[number], min(number, len(shared.visible) - 1)
            if (which, count, window) not in seen:
                bias = of_layer(shared.biases, number)
                part = None if bias is None else bias[..., -count:]
                seen[which, count, window] = {"bias": part, **of_layer(shared.visible, number).columns(count, window)}
            kept += ops.see(place.fields, **seen[which, count, window])
        for layer, place in zip(cross, self.sources, strict=True):
            place.read(layer, rows)
            kept += ops.see(place.fields, mask=shared.source_mask, causal=False)
        logits = x.new_empty(rows, keep, self.decoder.spec.vocab)
        self.last.y = logits.data_ptr()
        self.library.run(self.array, len(self.array), rows, fed, keep, torch.get_num_threads())
        return logits

    # -- the layers, as in `decoder.Stack.layer` -----------------------------------------------------------------------

    def _layer(self, x: Tensor, number: int) -> Tensor:
        spec, w = self.decoder.spec, self.decoder.weights.layers[number]
        if w.sinks is not None:
            raise _Unsuited
        h = self._norm(w.attn_norm, x, "h")
        a = self._norm(w.attn_out_norm, self._attention(h, w, number), "a norm")
        if spec.parallel:
            m = self._mlp(w, h if w.mlp_norm is None else self._norm(w.mlp_norm, x, "h mlp"))
            return self._sum(self._sum(x, a, 1.0, "x + a"), m, 1.0, "x + m")
        x = self._norm(w.attn_sum_norm, self._sum(x, a, spec.residual_scale, "x + a"), "x + a norm")
        if w.cross is not None:
            c = self._cross_attention(self._norm(w.cross.norm, x, "h"), w.cross)
            x = self._norm(w.cross.sum_norm, self._sum(x, c, 1.0, "x + c"), "x + c norm")
        m = self._mlp(w, x if w.mlp_norm is None else self._norm(w.mlp_norm, x, "h"))
        m = self._norm(w.mlp_out_norm, m, "a norm")
        return self._norm(w.mlp_sum_norm, self._sum(x, m, spec.residual_scale, "x + m"), "x + m norm")

    def _attention(self, h: Tensor, w: LayerWeights, number: int) -> Tensor:
        spec = self.decoder.spec
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_dim
        if spec.qkv == "grouped":
            each = heads // kv_heads
            if kv_heads > 1 and each > 1:  # the queries of a group are no even part of what the product makes
                raise _Unsuited
            together = self._joined(w.qkv, h, "qkv")[0].view(self.room, kv_heads, each + 2, size)
            q, k, v = torch.split(together, [each, 1, 1], 2)
            q = q[:, 0] if kv_heads == 1 else q[:, :, 0]
            k, v = k[:, :, 0], v[:, :, 0]
        else:
            q, k, v = self._joined(w.qkv, h, "qkv")
            if spec.qk_norm == "whole":
                q = self._norm(w.q_norm, self._even(q.unsqueeze(1), "q").squeeze(1), "q")
                k = self._norm(w.k_norm, self._even(k.unsqueeze(1), "k").squeeze(1), "k")
            q = q.view(self.room, heads, size)
            k, v = k.view(self.room, kv_heads, size), v.view(self.room, kv_heads, size)
        if spec.qk_norm in ("head", "each"):
            q = self._norm(w.q_norm, self._even(q, "q"), "q")
            k = self._norm(w.k_norm, self._even(k, "k"), "k")
        local = spec.windows[number] is not None
        rotary = self.decoder.local_rotary if local else self.decoder.rotary
        if rotary is not None and number not in spec.still:
            turned = [
                self._moved(_TURN, x, self._space(name, *x.shape[1:])) for x, name in ((q, "q turned"), (k, "k turned"))
            ]
            for call in self.calls[-2:]:
                call.turned, call.how = rotary.rope.size, rotary.rope.interleaved
                self.turns[local].append(call)
            q, k = turned
        for part in (k, v):
            self._moved(_COPY, part, part)  # to the cache, which says where
        stores = self.calls[-2], self.calls[-1]
        scaling = spec.scaling / (number + 1) if spec.scaling_by_layer else spec.scaling
        fields = self._mixed(q, kv_heads, scaling, spec.softcap)
        self.places.append(_Place(fields, stores))
        return self._product(w.o, self.spaces["mixed"], "a")

    def _cross_attention(self, h: Tensor, w: CrossWeights) -> Tensor:
        spec = self.decoder.spec
        q = self._product(w.q, h, "q").view(self.room, spec.heads, spec.head_dim)
        self.sources.append(_Place(self._mixed(q, spec.heads, spec.scaling, None)))
        return self._product(w.o, self.spaces["mixed"], "a")

    def _mixed(self, q: Tensor, kv_heads: int, scaling: float, softcap: float | None) -> ops.Attention:
        """q [B, H, D] -> attention in the buffer "mixed", [B, H·D]. Returns what says where it looks."""
        mixed = self._space("mixed", q.shape[1] * q.shape[2])
        fields = ops.fields(q.transpose(0, 1)[None], mixed, kv_heads, scaling=scaling, softcap=softcap)
        self._add(_ATTENTION, w=ctypes.addressof(fields))
        return fields

    def _mlp(self, w: LayerWeights, h: Tensor) -> Tensor:
        if type(w.mlp) is not MLP or type(w.mlp.activation) is not Activation:
            raise _Unsuited
        gate, *up = self._joined(w.mlp.up, h, "up")
        y = self._space("acted", gate.shape[-1]) if up or not gate.is_contiguous() else gate
        times = {"z": up[0].data_ptr(), "z_token": up[0].stride(0)} if up else {}
        how, size = ops.ACTIVATIONS[w.mlp.activation.name], gate.shape[-1]
        self._add(_ACTIVATE, x=gate.data_ptr(), x_token=gate.stride(0), y=y.data_ptr(), how=how, size=size, **times)
        return self._product(w.mlp.down, y, "m" if self.decoder.spec.parallel else "a")

    def _head(self, x: Tensor) -> None:
        """The states of the tokens that have logits, and their logits, whose place each pass says."""
        spec, last = self.decoder.spec, self._space("last", self.decoder.spec.hidden)
        self._moved(_COPY, x.unsqueeze(1), last.unsqueeze(1))
        count = len(self.calls) - 1
        last = self._norm(self.decoder.weights.final_norm, last, "last")
        if spec.head_scale != 1.0:
            self._sum(None, last, spec.head_scale, "last")
        self._product(self.decoder.output, last, None)
        for call in self.calls[count:]:
            call.kept = 1

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _space(self, name: str, *shape: int) -> Tensor:
        """A buffer [B, …]: every layer uses the same one."""
        found = self.spaces.get(name)
        if found is None or found.shape[1:] != shape:
            found = self.spaces[name] = torch.empty(self.room, *shape, dtype=self.decoder.dtype)
            self.held.append(found)
        return found

    def _add(self, kind: int, **fields: Any) -> None:
        self.calls.append(_Entry(kind=kind, type=self.type, **fields))

    def _product(self, product: Any, x: Tensor, name: str | None) -> Tensor:
        """x [B, …] -> a buffer; without a name the place is not known yet."""
        together = product.together if type(product) is CompiledProduct else product
        if type(together) is not CompiledProducts:
            raise _Unsuited
        y = x if name is None else self._space(name, together.size)
        self.held.append(together)
        weights = ctypes.addressof(together.addresses)
        self._add(_PRODUCTS, x=x.data_ptr(), y=y.data_ptr(), w=weights, how=together.count)
        return y

    def _joined(self, joined: Joined, x: Tensor, name: str) -> Sequence[Tensor]:
        if type(joined) is not Joined:
            raise _Unsuited
        if joined.one is not None:
            return torch.split(self._product(joined.one, x, name), joined.sizes, -1)
        return [self._product(part, x, f"{name} {place}") for place, part in enumerate(joined.parts)]

    def _norm(self, norm: Any, x: Tensor, name: str) -> Tensor:
        """x [B, …], without gaps."""
        if norm is same:
            return x
        if type(norm) not in (RMSNorm, LayerNorm):
            raise _Unsuited
        y, size = self._space(name, *x.shape[1:]), x.shape[-1]
        where = {"x": x.data_ptr(), "y": y.data_ptr(), "count": x[0].numel() // size, "size": size}
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

    def _sum(self, x: Tensor | None, added: Tensor, factor: float, name: str) -> Tensor:
        """x + added · factor."""
        y = self._space(name, added.shape[-1])
        where = None if x is None else x.data_ptr()
        self._add(_SUM, x=where, z=added.data_ptr(), y=y.data_ptr(), size=added.shape[-1], factor=factor)
        return y

    def _even(self, x: Tensor, name: str) -> Tensor:
        """x [B, H, D] without gaps."""
        return x if x.is_contiguous() else self._moved(_COPY, x, self._space(f"{name} even", *x.shape[1:]))

    def _moved(self, kind: int, x: Tensor, y: Tensor) -> Tensor:
        """x [B, H, D] -> y of this shape."""
        _, heads, size = x.shape
        fields = {"x": x.data_ptr(), "y": y.data_ptr(), "heads": heads, "size": size}
        fields["x_token"], fields["x_head"], _ = x.stride()
        fields["y_token"], fields["y_head"], _ = y.stride()
        self._add(kind, **fields)
        return y
