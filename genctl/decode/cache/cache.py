"""The key-value cache: fork it, select rows, merge lanes, crop it, convert it to another form.

Rows of different lengths share a cache aligned to the right: the shorter ones are padded on the left and masked.
Prompts that were prefilled in one pass stay in one cache until one of them is needed alone (`RowOfPass`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from genctl.decode.cache.growing import GrowingLayer, OffloadedLayer
from genctl.decode.cache.layer import CROSS, CacheLayer

if TYPE_CHECKING:
    from genctl.decode.cache.forms import SlotPlace


def _of_layers(of: Callable[[Iterator[object]], bool], name: str) -> Any:
    """A property: whether `of` (all or any) of a cache's layers have a true attribute of this name."""
    return property(lambda cache: of(getattr(layer, name, False) for layer in cache.sample))


class Cache:
    """The layers of a decoder's self-attention, and of an encoder-decoder's cross-attention, which never grows.

    This is the cache of native models. transformers' models need a `foreign.TransformersCache`.
    """

    def __init__(self, layers: Iterable[CacheLayer], cross: Sequence[GrowingLayer] | None = None) -> None:
        self.layers = list(layers)
        self.cross = cross
        self.beyond = False  # whether it holds tokens beyond the runtime's `bound` (see `runtime.ModelRuntime`)

    @property
    def for_model(self) -> Any:
        """The object to pass to a model."""
        return self

    is_plain: bool = _of_layers(all, "is_plain")  # a query sees exactly the columns that are stored
    # only keys and values, so padding on the left can be removed; False without layers
    only_columns: bool = _of_layers(lambda found: set(found) == {True}, "only_columns")
    is_mergeable: bool = _of_layers(all, "is_mergeable")  # rows of several lanes may share a cache of this kind
    is_croppable: bool = _of_layers(all, "is_croppable")  # tokens can be removed
    is_slotted: bool = _of_layers(all, "is_slotted")  # ready for steps of one shape
    is_recurrent: bool = _of_layers(any, "is_recurrent")  # a state of constant size
    is_fixed: bool = _of_layers(any, "is_fixed")  # allocated once, for an exact `room`
    is_shareable: bool = _of_layers(any, "is_shareable")  # a prompt that is long enough to share
    is_shared: bool = _of_layers(any, "prompt")  # its first columns are stored once for all rows
    records_past: bool = _of_layers(any, "record_past")  # columns to be dropped are kept until the next `crop`

    @property
    def sample(self) -> list[CacheLayer]:
        """Layers with the kinds and lengths of this cache's own."""
        return self.layers

    @property
    def length(self) -> int:
        """Columns (tokens) of self-attention, dropped ones included; 0 if there are only recurrent states."""
        return next((layer.get_seq_length() for layer in self.layers if layer.has_columns), 0)

    @property
    def takes_places(self) -> bool:
        """Whether each token of a pass may be written to a row and column of its own (`runtime.TokenPlaces`)."""
        return all(type(layer) is GrowingLayer and layer.prompt is None for layer in self.layers)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def with_layers(self, layers: Iterable[CacheLayer]) -> Self:
        """A cache of the same class with other layers of self-attention, and none of cross-attention."""
        new = self.with_cross(None)
        new.layers = list(layers)
        return new

    def with_cross(self, cross: Sequence[GrowingLayer] | None) -> Self:
        """The same self-attention with other layers of cross-attention."""
        new = copy.copy(self)
        new.cross = cross
        return new

    def select(self, rows: Tensor, *, room: int = 0, drop: int = 0) -> Self:
        """A new cache with `rows` (int64 [N], repeats allowed) of this one, without its first `drop` columns.

        This cache is unchanged. Cross-attention is left out: see `types.Sources`.
        """
        return self.with_layers(layer.select(rows, room=room, drop=drop) for layer in self.layers)

    def continued(self, rows: Tensor, room: int) -> Self:
        """Like `select` of all rows, but static layers that were allocated with this room reuse their buffers."""
        return self.with_layers(layer.continued(rows, room) for layer in self.layers)

    def reorder(self, rows: Tensor, since: int) -> Self:
        """Replace row i by row `rows[i]` (int64 [N], one per row); the rows must be equal before column `since`.

        Layers with their own buffers move the later columns in place: do not use this cache afterwards.
        """
        return self.with_layers(layer.reorder(rows, since) for layer in self.layers)

    def keep(self, rows: Sequence[int], index: Tensor, *, room: int = 0, drop: int = 0) -> Self:
        """Like `select` of `rows` (`index`: as a tensor), in place if possible: do not use this cache afterwards."""
        if any(row < place for place, row in enumerate(rows)):
            return self.select(index, room=room, drop=drop)
        return self.with_layers(layer.keep(rows, index, room=room, drop=drop) for layer in self.layers)

    def merge(self, others: Sequence[Cache], *, room: int = 0) -> Self:
        """One cache with the rows of all, aligned to the right; shorter ones are padded with zeros on the left.

        Do not use this cache afterwards: the others may overwrite the places of rows that left it (see `keep`).
        """
        if not others:
            return self
        together = zip(self.layers, *(other.layers for other in others), strict=True)
        return self.with_layers(first.merge(rest, room) for first, *rest in together)

    def share(self, rows: int, room: int) -> Self:
        """A cache for `rows` continuations of the prompt in this one; its growing layers are shared, not copied."""
        from genctl.decode.cache.shared import SharedLayer

        index = torch.zeros(rows, dtype=torch.long)

        def shared(layer: CacheLayer) -> CacheLayer:
            if isinstance(layer, GrowingLayer) and layer.is_shareable:
                return SharedLayer(layer, rows, room)
            return layer.select(index, room=room)

        return self.with_layers(map(shared, self.layers))

    def unshared(self) -> Self:
        """The cache with all columns in every row."""
        return self.with_layers(layer.unshared() for layer in self.layers) if self.is_shared else self

    # -- columns, in place ---------------------------------------------------------------------------------------------

    def crop(self, columns: int) -> None:
        """Remove the newest `columns` tokens of every row.

        Layers that record past columns are cut back to what they need, even if nothing is removed.
        """
        for layer in self.layers:
            if columns or layer.record_past:
                layer.crop(-columns)

    def shift(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """For each (row, first column, count), move columns right by `count`, over zeros. Only if it `takes_places`."""
        for layer in self.layers:
            assert isinstance(layer, GrowingLayer)
            for part in layer.buffers:
                columns = part.narrow(2, layer.begin, layer.length)
                for row, first, by in moves:
                    columns[row, :, first + by :] = columns[row, :, first : layer.length - by].clone()
                    columns[row, :, first : first + by] = 0

    def activate_past_recording(self) -> None:
        """Let windows and convolutions keep columns that they would otherwise drop, until the next `crop`."""
        for layer in self.layers:
            layer.activate_past_recording()

    def narrow(self, like: Cache) -> None:
        """Drop the columns that the windows of `like`, an empty cache of the same model, would have dropped."""
        for number, (layer, window) in enumerate(zip(self.layers, like.layers, strict=True)):
            if not isinstance(layer, GrowingLayer) or not isinstance(window, GrowingLayer):
                continue
            if layer.is_initialized and window.is_sliding and not layer.is_sliding:
                window.hold(*layer.content())
                self.layers[number] = window

    # -- forms, in place -----------------------------------------------------------------------------------------------

    def convert(self, form: str, room: int = 0) -> None:
        """Convert the growing self-attention layers to a form: static, quantized, offloaded; others change nothing.

        A static layer is allocated with `room` additional columns. Sliding windows, recurrent states and
        cross-attention do not grow and stay as they are. Offloading has no effect unless the layers are on a CUDA
        device.
        """
        if form in ("static", "quantized"):
            from genctl.decode.cache.forms import QuantizedLayer, StaticLayer

            kind = StaticLayer if form == "static" else QuantizedLayer
            self.layers = [layer.converted(kind, room) for layer in self.layers]
        elif form == "offloaded":
            growing = next((layer for layer in self.layers if isinstance(layer, GrowingLayer)), None)
            if growing is not None and growing.is_initialized and growing.device.type == "cuda":
                self.offload()

    def offload(self) -> None:
        """Move the growing layers to the CPU; each pass copies them to the GPU, one at a time."""
        self.layers = [layer.converted(OffloadedLayer) for layer in self.layers]

    def use_slots(self, *, windows: bool = False) -> None:
        """Prepare the growing layers for steps of one shape; with `windows` also the sliding windows."""
        from genctl.decode.cache.forms import SlidingLayer, SlottedLayer, SlottedWindow

        self.layers = [
            SlottedWindow.of(layer) if windows and type(layer) is SlidingLayer else layer.converted(SlottedLayer)
            for layer in self.layers
        ]

    def open_slots(
        self, rows: int, heads: int, size: int, dtype: torch.dtype, device: torch.device, count: int
    ) -> bool:
        """`use_slots` for an empty cache, with buffers for `count` columns plus the room of each layer.

        Returns whether steps may write to the cache; if not, it is unchanged.
        """
        if self.is_slotted and self.length:
            return True
        from genctl.decode.cache.forms import SlidingLayer

        if any(not layer.is_slotted and type(layer) not in (GrowingLayer, SlidingLayer) for layer in self.layers):
            return False
        rooms = [layer.room for layer in self.layers if isinstance(layer, GrowingLayer)]
        self.use_slots(windows=True)
        for layer, room in zip(self._slotted(), rooms, strict=True):
            if not layer.is_initialized:
                layer.room = 0
                layer.open(rows, heads, size, dtype, 0, device)
                layer.slots(count if layer.is_sliding else count + room)
        return True

    def slots(self, count: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each slotted layer, `[rows, heads, capacity, head_dim]`, with room for `count` columns."""
        return [layer.slots(count) for layer in self._slotted()]

    def places(self) -> list[SlotPlace]:
        """Where each slotted layer writes the next column. Call `slots` before."""
        return [layer.place() for layer in self._slotted()]

    def written(self, count: int = 1) -> None:
        """Register `count` columns that a compiled or captured step wrote."""
        for layer in self._slotted():
            layer.written(count)

    def _slotted(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_slotted]

    def refill(self, fresh: Cache) -> None:
        """Replace the rows by those of `fresh`, converted to the form of each layer of this cache."""
        for number, (old, new) in enumerate(zip(self.layers, fresh.layers, strict=True)):
            if isinstance(old, GrowingLayer) and old.is_chosen:
                new = new.converted(type(old), max(old.capacity - new.get_seq_length(), 0))
            self.layers[number] = new

    # -- contents ------------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """The parts in layer order, each `{"layer", "kind", "shape", "dtype", "device", "bytes"}`.

        `shape` is that of the keys, `[rows, heads, length, head_dim]`, or of a recurrent state; values of another shape
        add `value_shape`. `bytes` counts everything stored for the part, and nothing twice. If rows share a prompt,
        `shape` has all columns, `bytes` counts the prompt's once, and `shared` is their number. Free columns count only
        in a static layer, which adds `filled`, the columns in use. A hybrid layer has two parts.
        """
        parts = [part for number, layer in enumerate(self.layers) for part in layer.describe(number)]
        for number, layer in enumerate(self.cross or ()):
            parts += [{**part, "kind": CROSS} for part in layer.describe(number)]
        return parts

    def reserved(self) -> int:
        """Bytes of the growing layers' buffers, free columns included; other layers count as they are."""
        return sum(layer.reserved() for layer in (*self.layers, *(self.cross or ())))

    def state_dict(self) -> dict[str, Tensor]:
        """Every stored tensor: `self.I.NAME` and `cross.I.NAME` of layer I (see `CacheLayer.state_dict`).

        Raises ModelError if a layer cannot be saved.
        """
        tensors: dict[str, Tensor] = {}
        for place, layer in self._places():
            tensors |= {f"{place}.{name}": tensor for name, tensor in layer.state_dict().items()}
        return tensors

    def load_state_dict(self, states: dict[str, Tensor], length: int) -> None:
        """Load the result of `state_dict`, stored after `length` tokens of self-attention.

        Raises KeyError or ValueError if tensors are missing or have the wrong shape.
        """
        for place, layer in self._places():
            own = {name.removeprefix(f"{place}."): states[name] for name in states if name.startswith(f"{place}.")}
            layer.load_state_dict(own, length)

    def _places(self) -> Iterator[tuple[str, CacheLayer]]:
        for part, layers in (("self", self.layers), ("cross", self.cross or ())):
            for number, layer in enumerate(layers):
                yield f"{part}.{number}", layer


def new_cache(windows: Sequence[int | None], room: int = 0) -> Cache:
    """An empty cache for a native decoder; `windows` has None (full attention) or a window for each layer.

    `room` is the number of columns that follow the prefill.
    """
    if not any(windows):
        return Cache(GrowingLayer(room) for _ in windows)
    from genctl.decode.cache.forms import SlidingLayer

    return Cache(GrowingLayer(room) if size is None else SlidingLayer(size, room) for size in windows)


class RowOfPass(Cache):
    """A row of a pass over several prompts, padded on the left: `layers` copies it out on first use.

    Rows that continue together are selected at once (see `run_of`), so no layer is copied row by row.
    """

    def __init__(self, whole: Cache, row: int, pad: int) -> None:
        self.whole, self.row, self.pad = whole, row, pad
        self.cross, self.beyond = None, False
        self.own: list[CacheLayer] | None = None  # the layers of the row alone, without padding

    @property
    def layers(self) -> list[CacheLayer]:
        """The layers of the row alone, without padding."""
        if self.own is None:
            keys, _ = self.whole.layers[0].content()
            index = torch.tensor([self.row], device=keys.device)
            self.whole = self.whole.select(index, drop=self.pad)
            self.own = self.whole.layers
        return self.own

    @layers.setter
    def layers(self, layers: Iterable[CacheLayer]) -> None:
        self.own = list(layers)

    def with_layers(self, layers: Iterable[CacheLayer]) -> Cache:  # type: ignore[override]
        """A cache with other layers."""
        return Cache(layers)

    @property
    def sample(self) -> list[CacheLayer]:
        """Layers with the kinds and lengths of this cache's own, without copying the row out."""
        return self.own or self.whole.layers


def run_of(caches: Iterable[Cache | None]) -> list[RowOfPass]:
    """The leading caches that are rows of one pass, not yet copied out; empty if there are fewer than two."""
    rows: list[RowOfPass] = []
    for cache in caches:
        if not isinstance(cache, RowOfPass) or cache.own is not None or (rows and cache.whole is not rows[0].whole):
            break
        rows.append(cache)
    return rows if len(rows) > 1 else []
