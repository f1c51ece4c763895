"""Steps through torch.compile, of one fixed shape, so that a compiled or captured step can be reused.

A step reads one token of each row. Its rows see the whole buffers of the cache, filled or not; a mask marks the
columns that count, and the place of the new column is a tensor. Everything else (prompts, drafts, steps with hidden
states) is computed eagerly, on the same cache.

The first step of each kind is computed both ways, because a model may read the cache differently.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.generation.utils import GenerationMixin

from genctl import compat, process
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.foreign import CompiledLayer, new_cache
from genctl.errors import ModelError

VARIANTS = 64  # compilations that one process may hold; each model needs two
_ALIKE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # difference of logits to the largest of them

Step = Callable[[Tensor, Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]], Tensor]
Eager = Callable[[Cache], Tensor]


class Compiled:
    """The compiled steps of one model. `say` receives a line for each slow step and each pass that is not compiled.

    `accepted` are the arguments of its forward, `cache_name` the one for the cache. Raises ModelError for a model whose
    steps cannot keep one shape.
    """

    def __init__(self, model: Any, accepted: frozenset[str], cache_name: str, device: torch.device) -> None:
        _check(model, accepted, cache_name)
        self.device = device
        self.say: Callable[[str], None] = logging.getLogger("genctl").warning
        self.steps = 0  # compiled steps so far
        self.failed = False
        self._tried: set[bool] = set()  # whether one row, and several rows, were compared
        self._reported: set[str] = set()
        mode = "reduce-overhead" if device.type == "cuda" else None  # "reduce-overhead" records CUDA graphs
        with calm():
            compat.raise_recompile_limit(VARIANTS)
            self._step: Step = torch.compile(_stepping(model, accepted, cache_name), mode=mode)

    def takes(self, feed: Tensor, cache: Cache, *, hidden: bool) -> bool:
        """Whether a pass over `feed` int64 [N, F] is a step that can be compiled. Reports each reason once."""
        if self.failed or not cache.is_slotted:
            return False
        if hidden:
            return self._refuse("steps that look at hidden states")
        return feed.shape[1] == 1 or self._refuse("steps that read several tokens at once")

    def step(self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, eager: Eager) -> Tensor:
        """One step: feed int64 [N, 1], mask int64 [N, T+1] or None, positions int64 [N or 1, 1] -> logits [N, 1, V].

        `eager` computes it without compiling, on the cache in its argument. If compiling fails, or gives other logits,
        this and all later steps are eager.
        """
        if positions is None:
            positions = torch.full((1, 1), cache.length, dtype=torch.long, device=feed.device)
        rows, several = feed.shape[0], feed.shape[0] > 1
        if several in self._tried:
            return self._compute(feed, cache, mask, positions)
        # compared on a copy: both ways write the new column
        index = torch.arange(rows, device=self.device)
        reference = eager(cache.select(index, room=1))
        self.say(f"compiling the step for {'several rows' if several else '1 row'} …")
        began = time.perf_counter()
        length = cache.length
        try:
            with calm():
                logits = self._compute(feed, cache, mask, positions)
        except Exception as error:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error):
                raise  # the loop handles it
            why = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:200]}"
            return self._give_up(f"compiling failed ({why})", cache, length, eager)
        if not alike(logits, reference, _ALIKE.get(logits.dtype, 5e-2)):
            return self._give_up("the compiled step gives other numbers", cache, length, eager)
        self._tried.add(several)
        self.say(f"compiled in {time.perf_counter() - began:.1f} s")
        return logits

    def _compute(self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor) -> Tensor:
        rows, length = feed.shape[0], cache.length
        buffers = cache.slots()
        capacity = buffers[0][0].shape[2]
        # built on the device, so that the host does not wait
        full_mask = torch.zeros(rows, capacity, dtype=torch.long, device=feed.device)
        full_mask[:, : length + 1] = 1 if mask is None else mask
        place = torch.full((1,), length, dtype=torch.long, device=feed.device)
        # copies, because the compiler treats a view of a larger tensor as another kind of input
        positions = positions.expand(rows, 1).clone(memory_format=torch.contiguous_format)
        feed = feed.clone(memory_format=torch.contiguous_format)
        for keys, values in buffers:
            self._mark(keys)
            self._mark(values)
        for tensor in (feed, full_mask, positions):
            compat.mark_dynamic(tensor, 0)
        compat.mark_dynamic(full_mask, 1)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch is, here
        with process.ProtectedChildren():  # another shape may have to be compiled
            logits = self._step(feed, full_mask, positions, place, buffers)
        cache.written()
        self.steps += 1
        # the next run of a CUDA graph overwrites its output
        return logits.clone() if self.device.type == "cuda" else logits

    def _mark(self, buffer: Tensor) -> None:
        """Rows and width may change; on a GPU the address does not change from step to step, so it is not copied."""
        if not compat.is_marked_dynamic(buffer):
            compat.mark_dynamic(buffer, [0, 2])
            if self.device.type == "cuda":
                compat.mark_static_address(buffer)

    def _refuse(self, reason: str) -> bool:
        if reason not in self._reported:
            self._reported.add(reason)
            self.say(f"{reason} are not compiled")
        return False

    def _give_up(self, why: str, cache: Cache, length: int, eager: Eager) -> Tensor:
        self.failed = True
        self.say(f"{why}: going on without --compile")
        cache.crop(cache.length - length)  # as it was before
        return eager(cache)


def alike(logits: Tensor, reference: Tensor, within: float) -> bool:
    """Whether logits differ by at most `within` of the largest of them, or of 1."""
    if logits.shape != reference.shape:
        return False
    if torch.equal(logits, reference):  # includes infinities
        return True
    largest = reference.float().abs().amax().clamp(min=1.0)
    difference = (logits.float() - reference.float()).abs().amax()
    return bool(difference <= within * largest)


@contextmanager
def calm() -> Iterator[None]:
    """A context without the compiler's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(model: Any, accepted: frozenset[str], cache_name: str) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"--compile is for decoders; {name} is an encoder-decoder", hint="leave out --compile")
    why = ""
    takes = {cache_name, "attention_mask"} <= accepted and compat.takes_dynamic_cache(model)
    cache = new_cache(model.config) if takes else None
    if cache is None or not any(layer.has_columns for layer in cache.layers):
        why = "keeps no cache of keys and values that could be masked"
    elif not cache.is_plain:
        why = "has layers that keep a window or a recurrent state"
    elif type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        why = "prepares what it reads in a way of its own"
    if why:
        raise ModelError(
            f"--compile needs steps of one shape, in which every layer looks back over all tokens; {name} {why}",
            hint="leave out --compile",
        )


def _stepping(model: Any, accepted: frozenset[str], cache_name: str) -> Step:
    takes_positions, takes_keep = "position_ids" in accepted, "logits_to_keep" in accepted

    def step(
        feed: Tensor, mask: Tensor, positions: Tensor, place: Tensor, buffers: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        cache = cache_utils.Cache(layers=[CompiledLayer(keys, values, place) for keys, values in buffers])
        inputs = {"input_ids": feed, "attention_mask": mask, cache_name: cache, "use_cache": True}
        if takes_positions:
            inputs["position_ids"] = positions
        if takes_keep:
            inputs["logits_to_keep"] = 1
        logits: Tensor = model(**inputs, return_dict=True).logits
        return logits

    return step
