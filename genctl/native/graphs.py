"""Steps of one token as CUDA graphs: what a step launches is recorded once, and replayed with one call.

Without a graph, a GPU waits for Python between two small kernels. A graph has no such gaps, but its tensors keep their
shapes and addresses. So rows read the whole buffers of the cache, filled or not; one tensor says which columns count,
another one where the new column goes (`Decoder.step`, `static.SlottedLayer`), and layers with a window have such a pair
of their own. A graph is valid as long as the buffers stay in place. There is one for each number of rows; it is
captured again when its buffers change.

On a CPU the same steps are computed without capturing, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.out_of_memory import is_shortage
from genctl.native.decoder import Decoder
from genctl.native.spec import Spec

Buffers = list[tuple[Tensor, Tensor]]  # of each layer keys and values, [N, K, C, D]
MOST = 4  # graphs that are kept: rows of several batches take turns


def obstacle(spec: Spec) -> str:
    """Why the steps of a decoder cannot be captured: they depend on numbers on the host. "" if they can."""
    if spec.experts is not None:
        return "which experts are computed is decided on the host"
    if 1 in spec.windows:
        return "a window of one token"
    if spec.alibi and any(spec.windows):
        return "linear biases within a window"
    return ""


class Graphs:
    """The steps of one decoder. `steps` counts those that were computed here, `captures` the graphs made for them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.steps = self.captures = 0
        self.failed = ""  # why no step is captured any more
        self._fixed: dict[int, _FixedStep] = {}  # by the number of rows, the last used one at the end
        cuda = decoder.device.type == "cuda"
        self._stream = torch.cuda.Stream(decoder.device) if cuda else None  # type: ignore[no-untyped-call]  # torch is
        self._pool: Any = None  # the memory of all graphs: no two are replayed at once, and results are copied

    def takes(self, feed: Tensor, cache: Cache, *, hidden: bool) -> bool:
        """Whether a pass over `feed` int64 [N, F] is a step of one token on a cache that was read into."""
        if hidden or feed.shape[1] != 1 or not cache.is_slotted or not cache.length:
            return False
        return cache.cross is None or all(layer.is_initialized for layer in cache.cross)

    def step(
        self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, source_mask: Tensor | None = None
    ) -> Tensor:
        """One step, whose column is added to `cache`; returns logits f32 [N, 1, V].

        feed int64 [N, 1], mask int64 [N, T+1] or None, positions int64 [N or 1, 1], source_mask int64 [N, S] or None.
        """
        rows = feed.shape[0]
        buffers = cache.slots()
        source = _Source(cache.cross, source_mask)
        where = (_where(buffers), source.where())
        fixed = self._fixed.pop(rows, None)
        if fixed is None or fixed.where != where:
            fixed = None  # free the graph's memory before more is allocated
            fixed = _FixedStep(rows, self.decoder.spec, buffers, where)
        while len(self._fixed) >= MOST:
            del self._fixed[next(iter(self._fixed))]
        fixed.fill(feed, mask, positions, cache)
        logits = self._run(fixed, buffers, source)
        self._fixed[rows] = fixed
        cache.written()
        self.steps += 1
        return logits

    def free(self) -> None:
        """Drop all graphs, and the memory that they hold. Later steps make new ones."""
        self._fixed.clear()
        self._pool = None

    def _run(self, fixed: _FixedStep, buffers: Buffers, source: _Source) -> Tensor:
        """The first step on these buffers is computed without a graph, the second is captured, all later are replayed.

        Buffers that are used for one step only, because rows leave or join, are never captured.
        """
        stream, device = self._stream, self.decoder.device
        if stream is None or self.failed:
            return fixed.compute(self.decoder, buffers, source)
        if fixed.graph is None and not fixed.warm:
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # so that libraries make their workspaces on this stream
                logits = fixed.compute(self.decoder, buffers, source)
            current.wait_stream(stream)
            logits.record_stream(current)
            fixed.warm = True
            return logits
        if fixed.graph is None:
            try:
                self._capture(fixed, buffers, source)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                self.failed = (str(error).splitlines() or [type(error).__name__])[0][:120]
                return fixed.compute(self.decoder, buffers, source)
        assert fixed.graph is not None
        assert fixed.logits is not None
        fixed.graph.replay()
        return fixed.logits.clone()  # the next replay overwrites them

    def _capture(self, fixed: _FixedStep, buffers: Buffers, source: _Source) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, device = torch.cuda.CUDAGraph(), self.decoder.device
        # other threads may use the device meanwhile
        captured = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        with torch.cuda.device(device), captured:
            fixed.logits = fixed.compute(self.decoder, buffers, source)
        fixed.graph = graph
        self.captures += 1


class _Source:
    """What a step reads of the source: keys and values of each layer, and its mask. They stay while rows stay."""

    def __init__(self, cross: Sequence[GrowingLayer] | None, mask: Tensor | None) -> None:
        self.cross, self.mask = cross, mask

    def where(self) -> tuple[Any, ...]:
        """As `_where`."""
        if self.cross is None:
            return ()
        mask = () if self.mask is None else (self.mask.data_ptr(), self.mask.shape, self.mask.stride())
        return (_where([layer.content() for layer in self.cross]), mask)


class _FixedStep:
    """The inputs of a step for N rows on buffers with C columns, and the graph that reads them, once it is captured."""

    def __init__(self, rows: int, spec: Spec, buffers: Buffers, where: tuple[Any, ...]) -> None:
        device = buffers[0][0].device
        self.where = where
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        # the layers with one window, or without, have their columns at the same places
        self.layers = {window: number for number, window in reversed([*enumerate(spec.windows)])}
        self.places: dict[int | None, Tensor] = {}
        self.slots: dict[int | None, Tensor] = {}
        for window, number in self.layers.items():
            columns = buffers[number][0].shape[2]
            self.places[window] = torch.zeros(1, dtype=torch.long, device=device)
            self.slots[window] = torch.zeros(rows, 1, 1, columns, dtype=torch.bool, device=device)
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # f32 [N, 1, V], where the graph leaves them

    def fill(self, feed: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> None:
        """Copy in the inputs of a step (see `Graphs.step`). The host does not wait for the device."""
        self.tokens.copy_(feed)
        self.positions.copy_(positions)
        places = cache.places()
        for window, number in self.layers.items():
            place, slots = places[number], self.slots[window]
            self.places[window].fill_(place.column)
            end = place.column + 1
            slots[..., : place.first] = False  # columns that the window has left
            slots[..., end:] = False  # rejected drafts
            seen = None if mask is None else mask[:, None, None, place.before + place.first : place.before + end]
            slots[..., place.first : end] = True if seen is None else seen.bool()

    def compute(self, decoder: Decoder, buffers: Buffers, source: _Source) -> Tensor:
        """Logits f32 [N, 1, V]; writes one column of the buffers. A second call writes the same values."""
        made = decoder.step(
            self.tokens, self.positions, self.places, self.slots, buffers, cross=source.cross, source_mask=source.mask
        )
        return made.float()


def _where(buffers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
    """What a graph depends on: address, shape and strides of every buffer.

    New buffers in the place of freed ones may be equal in all of these. The graph is then valid for them as well.
    """
    return tuple((buffer.data_ptr(), buffer.shape, buffer.stride()) for pair in buffers for buffer in pair)
