"""What generation relies on when a model's code is called with a cache, checked while it runs.

The classes of transformers take any keyword argument. After a renaming a cache goes in and nobody reads it: no error,
only another text. So each pass is checked for what a cache shows, and each loaded model once for what it says.

N rows, F tokens fed, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from genctl import compat
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.foreign import ReturnedStatesCache
from genctl.decode.runtime import ModelRuntime
from genctl.errors import ContractError, is_shortage
from genctl.models.packed_layers import weights
from genctl.transformers.abilities import FAILURES, Probe

STEPS, BEGUN = 2, 3  # tokens of the comparison: read one by one, after so many in one pass

# The largest difference of scores, as a share of their spread (root mean squares). float32 rounds to 1e-5 of it even in
# deep models, bfloat16 to some percent; a cache that is not read, or positions that stand still, change more than that.
_LIMITS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 3e-2}
_ROUNDED = 1e-1  # bfloat16, and weights of 8 bits and fewer
_REDUCED = 2e-2  # float32 that is multiplied in TF32, which is the rule in a GPU's convolutions
_ROUTED = 3e-1  # experts in half precision: rounding sends some tokens to another expert


def columns(cache: Cache) -> list[int]:
    """The tokens in each layer that counts them, to be given to `check_pass`."""
    return [layer.get_seq_length() for layer in cache.layers if layer.has_columns]


def check_pass(model: Any, cache: Cache, given: Any, output: Any, before: list[int], fed: int) -> None:
    """Check a pass that read `fed` tokens: the cache that came back is the one that went in, and has grown by them.

    `given` is the cache as the model received it. Layers that never hold anything do not count; a model may put columns
    of its own before a text. Raises ContractError.
    """
    returned = compat.returned_cache(output)
    if returned is not None and returned is not given:
        raise _broken(model, "returns another cache than the one that it was given")
    pairs = [(old, new) for old, new in zip(before, columns(cache), strict=True) if new or old]
    if before and not pairs:
        raise _broken(model, f"keeps nothing in its cache: {fed} tokens were read, and it is empty")
    for old, new in pairs:
        if new - old != fed and (old or new < fed):
            raise _broken(model, f"does not keep what it reads in its cache, which went from {old} to {new} tokens "
                                 f"when {fed} were read")  # fmt: skip
    if isinstance(cache, ReturnedStatesCache):
        states, is_new = cache.for_model, cache.for_model is not None
        if isinstance(states, (list, tuple)) and isinstance(given, (list, tuple)):
            is_new = all(new is not old for new, old in zip(states, given, strict=False))
        if not is_new:  # others than those of the pass before
            raise _broken(model, "returns no state of what it has read")
    if cache.is_recurrent and not any(layer.state_dict() for layer in cache.layers if layer.is_recurrent):
        raise _broken(model, "keeps no state of what it has read")


def check_scores(forward: ModelRuntime) -> None:
    """Check a loaded model: a text that is read step by step on a cache gets the scores of the text read anew.

    A few tokens are read, by a runtime of their own; no generator of random numbers moves. The difference may be what
    rounding explains: by the type of the weights, and by the size of the scores. Recurrent states must change with each
    token. Raises ContractError.

    Nothing is compared where the two ways may differ, or one of them does not exist: a window of one token, which
    `generate()` ignores with a cache; positions or windows that depend on the length of a text from so few tokens on; a
    context that is shorter; code that fails on such a text; a model without numbers (on the meta device). The caller
    leaves out models whose cache changes what they say, those that were measured before (see `abilities`), and the
    passes that somebody watches by hooks.
    """
    if not _comparable(forward):
        return
    devices = [forward.device] if forward.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            steps, anew, moved = Probe(forward).continued(BEGUN, STEPS)
        except FAILURES as error:
            if is_shortage(error):
                raise
            return
    if not moved:
        raise _broken(forward.model, "does not change its recurrent states when it reads a token")
    limit, ulp, routed = _rounding(forward.model)
    differences = difference(steps, anew, ulp)
    # a token that goes to another expert differs; a cache that is not read makes all of them differ
    found = float(differences.amin() if routed else differences.amax())
    if found > limit or found != found:
        raise _broken(
            forward.model,
            "computes other scores for a step on its cache than for the text read anew "
            f"(they differ by {found:.2g} of their spread, and rounding explains {limit:.2g})",
        )


def difference(steps: Tensor, anew: Tensor, ulp: float) -> Tensor:
    """By how much scores f32 [N, V] differ beyond the last digit of the largest, as a share of their spread: f32 [N].

    `ulp` is the distance from 1 to the next number of their type. Scores that both forbid (-inf) do not count; infinite
    where only one does.
    """
    finite = anew.isfinite()
    if not bool((finite == steps.isfinite()).all()):
        return torch.full((len(anew),), float("inf"))
    steps, anew = torch.where(finite, steps, 0.0), torch.where(finite, anew, 0.0)
    off = ((steps - anew).abs() - anew.abs().amax(-1, keepdim=True) * ulp).clamp(min=0)
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    from_mean = torch.where(finite, anew - anew.sum(-1, keepdim=True) / count, 0.0)
    spread = (from_mean.square().sum(-1) / count[:, 0]).sqrt()
    return off.square().mean(-1).sqrt() / spread.clamp(min=1e-6)


def _comparable(forward: ModelRuntime) -> bool:
    context = getattr(forward.config.get_text_config(decoder=True), "max_position_embeddings", None)
    windows = [getattr(layer.for_model, "sliding_window", None) for layer in forward.new_cache().layers]
    few = STEPS + BEGUN
    return (
        forward.model.device.type != "meta"
        and forward.bound >= few
        and not (isinstance(context, int) and 0 < context < few)
        and 1 not in windows
    )


def _rounding(model: nn.Module) -> tuple[float, float, bool]:
    """The largest difference that rounding explains, the `ulp` of scores, and whether it may choose other experts."""
    config: Any = model.config
    device: Any = model.device
    types = {tensor.dtype for tensor in weights(model)}
    floats = [dtype for dtype in types if dtype.is_floating_point and dtype.itemsize > 1]
    limit = max((_LIMITS.get(dtype, _ROUNDED) for dtype in floats), default=_ROUNDED)
    if getattr(config, "quantization_config", None) is not None or len(floats) < len(types):
        limit = _ROUNDED
    elif device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        limit = max(limit, _REDUCED)
    ulp = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
    routed = limit > _REDUCED and _has_experts(config.to_dict())
    return (_ROUTED if routed else limit), ulp, routed


def _has_experts(fields: dict[str, Any]) -> bool:
    return any(
        _has_experts(value) if isinstance(value, dict) else "expert" in str(key) and type(value) is int and value > 1
        for key, value in fields.items()
    )


def _broken(model: Any, what: str) -> ContractError:
    tested = compat.TESTED_TRANSFORMERS
    return ContractError(
        f"{type(model).__name__} of transformers {compat.version('transformers')} {what}: its texts would be wrong",
        hint=f"use_cache = false reads the whole text at each step; tested are transformers {' and '.join(tested)}",
    )
