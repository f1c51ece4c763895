"""The runtime of a loaded model, and notes on its cache: if it is lossy or has no effect, if it cannot be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genctl.decode.cache.layer import FULL
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
    generation, window, form = resolved.generation, forward.cut_window, resolved.generation.cache_implementation
    uses, keeps, notes = generation.use_cache, forward.abilities.supports_cache, list[str]()
    if window is not None and window.note and uses and keeps:
        notes.append(window.note)
    if forward.abilities.cache_differs:
        used = "its cache is used, as in generate()" if uses else "everything is read again"
        notes.append(f"{forward.name} computes other numbers with a cache than without: {used}")
    drafting = [knob for knob in DRAFTING if getattr(generation, knob) is not None]
    if window is not None and window.indexed and drafting and uses:
        notes.append(
            f"{drafting[0]}: beyond {window.size} tokens ({window.name}) nothing is drafted: which tokens "
            f"{forward.name} sees there depends on how many are read at once"
        )
    if not uses or form == "off":
        return notes
    if not keeps:
        return [*notes, f"{name} keeps no cache: everything is read again at every step"]
    if form == "dynamic":
        return notes
    setting = f"cache_implementation = {form} ({resolved.origins['cache_implementation']})"
    kinds = {layer.kind for layer in forward.new_cache().layers if layer.kind}
    if FULL not in kinds:  # no layer keeps all tokens, so that its form could be chosen
        kept = " and ".join(f"{kind}s" for kind in sorted(kinds, reverse=True)) or "layers of its own"
        notes.append(f"{setting} changes nothing: {name} keeps only {kept}")
    elif form == "quantized":
        notes.append(f"{setting} is lossy: keys and values have 8 bits, so the text may differ")
    elif form == "offloaded" and (where := forward.device.type) != "cuda":
        notes.append(f"{setting} has nowhere to offload to: the model is on the {where}, so it acts as dynamic")
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


def reuse_limit(forward: ModelRuntime, saved: Prefix | None) -> str:
    """Why a saved prompt may be useless for another prompt."""
    if forward.is_encoder_decoder:
        return "an encoder reads a source as a whole, so only an equal one can be reused"
    if saved is not None and saved.cache is not None and not saved.cache.is_croppable:
        return "a recurrent state cannot be cropped, so only a prompt that continues it can reuse it"
    return "the prompts have no beginning in common"
