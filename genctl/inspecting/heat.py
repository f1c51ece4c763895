"""The norms of keys and values after the newest pass, with the tokens that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from genctl.errors import ModelError
from genctl.requests import Report, Request
from genctl.session import Session

Look: TypeAlias = tuple[int, list[dict[str, Any]], list[dict[str, Any]]]  # positions, self-attention, cross-attention


def check(session: Session) -> None:
    """Raises ModelError if no layer of this model keeps keys and values."""
    from genctl.decode import cache as caches

    name, forward = session.loaded.name, session.forward
    if not forward.supports_cache:
        raise ModelError(f"{name} keeps no cache, so --heatmap has nothing to look into")
    made = caches.self_part(forward.new_cache())
    if not any(map(caches.has_columns, made.layers)):
        raise ModelError(f"--heatmap shows keys and values, and {name} keeps none: its layers have recurrent states")


def look(session: Session) -> Look | None:
    """The norms as they are now, while a watched run waits to be read on."""
    from genctl.decode.norms import norms, watched

    cache = watched(session.forward)
    if cache is None:
        return None
    total, layers = norms(cache)
    return total, layers, norms(cache, cross=True)[1]


def heatmap(session: Session, request: Request, found: Look, tokens: Sequence[int]) -> dict[str, Any]:
    """The norms as they are reported. `tokens`: those of the first row; a prompt that was reused is put before them."""
    total, layers, cross = found
    lane = session.planner.plan(request, Report()).lane
    ids = [*lane.tokens, *tokens[len(lane.tokens) :]][:total]
    made = {**_part(session, ids, total), "layers": layers}
    if cross:
        source = list(lane.source or ())
        made["cross"] = {**_part(session, source, len(source)), "layers": cross}
    return made


def _part(session: Session, ids: Sequence[int], total: int) -> dict[str, Any]:
    from genctl.models.text import Detokenizer

    tokenizer = session.loaded.tokenizer
    words = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [f"#{id}" if words is None else words.piece(id) for id in ids]
    return {"positions": list(range(total)), "tokens": texts}
