"""Steps that run from a record: what a model computes for one new token a row, without the Python in between.

A fifth of a step of a small decoder passes in Python, between the operations, and a third of an encoder-decoder's. So
one step is recorded, as TorchScript, and later ones run the record: the same operations by the same kernels. What
changes from step to step goes in as tensors: tokens, positions, mask, the buffers of the cache, and where in them the
new column goes.

What a record cannot know is whether Python would have taken another way. Therefore only architectures are recorded
whose steps do the same whatever they are given (`KNOWN`), every layer's attention has to pass through here, nothing but
weights may be kept in a record, and what it gives is compared with the model itself: in the step after it was made,
with several rows after one, and each time the text has doubled in length. Where it differs, it is given up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from genctl.decode import cache as caches
from genctl.decode.layers import GrowingLayer, SlidingLayer, StaticLayer
from genctl.decode.recording import Fed, Recording, full, given_to, tidied, traced, written
from genctl.decode.shared import SharedLayer

# Dense models whose attention goes through transformers' table of attention functions.
KNOWN = frozenset({
    "bart", "gemma", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "marian", "mbart", "mistral", "mt5", "olmo",
    "olmo2", "opt", "pegasus", "phi", "qwen2", "qwen3", "stablelm", "starcoder2", "t5",
})  # fmt: skip
# Making a record takes as long as it saves in 35 to 45 steps. How many follow is not known, only how many may.
SURE = 60  # steps to come from which on it is made at once
SOME, LEAST = 48, 16  # steps taken after which it is made if at least so many may follow
_OURS = ("torch.", "transformers.", "genctl.")  # adapters, quantisers and remote code are others'
_ALIKE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # difference of logits to the largest of them

Eager = Callable[[Cache], Tensor]


@dataclass
class Record:
    """One kind of step: as it was recorded, if it was."""

    taken: int = 0  # steps without a record
    run: Any = None  # the record
    failed: str = ""  # why there is none and will be none
    checked: dict[bool, int] = field(default_factory=dict)  # several rows? -> length up to which it was compared


class Recorder:
    """The records of one model. `made` counts them, `steps` those that ran from one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.records: dict[tuple[Any, ...], Record] = {}
        self.made = self.steps = 0
        self.sure = SURE
        self._hooked = False

    def begin(self) -> None:
        """Look at the model again: somebody may watch its modules, or have put in some that may be switched later."""
        self._hooked = _hooked(self.model)

    def step(self, fed: Fed, ahead: int | None, eager: Eager) -> Tensor | None:
        """Logits [N, 1, V] of one step after which at most `ahead` may follow; None where the model has to do it.

        `eager` computes the same by the model. The new column is appended to the cache, as a model does.
        """
        if self._hooked:
            return None
        kind = _kind(fed)
        if kind is None:
            return None
        record = self.records.setdefault(kind, Record())
        if record.failed:
            return None
        if record.run is None:
            record.taken += 1
            known = LEAST if ahead is None else ahead
            if known < self.sure and (record.taken < SOME or known < LEAST):
                return None
            return self._record(record, fed)
        several, length = fed.feed.shape[0] > 1, max(1, caches.length_of(fed.cache))
        if length <= record.checked.get(several, 0):
            return self._run(record, fed)
        return self._compared(record, fed, several, length, eager)

    def _record(self, record: Record, fed: Fed) -> Tensor | None:
        """Record a step while it is taken."""
        recording, run = None, None
        try:
            with calm():
                recording = Recording(self.model, fed)
                with recording.attending():
                    run = traced(recording, given_to(fed))
            record.failed = recording.why(run)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a tracer, or a model that is traced, may raise
            record.failed = f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
        if record.failed or recording is None or recording.logits is None:
            return None  # the column that may have been written lies behind the end
        record.run = tidied(run)
        self.made += 1
        written(fed)
        return recording.logits

    def _compared(self, record: Record, fed: Fed, several: bool, length: int, eager: Eager) -> Tensor:
        """A step both ways; the model's own counts."""
        before = [dict(layer.__dict__) for layer in fed.layers()]
        try:
            found = self._run(record, fed).clone()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            found, record.failed = None, str(error)
        for layer, state in zip(fed.layers(), before, strict=True):
            layer.__dict__.update(state)
        wanted = eager(fed.cache)
        if found is not None and alike(found, wanted, _ALIKE.get(wanted.dtype, 2e-2)):
            record.checked[several] = 2 * length
        else:
            record.run, record.failed = None, record.failed or "it gave other numbers"
        return wanted

    def _run(self, record: Record, fed: Fed) -> Tensor:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # it is there
            logits: Tensor = record.run(*given_to(fed))
        written(fed)
        self.steps += 1
        return logits


def recordable(model: Any) -> bool:
    """Whether a model's steps may be recorded at all: see the top of this file."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if not isinstance(model, nn.Module) or config.model_type not in KNOWN or not hasattr(torch.jit, "trace"):
        return False
    if str(model.device) != "cpu" or getattr(text, "_attn_implementation", "") != "sdpa":
        return False
    if any(tensor.requires_grad for tensor in model.parameters()):
        return False
    # angles that are chosen by the length of the text
    return not any("dynamic" in kind or "longrope" in kind for kind in _rope_types(text))


def _rope_types(config: Any) -> Iterator[str]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in (found, *found.values()):
        if isinstance(one, dict):
            yield str(one.get("rope_type", ""))


def _hooked(model: Any) -> bool:
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in module.__dict__
        or not type(module).__module__.startswith(_OURS)
        for module in model.modules()
    )


def _kind(fed: Fed) -> tuple[Any, ...] | None:
    """What two steps must have in common to run from one record; None for one that cannot."""
    if fed.feed.shape[1] != 1 or fed.feed.device.type != "cpu":
        return None
    kinds = []
    for layer in fed.layers():
        kind = type(layer)
        if kind not in (GrowingLayer, SlidingLayer, StaticLayer, SharedLayer) or not layer.is_initialized:
            return None
        if kind is SlidingLayer and layer.record_past:
            return None
        kinds.append((kind, full(layer)))
    if (SharedLayer, False) in kinds and fed.mask is not None:
        return None
    if any(type(layer) is not GrowingLayer or not layer.is_initialized for layer in fed.cross()):
        return None
    return (*kinds, len(fed.cross()), fed.mask is None, fed.source_mask is None)


def alike(found: Tensor, wanted: Tensor, within: float) -> bool:
    """Whether logits differ by at most `within` of the largest of them, or of 1."""
    if found.shape != wanted.shape:
        return False
    if torch.equal(found, wanted):  # infinite ones too
        return True
    largest = wanted.float().abs().amax().clamp(min=1.0)
    difference = (found.float() - wanted.float()).abs().amax()
    return bool(difference <= within * largest)


@contextmanager
def calm() -> Iterator[None]:
    """Without the warnings that the code of a tracer or a compiler causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
