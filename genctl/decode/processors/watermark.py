"""Watermarks of transformers: green lists, and SynthID without a state per row (Dathathri et al., Nature 634, 2024)."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_type_hints

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from genctl import compat
from genctl.config.check import Misfit, fit
from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext, own
from genctl.errors import UsageError


class SynthID:
    """transformers' SynthIDTextWatermarkLogitsProcessor as a function of the history.

    transformers stores the last tokens and the hashes of all contexts by row number, which is wrong once rows are
    reordered. Here both are computed from the new tokens, with transformers' hash and score update.
    """

    def __init__(self, processor: Any, prompt_len: int) -> None:
        self.processor, self.prompt_len = processor, prompt_len

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores f32 [R, V], log-probabilities where watermarked."""
        inner = self.processor
        scores = torch.ones_like(scores) if inner.debug_mode else scores
        width = inner.ngram_len - 1
        new = history[:, self.prompt_len :]
        count, rows = new.shape[1], new.shape[0]
        if inner.skip_first_ngram_calls and count < width:
            return scores
        # The first context is all zeros, the prompt is not part of it; then each new token enters from the right.
        contexts = torch.cat([new.new_zeros(rows, width), new], 1).unfold(1, width, 1)  # [R, count + 1, width]
        ones = torch.ones(rows * (count + 1), dtype=torch.long, device=history.device)
        hashes = inner.accumulate_hash(ones, contexts.reshape(-1, width)).view(rows, count + 1)
        ids = torch.arange(scores.shape[1], device=history.device).expand(rows, -1)
        keys, now = compat.synthid_keys(inner, contexts[:, -1], ids)
        marked = inner.update_scores(scores, inner.sample_g_values(keys))
        first = width if inner.skip_first_ngram_calls else 0
        earlier = hashes[:, first:count][:, -inner.context_history_size :]
        repeated = (earlier == now[:, None]).any(1, keepdim=True)
        if earlier.shape[1] < inner.context_history_size:
            repeated |= (now == 0)[:, None]  # transformers pads its list of hashes with zeros
        return torch.where(repeated, scores, marked)


def watermarking_config(m: ProcessorContext, fields: dict[str, Any]) -> Processor:
    """WatermarkingConfig, or SynthIDTextWatermarkingConfig where `ngram_len` or `keys` are among the fields."""
    from transformers.generation import configuration_utils

    synthid = "ngram_len" in fields or "keys" in fields
    kind = configuration_utils.SynthIDTextWatermarkingConfig if synthid else configuration_utils.WatermarkingConfig
    try:
        config = kind(**fields)
    except TypeError as error:  # "… __init__() got an unexpected keyword argument 'x'"
        raise UsageError(f"watermarking_config: {str(error).partition('() ')[2]}") from None
    hints = get_type_hints(kind.__init__) | _FIELDS
    for name, value in fields.items():
        try:
            fit(hints[name], value)
        except Misfit as misfit:
            raise UsageError(f"watermarking_config: {name} = {value!r:.60}: {misfit}") from None
    if synthid:
        return SynthID(config.construct_processor(m.vocab_size, m.device), m.prompt_len)
    if config.seeding_scheme == "selfhash" and m.vocab_size < 40:
        raise UsageError("watermarking_config: selfhash needs a vocabulary of at least 40 tokens")
    return _greenlist(m.vocab_size, str(m.device), tuple(sorted(config.to_dict().items())))


# Choices and bounds beyond the types of transformers' classes; upper bounds keep tables small enough for memory.
_FIELDS: dict[str, Any] = {
    "seeding_scheme": Literal["selfhash", "lefthash"],
    "greenlist_ratio": Annotated[float, Gt(0.0), Lt(1.0)],
    "context_width": Annotated[int, Ge(1), Le(256)],
    "ngram_len": Annotated[int, Ge(2), Le(256)],
    "context_history_size": Annotated[int, Le(1 << 20)],
    "sampling_table_size": Annotated[int, Le(1 << 24)],
}


@lru_cache(maxsize=8)
def _greenlist(vocab_size: int, device: str, fields: tuple[tuple[str, Any], ...]) -> Processor:
    """Cached, because it builds a table of a million numbers. Each call reseeds its generator."""
    return own("WatermarkLogitsProcessor", vocab_size=vocab_size, device=torch.device(device), **dict(fields))
