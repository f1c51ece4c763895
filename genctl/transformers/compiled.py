"""Steps through torch.compile, with fixed shapes so that compiled or captured steps can be reused.

A step reads one token of each row. Its rows see the whole buffers of the cache, filled or not; a mask marks the
valid columns, and the index of the new column is a tensor. Everything else (prompts, drafts, steps with hidden
states) runs eagerly on the same cache. The first step with one row, and with several, is also computed eagerly.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.generation.utils import GenerationMixin

from genctl import compat, process
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.foreign import CompiledLayer, new_cache
from genctl.errors import ModelError, is_shortage

VARIANTS = 64  # torch's recompile limit for a process; each model needs two compilations
_ALIKE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # tolerance, relative to the largest logit
Eager = Callable[[Cache], Tensor]
_LEAVE_OUT = "leave out --compile"


class Compiled:
    """The compiled steps of one model. Raises ModelError for a model whose steps cannot keep one shape."""

    def __init__(self, model: Any, accepted: frozenset[str], cache_name: str, device: torch.device) -> None:
        """`accepted` are the arguments of the model's forward, `cache_name` the one for the cache."""
        if why := _unfit(model, accepted, cache_name):
            raise ModelError(f"--compile: {type(model).__name__} {why}", hint=_LEAVE_OUT)
        self.device = device
        self.report: Callable[[str], None] = logging.getLogger("genctl").warning  # receives a line for each compilation
        self.steps = 0  # compiled steps so far
        self._compared: set[bool] = set()  # one row, several rows
        mode = "reduce-overhead" if device.type == "cuda" else None  # "reduce-overhead" records CUDA graphs
        compat.raise_recompile_limit(VARIANTS)

        def step(feed: Tensor, mask: Tensor, positions: Tensor, place: Tensor, buffers: list[Any]) -> Tensor:
            cache = cache_utils.Cache(layers=[CompiledLayer(keys, values, place) for keys, values in buffers])
            more = {"position_ids": positions, "logits_to_keep": 1}
            inputs = {name: value for name, value in more.items() if name in accepted}
            inputs.update({"input_ids": feed, "attention_mask": mask, cache_name: cache, "use_cache": True})
            logits: Tensor = model(**inputs, return_dict=True).logits
            return logits

        with warnings.catch_warnings(action="ignore"):
            self._step = torch.compile(step, mode=mode)

    def step(
        self,
        feed: Tensor,
        cache: Cache,
        mask: Tensor | None,
        positions: Tensor | None,
        eager: Callable[[Cache], Tensor],
    ) -> Tensor:
        """One step: feed int64 [N, 1], mask int64 [N, T+1] or None, positions int64 [N or 1, 1] -> logits [N, 1, V].

        `eager` computes it without compiling, on the cache in its argument. Raises ModelError if compiling fails, or if
        the first compiled step of one row, or of several, gives other logits.
        """
        rows, several, reference = len(feed), len(feed) > 1, None
        if several not in self._compared:
            self.report(f"compiling the step for {'several rows' if several else '1 row'} …")
            reference = eager(cache.select(torch.arange(rows, device=self.device), room=1))
        inputs = self._inputs(feed, cache, mask, positions)
        try:
            with warnings.catch_warnings(action="ignore"), process.ProtectedChildren():
                logits: Tensor = self._step(*inputs)
        except Exception as error:
            if is_shortage(error):
                raise
            why = (str(error).strip() or "no reason given").splitlines()[0][:200]
            raise ModelError(f"--compile failed: {type(error).__name__}: {why}", hint=_LEAVE_OUT) from error
        cache.written()
        if reference is not None:
            largest = reference[reference.isfinite()].abs().max().clamp(min=1.0)
            if not torch.allclose(logits, reference, rtol=0, atol=_ALIKE.get(logits.dtype, 5e-2) * float(largest)):
                raise ModelError("--compile: the compiled step of this model gives other numbers", hint=_LEAVE_OUT)
            self._compared.add(several)
        self.steps += 1
        return logits.clone() if self.device.type == "cuda" else logits  # a CUDA graph overwrites its output

    def _inputs(self, feed: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None) -> tuple[Any, ...]:
        """The inputs of the compiled step, made on the device to avoid a synchronisation."""
        rows, length, buffers = feed.shape[0], cache.length, cache.slots()
        full_mask = torch.zeros(rows, buffers[0][0].shape[2], dtype=torch.long, device=feed.device)
        full_mask[:, : length + 1] = 1 if mask is None else mask
        place = torch.full((1,), length, dtype=torch.long, device=feed.device)
        # copies, because the compiler treats a view of a larger tensor as another kind of input
        positions = (place[None] if positions is None else positions).expand(rows, 1).clone().contiguous()
        feed = feed.clone(memory_format=torch.contiguous_format)
        for buffer in (part for pair in buffers for part in pair):  # rows and width may change, the address does not
            if not compat.is_marked_dynamic(buffer):
                compat.mark_dynamic(buffer, [0, 2])
                if self.device.type == "cuda":
                    compat.mark_static_address(buffer)
        for tensor in (feed, full_mask, positions):
            compat.mark_dynamic(tensor, 0)
        compat.mark_dynamic(full_mask, 1)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # untyped in torch
        return feed, full_mask, positions, place, buffers


def _unfit(model: Any, accepted: frozenset[str], cache_name: str) -> str:
    """Why a model's steps cannot have a fixed shape, with every layer attending to all tokens; "" if they can."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "is an encoder-decoder, and --compile is for decoders"
    takes = {cache_name, "attention_mask"} <= accepted and compat.takes_dynamic_cache(model)
    cache = new_cache(model.config) if takes else None
    if cache is None or not any(layer.has_columns for layer in cache.layers):
        return "keeps no cache of keys and values that could be masked"
    if not cache.is_plain:
        return "has layers that keep a window or a recurrent state"
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return "prepares its inputs in its own way" if own else ""
