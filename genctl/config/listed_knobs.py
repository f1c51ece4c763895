"""The names that the lists [[processors]] and [[stopping]] may have, with their knobs and in their default order.

The lists may also name a user's code, by a dotted path (`package.module:Class`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from genctl.config.check import (
    Misfit,
    Wrong,
    check,
    check_plain,
    did_you_mean,
    kind_of,
    known,
    named,
    shown,
)
from genctl.errors import UsageError, nearest, raised
from genctl.params import Generation, knobs


def make(
    kind: str, use: str, arguments: Mapping[str, Any], *, allowed: bool, offered: Mapping[str, Any] | None = None
) -> Any:
    """Make what `use` names: a class is constructed with `arguments`, a function is called with them each time.

    Parameters of a class with a name in `offered` receive that value. Raises UsageError if the code is not `allowed`,
    not found, or cannot be constructed or called.
    """
    target = _target(kind, use, allowed)
    try:
        if isinstance(target, type):
            extra = {name: value for name, value in (offered or {}).items() if name in _parameters(target)}
            made = target(**{**extra, **arguments})
        else:
            made = partial(target, **arguments) if arguments else target
    except Exception as error:
        raise UsageError(f"{kind} {use} could not be made: {raised(error)}") from error
    if not callable(made):
        raise UsageError(f"{kind} {use}: {type(made).__name__} cannot be called")
    return made


def _target(kind: str, use: str, allowed: bool) -> Any:
    if not allowed:
        raise UsageError(f"{kind} {use}: code from outside needs --allow-plugins")
    module, _, path = use.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:
        raise UsageError(f"{kind} {use}: module {module} could not be loaded: {raised(error)}") from error
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError as error:
            raise UsageError(f"{kind} {use}: module {module} has no {path}") from error
    return target


def _parameters(target: type) -> list[str]:
    """The names of a class's parameters; [] for some classes written in C."""
    import inspect

    try:
        return list(inspect.signature(target).parameters)
    except ValueError:
        return []


WINDOW = "penalty_last_n"  # the last knob of penalties that may look at the last tokens alone

# The scores alone; also the tokens of each row, wherever its prompt ends; or also the end of the prompt and more.
Reads: TypeAlias = Literal["scores", "row", "lane"]


@dataclass(frozen=True)
class ProcessorRow:
    """A logits processor."""

    name: str  # in [[processors]]
    source: str  # the transformers class, or the paper or tool it was taken from
    maker: str  # FILE.FUNCTION in `decode/processors`, called with a ProcessorContext and the value of the first knob
    knobs: tuple[str, ...]  # the first one turns it on; the others have no effect without it
    reads: Reads  # its inputs: unless "lane", lanes with equal knobs may share one call

    @property
    def sampling(self) -> bool:
        """Whether it acts only when tokens are sampled (transformers' warpers)."""
        return bool(knobs()[self.knobs[0]].metadata["sampling"])


def _row(
    name: str,
    source: str,
    maker: str,
    knobs: tuple[str, ...] = (),
    *,
    reads: Reads = "lane",
) -> ProcessorRow:
    """A row. By default the function of the maker, and the only knob, have the name of the row."""
    maker = maker if "." in maker else f"{maker}.{name}"
    return ProcessorRow(name, source, maker, knobs or (name,), reads)


# The processors in the order in which they are applied by default. It is that of transformers. Processors that
# transformers lacks are where other tools put them: biases and penalties among the penalties, before any filter
# (llama.cpp's `logit_bias`, `penalties` and `dry` come first; so do text-generation-webui's); top-n-sigma before
# temperature (both); dynamic temperature at the place of temperature; XTC after the filters (both); mirostat last,
# since it must see the distribution that is sampled.
_ROWS = (
    _row("guidance_scale", "as UnbatchedClassifierFreeGuidanceLogitsProcessor, arXiv:2306.17806", "samplers"),
    _row("sequence_bias", "SequenceBiasLogitsProcessor", "penalties", reads="row"),
    _row("logit_bias", "OpenAI API, llama.cpp", "penalties", reads="row"),
    _row("encoder_repetition_penalty", "EncoderRepetitionPenaltyLogitsProcessor", "penalties"),
    _row(
        "repetition_penalty",
        "RepetitionPenaltyLogitsProcessor",
        "penalties",
        knobs=("repetition_penalty", WINDOW),
        reads="row",
    ),
    _row("presence_penalty", "OpenAI API, vLLM", "penalties.presence", ("presence_penalty", WINDOW)),
    _row("frequency_penalty", "OpenAI API, vLLM", "penalties.frequency", ("frequency_penalty", WINDOW)),
    _row(
        "dry",
        "oobabooga/text-generation-webui#5677",
        "penalties.dry_of_knobs",
        ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", WINDOW),
    ),
    _row("no_repeat_ngram_size", "NoRepeatNGramLogitsProcessor", "penalties", reads="row"),
    _row("encoder_no_repeat_ngram_size", "EncoderNoRepeatNGramLogitsProcessor", "penalties"),
    _row("bad_words_ids", "NoBadWordsLogitsProcessor", "forcing", reads="row"),
    _row("bad_words", "NoBadWordsLogitsProcessor, on text", "forcing", reads="row"),
    _row("ban", "LostRuins/koboldcpp#1141", "bans.ban", ("ban", "ban_ignore_case")),
    _row("min_length", "MinLengthLogitsProcessor", "forcing"),
    _row("min_new_tokens", "MinNewTokensLengthLogitsProcessor", "forcing"),
    _row("forced_bos_token_id", "ForcedBOSTokenLogitsProcessor", "forcing"),
    _row("forced_eos_token_id", "ForcedEOSTokenLogitsProcessor", "forcing"),
    _row("remove_invalid_values", "InfNanRemoveLogitsProcessor", "samplers", reads="scores"),
    _row("exponential_decay_length_penalty", "ExponentialDecayLengthPenalty", "penalties"),
    _row("suppress_tokens", "SuppressTokensLogitsProcessor", "forcing", reads="scores"),
    _row("begin_suppress_tokens", "SuppressTokensAtBeginLogitsProcessor", "forcing"),
    _row("json_schema", "llguidance", "grammar.json_schema"),
    _row("regex", "llguidance", "grammar.regex"),
    _row("grammar", "llguidance", "grammar.lark"),
    _row("prefix", "bytes of the vocabulary", "required_prefix.prefix"),
    _row(
        "thinking_budget",
        "vllm-project/vllm#20859",
        "thinking.thinking",
        ("thinking_budget", "thinking_tags", "thinking_end"),
    ),
    _row("top_n_sigma", "arXiv:2411.07641", "filters", reads="scores"),
    _row("min_k", "arXiv:2604.11012", "filters", reads="scores"),
    _row("temperature", "TemperatureLogitsWarper", "samplers", reads="scores"),
    _row(
        "dynatemp",
        "llama.cpp temp_ext",
        "samplers.dynatemp",
        ("dynatemp_range", "dynatemp_exponent", "temperature"),
        reads="scores",
    ),
    _row(
        "quadratic",
        "oobabooga/text-generation-webui#5403, #5551",
        "samplers.quadratic",
        ("smoothing_factor", "smoothing_curve"),
        reads="scores",
    ),
    _row("top_h", "TopHLogitsWarper, arXiv:2509.02510", "filters", reads="scores"),
    _row("p_less", "arXiv:2509.23234", "filters", reads="scores"),
    _row("top_k", "TopKLogitsWarper", "filters", reads="scores"),
    _row("top_p", "TopPLogitsWarper, arXiv:1904.09751", "filters", reads="scores"),
    _row("min_p", "MinPLogitsWarper, arXiv:2407.01082", "filters", reads="scores"),
    _row("typical_p", "TypicalLogitsWarper, arXiv:2202.00666", "filters", reads="scores"),
    _row("epsilon_cutoff", "EpsilonLogitsWarper, arXiv:2210.15191", "filters", reads="scores"),
    _row("eta_cutoff", "EtaLogitsWarper, arXiv:2210.15191", "filters", reads="scores"),
    _row("xtc", "oobabooga/text-generation-webui#6335", "samplers.xtc", ("xtc_probability", "xtc_threshold")),
    _row("adaptive_p", "llama.cpp adaptive-p", "mirostat.AdaptiveP", ("adaptive_target", "adaptive_decay")),
    _row(
        "mirostat", "arXiv:2007.14966, version 2 as in llama.cpp", "mirostat.Mirostat", ("mirostat_tau", "mirostat_eta")
    ),
    _row("watermarking_config", "WatermarkLogitsProcessor, SynthIDTextWatermarkLogitsProcessor", "watermark"),
    _row("renormalize_logits", "LogitNormalization", "samplers", reads="scores"),
)
PROCESSORS: dict[str, ProcessorRow] = {row.name: row for row in _ROWS}

# The criteria that [[stopping]] may name, in the default order of their calls, each with its keys.
CRITERIA: dict[str, tuple[str, ...]] = {
    "max_time": ("max_time",),
    "stop_strings": ("stop_strings",),
    "stop_token_ids": ("stop_token_ids",),
    "stop_regex": ("stop_regex",),
    "stop_mean_logprob": ("stop_mean_logprob", "min_tokens"),
    "stop_repeat_ngram": ("stop_repeat_ngram", "stop_repeat_times"),
}


# the lists of a preset -> what each may name, with its knobs
LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "processors": {name: row.knobs for name, row in PROCESSORS.items()},
    "stopping": CRITERIA,
}


def criteria_of(generation: Generation) -> list[str]:
    """The criteria whose knobs are set, in the order of `CRITERIA`."""
    return [name for name in CRITERIA if getattr(generation, name) not in (None, [], ())]


def processors_of(generation: Generation, *, healed: bool) -> list[ProcessorRow]:
    """The processors that are set, in default order; those for sampling only if tokens are sampled."""
    rows = (row for row in _ROWS if generation.draws or not row.sampling)
    return [row for row in rows if is_set(row, generation, healed=healed)]


def is_set(row: ProcessorRow, generation: Generation, *, healed: bool) -> bool:
    """Whether a processor has an effect. With token healing (`healed`) "prefix" has one without its knob."""
    value = getattr(generation, row.knobs[0])
    is_neutral = value is None or value == knobs()[row.knobs[0]].metadata["neutral"]
    return not is_neutral or (row.name == "prefix" and healed)


def check_finite(generation: Generation) -> None:
    """Raises UsageError for a knob that is NaN or infinite."""
    for name in knobs():
        value = getattr(generation, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name}: must be a finite number, but is {value}")


# -- lists from a preset: tables, each with a name and the knobs of what it names --------------------------------------


WHAT = {"processors": "processor", "stopping": "stopping criterion"}


def check_list(key: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The tables of a list, with values in the types of their knobs. Raises Wrong, with a line for each mistake."""
    if not isinstance(value, (list, tuple)):
        shown_value = "" if isinstance(value, dict) else f" = {shown(value)}:"
        raise Wrong(f"{key}{shown_value} must be a list of tables ([[{key}]])")
    mistakes: list[str] = []
    tables = [_table(key, f"{key}, item {number}", item, mistakes) for number, item in enumerate(value, 1)]
    if mistakes:
        raise Wrong("\n".join(mistakes))
    return tuple(tables)


def _table(key: str, place: str, item: Any, mistakes: list[str]) -> dict[str, Any]:
    """One checked table; its mistakes are added to `mistakes`."""
    if not isinstance(item, dict):
        mistakes.append(f'{place}: must be a table with use = "NAME", not {shown(item)}')
        return {}
    use = item.get("use")
    if not isinstance(use, str) or not use.strip():
        near = "" if "use" in item else did_you_mean(next(iter(item), ""), ["use"])
        actual = f", not {kind_of(use)}" if use is not None and not isinstance(use, str) else ""
        mistakes.append(f'{place}: needs use = "NAME"{actual}' + (f"; did you mean {near}?" if near else ""))
        return {}
    if use in LISTS[key]:
        return {"use": use, **_values(LISTS[key][use], f"{place}: {use}", item, mistakes)}

    if ":" not in use:
        near = nearest(use.strip().lower(), LISTS[key])
        suggestion = f"did you mean {near}?" if near else f"there are {', '.join(LISTS[key])}, and package.module:Class"
        mistakes.append(f"{place}: unknown {WHAT[key]} {shown(use)}; {suggestion}")
    try:
        check_plain(item)
    except Misfit as misfit:
        mistakes.append(f"{place}: {misfit}")
    except RecursionError:
        mistakes.append(f"{place}: is nested too deeply")
    return dict(item)


def _values(knobs: Sequence[str], place: str, item: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """The knobs of a table, in their types."""
    values = {}
    for name, value in item.items():
        if name == "use":
            continue
        if name not in knobs:
            near = nearest(name, knobs)
            suggestion = f"did you mean {near}?" if near else f"it takes {' and '.join(knobs)}"
            mistakes.append(f"{place} has no key {named(name)}; {suggestion}")
            continue
        try:
            if name in known():
                value = check(name, value)
            else:
                check_plain(value)
        except Wrong as wrong:
            mistakes.append(f"{place}: {wrong}")
        except Misfit as misfit:
            mistakes.append(f"{place}: {name} = {shown(value)}: {misfit}")
        values[name] = value
    return values
