"""Steps of one token as CUDA graphs: what a step launches is recorded once, and replayed with one call.

Without a graph, a GPU waits for Python between two small kernels. A graph has no such gaps, but its tensors keep their
shapes and addresses. So rows read the whole buffers of the cache, filled or not; one tensor says which columns count,
another one where the new column goes (`Decoder.step`, `static.SlottedLayer`). A graph is valid as long as the buffers
stay in place. There is one for each number of rows; it is captured again when its buffers change.

On a CPU the same steps are computed without capturing, which is how they are tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.native.decoder import Decoder
from genctl.native.spec import Spec

Buffers = list[tuple[Tensor, Tensor]]  # of each layer keys and values, [N, K, C, D]


def fits(spec: Spec) -> bool:
    """Whether the steps of a decoder have one fixed shape, and use only tensors on the device.

    Windows, ALiBi, soft caps, sinks, a source, experts, and angles that depend on the length of a text rule this out.
    """
    if spec.encoder is not None or spec.relative is not None or spec.sinks or spec.experts is not None:
        return False
    if any(window is not None for window in spec.windows) or spec.alibi or spec.softcap is not None:
        return False
    return spec.rope is None or not spec.rope.depends_on_length


class Graphs:
    """The steps of one decoder. `steps` counts those that were computed here, `captures` the graphs made for them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.steps = self.captures = 0
        self._fixed: dict[int, _FixedStep] = {}  # by the number of rows
        cuda = decoder.device.type == "cuda"
        self._stream = torch.cuda.Stream(decoder.device) if cuda else None  # type: ignore[no-untyped-call]  # torch is

    def takes(self, feed: Tensor, cache: Cache, *, hidden: bool) -> bool:
        """Whether a pass over `feed` int64 [N, F] is a step of one token on full attention."""
        return not hidden and feed.shape[1] == 1 and cache.is_slotted and cache.length > 0

    def step(self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor) -> Tensor:
        """One step, whose column is added to `cache`; returns logits f32 [N, 1, V].

        feed int64 [N, 1], mask int64 [N, T+1] or None, positions int64 [N or 1, 1].
        """
        rows, length = feed.shape[0], cache.length
        buffers = cache.slots()
        where = _where(buffers)
        fixed = self._fixed.get(rows)
        if fixed is None or fixed.where != where:
            self._fixed.pop(rows, None)  # free the graph's memory before more is allocated
            fixed = self._fixed[rows] = _FixedStep(rows, buffers, where)
        fixed.fill(feed, mask, positions, length)
        logits = self._run(fixed, buffers)
        cache.written()
        self.steps += 1
        return logits

    def _run(self, fixed: _FixedStep, buffers: Buffers) -> Tensor:
        """The first step on these buffers is computed without a graph, the second is captured, all later are replayed.

        Buffers that are used for one step only, because rows leave or join, are never captured.
        """
        stream, device = self._stream, self.decoder.device
        if stream is None:
            return fixed.compute(self.decoder, buffers)
        if fixed.graph is None and not fixed.warm:
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # so that libraries make their workspaces on this stream
                logits = fixed.compute(self.decoder, buffers)
            current.wait_stream(stream)
            logits.record_stream(current)
            fixed.warm = True
            return logits
        if fixed.graph is None:
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                fixed.logits = fixed.compute(self.decoder, buffers)
            fixed.graph = graph
            self.captures += 1
        assert fixed.logits is not None
        fixed.graph.replay()
        return fixed.logits.clone()  # the next replay overwrites them


class _FixedStep:
    """The inputs of a step for N rows on buffers with C columns, and the graph that reads them, once it is captured."""

    def __init__(self, rows: int, buffers: Buffers, where: tuple[Any, ...]) -> None:
        device, columns = buffers[0][0].device, buffers[0][0].shape[2]
        self.where = where
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.slots = torch.zeros(rows, 1, 1, columns, dtype=torch.bool, device=device)
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # f32 [N, 1, V], where the graph leaves them

    def fill(self, feed: Tensor, mask: Tensor | None, positions: Tensor, length: int) -> None:
        """Copy in the inputs of a step (see `Graphs.step`). The host does not wait for the device."""
        self.tokens.copy_(feed)
        self.positions.copy_(positions)
        self.place.fill_(length)
        self.slots[..., length + 1 :] = False  # rejected drafts
        self.slots[..., : length + 1] = True if mask is None else mask[:, None, None].bool()

    def compute(self, decoder: Decoder, buffers: Buffers) -> Tensor:
        """Logits f32 [N, 1, V]; writes one column of the buffers. A second call writes the same values."""
        return decoder.step(self.tokens, self.positions, self.place, self.slots, buffers).float()


def _where(buffers: Buffers) -> tuple[Any, ...]:
    """What a graph depends on: address, shape and strides of every buffer.

    New buffers in the place of freed ones may be equal in all of these. The graph is then valid for them as well.
    """
    return tuple((buffer.data_ptr(), buffer.shape, buffer.stride()) for pair in buffers for buffer in pair)
