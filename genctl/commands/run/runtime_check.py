"""Compare the native runtime with transformers' classes: one checkpoint, the same tokens, the difference of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from genctl.decode.encoder_inputs import Sources
from genctl.decode.runtime import ModelRuntime
from genctl.engines.local.session import Session
from genctl.engines.requests import Report, Request
from genctl.errors import UsageError
from genctl.models import hub
from genctl.plural import count

STEPS = 16
# of the largest logit; float32 sums in another order differ by about 1e-6, 16-bit numbers are rounded at every layer
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Comparison:
    """The result for one prompt and the steps after it."""

    difference: float  # the largest of any two logits
    largest: float  # of transformers' logits
    prompt: int  # tokens
    steps: int
    close: bool
    source: int = 0  # tokens that an encoder read

    def __str__(self) -> str:
        share = self.difference / self.largest
        source, prompt = count(self.source, "token"), count(self.prompt, "token")
        read = f"a source of {source}" if self.source else f"a prompt of {prompt}"
        return (
            f"largest difference of logits to transformers: {self.difference:.1e} ({share:.1e} of the largest logit), "
            f"over {read} and {count(self.steps, 'step')}"
        )


def compare(session: Session, request: Request, *, steps: int = STEPS) -> Comparison:
    """Feed a request's prompt and the greedy tokens after it to both runtimes. The checkpoint is loaded again.

    Raises UsageError if the run is not native, or quantised.
    """
    native = session.forward
    if native.kind != "native":
        chosen = session.planner.runtime.runtime == "transformers"
        raise UsageError(
            f"--check-runtime compares the native runtime with transformers' classes, which run {native.name}",
            hint="leave out --runtime transformers" if chosen else "-v says why it does not run natively",
        )
    if session.planner.runtime.quantize is not None:
        problem = f"--check-runtime and --quantize {session.planner.runtime.quantize} contradict each other"
        raise UsageError(f"{problem}: rounded weights have other logits")
    lane = session.planner.plan(request, Report()).lane
    runtime = replace(session.planner.runtime, runtime="transformers", pack=False)
    loaded = hub.load(runtime, need_tokenizer=False, **session.planner.flags)
    from genctl.transformers.runtime import (
        TransformersRuntime,  # loads transformers' classes
    )

    reference_runtime = TransformersRuntime(loaded.model)
    feed = torch.tensor([list(lane.tokens)], device=native.device)
    context = session.planner.context
    count = steps if context is None else max(0, min(steps, context - len(lane.tokens)))
    both: tuple[ModelRuntime, ModelRuntime] = (native, reference_runtime)
    held = [forward.new_cache() for forward in both]
    sources: list[Sources | None] = [None, None]
    if lane.source is not None:
        sources = [Sources(forward.encode(lane.source).states, None, None) for forward in both]
    difference = largest = 0.0
    for step in range(count + 1):
        pair = zip(both, held, sources, strict=True)
        logits, reference = (
            forward(feed, cache, sources=read, first=step == 0).logits for forward, cache, read in pair
        )
        difference = max(difference, float((logits - reference).abs().max()))
        largest = max(largest, float(reference.abs().max()))
        if step == 0:  # the same steps as a run
            for forward, cache in zip(both, held, strict=True):
                forward.prepare(cache)
        feed = reference[:, -1].argmax(-1, keepdim=True)
    close = difference <= CLOSE.get(native.dtype, 1e-4) * largest
    return Comparison(difference, largest, len(lane.tokens), count, close, len(lane.source or ()))
