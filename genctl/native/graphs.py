"""Steps as CUDA graphs: the launches of a step are recorded once and replayed with one call.

Without a graph, a GPU waits for Python between small kernels. A graph avoids that, but fixes the shapes and addresses
of its tensors. So rows read the whole buffers of the cache, filled or not; one tensor marks the valid columns, another
holds the column to write (`Decoder.step`, `cache.forms.SlottedLayer`), and each window size has its own such pair. A
graph is valid as long as the buffers stay in place. There is one for each number of rows (and of tokens per row); it is
captured again when its buffers change.

If the Triton kernels compute all of a decoder, a step may have several tokens of each row, and the kernels also read
prompts, without a graph. A row then has the same bits alone and in any batch, in prefill and in steps, in passes of one
token and of several. Otherwise torch computes steps of one token, and reads prompts.

On a CPU the same steps run without capturing; this is how they are tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.errors import is_shortage
from genctl.native.decoder import Decoder
from genctl.native.spec import Spec

if TYPE_CHECKING:
    from genctl.decode.cache.forms import SlotPlace
    from genctl.native.kernel_decoder import KernelDecoder

Buffers = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [N, K, C, D]
MOST_CAPTURED = 64  # tokens, over all rows, of a step with several tokens for each row (drafts)
MOST = 8  # graphs kept: numbers of rows and draft lengths alternate


def obstacle(spec: Spec) -> str:
    """Why the steps of a decoder cannot be captured (they depend on values on the host); "" if they can."""
    if spec.experts is not None:
        return "which experts are computed is decided on the host"
    if 1 in spec.windows:
        return "a window of one token"
    if spec.alibi and any(spec.windows):
        return "linear biases within a window"
    return ""


class Graphs:
    """The steps of one decoder. `steps` counts the steps computed here, `captures` the graphs captured for them."""

    def __init__(self, decoder: Decoder, kernels: KernelDecoder | None = None) -> None:
        self.decoder, self.kernels = decoder, kernels
        self.steps = self.captures = 0
        self.failed = ""  # why capturing has stopped
        # key: rows, tokens for each; the most recently used is last
        self._fixed: dict[tuple[int, int], _FixedStep] = {}
        cuda = decoder.device.type == "cuda"
        self._stream = torch.cuda.Stream(decoder.device) if cuda else None  # type: ignore[no-untyped-call]  # torch is
        self._pool: Any = None  # memory pool of all graphs: no two are replayed at once, and results are copied

    def takes(self, feed: Tensor, cache: Cache, *, hidden: bool) -> bool:
        """Whether a pass over `feed` int64 [N, F] is a step (of one token, or a draft's) that can run here."""
        if hidden or not cache.is_slotted or not cache.length:
            return False
        if feed.shape[1] != 1 and (self.kernels is None or feed.numel() > MOST_CAPTURED):
            return False
        return cache.cross is None or all(layer.is_initialized for layer in cache.cross)

    def read(
        self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, keep: int, *, hidden: bool
    ) -> Tensor | None:
        """Prefill with the kernels, without a graph; logits f32 of the last `keep` tokens of each row (0: of all).

        feed int64 [N, F], mask int64 [N, T+F] or None, positions int64 [N or 1, F]. None if the kernels do not compute
        this decoder or cannot use this cache.
        """
        if self.kernels is None or hidden or cache.cross is not None:
            return None
        spec, (rows, fed) = self.decoder.spec, feed.shape
        if not cache.open_slots(rows, spec.kv_heads, spec.head_dim, self.decoder.dtype, feed.device, fed):
            return None
        padding = None if mask is None else mask.shape[1] - mask.sum(-1)
        positions, keep = positions.expand(rows, fed), keep or fed
        each, found = self.kernels.tokens_at_once(rows), []
        for begin in range(0, fed, each):
            part = slice(begin, min(begin + each, fed))
            count = part.stop - begin
            buffers, places = cache.slots(count), cache.places()
            columns: dict[int | None, tuple[Tensor, Tensor]] = {}
            for number, window in enumerate(spec.windows):
                if window not in columns:
                    column = torch.full((1,), places[number].column, dtype=torch.long, device=feed.device)
                    columns[window] = column, _starts(padding, places[number], rows, feed.device)
            wanted = max(0, part.stop - max(begin, fed - keep))
            tokens, at = feed[:, part].contiguous(), positions[:, part].contiguous()
            found.append(self.kernels(tokens, at, columns, buffers, wanted))
            cache.written(count)
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def step(
        self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, source_mask: Tensor | None = None
    ) -> Tensor:
        """One step, which appends its columns to `cache`; returns logits f32 [N, F, V].

        feed int64 [N, F], mask int64 [N, T+F] or None, positions int64 [N or 1, F], source_mask int64 [N, S] or None.
        """
        shape = feed.shape[0], feed.shape[1]
        buffers = cache.slots(shape[1])
        source = _Source(cache.cross, source_mask)
        fixed = self._fixed.pop(shape, None)
        if fixed is None or not fixed.reads(buffers, source):
            fixed = None  # free the old graph's memory before allocating more
            fixed = _FixedStep(shape, self.decoder.spec, buffers, source, self.kernels)
        while len(self._fixed) >= MOST:
            del self._fixed[next(iter(self._fixed))]
        fixed.fill(feed, mask, positions, cache)
        logits = self._run(fixed, buffers, source)
        self._fixed[shape] = fixed
        cache.written(shape[1])
        self.steps += 1
        return logits

    def free(self) -> None:
        """Drop all graphs and their memory. Later steps capture new ones."""
        self._fixed.clear()
        self._pool = None

    def _run(self, fixed: _FixedStep, buffers: Buffers, source: _Source) -> Tensor:
        """Run the first step on these buffers without a graph, capture the second, and replay from then on.

        So no graph is captured for buffers that last one step only because rows leave or join.
        """
        stream, device = self._stream, self.decoder.device
        if stream is None or self.failed:
            return fixed.compute(self.decoder, buffers, source)
        if fixed.graph is None and not fixed.warm:
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries then make their workspaces on this stream
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
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        captured = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        with torch.cuda.device(self.decoder.device), captured:
            fixed.logits = fixed.compute(self.decoder, buffers, source)
        fixed.graph = graph
        self.captures += 1


class _Source(NamedTuple):
    """A step's view of the source: keys and values of each layer, and the mask. Fixed while the rows are the same."""

    cross: Sequence[GrowingLayer] | None
    mask: Tensor | None

    def where(self) -> tuple[Any, ...]:
        """As `_where`."""
        cross = [] if self.cross is None else [layer.content() for layer in self.cross]
        return _where([*cross, *([] if self.mask is None else [(self.mask,)])])


class _FixedStep:
    """The inputs of a step for N rows on buffers with C columns, and the graph that reads them once captured."""

    def __init__(
        self, shape: tuple[int, int], spec: Spec, buffers: Buffers, source: _Source, kernels: KernelDecoder | None
    ) -> None:
        device = buffers[0][0].device
        self.kernels = kernels
        self.where = (_where(buffers), source.where())
        self.seen: list[weakref.ref[Tensor]] = []  # the buffers themselves: comparing them is faster than `_where`
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.positions = torch.zeros(shape, dtype=torch.long, device=device)
        # layers with the same window size have their columns at the same places: one such layer for each size
        self.layers = {window: number for number, window in reversed([*enumerate(spec.windows)])}
        self.places: dict[int | None, Tensor] = {}
        self.slots: dict[int | None, Tensor] = {}
        for window, number in self.layers.items():
            columns = buffers[number][0].shape[2]
            self.places[window] = torch.zeros(1, dtype=torch.long, device=device)
            if kernels is None:
                self.slots[window] = torch.zeros(shape[0], 1, 1, columns, dtype=torch.bool, device=device)
        # a row's first column, for the kernels
        self.starts = {window: torch.zeros(shape[0], dtype=torch.int32, device=device) for window in self.layers}
        self.padded = False
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # f32 [N, F, V], where the graph leaves them

    def reads(self, buffers: Buffers, source: _Source) -> bool:
        """Whether this step's graph is valid for these buffers and this source."""
        flat = [buffer for pair in buffers for buffer in pair]
        same = len(self.seen) == len(flat) and all(ref() is buffer for ref, buffer in zip(self.seen, flat, strict=True))
        if self.where != (self.where[0] if same else _where(buffers), source.where()):
            return False
        self.seen = self.seen if same else [weakref.ref(buffer) for buffer in flat]
        return True

    def fill(self, feed: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> None:
        """Copy in the inputs of a step (see `Graphs.step`), without a device synchronisation."""
        self.tokens.copy_(feed)
        self.positions.copy_(positions)
        places = cache.places()
        padding = None if self.kernels is None or mask is None else mask.shape[1] - mask.sum(-1)
        for window, number in self.layers.items():
            place = places[number]
            self.places[window].fill_(place.column)
            if self.kernels is not None:
                if padding is not None:
                    self.starts[window].copy_(_starts(padding, place, len(feed), feed.device))
                elif self.padded:
                    self.starts[window].zero_()
                continue
            slots, end = self.slots[window], place.column + 1
            slots[..., : place.first] = False  # columns that the window has left
            slots[..., end:] = False  # rejected drafts
            seen = None if mask is None else mask[:, None, None, place.before + place.first : place.before + end]
            slots[..., place.first : end] = True if seen is None else seen.bool()
        self.padded = mask is not None

    def compute(self, decoder: Decoder, buffers: Buffers, source: _Source) -> Tensor:
        """Logits f32 [N, F, V]; writes F columns of the buffers. A second call writes the same values."""
        if self.kernels is not None:
            columns = {window: (place, self.starts[window]) for window, place in self.places.items()}
            return self.kernels(self.tokens, self.positions, columns, buffers)
        made = decoder.step(
            self.tokens, self.positions, self.places, self.slots, buffers, cross=source.cross, source_mask=source.mask
        )
        return made.float()


def _starts(padding: Tensor | None, place: SlotPlace, rows: int, device: torch.device) -> Tensor:
    """The first column of each row in its buffers, int32 [N], after the `padding` int64 [N] of its text."""
    if padding is None:
        return torch.zeros(rows, dtype=torch.int32, device=device)
    return (padding - place.before).clamp(min=0).int()


def _where(buffers: Sequence[tuple[Tensor, ...]]) -> tuple[Any, ...]:
    """The properties that a graph depends on: address, shape and strides of every buffer.

    New buffers at the address of freed ones may be equal in all three; the graph is then valid for them, too.
    """
    return tuple((buffer.data_ptr(), buffer.shape, buffer.stride()) for pair in buffers for buffer in pair)
