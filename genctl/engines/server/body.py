"""Convert settings to the fields of a request. A setting without a field is reported as a problem, never dropped.

A server accepts the fields of OpenAI's reference and those of its dialect (`DIALECTS`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl import params
from genctl.config import reader
from genctl.config.check import default, names_file, shown
from genctl.config.conflicts import variables_of
from genctl.config.layers import Resolved
from genctl.config.reader import BadJson, Unreadable
from genctl.errors import UsageError, cannot_read
from genctl.params import DEFAULT_NEW_TOKENS, GRAMMARS, Runtime

MOST_BYTES = 1 << 20  # largest file
SEEDS = 2**31 - 1  # llama.cpp's limit, the smallest of all servers
NO_FIELD = "the server has no field for it"

# -- dialects: the fields of requests ----------------------------------------------------------------------------------

_SHARED = {
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "stop",
    "presence_penalty", "frequency_penalty", "logit_bias", "seed",
}  # fmt: skip
COMPLETIONS = frozenset(_SHARED | {"prompt", "echo"})  # of OpenAI's reference
CHAT = frozenset(_SHARED | {"messages", "top_logprobs", "response_format"})

LLAMA_CPP_PYTHON = "me"
# `owned_by` in the list of models -> fields besides those of OpenAI
DIALECTS: dict[str, set[str]] = {
    "vllm": {
        "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output",
        "structured_outputs", "response_format", "chat_template_kwargs", "return_token_ids",
    },
    "llamacpp": {
        "top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "top_n_sigma", "xtc_probability",
        "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", "dynatemp_range",
        "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "json_schema", "grammar",
        "chat_template_kwargs",
    },
    "sglang": {
        "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "json_schema", "regex", "ebnf",
        "chat_template_kwargs",
    },
    LLAMA_CPP_PYTHON: {"top_k", "min_p", "repeat_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta", "grammar"},
}  # fmt: skip
OPENAI = ("openai", "openai-internal", "system")
PATHS = {False: "/completions", True: "/chat/completions"}  # below the server's base URL; the key: whether it is a chat


def fields_of(owner: str, *, chat: bool) -> frozenset[str]:
    """The fields that a server accepts, by the `owned_by` of its models."""
    fields = (CHAT if chat else COMPLETIONS) | DIALECTS.get(owner, set())
    return fields - {"max_tokens"} | {"max_completion_tokens"} if chat and owner in OPENAI else fields


# -- settings ----------------------------------------------------------------------------------------------------------

# knob -> servers' names of fields with the same meaning
FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (
        "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
        "dynatemp_exponent", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
        "dry_allowed_length", "dry_sequence_breakers", "stop_token_ids",
    )},
    "min_new_tokens": ("min_tokens",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "penalty_last_n": ("repeat_last_n",),
    "stop_strings": ("stop",),
}  # fmt: skip
# Sent even if they change nothing: a server may have other defaults.
EXPLICIT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
# Knobs that `sampling_fields` handles itself, or that do not affect the choice of tokens.
OWN = {
    "do_sample", "temperature", "max_new_tokens", "max_time", "num_return_sequences", "mirostat_tau", "mirostat_eta",
    "logit_bias", "keep_stop", "pad_token_id", *GRAMMARS,
}  # fmt: skip
# settings of the run that no server accepts
_HERE = (
    "prompt_cache", "draft_corpus", "truncate", "chat_template", "tools", "processed_logprobs", "src_lang", "tgt_lang",
)  # fmt: skip


def sampling_fields(resolved: Resolved, owner: str, *, chat: bool) -> tuple[dict[str, Any], list[str]]:
    """The sampling fields, and a line for each setting that cannot be sent (`knob = value (origin): reason`).

    Raises UsageError if a grammar's file cannot be read, or for several grammars.
    """
    generation, fields = resolved.generation, fields_of(owner, chat=chat)
    problems: list[str] = []

    def refuse(knob: str, value: Any, why: str = NO_FIELD) -> None:
        problems.append(f"{knob} = {shown(value)} ({resolved.origins.get(knob, 'default')}): {why}")

    def send(knob: str, forms: Mapping[str, Any], **more: Any) -> None:
        """Send the first form of a knob that the server has, or refuse the knob."""
        if (name := next((name for name in forms if name in fields), None)) is None:
            refuse(knob, getattr(generation, knob))
        else:
            body.update({name: forms[name], **more})

    most = "max_tokens" if "max_tokens" in fields else "max_completion_tokens"
    body: dict[str, Any] = {most: generation.max_new_tokens or DEFAULT_NEW_TOKENS}
    body["temperature"] = generation.temperature if generation.draws else 0.0
    for knob, item in params.knobs().items():
        if item.metadata["sampling"] and not generation.draws:
            continue  # greedy decoding needs no sampling fields
        value, names = getattr(generation, knob), FIELDS.get(knob, ())
        name = next((name for name in names if name in fields), None)
        # the built-in default of top_k keeps 50 tokens: it is sent, but a server without the field is not refused
        changes = value not in (None, default(knob), item.metadata["neutral"]) or (knob == "top_k" and value != 0)
        is_default = knob == "top_k" and resolved.origins.get(knob) == "default"
        if name is not None and (changes or knob in EXPLICIT):
            body[name] = EXPLICIT.get(knob) if value is None else value
        elif name is None and changes and knob not in OWN and not is_default:
            refuse(knob, value)
    if generation.draws and (tau := generation.mirostat_tau) is not None:
        forms = {"mirostat": 2, "mirostat_mode": 2}
        send("mirostat_tau", forms, mirostat_tau=tau, mirostat_eta=generation.mirostat_eta)
    if generation.keep_stop and generation.stop_strings is not None:
        send("keep_stop", {"include_stop_str_in_output": True})
    if biases := generation.logit_bias:
        by_id = {key[1:]: value for key, value in biases.items() if key[:1] == "#" and key[1:].isdigit()}
        if len(by_id) < len(biases):
            refuse("logit_bias", biases, 'the server knows only ids, such as "#123"')
        else:
            send("logit_bias", {"logit_bias": by_id})
    grammars = [(knob, value) for knob in GRAMMARS if (value := getattr(generation, knob)) is not None]
    if len(grammars) > 1:
        words = " and ".join(knob for knob, _ in grammars)
        raise UsageError(f"{words} cannot be combined: each says what the whole text is")
    for knob, value in grammars:
        send(knob, _forms(knob, value, fields, chat=chat, owner=owner))
    if variables := variables_of(replace(resolved.runtime, tools=None)):
        if chat and "chat_template_kwargs" in fields:
            body["chat_template_kwargs"] = variables
        else:
            refuse("chat_template_kwargs", variables, NO_FIELD if chat else "the server reads no chat")
    # settings of where and how a checkpoint runs, which the server has already decided
    for knob, item in params.knobs(Runtime).items():
        value, setting = getattr(resolved.runtime, knob), resolved.settings.get(knob)
        if value == default(knob) or setting is None:
            continue
        is_local = item.metadata["group"] == params.MODEL and knob not in ("model", "backend", "tokenizer")
        if is_local and (setting.typed or setting.kind == "command"):
            refuse(knob, value, "the server has loaded its model already")
        elif knob in _HERE:
            refuse(knob, value)
    for name in ("processors", "stopping"):
        if getattr(resolved, name) is not None:
            origin = resolved.origins.get(name, "preset")
            problems.append(f"{name} ({origin}): the server runs no {name} of its callers")
    return body, problems


def logprob_fields(top: int, *, chat: bool) -> dict[str, Any]:
    """The log-probability fields. They request at least one alternative: for 0, some servers return nothing."""
    return {"logprobs": True, "top_logprobs": max(top, 1)} if chat else {"logprobs": max(top, 1)}


def _forms(knob: str, value: Any, fields: frozenset[str], *, chat: bool, owner: str) -> dict[str, Any]:
    """The fields that constrain the text by a schema, a regular expression or a grammar, in order of preference.

    Raises UsageError for an unreadable file or invalid JSON.
    """
    try:
        if names_file(knob, value):
            value = reader.text(Path(value).expanduser(), MOST_BYTES, regular=True)
        if knob == "json_schema" and isinstance(value, str):
            value = reader.loads(value)
    except BadJson as error:
        raise UsageError(f"json_schema: {error}") from None
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~NAME of an unknown user
        reason = error if isinstance(error, Unreadable) else "no such file"
        raise UsageError(cannot_read(value, reason, knob)) from None
    if knob != "json_schema":
        return {"structured_outputs": {knob: value}, knob: value, **({"ebnf": value} if knob == "grammar" else {})}
    forms: dict[str, Any] = {"structured_outputs": {"json": value}}
    if chat or knob not in fields:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": value}}
        own = {"type": "json_object", "schema": value}
        forms["response_format"] = own if owner == LLAMA_CPP_PYTHON else schema
    return {**forms, knob: json.dumps(value) if owner == "sglang" else value}


def messages_of(
    prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, system: str | None
) -> list[dict[str, Any]]:
    """The messages of a chat: those of a row, or the prompt as a user message; a system message comes first.

    The arguments of tool calls are sent as JSON strings, as the API requires.
    """
    sent = [dict(message) for message in messages] if messages is not None else []
    for message in sent:
        calls = []
        for call in message.get("tool_calls", ()):
            function = dict(call.get("function", call))
            if not isinstance(arguments := function.get("arguments") or {}, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            calls.append({"type": "function", **(call if "function" in call else {}), "function": function})
        if "tool_calls" in message:
            message["tool_calls"] = calls
    sent = sent or [{"role": "user", "content": prompt or ""}]
    return [{"role": "system", "content": system}, *sent] if system is not None else sent
