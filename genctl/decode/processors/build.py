"""From knobs to processors, in the order of `listed_knobs.PROCESSORS`.

By default the order is that of transformers. Processors that transformers lacks stand where other tools put them:
biases and penalties among the penalties, before any filter (llama.cpp's `logit_bias`, `penalties` and `dry` come first;
so do text-generation-webui's); top-n-sigma before temperature (both); dynamic temperature in the place of temperature;
XTC after the filters (both); mirostat last, since it must see the distribution that is sampled.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from genctl.config.listed_knobs import PROCESSORS
from genctl.config.plugins import make as make_plugin
from genctl.config.plugins import one_line
from genctl.decode.processors import Processor, filters, grammar, repetition, samplers, standard, token_sequences
from genctl.decode.processors import required_prefix as prefix
from genctl.decode.processors.context import NamedProcessor, ProcessorContext
from genctl.decode.processors.mirostat import Mirostat
from genctl.errors import GenctlError, UsageError
from genctl.params import Generation, knobs

__all__ = ["NAMES", "ORDER", "NamedProcessor", "ProcessorContext", "ProcessorEntry", "build", "unlisted"]


# (context, value of the first knob) -> processor; None if the setting has no effect.
Make: TypeAlias = Callable[[ProcessorContext, Any], Processor | None]


@dataclass(frozen=True)
class Maker:
    """The constructor of a processor."""

    make: Make
    source: str  # the transformers class, or the paper or tool it was taken from
    of_scores: bool = False  # it depends on scores alone: lanes with equal knobs may share one call


@dataclass(frozen=True)
class ProcessorEntry:
    """One processor: its knobs and its constructor."""

    name: str
    knobs: tuple[str, ...]  # the first one turns it on
    make: Make
    source: str
    of_scores: bool

    @property
    def sampling(self) -> bool:
        """Whether it acts only when tokens are drawn (transformers' warpers)."""
        return bool(knobs()[self.knobs[0]].metadata["sampling"])


def _presence(m: ProcessorContext, penalty: float) -> Processor:
    return repetition.presence_penalty(penalty, m.prompt_len)


def _frequency(m: ProcessorContext, penalty: float) -> Processor:
    return repetition.frequency_penalty(penalty, m.prompt_len)


def _dry(m: ProcessorContext, multiplier: float) -> Processor:
    g, knob = m.generation, "dry_sequence_breakers"
    sequences = {ids for text in g.dry_sequence_breakers for ids in token_sequences.containing(m.tokenizer, text, knob)}
    breakers, phrases = repetition.as_ids(sequences)
    return repetition.dry(multiplier, g.dry_base, g.dry_allowed_length, breakers, phrases)


def _top_n_sigma(m: ProcessorContext, n: float) -> Processor:
    least = m.min_tokens_to_keep
    return filters.Filter(filters.top_n_sigma(n, least), samplers.top_n_sigma(n, least))


def _dynatemp(m: ProcessorContext, spread: float) -> Processor:
    return samplers.dynamic_temperature(m.generation.temperature, spread, m.generation.dynatemp_exponent)


def _xtc(m: ProcessorContext, probability: float) -> Processor:
    return samplers.exclude_top_choices(probability, m.generation.xtc_threshold, m.seed, m.min_tokens_to_keep)


def _mirostat(m: ProcessorContext, tau: float) -> Processor:
    return Mirostat(tau, m.generation.mirostat_eta, m.prompt_len, m.min_tokens_to_keep)


def _grammar(knob: str) -> Make:
    return lambda m, value: grammar.constraint(m, knob)


MAKERS: dict[str, Maker] = {
    "guidance_scale": Maker(standard.guidance, "as UnbatchedClassifierFreeGuidanceLogitsProcessor, arXiv:2306.17806"),
    "sequence_bias": Maker(standard.sequence_bias, "SequenceBiasLogitsProcessor"),
    "logit_bias": Maker(standard.logit_bias, "OpenAI API, llama.cpp"),
    "encoder_repetition_penalty": Maker(standard.encoder_repetition_penalty, "EncoderRepetitionPenaltyLogitsProcessor"),
    "repetition_penalty": Maker(standard.repetition_penalty, "RepetitionPenaltyLogitsProcessor"),
    "presence_penalty": Maker(_presence, "OpenAI API, vLLM"),
    "frequency_penalty": Maker(_frequency, "OpenAI API, vLLM"),
    "dry": Maker(_dry, "oobabooga/text-generation-webui#5677"),
    "no_repeat_ngram_size": Maker(standard.no_repeat_ngram_size, "NoRepeatNGramLogitsProcessor"),
    "encoder_no_repeat_ngram_size": Maker(standard.encoder_no_repeat_ngram_size, "EncoderNoRepeatNGramLogitsProcessor"),
    "bad_words_ids": Maker(standard.bad_words_ids, "NoBadWordsLogitsProcessor"),
    "bad_words": Maker(standard.bad_words, "NoBadWordsLogitsProcessor, on text"),
    "min_length": Maker(standard.min_length, "MinLengthLogitsProcessor"),
    "min_new_tokens": Maker(standard.min_new_tokens, "MinNewTokensLengthLogitsProcessor"),
    "forced_bos_token_id": Maker(standard.forced_bos_token_id, "ForcedBOSTokenLogitsProcessor"),
    "forced_eos_token_id": Maker(standard.forced_eos_token_id, "ForcedEOSTokenLogitsProcessor"),
    "remove_invalid_values": Maker(standard.remove_invalid_values, "InfNanRemoveLogitsProcessor", of_scores=True),
    "exponential_decay_length_penalty": Maker(
        standard.exponential_decay_length_penalty, "ExponentialDecayLengthPenalty"
    ),
    "suppress_tokens": Maker(standard.suppress_tokens, "SuppressTokensLogitsProcessor", of_scores=True),
    "begin_suppress_tokens": Maker(standard.begin_suppress_tokens, "SuppressTokensAtBeginLogitsProcessor"),
    "json_schema": Maker(_grammar("json_schema"), "llguidance"),
    "regex": Maker(_grammar("regex"), "llguidance"),
    "grammar": Maker(_grammar("grammar"), "llguidance"),
    "prefix": Maker(lambda m, text: prefix.prefix(m), "bytes of the vocabulary"),
    "top_n_sigma": Maker(_top_n_sigma, "arXiv:2411.07641", of_scores=True),
    "temperature": Maker(standard.temperature, "TemperatureLogitsWarper", of_scores=True),
    "dynatemp": Maker(_dynatemp, "llama.cpp temp_ext", of_scores=True),
    "top_h": Maker(standard.top_h, "TopHLogitsWarper, arXiv:2509.02510", of_scores=True),
    "top_k": Maker(standard.top_k, "TopKLogitsWarper", of_scores=True),
    "top_p": Maker(standard.top_p, "TopPLogitsWarper, arXiv:1904.09751", of_scores=True),
    "min_p": Maker(standard.min_p, "MinPLogitsWarper, arXiv:2407.01082", of_scores=True),
    "typical_p": Maker(standard.typical_p, "TypicalLogitsWarper, arXiv:2202.00666", of_scores=True),
    "epsilon_cutoff": Maker(standard.epsilon_cutoff, "EpsilonLogitsWarper, arXiv:2210.15191", of_scores=True),
    "eta_cutoff": Maker(standard.eta_cutoff, "EtaLogitsWarper, arXiv:2210.15191", of_scores=True),
    "xtc": Maker(_xtc, "oobabooga/text-generation-webui#6335"),
    "mirostat": Maker(_mirostat, "arXiv:2007.14966, version 2 as in llama.cpp"),
    "watermarking_config": Maker(
        standard.watermarking_config,
        "WatermarkLogitsProcessor, SynthIDTextWatermarkLogitsProcessor",
    ),
    "renormalize_logits": Maker(standard.renormalize_logits, "LogitNormalization", of_scores=True),
}

if PROCESSORS.keys() != MAKERS.keys():
    only = ", ".join(sorted(PROCESSORS.keys() ^ MAKERS.keys()))
    raise RuntimeError(f"a processor has a row in listed_knobs.PROCESSORS and one in build.MAKERS, but not {only}")

ORDER: tuple[ProcessorEntry, ...] = tuple(
    ProcessorEntry(name, names, maker.make, maker.source, maker.of_scores)
    for name, names in PROCESSORS.items()
    for maker in (MAKERS[name],)
)

NAMES: dict[str, ProcessorEntry] = {entry.name: entry for entry in ORDER}


def build(context: ProcessorContext) -> tuple[NamedProcessor, ...]:
    """The processors of the knobs, in the order of `ORDER`; those for sampling only when sampling.

    With `context.explicit`, the processors of the list in its order and no others: each entry is
    `{"use": NAME, KNOB: VALUE, …}` with knobs of that processor (others keep the value of `context.generation`), or
    a user's own. `config` has checked names, keys and values. A listed processor acts in every mode. Processors whose
    settings have no effect are left out.

    Raises UsageError if a processor cannot be built.
    """
    _finite(context.generation)
    if context.explicit is not None:
        return tuple(processor for processor in _explicit(context.explicit, context) if processor is not None)
    made = (_make(entry, context) for entry in ORDER if context.sampling or not entry.sampling)
    return tuple(processor for processor in made if processor is not None)


def unlisted(context: ProcessorContext) -> tuple[str, ...]:
    """Processors that the knobs enable but an explicit list does not name.

    A knob at its default (transformers' top_k = 50) does not count.
    """
    if context.explicit is None:
        return ()
    listed = {entry.get("use") for entry in context.explicit}
    default = Generation()
    return tuple(
        made.name
        for made in build(dataclasses.replace(context, explicit=None))
        if made.name not in listed and any(value != getattr(default, knob) for knob, value in made.settings.items())
    )


def _make(entry: ProcessorEntry, context: ProcessorContext) -> NamedProcessor | None:
    value = getattr(context.generation, entry.knobs[0])
    off = value is None or value == knobs()[entry.knobs[0]].metadata["neutral"]
    if off and not (entry.name == "prefix" and context.healed):  # a healed prompt requires a prefix without the knob
        return None
    try:
        function = entry.make(context, value)
    except GenctlError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # raised by transformers' constructors
        raise UsageError(f"{entry.name}: {one_line(error)}") from error
    if function is None:
        return None
    settings = {name: getattr(context.generation, name) for name in entry.knobs}
    key = (entry.name, repr(settings)) if entry.of_scores else None
    return NamedProcessor(entry.name, function, settings, key=key)


def _explicit(items: tuple[dict[str, Any], ...], context: ProcessorContext) -> Iterator[NamedProcessor | None]:
    for number, item in enumerate(items, 1):
        try:
            yield _listed(item, context)
        except UsageError as error:
            raise UsageError(f"processors, item {number}: {error.message}", hint=error.hint) from error


def _listed(item: dict[str, Any], context: ProcessorContext) -> NamedProcessor | None:
    use, values = item["use"], {key: value for key, value in item.items() if key != "use"}
    if use not in NAMES:
        return NamedProcessor(use, _foreign(use, values, allowed=context.allow_plugins), values, foreign=True)
    changed = standard.changed(context, **values)
    _finite(changed.generation)
    if use == "temperature" and "temperature" in values:
        if values["temperature"] == 0.0:
            raise UsageError("temperature: must be above 0 in a list; do_sample = false takes the best token")
        changed = standard.changed(changed, dynatemp_range=0.0)  # both may be listed, each with its own value
    return _make(NAMES[use], changed)


def _foreign(use: str, values: dict[str, Any], *, allowed: bool) -> Processor:
    """A user's own: a class that is constructed with the values (a transformers LogitsProcessor, or anything whose
    instances take history and scores), or a function that receives them after history and scores.
    """
    processor = make_plugin("processor", use, values, allowed=allowed)
    fixed = isinstance(processor, partial)
    try:
        inspect.signature(processor.func if fixed else processor).bind(None, None, **(values if fixed else {}))
    except TypeError as error:
        raise UsageError(f"processor {use} does not take history and scores: {one_line(error)}") from error
    except ValueError:  # C code without a signature: a wrong call fails later
        pass
    function: Processor = processor
    return function


def _finite(generation: Generation) -> None:
    for name in knobs():
        value = getattr(generation, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name}: must be a finite number, but is {value}")
