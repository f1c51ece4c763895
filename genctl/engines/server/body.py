"""From settings to the fields of a request. A setting that has no field is a problem, never dropped.

The fields that a server's requests have are those of its own description, else those of its kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl import params
from genctl.config.chat_settings import variables_of
from genctl.config.check import default, shown
from genctl.config.layers import Resolved
from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.errors import UsageError
from genctl.params import DEFAULT_NEW_TOKENS, GRAMMARS, Generation, Runtime

MOST_BYTES = 1 << 20  # of a file
SEEDS = 2**31 - 1  # of the servers, llama.cpp takes the fewest

# Knobs of sampling that servers call by the same name, with the same meaning
SAMPLING = (
    "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
    "dynatemp_exponent", "smoothing_factor", "smoothing_curve",
)  # fmt: skip
# Other knobs -> the names that servers have for it
ALWAYS: dict[str, tuple[str, ...]] = {
    "min_new_tokens": ("min_tokens",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "penalty_last_n": ("repeat_last_n",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "dry_multiplier": ("dry_multiplier",),
    "dry_base": ("dry_base",),
    "dry_allowed_length": ("dry_allowed_length",),
    "dry_sequence_breakers": ("dry_sequence_breakers",),
    "bad_words": ("bad_words",),
    "stop_strings": ("stop",),
    "stop_token_ids": ("stop_token_ids",),
}
# Sent even where they change nothing: a server may have other defaults.
EXPLICIT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
# Knobs that this program sees to itself, or that say nothing about tokens.
OWN = {
    "do_sample", "temperature", "max_new_tokens", "max_time", "num_return_sequences", "mirostat_tau", "mirostat_eta",
    "logit_bias", "sampler", "keep_stop", "pad_token_id", "ban_file", *GRAMMARS,
}  # fmt: skip
NO_FIELD = "has no field for it"
# settings of the run that no server takes
_HERE = ("prompt_cache", "draft_corpus", "truncate", "chat_template", "tools", "processed_logprobs")


def sampling_fields(
    resolved: Resolved, fields: frozenset[str], *, chat: bool, kind: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The fields that say how to choose tokens, and why each other setting cannot be done (`knob = value: …`)."""
    generation = resolved.generation
    body: dict[str, Any] = {}
    problems: list[str] = []

    def refuse(knob: str, why: str = NO_FIELD) -> None:
        origin = resolved.origins.get(knob, "default")
        problems.append(f"{knob} = {shown(getattr(generation, knob))} ({origin}): the server {why}")

    most = "max_completion_tokens" if "max_completion_tokens" in fields and "max_tokens" not in fields else "max_tokens"
    body[most] = generation.max_new_tokens or DEFAULT_NEW_TOKENS
    body["temperature"] = generation.temperature if generation.draws else 0.0
    _drawn(resolved, fields, body, refuse)
    for knob, names in ALWAYS.items():
        _one(generation, knob, names, fields, body, refuse)
    if generation.keep_stop and generation.stop_strings is not None:
        if "include_stop_str_in_output" in fields:
            body["include_stop_str_in_output"] = True
        else:
            refuse("keep_stop")
    if generation.logit_bias:
        biases = {
            key[1:]: value for key, value in generation.logit_bias.items() if key[:1] == "#" and key[1:].isdigit()
        }
        if len(biases) < len(generation.logit_bias):
            refuse("logit_bias", 'knows only ids, such as "#123"')
        elif "logit_bias" not in fields:
            refuse("logit_bias")
        else:
            body["logit_bias"] = biases
    body |= constrained(generation, fields, refuse, chat=chat, kind=kind)
    variables = variables_of(replace(resolved.runtime, tools=None))
    if variables and chat and "chat_template_kwargs" in fields:
        body["chat_template_kwargs"] = variables
    elif variables:
        problems.append(
            f"chat_template_kwargs = {shown(variables)}: the server {NO_FIELD if chat else 'reads no chat'}"
        )
    for knob in _others(generation):
        refuse(knob)
    return body, [*problems, *_runtime_problems(resolved)]


def _drawn(resolved: Resolved, fields: frozenset[str], body: dict[str, Any], refuse: Any) -> None:
    """The fields of sampling. A greedy search needs none of them."""
    generation = resolved.generation
    if not generation.draws:
        return
    for knob in SAMPLING:
        if knob == "top_k" and resolved.origins.get("top_k", "default") == "default" and knob not in fields:
            continue  # said in a note (`unused_default`)
        _one(generation, knob, (knob,), fields, body, refuse)
    if generation.mirostat_tau is None:
        return
    name = next((name for name in ("mirostat", "mirostat_mode") if name in fields), None)
    if name is None:
        refuse("mirostat_tau")
    else:
        body |= {name: 2, "mirostat_tau": generation.mirostat_tau, "mirostat_eta": generation.mirostat_eta}


def unused_default(resolved: Resolved, fields: frozenset[str]) -> str:
    """The one built-in default that a server may lack and that changes what is drawn, in words; "" if it is there."""
    generation = resolved.generation
    lacks = generation.draws and resolved.origins.get("top_k", "default") == "default" and "top_k" not in fields
    return f"top_k = {generation.top_k} (default) is not used: the server {NO_FIELD}" if lacks else ""


def _one(
    generation: Generation, knob: str, names: Sequence[str], fields: frozenset[str], body: dict[str, Any], refuse: Any
) -> None:
    value = getattr(generation, knob)
    name = next((name for name in names if name in fields), None)
    plain = value is None or value == default(knob) or value == params.knobs()[knob].metadata["neutral"]
    if knob == "top_k" and value != 0:
        plain = False  # the default keeps 50 tokens
    if name is None:
        if not plain:
            refuse(knob)
    elif not plain or knob in EXPLICIT:
        body[name] = EXPLICIT.get(knob) if value is None else value


def _others(generation: Generation) -> Iterator[str]:
    """Knobs that are set, and that no server has."""
    for knob, item in params.knobs().items():
        value = getattr(generation, knob)
        elsewhere = knob in OWN or knob in SAMPLING or knob in ALWAYS
        if not elsewhere and value is not None and value not in (default(knob), item.metadata["neutral"]):
            yield knob
    if generation.draws and generation.sampler != default("sampler"):
        yield "sampler"


def _runtime_problems(resolved: Resolved) -> Iterator[str]:
    """Settings of where and how a checkpoint runs, which the server has decided already; lists of own functions."""
    for knob, item in params.knobs(Runtime).items():
        value, origin = getattr(resolved.runtime, knob), resolved.origins.get(knob, "default")
        local = item.metadata["group"] == params.MODEL and knob not in ("model", "backend", "tokenizer")
        setting = resolved.settings.get(knob)
        typed = setting is not None and (setting.typed or setting.kind == "command")
        if value != default(knob) and ((local and typed) or knob in _HERE):
            yield (
                f"{knob} = {shown(value)} ({origin}): the server has loaded its model already"
                if local
                else (f"{knob} = {shown(value)} ({origin}): the server {NO_FIELD}")
            )
    for name in ("processors", "stopping"):
        if getattr(resolved, name) is not None:
            yield f"{name} ({resolved.origins.get(name, 'preset')}): the server runs no {name} of its callers"


def seed_field(seed: int, fields: Mapping[str, Any] | frozenset[str], generation: Generation) -> dict[str, int]:
    """The seed as servers take it, where tokens are drawn."""
    return {"seed": seed % SEEDS} if "seed" in fields and generation.draws else {}


def messages_of(
    prompt: str | None, messages: Sequence[Mapping[str, str]] | None, system: str | None
) -> list[dict[str, str]]:
    """The messages of a chat: those of a row, or a prompt as the user's; a system message goes first."""
    said = [dict(message) for message in messages] if messages is not None else []
    said = said or [{"role": "user", "content": prompt or ""}]
    return [{"role": "system", "content": system}, *said] if system is not None else said


# -- structured output, as the different servers ask for it ------------------------------------------------------------


def constrained(
    generation: Generation, fields: frozenset[str], refuse: Any, *, chat: bool, kind: str = ""
) -> dict[str, Any]:
    """The fields that hold the text to a schema, an expression or a grammar. Raises UsageError for a broken file."""
    given = [name for name in GRAMMARS if getattr(generation, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined: each says what the whole text is")
    if not given:
        return {}
    knob = given[0]
    value = schema_of(generation) if knob == "json_schema" else getattr(generation, knob)
    if knob == "grammar":
        value = _text_of(knob, value)
    short = {"json_schema": "json"}.get(knob, knob)
    if "structured_outputs" in fields:  # vLLM since 0.11
        return {"structured_outputs": {short: value}}
    if f"guided_{short}" in fields:  # vLLM before that
        return {f"guided_{short}": value}
    if knob == "json_schema" and "response_format" in fields and (chat or knob not in fields):
        return {"response_format": _response_format(value, kind)}
    names = {"json_schema": ("json_schema",), "regex": ("regex",), "grammar": ("grammar", "ebnf")}[knob]
    name = next((name for name in names if name in fields), None)
    if name is None:
        refuse(knob)
        return {}
    return {name: json.dumps(value) if name == "json_schema" and kind == "sglang" else value}


def _response_format(schema: Any, kind: str) -> dict[str, Any]:
    if kind == LLAMA_CPP_PYTHON:
        return {"type": "json_object", "schema": schema}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def schema_of(generation: Generation) -> Any:
    """The schema: itself, or what a file or a text holds. Raises UsageError."""
    value = generation.json_schema
    if not isinstance(value, str):
        return value
    text = _text_of("json_schema", value)
    try:
        return reader.loads(text)
    except BadJson as error:
        raise UsageError(f"json_schema: {error}") from None


def _text_of(knob: str, value: str) -> str:
    """A text, or what the file holds that it names."""
    if any(mark in value for mark in "\n{:") and not _is_file(value):
        return value
    try:
        return reader.text(Path(value).expanduser(), MOST_BYTES, regular=True)
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~ of a user who is not there
        reason = error if isinstance(error, Unreadable) else "no such file"
        raise UsageError(f"{knob}: {value}: {reason}") from None


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def incomplete(generation: Generation, text: str) -> str:
    """The knob whose structure a text that was cut off does not have; "" where that cannot be told."""
    if generation.json_schema is not None:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "json_schema"
    if generation.regex is not None:
        try:
            return "" if re.fullmatch(generation.regex, text, re.DOTALL) else "regex"
        except re.error:
            return ""
    return ""


# -- the fields that requests have: as a server describes itself, else as its kind is known ----------------------------

_SHARED = {
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "stop",
    "presence_penalty", "frequency_penalty", "logit_bias", "seed",
}  # fmt: skip
COMPLETIONS = frozenset(_SHARED | {"prompt", "echo"})  # of OpenAI's reference
CHAT = frozenset(_SHARED | {"messages", "top_logprobs", "response_format"})

_VLLM = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output",
    "structured_outputs", "response_format", "chat_template_kwargs",
}  # fmt: skip
_LLAMA_CPP = {
    "top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", "dynatemp_range", "dynatemp_exponent",
    "mirostat", "mirostat_tau", "mirostat_eta", "json_schema", "grammar",
    "chat_template_kwargs",
}  # fmt: skip
_SGLANG = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "json_schema", "regex", "ebnf",
    "chat_template_kwargs",
}  # fmt: skip

# `owned_by` in the list of models -> fields besides those of OpenAI
KINDS: dict[str, set[str]] = {"vllm": _VLLM, "llamacpp": _LLAMA_CPP, "sglang": _SGLANG}
LLAMA_CPP_PYTHON = "llama-cpp-python"
OPENAI = ("openai", "openai-internal", "system")


def known(kind: str, *, chat: bool) -> frozenset[str]:
    """The fields of a kind of server that does not describe itself."""
    fields = (CHAT if chat else COMPLETIONS) | KINDS.get(kind, set())
    return fields - {"max_tokens"} | {"max_completion_tokens"} if chat and kind in OPENAI else fields


def described(description: Any, path: str) -> frozenset[str]:
    """The fields of the requests to `path` in an OpenAPI document; empty where it does not say."""
    try:
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        reference = content.get("$ref", "")
        schema = description["components"]["schemas"][reference.rpartition("/")[2]] if reference else content
        properties = schema["properties"]
    except (KeyError, TypeError, AttributeError):
        return frozenset()
    return frozenset(map(str, properties)) if isinstance(properties, Mapping) else frozenset()


def kind_of(description: Any, owner: str) -> str:
    """The kind of a server: who owns its models, or its title."""
    info = description.get("info") if isinstance(description, dict) else None
    title = info.get("title", "") if isinstance(info, dict) else ""
    return LLAMA_CPP_PYTHON if "llama.cpp Python" in str(title) else owner
