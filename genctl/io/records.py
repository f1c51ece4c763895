"""The records of schema genctl/1: plain JSON values with their keys in a fixed order.

Equal results give equal bytes: without `timing` a record has no wall-clock values, floats are not rounded, and
non-finite numbers become null.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from genctl import events
from genctl.events.results import Result
from genctl.io.rows import SCHEMA as SCHEMA
from genctl.io.rows import InputRow


def record(
    row: InputRow,
    sequence: int,
    hypothesis: events.Hypothesis,
    *,
    prompt_text: str,
    model: str,
    strategy: str,
    seed: int | None,
    prompt_tokens: int | None,
    tokens: Sequence[events.Token] | None = None,
    timing: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    reused_tokens: int | None = None,
    prompt_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """One returned sequence of one row. `sequence` counts from 0; log-probabilities are in nats, `timing` in seconds.

    `seed` is None if nothing is sampled. `tokens` adds the per-token entries; their processors' traces have seconds
    only if there is a `timing`. `extra` is appended at the end; ValueError if it would replace a key. `reused_tokens`
    counts prompt tokens found in a prompt cache; None: no cache. `prompt_tokens` is None if a server does not report
    it. `prompt_ids` are the ids that were read, if they do not follow from `prompt_text`.
    """
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "id": row.id,
        "sequence": sequence,
        "prompt": prompt_text,
        "text": hypothesis.text,
        "token_ids": list(hypothesis.tokens),
        "finish_reason": hypothesis.reason,
        **({"stop": {"kind": hypothesis.kind, "what": hypothesis.stop}} if hypothesis.kind else {}),
        "logprob": hypothesis.logprob,
        "score": hypothesis.score,
        "strategy": strategy,
        "seed": seed if hypothesis.seed is None else hypothesis.seed,
        "model": model,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "new_tokens": None if hypothesis.text and not hypothesis.length else hypothesis.length,
        },
    }
    if row.columns:
        fields["input"] = row.columns
    if prompt_ids:
        fields["prompt_ids"] = list(prompt_ids)
    if reused_tokens is not None:
        fields["usage"]["reused_tokens"] = reused_tokens
    if hypothesis.unmet:
        fields["unmet"] = list(hypothesis.unmet)
    if hypothesis.thought is not None or hypothesis.thought_text:
        fields["thinking"] = {"tokens": hypothesis.thought, "cut": hypothesis.thought_cut}
        fields["thinking"] |= {"text": hypothesis.thought_text} if hypothesis.thought_text else {}
    if tokens is not None:
        fields["tokens"] = [token_entry(token, timing=timing is not None) for token in tokens]
    if timing is not None:
        fields["timing"] = dict(timing)
    if extra:
        if taken := sorted(extra.keys() & fields.keys()):
            raise ValueError(f"the record already has {taken[0]!r}")
        fields.update(extra)
    plain: dict[str, Any] = finite(fields)
    return plain


def result_record(
    row: InputRow,
    result: Result,
    number: int,
    *,
    hypothesis: events.Hypothesis | None = None,
    tokens: bool = False,
    load_s: float | None = None,
    extra: Mapping[str, Any],
    reused_tokens: int | None,
) -> dict[str, Any]:
    """The record of a sequence of a result, with its own `hypothesis` or another.

    `tokens` adds its tokens, `load_s` adds `timing` (load, prefill, decode); `extra` follows the remarks on the result.
    """
    sequence = result.sequences[number]
    timing = (
        {"load_s": load_s, "prefill_s": result.prefill_s, "decode_s": result.decode_s} if load_s is not None else None
    )
    return record(
        row,
        number,
        hypothesis or sequence.hypothesis,
        prompt_text=result.prompt,
        model=result.model,
        strategy=result.strategy,
        seed=result.seed,
        prompt_tokens=result.prompt_tokens or (None if result.backend else 0),
        tokens=sequence.tokens if tokens else None,
        timing=timing,
        extra={**result.remarks, **extra},
        reused_tokens=reused_tokens,
        prompt_ids=result.prompt_ids,
    )


def other_entry(hypothesis: events.Hypothesis) -> dict[str, Any]:
    """A sample that was not chosen, as an entry of `others`."""
    return {
        "text": hypothesis.text,
        "token_ids": list(hypothesis.tokens),
        "finish_reason": hypothesis.reason,
        "logprob": hypothesis.logprob,
        "score": hypothesis.score,
    }


def error_record(id: str, code: str, message: str, columns: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of a failed row, with the columns that it has."""
    input = {"input": finite(columns)} if columns else {}
    return {"schema": SCHEMA, "id": id, "error": {"code": code, "message": message}, **input}


def token_entry(token: events.Token, *, timing: bool = False) -> dict[str, Any]:
    """One entry of `tokens`; an entry of `top` is [id, text, logprob].

    `processed`, `top`, `watched` and `trace` are only present if not empty. An id that servers do not report is null.

    An entry of `watched` is [id, text, logprob, rank]. With `timing`, a trace includes seconds.
    """
    entry: dict[str, Any] = {
        "id": known_id(token.id),
        "text": token.text,
        "logprob": token.logprob,
        "rank": token.rank,
        "entropy": token.entropy,
    }
    if token.top:
        entry["top"] = [[known_id(id), text, logprob] for id, text, logprob in token.top]
    if token.processed is not None:
        entry["processed"] = token.processed
    if token.watched:
        entry["watched"] = [list(watch) for watch in token.watched]
    if token.trace:
        entry["trace"] = [dataclasses.asdict(item) for item in token.trace]
        if not timing:
            for item in entry["trace"]:
                del item["seconds"]
    plain: dict[str, Any] = finite(entry)
    return plain


def known_id(id: int) -> int | None:
    """The id of a token; None for one that a server does not report."""
    return None if id <= events.UNKNOWN_ID else id


def finding(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a command that does not generate texts. Non-finite numbers become null."""
    plain: dict[str, Any] = finite({"schema": SCHEMA, "kind": kind, **fields})
    return plain


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
