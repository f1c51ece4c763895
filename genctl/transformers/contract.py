"""Run-time checks that a model's code uses the cache that it is called with.

The classes of transformers accept any keyword argument. After a renaming, a model silently ignores the cache: no error,
only a different text. So the cache is checked after each pass, and the scores of each loaded model once.

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

STEPS, BEGUN = 2, 3  # tokens of the comparison: STEPS read one by one, after BEGUN in one pass

# The largest difference of scores, relative to their spread (root mean squares). float32 rounds to 1e-5 of it even in
# deep models, bfloat16 to a few percent; an ignored cache or positions that do not advance change more than that.
_LIMITS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 3e-2}
_ROUNDED = 1e-1  # bfloat16, and weights of 8 bits or fewer
_REDUCED = 2e-2  # float32 multiplied in TF32, the default for convolutions on a GPU
_ROUTED = 3e-1  # experts in half precision: rounding sends some tokens to another expert


def columns(cache: Cache) -> list[int]:
    """The number of tokens in each layer that counts them, for `check_pass`."""
    return [layer.get_seq_length() for layer in cache.layers if layer.has_columns]


def check_pass(model: Any, cache: Cache, given: Any, output: Any, before: list[int], fed: int) -> None:
    """Check a pass that read `fed` tokens: the returned cache is the one passed in, and has grown by `fed` columns.

    `given` is the cache as passed to the model. Layers that never hold anything are ignored; a model may put columns
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
        if not is_new:  # the states of the previous pass came back
            raise _broken(model, "returns no state of what it has read")
    if cache.is_recurrent and not any(layer.state_dict() for layer in cache.layers if layer.is_recurrent):
        raise _broken(model, "keeps no state of what it has read")


def check_scores(forward: ModelRuntime) -> None:
    """Check a loaded model: steps on a cache must give the same scores as reading the whole text without one.

    A few tokens are read by a separate runtime; random number generators are unchanged. The scores may differ as much
    as rounding explains, given the type of the weights and the size of the scores. Recurrent states must change with
    each token. Raises ContractError.

    Nothing is compared where the two may legitimately differ, or one is impossible: a window of one token, which
    `generate()` ignores with a cache; positions or windows that depend on the text's length from this few tokens on; a
    context shorter than this; code that fails on such a text; a model without weights (on the meta device). The caller
    skips models whose cache is known to change the scores, models whose abilities were measured (see `abilities`), and
    models with forward hooks added since loading.
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
    # a token routed to another expert differs; an ignored cache makes all tokens differ
    found = float(differences.amin() if routed else differences.amax())
    if found > limit or found != found:
        raise _broken(
            forward.model,
            "computes other scores for a step on its cache than for the text read anew "
            f"(they differ by {found:.2g} of their spread, and rounding explains {limit:.2g})",
        )


def difference(steps: Tensor, anew: Tensor, ulp: float) -> Tensor:
    """The RMS difference of scores f32 [N, V] beyond one ulp of the largest score, relative to their spread: f32 [N].

    `ulp` is the distance from 1 to the next number of their type. Scores that are -inf in both are ignored; the result
    is infinite if any is -inf in only one.
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
    """The largest difference that rounding explains, the `ulp` of scores, and whether rounding may change experts."""
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
