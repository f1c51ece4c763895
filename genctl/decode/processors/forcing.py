"""Tokens that are barred or forced: bad words, a minimum length, suppressed ids, a forced first and last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext, own, within
from genctl.errors import UsageError
from genctl.params import Ids, Words

OUT = -float("inf")


def bad_words_ids(m: ProcessorContext, banned: list[Ids]) -> Processor:
    return _banned(m, "bad_words_ids", [list(ids) for ids in banned])


def bad_words(m: ProcessorContext, words: Words) -> Processor | None:
    from genctl.decode.processors import token_sequences

    if not words:
        return None
    spelled = [list(ids) for word in words for ids in token_sequences.variants(m.tokenizer, word, "bad_words")]
    return _banned(m, "bad_words", spelled)


def _banned(m: ProcessorContext, knob: str, sequences: list[list[int]]) -> Processor:
    from genctl.decode.processors.penalties import checked_bias

    barred = {tuple(ids): OUT for ids in sequences if not (len(ids) == 1 and ids[0] in m.eos)}
    if sequences and not barred:
        raise UsageError(f"{knob}: it lists only EOS, which ends a text and is never removed")
    return checked_bias(m, knob, barred)


def min_length(m: ProcessorContext, least: int) -> Processor | None:
    return min_new_tokens(m, least - m.prompt_len) if m.generation.min_new_tokens is None else None  # it replaces this


def min_new_tokens(m: ProcessorContext, count: int) -> Processor | None:
    return _below(m.prompt_len + count, without(m.eos, m.device)) if m.eos else None


def _below(length: int, processor: Processor) -> Processor:
    """`processor` for histories shorter than `length`; others skip it, because it has no effect on them."""
    return lambda history, scores: processor(history, scores) if history.shape[1] < length else scores


def forced_bos_token_id(m: ProcessorContext, token: int) -> Processor:
    within(m, "forced_bos_token_id", [token])
    return own("ForcedBOSTokenLogitsProcessor", token)


def forced_eos_token_id(m: ProcessorContext, forced: int | Ids) -> Processor:
    ids = [forced] if isinstance(forced, int) else list(forced)
    within(m, "forced_eos_token_id", ids)
    return own("ForcedEOSTokenLogitsProcessor", m.max_length, ids, device=m.device)


def suppress_tokens(m: ProcessorContext, ids: Ids) -> Processor:
    return without(ids, m.device)


def begin_suppress_tokens(m: ProcessorContext, ids: Ids) -> Processor:
    forced = m.prompt_len == 1 and m.generation.forced_bos_token_id is not None
    at = m.prompt_len + 1 if forced else m.prompt_len  # after the forced first token
    return _below(at + 1, own("SuppressTokensAtBeginLogitsProcessor", ids, at, device=m.device))


def without(ids: Sequence[int], device: torch.device | str) -> Processor:
    """Remove these tokens."""
    barred = torch.tensor(list(ids), device=device)

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        out = torch.isin(torch.arange(scores.shape[-1], device=scores.device), barred)
        return torch.where(out, OUT, scores)

    return processor
