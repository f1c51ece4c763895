"""The norms of keys and values after the newest pass, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from genctl.engines.local.session import Session
from genctl.engines.requests import Report, Request
from genctl.errors import ModelError

CacheNorms: TypeAlias = tuple[
    int, list[dict[str, Any]], list[dict[str, Any]]
]  # positions, self-attention, cross-attention


def check(session: Session) -> None:
    """Raises ModelError if no layer of this model keeps keys and values."""
    name, forward = session.loaded.name, session.forward
    if not forward.abilities.supports_cache:
        raise ModelError(f"{name} keeps no cache, so --heatmap has nothing to look into")
    if not any(layer.has_columns for layer in forward.new_cache().layers):
        raise ModelError(f"--heatmap shows keys and values, and {name} keeps none: its layers have recurrent states")


def current_norms(session: Session) -> CacheNorms | None:
    """The norms at this moment of an observed run."""
    from genctl.decode.cache_norms import norms, observed_cache

    cache = observed_cache(session.forward)
    if cache is None:
        return None
    total, layers = norms(cache)
    return total, layers, norms(cache, cross=True)[1]


def heatmap(session: Session, request: Request, norms: CacheNorms, tokens: Sequence[int]) -> dict[str, Any]:
    """The report of the norms. `tokens` are those of the first row; a reused prompt is put before them."""
    total, layers, cross = norms
    lane = session.planner.plan(request, Report()).lane
    ids = [*lane.tokens, *tokens[len(lane.tokens) :]][:total]
    report = {**_part(session, ids, total), "layers": layers}
    if cross:
        source = list(lane.source or ())
        report["cross"] = {**_part(session, source, len(source)), "layers": cross}
    return report


def _part(session: Session, ids: Sequence[int], total: int) -> dict[str, Any]:
    from genctl.models.text import Detokenizer

    tokenizer = session.loaded.tokenizer
    words = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [f"#{id}" if words is None else words.piece(id) for id in ids]
    return {"positions": list(range(total)), "tokens": texts}
