"""What is worth telling of the cache that was asked for: where it loses something, and where it changes nothing."""

from __future__ import annotations

from genctl.config.layers import Resolved
from genctl.session import Session


def cache_notes(session: Session, resolved: Resolved) -> list[str]:
    """One sentence for each thing about `cache_implementation` that its name does not say."""
    generation = resolved.generation
    form = generation.cache_implementation
    name = session.loaded.name
    if not generation.use_cache or form == "off":
        return []
    if not session.forward.supports_cache:
        return [f"{name} keeps no cache: everything is read again at every step"]
    if form == "dynamic":
        return []
    said = f"cache_implementation = {form} ({resolved.origins['cache_implementation']})"
    if not _grows(session):
        return [f"{said} changes nothing: {name} keeps only {_kept(session)}"]
    if form == "quantized":
        return [f"{said} is lossy: keys and values are kept in 8 bits, so the text may come out differently"]
    if form == "offloaded" and session.forward.device.type != "cuda":
        where = session.forward.device.type
        return [f"{said} has nowhere to offload to: the model is on the {where}, so it acts as dynamic"]
    return []


def _kinds(session: Session) -> set[str]:
    from genctl.decode import cache as caches
    from genctl.decode.layers import GrowingLayer, SlidingLayer

    made = caches.self_part(session.forward.new_cache())
    found = set()
    for layer in made.layers:
        if isinstance(layer, SlidingLayer):
            found.add("sliding windows")
        elif isinstance(layer, GrowingLayer):
            found.add("full")
        elif hasattr(layer, "recurrent_states"):
            found.add("recurrent states")
    return found


def _grows(session: Session) -> bool:
    """Whether any layer keeps all tokens, in a form that can be chosen."""
    return "full" in _kinds(session)


def _kept(session: Session) -> str:
    return " and ".join(sorted(_kinds(session), reverse=True)) or "layers of its own"


def reuse_limit(session: Session) -> str:
    """Why a saved prompt may be of no use to another one."""
    from genctl.decode import cache as caches

    if session.forward.is_encoder_decoder:
        return "an encoder reads a source as a whole, so only an equal one can be reused"
    if session.saved is not None and not caches.croppable(session.saved.cache):
        return "a recurrent state cannot be cut back, so only a prompt that goes on where it ends can reuse it"
    return "the prompts have no beginning in common"
