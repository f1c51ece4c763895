"""The processors that transformers has: plain ones with the same numbers, or its own classes, under its conditions.

Each function takes a `ProcessorContext` and the value of its knob (never the one that turns it off), and returns a
processor, or None if the setting has no effect. Conditions and arguments follow
`GenerationMixin._get_logits_processor` of transformers 5.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Annotated, Any, Literal, get_type_hints

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from genctl.config.fit import Misfit, fit
from genctl.decode.processors import Processor, filters, plain, token_sequences
from genctl.decode.processors.context import ProcessorContext
from genctl.decode.processors.filters import Filter
from genctl.decode.processors.repetition import windowed
from genctl.decode.processors.synthid import SynthID
from genctl.errors import UsageError, nearest
from genctl.params import Bias, Ids, Words


def _own(name: str, *arguments: Any, **keywords: Any) -> Processor:
    """An instance of transformers' class `name`."""
    from transformers.generation import logits_process

    processor: Processor = getattr(logits_process, name)(*arguments, **keywords)
    return processor


def guidance_scale(m: ProcessorContext, scale: float) -> Processor:
    if m.unconditional is None:
        raise UsageError("guidance_scale: this strategy cannot read a second prompt, so it cannot be guided")
    unconditional = m.unconditional

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        # UnbatchedClassifierFreeGuidanceLogitsProcessor (arXiv:2306.17806), with a separate cache for the second pass
        without = unconditional(history).to(scores).log_softmax(-1)
        return scale * (scores.log_softmax(-1) - without) + without

    return processor


def sequence_bias(m: ProcessorContext, biases: list[Bias]) -> Processor:
    return _biased(m, "sequence_bias", {tuple(ids): float(bias) for ids, bias in biases})


def logit_bias(m: ProcessorContext, biases: dict[str, float]) -> Processor | None:
    return _biased(m, "logit_bias", token_sequences.bias_of(m.tokenizer, biases, m.vocab_size)) if biases else None


def _biased(m: ProcessorContext, knob: str, biases: dict[tuple[int, ...], float]) -> Processor:
    if not biases:
        raise UsageError(f"{knob}: the list is empty; expected at least one sequence of ids")
    for ids, bias in biases.items():
        _within(m, knob, ids)
        if bias != bias or bias == float("inf"):
            raise UsageError(f"{knob}: a bias must be a number or -inf, but is {bias}")
    return plain.sequence_bias(biases, m.vocab_size, m.device)


def encoder_repetition_penalty(m: ProcessorContext, penalty: float) -> Processor:
    ids = _encoder_ids(m, "encoder_repetition_penalty")
    ids = ids[:, ids[0] < m.vocab_size]  # an embedding may have more rows than there are scores
    return plain.encoder_repetition_penalty(1 / float(penalty), ids)


def repetition_penalty(m: ProcessorContext, penalty: float) -> Processor:
    return windowed(plain.repetition_penalty(float(penalty)), m.generation.penalty_last_n)


def no_repeat_ngram_size(m: ProcessorContext, size: int) -> Processor:
    return plain.no_repeat_ngram(size)


def encoder_no_repeat_ngram_size(m: ProcessorContext, size: int) -> Processor | None:
    ids = _encoder_ids(m, "encoder_no_repeat_ngram_size")
    if size > ids.shape[1]:  # there is no sequence of n tokens to repeat, and transformers would count up to n
        return None
    return _own("EncoderNoRepeatNGramLogitsProcessor", size, ids)


def bad_words_ids(m: ProcessorContext, banned: list[Ids]) -> Processor:
    return _banned(m, "bad_words_ids", [list(ids) for ids in banned])


def bad_words(m: ProcessorContext, words: Words) -> Processor | None:
    if not words:
        return None
    spelled = [list(ids) for word in words for ids in token_sequences.variants(m.tokenizer, word, "bad_words")]
    return _banned(m, "bad_words", spelled)


def _banned(m: ProcessorContext, knob: str, sequences: list[list[int]]) -> Processor:
    if not sequences:
        raise UsageError(f"{knob}: the list is empty; expected at least one sequence of ids")
    for ids in sequences:
        _within(m, knob, ids)
    barred = {tuple(ids): -float("inf") for ids in sequences if not (len(ids) == 1 and ids[0] in m.eos)}
    if not barred:
        raise UsageError(f"{knob}: it lists only EOS, which ends a text and is never removed")
    return plain.sequence_bias(barred, m.vocab_size, m.device)


def min_length(m: ProcessorContext, least: int) -> Processor | None:
    # min_new_tokens replaces min_length
    return _no_eos_below(m, least) if m.generation.min_new_tokens is None else None


def min_new_tokens(m: ProcessorContext, count: int) -> Processor | None:
    return _no_eos_below(m, m.prompt_len + count)


def _no_eos_below(m: ProcessorContext, length: int) -> Processor | None:
    return _below(length, plain.without(m.eos, m.device)) if m.eos else None


def _below(length: int, processor: Any) -> Processor:
    """`processor` for histories shorter than `length`; longer ones skip it, because it has no effect."""

    def bounded(history: Tensor, scores: Tensor) -> Tensor:
        output: Tensor = processor(history, scores) if history.shape[1] < length else scores
        return output

    return bounded


def forced_bos_token_id(m: ProcessorContext, token: int) -> Processor:
    _within(m, "forced_bos_token_id", [token])
    return _own("ForcedBOSTokenLogitsProcessor", token)


def forced_eos_token_id(m: ProcessorContext, forced: int | Ids) -> Processor:
    ids = [forced] if isinstance(forced, int) else list(forced)
    _within(m, "forced_eos_token_id", ids)
    return _own("ForcedEOSTokenLogitsProcessor", m.max_length, ids, device=m.device)


def remove_invalid_values(m: ProcessorContext, on: bool) -> Processor:
    return _own("InfNanRemoveLogitsProcessor")


def exponential_decay_length_penalty(m: ProcessorContext, decay: tuple[int, float]) -> Processor:
    eos = [token for token in m.eos if token < m.vocab_size]  # config.json may name an id that the model lacks
    if not eos:
        raise UsageError("exponential_decay_length_penalty makes EOS more likely, but there is no EOS id")
    start, factor = decay
    return plain.exponential_decay(start + m.prompt_len, float(factor), eos, m.device)


def suppress_tokens(m: ProcessorContext, ids: Ids) -> Processor:
    return plain.without(ids, m.device)


def begin_suppress_tokens(m: ProcessorContext, ids: Ids) -> Processor:
    forced = m.prompt_len == 1 and m.generation.forced_bos_token_id is not None
    at = m.prompt_len + 1 if forced else m.prompt_len  # after the forced first token
    return _below(at + 1, _own("SuppressTokensAtBeginLogitsProcessor", ids, at, device=m.device))


def temperature(m: ProcessorContext, value: float) -> Processor | None:
    """None at 0, which means greedy, and beside dynamic temperature, which takes its place."""
    return None if value == 0.0 or m.generation.dynatemp_range > 0.0 else plain.temperature(float(value))


def top_h(m: ProcessorContext, share: float) -> Processor:
    exact: Any = _own("TopHLogitsWarper", top_h=share)
    return Filter(filters.top_h(share, exact.top_n), exact)


def top_k(m: ProcessorContext, k: int) -> Processor:
    k = max(k, m.min_tokens_to_keep)
    return Filter(filters.top_k(k), plain.top_k(k))


def top_p(m: ProcessorContext, p: float) -> Processor:
    least = m.min_tokens_to_keep
    return Filter(filters.nucleus(p, least, together=m.half), plain.nucleus(p, least))


def min_p(m: ProcessorContext, p: float) -> Processor | None:
    least = m.min_tokens_to_keep
    return Filter(filters.min_p(p, least), plain.min_p(p, least)) if p else None


def typical_p(m: ProcessorContext, p: float) -> Processor:
    least = m.min_tokens_to_keep
    return Filter(filters.typical(p, least), _own("TypicalLogitsWarper", mass=p, min_tokens_to_keep=least))


def epsilon_cutoff(m: ProcessorContext, cutoff: float) -> Processor:
    least = m.min_tokens_to_keep
    exact = _own("EpsilonLogitsWarper", epsilon=cutoff, min_tokens_to_keep=least)
    return Filter(filters.epsilon(cutoff, least), exact)


def eta_cutoff(m: ProcessorContext, cutoff: float) -> Processor:
    least = m.min_tokens_to_keep
    exact = _own("EtaLogitsWarper", epsilon=cutoff, device=m.device, min_tokens_to_keep=least)
    return Filter(filters.eta(cutoff, least), exact)


def renormalize_logits(m: ProcessorContext, on: bool) -> Processor:
    return _own("LogitNormalization")


def watermarking_config(m: ProcessorContext, fields: dict[str, Any]) -> Processor:
    """WatermarkingConfig, or SynthIDTextWatermarkingConfig where `ngram_len` or `keys` are among the fields."""
    from transformers.generation import configuration_utils

    synthid = "ngram_len" in fields or "keys" in fields
    kind = configuration_utils.SynthIDTextWatermarkingConfig if synthid else configuration_utils.WatermarkingConfig
    known = inspect.signature(kind).parameters
    parameters = list(known)
    missing = [name for name, parameter in known.items() if parameter.default is parameter.empty and name not in fields]
    if missing:
        raise UsageError(f"watermarking_config: {kind.__name__} needs {' and '.join(missing)}")
    for name in fields:
        if name not in parameters:
            near = nearest(name, parameters)
            suggestion = f"did you mean {near}?" if near else f"there are {', '.join(parameters)}"
            raise UsageError(f"watermarking_config: {kind.__name__} has no field {name!r}; {suggestion}")
    _check_watermark(fields, get_type_hints(kind.__init__))
    config = kind(**fields)
    config.validate()
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


def _check_watermark(fields: dict[str, Any], hints: dict[str, Any]) -> None:
    """Raises UsageError, naming every field whose value has the wrong type or breaks a bound."""
    mistakes = []
    for name, value in fields.items():
        try:
            fit(_FIELDS.get(name, hints[name]), value)
        except Misfit as misfit:
            mistakes.append(f"watermarking_config: {name} = {value!r:.60}: {misfit}")
    if mistakes:
        raise UsageError("\n".join(mistakes))


@lru_cache(maxsize=8)
def _greenlist(vocab_size: int, device: str, fields: tuple[tuple[str, Any], ...]) -> Processor:
    """Cached, because it builds a table of a million numbers. Each call seeds its generator again."""
    return _own("WatermarkLogitsProcessor", vocab_size=vocab_size, device=torch.device(device), **dict(fields))


def _encoder_ids(m: ProcessorContext, knob: str) -> Tensor:
    ids = m.encoder_ids
    if ids is None or bool((ids < 0).any()):
        raise UsageError(f"{knob}: there are no ids of a prompt or source to compare with")
    return ids.to(m.device)


def _within(m: ProcessorContext, knob: str, ids: Any) -> None:
    if not ids:
        raise UsageError(f"{knob}: a sequence of ids is empty")
    for token in ids:
        if not 0 <= token < m.vocab_size:
            raise UsageError(f"{knob}: {token} is not one of the {m.vocab_size} ids of the vocabulary")
