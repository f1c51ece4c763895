"""The runtime of a loaded model, and notes on its cache: if it is lossy or has no effect, if it cannot be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genctl.decode.runtime import ModelRuntime
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import DRAFTING

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.decode.types import Prefix


def runtime_of(model: Any, *, compile: bool = False) -> ModelRuntime:
    """The `ModelRuntime` of a loaded model. `compile` affects only transformers' models."""
    if isinstance(model, NativeModel):
        return NativeRuntime(model)
    from genctl.transformers.runtime import TransformersRuntime

    return TransformersRuntime(model, compile=compile)


def cache_notes(forward: ModelRuntime, name: str, resolved: Resolved) -> list[str]:
    """One sentence for each surprising effect of the cache, and of `cache_implementation`. `name`: the checkpoint's."""
    window = forward.cut_window
    effects = [*_differing(forward, resolved), *_effects(forward, name, resolved)]
    if window is None or not window.note or not resolved.generation.use_cache or not forward.abilities.supports_cache:
        return effects
    return [window.note, *effects]


def _differing(forward: ModelRuntime, resolved: Resolved) -> list[str]:
    generation = resolved.generation
    notes = []
    if forward.abilities.cache_differs:
        used = "its cache is used, as in generate()" if generation.use_cache else "everything is read again"
        notes.append(f"{forward.name} computes other numbers with a cache than without: {used}")
    window = forward.cut_window
    drafting = [name for name in DRAFTING if getattr(generation, name) is not None]
    if window is not None and window.indexed and drafting and generation.use_cache:
        notes.append(
            f"{drafting[0]}: beyond {window.size} tokens ({window.name}) nothing is drafted: which tokens "
            f"{forward.name} sees there depends on how many are read at once"
        )
    return notes


def undrafted(forward: ModelRuntime, resolved: Resolved) -> str:
    """Why nothing is drafted unless a setting names a drafter; "" if it is, in passes of plain decoding."""
    generation = resolved.generation
    if not resolved.runtime.draft:
        return "draft = false"
    if not generation.use_cache or generation.cache_implementation != "dynamic":
        return "the cache is off, or of another form than dynamic"
    if resolved.processors is not None or generation.guidance_scale not in (None, 1.0):
        return "custom processors, or guidance, see every token"
    if not forward.drafts_unasked:
        return "only native models on a CPU compute several tokens of a row as one at a time"
    return ""


def _effects(forward: ModelRuntime, name: str, resolved: Resolved) -> list[str]:
    generation = resolved.generation
    form = generation.cache_implementation
    if not generation.use_cache or form == "off":
        return []
    if not forward.abilities.supports_cache:
        return [f"{name} keeps no cache: everything is read again at every step"]
    if form == "dynamic":
        return []
    setting = f"cache_implementation = {form} ({resolved.origins['cache_implementation']})"
    if "full" not in _kinds(forward):  # no layer keeps all tokens, so that its form could be chosen
        return [f"{setting} changes nothing: {name} keeps only {_kept(forward)}"]
    if form == "quantized":
        return [f"{setting} is lossy: keys and values have 8 bits, so the text may differ"]
    if form == "offloaded" and forward.device.type != "cuda":
        where = forward.device.type
        return [f"{setting} has nowhere to offload to: the model is on the {where}, so it acts as dynamic"]
    return []


def _kinds(forward: ModelRuntime) -> set[str]:
    return {layer.kind for layer in forward.new_cache().layers if layer.kind}


def _kept(forward: ModelRuntime) -> str:
    return " and ".join(f"{kind}s" for kind in sorted(_kinds(forward), reverse=True)) or "layers of its own"


def reuse_limit(forward: ModelRuntime, saved: Prefix | None) -> str:
    """Why a saved prompt may be useless for another prompt."""
    if forward.is_encoder_decoder:
        return "an encoder reads a source as a whole, so only an equal one can be reused"
    if saved is not None and saved.cache is not None and not saved.cache.is_croppable:
        return "a recurrent state cannot be cropped, so only a prompt that continues it can reuse it"
    return "the prompts have no beginning in common"
