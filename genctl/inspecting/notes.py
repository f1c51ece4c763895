"""Notes on the chosen cache: where it is lossy, where it has no effect, and what of a saved prompt was reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from genctl import events

if TYPE_CHECKING:
    from genctl.config.layers import Resolved
    from genctl.session import Session


_DRAFTING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def cache_notes(session: Session, resolved: Resolved) -> list[str]:
    """One sentence for each surprising effect of the cache, and of `cache_implementation`."""
    window = session.forward.cut_window
    effects = [*_differing(session, resolved), *_effects(session, resolved)]
    if window is None or not window.note or not resolved.generation.use_cache or not session.forward.supports_cache:
        return effects
    return [window.note, *effects]


def _differing(session: Session, resolved: Resolved) -> list[str]:
    forward, generation = session.forward, resolved.generation
    found = []
    if forward.cache_differs:
        used = "its cache is used, as in generate()" if generation.use_cache else "everything is read again"
        found.append(f"{forward.name} computes other numbers with a cache than without: {used}")
    window = forward.cut_window
    drafting = [name for name in _DRAFTING if getattr(generation, name) is not None]
    if window is not None and window.indexed and drafting and generation.use_cache:
        found.append(
            f"{drafting[0]}: beyond {window.size} tokens ({window.name}) nothing is drafted: which tokens "
            f"{forward.name} sees there depends on how many are read at once"
        )
    return found


def _effects(session: Session, resolved: Resolved) -> list[str]:
    generation = resolved.generation
    form = generation.cache_implementation
    name = session.loaded.name
    if not generation.use_cache or form == "off":
        return []
    if not session.forward.supports_cache:
        return [f"{name} keeps no cache: everything is read again at every step"]
    if form == "dynamic":
        return []
    setting = f"cache_implementation = {form} ({resolved.origins['cache_implementation']})"
    if not _grows(session):
        return [f"{setting} changes nothing: {name} keeps only {_kept(session)}"]
    if form == "quantized":
        return [f"{setting} is lossy: keys and values are kept in 8 bits, so the text may come out differently"]
    if form == "offloaded" and session.forward.device.type != "cuda":
        where = session.forward.device.type
        return [f"{setting} has nowhere to offload to: the model is on the {where}, so it acts as dynamic"]
    return []


def _kinds(session: Session) -> set[str]:
    return {layer.kind for layer in session.forward.new_cache().layers if layer.kind}


def _grows(session: Session) -> bool:
    """Whether any layer keeps all tokens, so that its form can be chosen."""
    return "full" in _kinds(session)


def _kept(session: Session) -> str:
    return " and ".join(f"{kind}s" for kind in sorted(_kinds(session), reverse=True)) or "layers of its own"


def reuse_limit(session: Session) -> str:
    """Why a saved prompt may be useless for another prompt."""
    if session.forward.is_encoder_decoder:
        return "an encoder reads a source as a whole, so only an equal one can be reused"
    if session.saved is not None and session.saved.cache is not None and not session.saved.cache.is_croppable:
        return "a recurrent state cannot be cut back, so only a prompt that goes on where it ends can reuse it"
    return "the prompts have no beginning in common"


@dataclass
class Reuse:
    """Counts the prompt tokens that `--prompt-cache` saved. A listener of events; without `path` it says nothing."""

    path: str | None
    prompts: int = 0
    tokens: int = 0
    reused: int = 0
    useless: int = 0  # prompts for which nothing could be reused

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if self.path is None or not isinstance(event, events.Prefilled) or event.shared:
            return
        self.prompts += 1
        self.tokens += event.prompt_tokens
        self.reused += event.reused
        self.useless += not event.reused

    def notes(self, session: Session, *, verbose: bool) -> list[str]:
        """Notes for the end of a run: always where nothing was reused, with `verbose` also how much was.

        `verbose` adds what was found out about the model.
        """
        return [*(session.forward.findings if verbose else ()), *self.lines(reuse_limit(session), verbose=verbose)]

    def lines(self, limit: str, *, verbose: bool) -> list[str]:
        """The same without what was found out about the model. `limit` is its `reuse_limit`."""
        lines = []
        if self.useless:
            what = "nothing" if self.prompts == 1 else f"for {self.useless} of {self.prompts} prompts nothing"
            lines.append(f"{what} of the prompt cache {self.path} could be reused: {limit}")
        if verbose and self.prompts:
            lines.append(f"reused {self.reused} of {self.tokens} prompt token{'' if self.tokens == 1 else 's'}")
        return lines
