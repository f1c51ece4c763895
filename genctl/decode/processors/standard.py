"""The processors that transformers has: plain ones with the same numbers, or its own classes, under its conditions.

Each function takes a `ProcessorContext` and returns a processor, or None if the setting has no effect. Conditions and
arguments follow `GenerationMixin._get_logits_processor` of transformers 5; `build.ORDER` follows its order.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import lru_cache
from typing import Annotated, Any, Literal, get_type_hints

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from genctl.decode.processors import filters, plain, token_sequences
from genctl.decode.processors.context import ProcessorContext
from genctl.decode.processors.filters import Filter
from genctl.decode.processors.synthid import SynthID
from genctl.decode.types import Processor
from genctl.errors import UsageError, nearest
from genctl.fit import Misfit, fit


def _classes() -> Any:
    from transformers.generation import logits_process

    return logits_process


def _processor(processor: Any) -> Processor:
    function: Processor = processor
    return function


def guidance(m: ProcessorContext) -> Processor | None:
    scale = m.generation.guidance_scale
    if scale is None or scale == 1:
        return None
    if m.unconditional is None:
        raise UsageError("guidance_scale: this strategy cannot read a second prompt, so it cannot be guided")
    unconditional = m.unconditional

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        # UnbatchedClassifierFreeGuidanceLogitsProcessor (arXiv:2306.17806), the second model's cache kept elsewhere
        without = unconditional(history).to(scores).log_softmax(-1)
        return scale * (scores.log_softmax(-1) - without) + without

    return processor


def sequence_bias(m: ProcessorContext) -> Processor | None:
    if m.generation.sequence_bias is None:
        return None
    pairs = {tuple(ids): float(bias) for ids, bias in m.generation.sequence_bias}
    return _biased(m, "sequence_bias", pairs)


def logit_bias(m: ProcessorContext) -> Processor | None:
    if not m.generation.logit_bias:
        return None
    return _biased(m, "logit_bias", token_sequences.bias_of(m.tokenizer, m.generation.logit_bias, m.vocab_size))


def _biased(m: ProcessorContext, knob: str, biases: dict[tuple[int, ...], float]) -> Processor:
    if not biases:
        raise UsageError(f"{knob}: the list is empty; expected at least one sequence of ids")
    for ids, bias in biases.items():
        _within(m, knob, ids)
        if bias != bias or bias == float("inf"):
            raise UsageError(f"{knob}: a bias must be a number or -inf, but is {bias}")
    return _processor(_classes().SequenceBiasLogitsProcessor(sequence_bias=biases))


def encoder_repetition_penalty(m: ProcessorContext) -> Processor | None:
    penalty = float(m.generation.encoder_repetition_penalty)
    if penalty == 1.0:
        return None
    ids = _encoder_ids(m, "encoder_repetition_penalty")
    ids = ids[:, ids[0] < m.vocab_size]  # an embedding may have more rows than there are scores
    return _processor(_classes().EncoderRepetitionPenaltyLogitsProcessor(penalty=penalty, encoder_input_ids=ids))


def repetition_penalty(m: ProcessorContext) -> Processor | None:
    penalty = float(m.generation.repetition_penalty)
    return None if penalty == 1.0 else plain.repetition_penalty(penalty)


def no_repeat_ngram_size(m: ProcessorContext) -> Processor | None:
    size = m.generation.no_repeat_ngram_size
    return None if size == 0 else plain.no_repeat_ngram(size)


def encoder_no_repeat_ngram_size(m: ProcessorContext) -> Processor | None:
    size = m.generation.encoder_no_repeat_ngram_size
    if size == 0:
        return None
    ids = _encoder_ids(m, "encoder_no_repeat_ngram_size")
    if size > ids.shape[1]:  # there is no sequence of n tokens to repeat, and transformers would count up to n
        return None
    return _processor(_classes().EncoderNoRepeatNGramLogitsProcessor(size, ids))


def bad_words_ids(m: ProcessorContext) -> Processor | None:
    banned = m.generation.bad_words_ids
    return None if banned is None else _banned(m, "bad_words_ids", [list(ids) for ids in banned])


def bad_words(m: ProcessorContext) -> Processor | None:
    if not m.generation.bad_words:
        return None
    spelled = [
        list(ids) for word in m.generation.bad_words for ids in token_sequences.variants(m.tokenizer, word, "bad_words")
    ]
    return _banned(m, "bad_words", spelled)


def _banned(m: ProcessorContext, knob: str, sequences: list[list[int]]) -> Processor:
    if not sequences:
        raise UsageError(f"{knob}: the list is empty; expected at least one sequence of ids")
    for ids in sequences:
        _within(m, knob, ids)
    return _processor(_classes().NoBadWordsLogitsProcessor(sequences, list(m.eos) or None))


def min_length(m: ProcessorContext) -> Processor | None:
    # min_new_tokens, once set, replaces min_length
    if m.generation.min_length == 0 or m.generation.min_new_tokens is not None or not m.eos:
        return None
    least = m.generation.min_length
    return _below(least, plain.without(m.eos, m.device))


def min_new_tokens(m: ProcessorContext) -> Processor | None:
    count = m.generation.min_new_tokens
    if not count or not m.eos:
        return None
    return _below(m.prompt_len + count, plain.without(m.eos, m.device))


def _below(length: int, processor: Any) -> Processor:
    """`processor` for histories shorter than `length`; beyond, where it has no effect, it is not called."""

    def bounded(history: Tensor, scores: Tensor) -> Tensor:
        output: Tensor = processor(history, scores) if history.shape[1] < length else scores
        return output

    return bounded


def forced_bos_token_id(m: ProcessorContext) -> Processor | None:
    token = m.generation.forced_bos_token_id
    if token is None:
        return None
    _within(m, "forced_bos_token_id", [token])
    return _processor(_classes().ForcedBOSTokenLogitsProcessor(token))


def forced_eos_token_id(m: ProcessorContext) -> Processor | None:
    forced = m.generation.forced_eos_token_id
    if forced is None:
        return None
    ids = [forced] if isinstance(forced, int) else list(forced)
    _within(m, "forced_eos_token_id", ids)
    return _processor(_classes().ForcedEOSTokenLogitsProcessor(m.max_length, ids, device=m.device))


def remove_invalid_values(m: ProcessorContext) -> Processor | None:
    return _processor(_classes().InfNanRemoveLogitsProcessor()) if m.generation.remove_invalid_values else None


def exponential_decay_length_penalty(m: ProcessorContext) -> Processor | None:
    decay = m.generation.exponential_decay_length_penalty
    if decay is None:
        return None
    if not m.eos:
        raise UsageError("exponential_decay_length_penalty makes EOS more likely, but there is no EOS id")
    start, factor = decay
    processor = _classes().ExponentialDecayLengthPenalty((start, float(factor)), list(m.eos), m.prompt_len)
    return _processor(processor)


def suppress_tokens(m: ProcessorContext) -> Processor | None:
    ids = m.generation.suppress_tokens
    return None if ids is None else plain.without(ids, m.device)


def begin_suppress_tokens(m: ProcessorContext) -> Processor | None:
    ids = m.generation.begin_suppress_tokens
    if ids is None:
        return None
    forced = m.prompt_len == 1 and m.generation.forced_bos_token_id is not None
    at = m.prompt_len + 1 if forced else m.prompt_len  # after the forced first token
    return _below(at + 1, _classes().SuppressTokensAtBeginLogitsProcessor(ids, at, device=m.device))


def temperature(m: ProcessorContext) -> Processor | None:
    """None at 0 too, which means greedy, and beside dynamic temperature, which takes its place."""
    if m.generation.temperature in (0.0, 1.0) or m.generation.dynatemp_range > 0.0:
        return None
    return plain.temperature(float(m.generation.temperature))


def top_h(m: ProcessorContext) -> Processor | None:
    share = m.generation.top_h
    if share is None:
        return None
    exact = _classes().TopHLogitsWarper(top_h=share)
    return Filter(filters.top_h(share, exact.top_n), _processor(exact))


def top_k(m: ProcessorContext) -> Processor | None:
    k, least = m.generation.top_k, m.min_tokens_to_keep
    k = 0 if k == 0 else max(k, least)
    return None if k == 0 else Filter(filters.top_k(k), plain.top_k(k))


def top_p(m: ProcessorContext) -> Processor | None:
    p, least = m.generation.top_p, m.min_tokens_to_keep
    if p >= 1.0:
        return None
    return Filter(filters.top_p(p, least, together=m.half), plain.top_p(p, least))


def min_p(m: ProcessorContext) -> Processor | None:
    p, least = m.generation.min_p, m.min_tokens_to_keep
    return None if not p else Filter(filters.min_p(p, least), plain.min_p(p, least))


def typical_p(m: ProcessorContext) -> Processor | None:
    p = m.generation.typical_p
    return None if p >= 1.0 else _filter(m, filters.typical(p, m.min_tokens_to_keep), "TypicalLogitsWarper", mass=p)


def epsilon_cutoff(m: ProcessorContext) -> Processor | None:
    cutoff = m.generation.epsilon_cutoff
    if cutoff == 0.0:
        return None
    return _filter(m, filters.epsilon(cutoff, m.min_tokens_to_keep), "EpsilonLogitsWarper", epsilon=cutoff)


def eta_cutoff(m: ProcessorContext) -> Processor | None:
    cutoff = m.generation.eta_cutoff
    if cutoff == 0.0:
        return None
    keep = filters.eta(cutoff, m.min_tokens_to_keep)
    return _filter(m, keep, "EtaLogitsWarper", epsilon=cutoff, device=m.device)


def _filter(m: ProcessorContext, keep: filters.Keep, kind: str, **arguments: Any) -> Processor:
    exact = getattr(_classes(), kind)(**arguments, min_tokens_to_keep=m.min_tokens_to_keep)
    return Filter(keep, _processor(exact))


def watermarking_config(m: ProcessorContext) -> Processor | None:
    """WatermarkingConfig, or SynthIDTextWatermarkingConfig where `ngram_len` or `keys` are among the fields."""
    fields = m.generation.watermarking_config
    if fields is None:
        return None
    from transformers.generation import configuration_utils

    synthid = "ngram_len" in fields or "keys" in fields
    kind = configuration_utils.SynthIDTextWatermarkingConfig if synthid else configuration_utils.WatermarkingConfig
    found = inspect.signature(kind).parameters
    parameters = list(found)
    missing = [name for name, parameter in found.items() if parameter.default is parameter.empty and name not in fields]
    if missing:
        raise UsageError(f"watermarking_config: {kind.__name__} needs {' and '.join(missing)}")
    for name in fields:
        if name not in parameters:
            near = nearest(name, parameters)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(parameters)}"
            raise UsageError(f"watermarking_config: {kind.__name__} has no field {name!r}; {meant}")
    _check_watermark(fields, get_type_hints(kind.__init__))
    config = kind(**fields)
    config.validate()
    if synthid:
        return SynthID(config.construct_processor(m.vocab_size, m.device), m.prompt_len)
    if config.seeding_scheme == "selfhash" and m.vocab_size < 40:
        raise UsageError("watermarking_config: selfhash needs a vocabulary of at least 40 tokens")
    return _processor(_greenlist(m.vocab_size, str(m.device), tuple(sorted(config.to_dict().items()))))


# Choices and bounds that the types of transformers' classes do not tell; the upper ones keep tables in memory.
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
def _greenlist(vocab_size: int, device: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    """Its table of a million numbers is made once, not for each prompt; a call seeds its generator anew."""
    return _classes().WatermarkLogitsProcessor(vocab_size=vocab_size, device=torch.device(device), **dict(fields))


def renormalize_logits(m: ProcessorContext) -> Processor | None:
    return _processor(_classes().LogitNormalization()) if m.generation.renormalize_logits else None


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


def changed(m: ProcessorContext, **values: Any) -> ProcessorContext:
    """The same context with other knobs."""
    return dataclasses.replace(m, generation=dataclasses.replace(m.generation, **values))
