"""A pass as one call of the compiled library.

The code of `decoder.Decoder` runs once with operations that do not compute, but record their library call and the
buffers between the calls; a pass then runs this list. It makes the decoder's calls in the decoder's order, so every bit
is the same. It saves the time that Python spends between them, a tenth to a third of a step. A decoder that uses an
operation without a recorded form runs its own code.

A call describes the work for each token, so one list works for any number of rows and tokens that fits its buffers.

N rows, F tokens fed to each, E features of the residual stream, H heads of queries, K heads of keys and values,
D features of a head, V vocabulary; S tokens of a source, B tokens for which the buffers have room.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import KeyValues
from genctl.decode.runtime import TokenPlaces
from genctl.kernels import ops
from genctl.kernels.ops import TYPES, Library, library
from genctl.native.attention import places_mask
from genctl.native.decoder import CrossWeights, Decoder, LayerWeights, PassFacts, of_layer
from genctl.native.linear import CompiledProduct, CompiledProducts, Joined
from genctl.native.mlp import MLP, Activation, LayerNorm, RMSNorm, same
from genctl.native.positions import Rotary

MOST_BYTES = 2**26  # of a list's buffers: for longer passes the decoder's own code needs less
ROOM = 64  # tokens of the list that is kept; lists for longer passes, seldom repeated, are not kept
_PRODUCTS, _RMS_NORM, _LAYER_NORM, _ACTIVATE, _SUM, _COPY, _TURN, _ATTENTION = range(8)  # as in products.h
# buffers shared by several parts of a layer: when one part writes, the earlier content is no longer needed
_BUFFERS = {
    **dict.fromkeys(("attn_norm", "norm", "mlp_norm", "down", "mlp_out_norm"), "h"),
    "attn_out_norm": "o",
    **dict.fromkeys(("attn_sum_norm", "sum_norm", "mlp_sum_norm"), "normed sum"),
}


class _Entry(ctypes.Structure):
    """`Call` of products.h."""

    _fields_: ClassVar[Any] = [
        *[(name, ctypes.c_int32) for name in ("kind", "type", "how", "kept")],
        *[(name, ctypes.c_float) for name in ("eps", "factor")],
        *[(name, ctypes.c_int64) for name in ("count", "size", "period", "heads", "turned")],
        *[(name, ctypes.c_void_p) for name in ("x", "z", "w", "weight", "bias", "y")],
        *[(name, ctypes.c_int64) for name in ("x_token", "z_token", "y_token", "x_head", "y_head", "z_row", "y_row")],
        ("places", ctypes.c_void_p),
    ]


class _Unsuited(Exception):
    """A part of a decoder that has no recorded form."""


class Steps:
    """The recorded calls of one decoder. `taken` counts the passes that used them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.taken = 0
        self._library = library() if decoder.device.type == "cpu" and decoder.dtype in TYPES else None
        self._list: _List | None = None
        self._busy = threading.Lock()  # only one pass can use the buffers at a time
        spec = decoder.spec
        numbers = spec.head_dim * (3 * spec.heads + 4 * spec.kv_heads) + spec.inner * (3 if spec.gated else 1)
        self._width = (6 * spec.hidden + numbers) * decoder.dtype.itemsize  # approximate bytes of the buffers per token

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
        places: TokenPlaces | None = None,
    ) -> Tensor | None:
        """A pass over `feed` int64 [N, F], appended to the `past` columns of `cache`: logits [N, `keep` or F, V].

        None if the list cannot compute it; `cache` is then unchanged. mask [N, past + F] is 0 where a row has
        padding, positions int64 [N or 1, F], source_mask [N, S]. `places` as in `decode.runtime.Pass`.
        """
        rows, fed = feed.shape
        spec = self.decoder.spec
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer) and layer.extends]
        cross = cache.cross or ()
        if (
            self._library is None
            or len(layers) < len(cache.layers)
            or not all(layer.extends and layer.is_initialized for layer in cross)  # source already read
            or self.decoder.dtype not in TYPES  # temporarily (parity's float64 pass)
            or rows * fed * self._width > MOST_BYTES
            or (not past and any(spec.windows))  # in a prefill, a window layer stores less than it reads
            or not self._busy.acquire(blocking=False)
        ):
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
                shared = decoder.shared(fed, positions, mask, past, None if places is None else [places_mask(mask)])
                shared.source_mask = None if source_mask is None else source_mask.bool()
                logits = calls.run(decoder.embed(feed, positions), shared, layers, cross, keep or fed, places)
            self.taken += 1
            return decoder.scaled(logits)
        finally:
            self._busy.release()

    @property
    def is_compiled(self) -> bool:
        """Whether passes of this decoder can run through the compiled library."""
        return self._library is not None

    def _with_room(self, tokens: int) -> _List | None:
        """The kept list, or a new one for a long pass; None if a part of the decoder is unsuited."""
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


def _held(reference: weakref.ref[Tensor] | None) -> Tensor | None:
    return None if reference is None else reference()


class _Place:
    """Where a layer's keys and values are in memory, for its attention and for the calls that store new ones."""

    def __init__(self, fields: ops.Attention, stores: tuple[_Entry, ...] = ()) -> None:
        self.fields, self.stores = fields, stores  # `stores`: the call for keys and that for values
        # the keys seen last, and those of a prompt that rows share; weak references, so they can be freed
        self.keys: weakref.ref[Tensor] | None = None
        self.prompt: weakref.ref[Tensor] | None = None
        self.part = 0  # index of the buffers' part of the columns: 1 after a prompt that rows share, else 0
        self.before = 0  # columns of that prompt
        self.sources = 1  # rows of a source's keys
        self.lies: list[tuple[int, int]] = []  # for keys and values: address of the buffer, bytes of a column

    def write(
        self, layer: GrowingLayer, first: int, columns: int, keys: Tensor, count: int, places: TokenPlaces | None
    ) -> int:
        """Attend to `columns` columns of `keys` from `first` on; the new ones are the last `count`, or at `places`.

        Returns the number of columns seen, with those of a shared prompt.
        """
        if keys is not _held(self.keys) or (layer.prompt and layer.prompt[0]) is not _held(self.prompt):
            self._look(layer)
        fields, part = self.fields, self.part
        fields.columns[part] = columns
        fields.of = None if places is None else places.rows.data_ptr()
        new = columns - count if places is None else 0
        for held, store, (begin, step) in zip((fields.k, fields.v), self.stores, self.lies, strict=True):
            held[part] = begin + first * step
            store.y, store.places = begin + (first + new) * step, None if places is None else places.both.data_ptr()
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
        """Attend to a source, whose columns do not change."""
        if layer.buffers[0] is not _held(self.keys):
            keys, values = layer.content()
            self.keys = weakref.ref(layer.buffers[0])
            if keys.stride(0) == 0:  # one row, viewed as many
                keys, values = keys[:1], values[:1]
            ops.point(self.fields, 0, keys, values)
            self.fields.columns[0], self.sources = keys.shape[2], len(keys)
        self.fields.each = rows // self.sources


class _List(Decoder):
    """A decoder whose operations record their calls in order, with input and output buffers, in place of computing.

    Here each x of the decoder's code is a buffer [1, B, …] or a view of one.
    """

    def __init__(self, found: Library, decoder: Decoder, room: int) -> None:
        """`room` is B, the tokens of all rows together. Raises _Unsuited."""
        vars(self).update(vars(decoder))
        self.library, self.room = found, room
        self.type = TYPES[decoder.dtype]
        self.calls: list[_Entry] = []
        self.held: list[Any] = []  # objects that calls point to
        self.kept = 0  # whether calls recorded from here on compute only the tokens that get logits
        self.spaces: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.turns: dict[bool, list[_Entry]] = {False: [], True: []}  # key: whether the layer uses the local angles
        self.places: list[_Place] = []
        self.sources: list[_Place] = []
        self._record(decoder)
        self.array = (_Entry * len(self.calls))(*self.calls)
        # from here on refer to the array's copies of the calls
        place = {id(call): self.array[index] for index, call in enumerate(self.calls)}
        self.turns = {local: [place[id(call)] for call in calls] for local, calls in self.turns.items()}
        for layer in self.places:
            layer.stores = tuple(place[id(call)] for call in layer.stores)
        self.last, self.entry = self.array[-1], self.x[0]

    def _record(self, decoder: Decoder) -> None:
        """Run the code of a pass once, recording its calls."""
        weights, output = decoder.weights, decoder.output
        layers = [self._part("", layer) for layer in weights.layers]
        ends = {name: self._part(name, getattr(weights, name)) for name in ("final_norm", "project_out")}
        self.weights, self.output = replace(weights, layers=layers, **ends), self._part("", output)
        x = self.x = self._space("x", self.spec.hidden)
        shared = PassFacts([])
        for number in range(self.spec.layers):
            x = self.layer(x, number, shared, None, None)
        self.kept = 1
        last = self._space("final_norm", self.spec.hidden)
        self._moved(_COPY, x[:, None], last[:, None])
        self.head(self.end(last))
        self.weights, self.output = weights, output  # recording parts would keep this list and its buffers alive

    def run(
        self,
        x: Tensor,
        shared: PassFacts,
        layers: Sequence[GrowingLayer],
        cross: Sequence[GrowingLayer],
        keep: int,
        places: TokenPlaces | None = None,
    ) -> Tensor:
        """x [N, F, E], the facts that all layers share, and the cache -> logits [N, `keep`, V]."""
        rows, fed, _ = x.shape
        self.entry[: rows * fed] = x.flatten(0, 1)
        for calls, angles in ((self.turns[False], shared.angles), (self.turns[True], shared.local_angles)):
            if angles is not None:
                cos, sin = angles
                where = cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.stride(0)
                for call in calls:
                    call.z, call.w, call.z_row = where
        kept: list[Any] = []  # keep these alive until the call returns
        new = fed if places is None else places.new
        grown = [(layer, *layer.extend(new), layer.buffers[0]) for layer in layers]
        counts = [place.write(*where, new, places) for place, where in zip(self.places, grown, strict=True)]
        seen: dict[tuple[int, int, int | None], dict[str, Any]] = {}  # by mask, columns and window of a layer
        for number, (place, count) in enumerate(zip(self.places, counts, strict=True)):
            window, which = self.spec.windows[number], min(number, len(shared.visible) - 1)
            if (which, count, window) not in seen:
                bias = of_layer(shared.biases, number)
                part = None if bias is None else bias[..., -count:]
                seen[which, count, window] = {"bias": part, **of_layer(shared.visible, number).columns(count, window)}
            kept += ops.see(place.fields, **seen[which, count, window])
        for layer, place in zip(cross, self.sources, strict=True):
            place.read(layer, rows)
            kept += ops.see(place.fields, mask=shared.source_mask, causal=False)
        logits = x.new_empty(rows, keep, self.spec.vocab)
        self.last.y = logits.data_ptr()
        self.library.run(self.array, len(self.array), rows, fed, keep, torch.get_num_threads())
        return logits

    # -- operations of the decoder -------------------------------------------------------------------------------------

    def _part(self, name: str, part: Any) -> Any:
        """Return the recording counterpart of a part of the weights. `name` is the name of its output buffer."""
        kind, name = type(part), _BUFFERS.get(name, name)
        if part is None or part is same:
            return part
        if kind in (LayerWeights, CrossWeights):
            return replace(part, **{field: self._part(field, one) for field, one in vars(part).items()})
        if kind is MLP:
            return MLP(self._part("up", part.up), self._part("down", part.down), self._part("", part.activation))
        if kind is Joined:
            joined = copy(part)
            joined.one = self._part(name, part.one)
            joined.parts = tuple(self._part(f"{name} {place}", one) for place, one in enumerate(part.parts))
            return joined
        if kind in (CompiledProduct, CompiledProducts):
            return partial(self._product, part, name)
        if kind in (RMSNorm, LayerNorm):
            return partial(self._norm, part, name)
        if kind is Activation:
            return partial(self._activate, part)
        raise _Unsuited

    def _product(self, product: Any, name: str, x: Tensor) -> Tensor:
        """x [1, B, I] -> [1, B, O]; without a name, each pass sets the address of the output."""
        together = product.together if type(product) is CompiledProduct else product
        x = self._even(x, f"{name} even")
        y = self._space(name, together.size) if name else x
        self.held.append(together)
        self._add(_PRODUCTS, x=self._at(x), y=y.data_ptr(), w=ctypes.addressof(together.addresses), how=together.count)
        return y

    def _norm(self, norm: Any, name: str, x: Tensor) -> Tensor:
        """x [1, B, …, features]."""
        x, size = self._even(x, f"{name} even"), x.shape[-1]
        y = self._space(name, *x.shape[2:])
        where = {"x": self._at(x), "y": y.data_ptr(), "count": x[0, 0].numel() // size, "size": size}
        for part in ("weight", "bias"):
            wide = getattr(norm, part, None)
            if wide is not None:
                self.held.append(wide.float().contiguous())
                where[part] = self.held[-1].data_ptr()
        if type(norm) is RMSNorm:
            self._add(_RMS_NORM, eps=norm.number, how=norm.late, **where)
        else:
            period = 1 if norm.weight is None else norm.weight.numel() // size
            self._add(_LAYER_NORM, eps=norm.eps, period=period, **where)
        return y

    def _activate(self, activation: Activation, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Each [1, B, I]."""
        size = gate.shape[-1]
        y = gate if up is None and gate.is_contiguous() else self._space("acted", size)
        times = {} if up is None else {"z": self._at(up), "z_token": up.stride(1)}
        how = ops.ACTIVATIONS[activation.name]
        self._add(_ACTIVATE, x=self._at(gate), x_token=gate.stride(1), y=y.data_ptr(), how=how, size=size, **times)
        return y

    def sum(self, x: Tensor | None, added: Tensor, factor: float = 1.0) -> Tensor:
        """Alternates between two buffers, because the library's loop is slower in place."""
        where, y = None, added
        if x is not None:
            where, y = self._at(x), self._space("sum" if x is self.x else "x", added.shape[-1])
        self._add(_SUM, x=where, z=self._at(added), y=y.data_ptr(), size=added.shape[-1], factor=factor)
        return y

    def turn(self, q: Tensor, k: Tensor, rotary: Rotary, shared: PassFacts) -> tuple[Tensor, Tensor]:
        """Each pass sets the addresses of its angles."""
        turned = []
        for name, x in (("q", q), ("k", k)):
            y = self._space(f"{name} turned", x.shape[1], x.shape[3]).transpose(1, 2)
            turned.append(self._moved(_TURN, x, y, turned=rotary.rope.size, how=rotary.rope.interleaved))
            self.turns[rotary is not self.rotary].append(self.calls[-1])
        return turned[0], turned[1]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: LayerWeights, shared: PassFacts, number: int, cache: KeyValues | None
    ) -> Tensor:
        """Each pass sets the addresses of the cache."""
        for part in (k, v):
            self._moved(_COPY, part, part)
        stores = self.calls[-2], self.calls[-1]
        mixed, fields = self._mixed(q, self.spec.kv_heads, self.scalings[number], self.spec.softcap)
        self.places.append(_Place(fields, stores))
        return mixed

    def attend_source(self, q: Tensor, w: CrossWeights, shared: PassFacts, layer: GrowingLayer | None) -> Tensor:
        """Each pass sets the addresses of the source's keys and values."""
        mixed, fields = self._mixed(q, self.spec.heads, self.spec.scaling, None)
        self.sources.append(_Place(fields))
        return mixed

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _space(self, name: str, *shape: int) -> Tensor:
        """A buffer [1, B, …]: every layer uses the same one."""
        key = name, shape
        if key not in self.spaces:
            self.spaces[key] = torch.empty(1, self.room, *shape, dtype=self.dtype)
        return self.spaces[key]

    def _at(self, x: Tensor) -> int:
        """The address of x. Raises _Unsuited if x is not in a recorded buffer: no pass would compute it again."""
        held = any(x.untyped_storage().data_ptr() == space.data_ptr() for space in self.spaces.values())
        if not held or x.stride(-1) != 1:
            raise _Unsuited
        return x.data_ptr()

    def _add(self, kind: int, **fields: Any) -> None:
        self.calls.append(_Entry(kind=kind, type=self.type, kept=self.kept, **fields))

    def _mixed(self, q: Tensor, kv_heads: int, scaling: float, softcap: float | None) -> tuple[Tensor, ops.Attention]:
        """q [1, H, B, D] -> attention [1, B, H·D], and the fields that hold the addresses of keys and values."""
        self._at(q)
        mixed = self._space("mixed", q.shape[1] * q.shape[3])
        fields = ops.fields(q, mixed, kv_heads, scaling=scaling, softcap=softcap)
        self._add(_ATTENTION, w=ctypes.addressof(fields))
        return mixed, fields

    def _even(self, x: Tensor, name: str) -> Tensor:
        """x [1, B, …], copied if it is not contiguous."""
        if x.is_contiguous():
            return x
        y = self._space(name, *x.shape[2:])
        heads, even = (part.view(1, self.room, -1, x.shape[-1]).transpose(1, 2) for part in (x, y))
        self._moved(_COPY, heads, even)
        return y

    def _moved(self, kind: int, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        """x [1, H, B, D] -> y of this shape."""
        (_, x_head, x_token, _), (_, y_head, y_token, _) = x.stride(), y.stride()
        strides = {"x_token": x_token, "x_head": x_head, "y_token": y_token, "y_head": y_head}
        self._add(kind, x=self._at(x), y=y.data_ptr(), heads=x.shape[1], size=x.shape[3], **strides, **more)
        return y
