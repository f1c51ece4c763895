"""From settings to the fields of a request. A setting that has no field is a problem, never dropped.

The fields that a server's requests have are those of its own description, else those of its kind (`KINDS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from genctl.params import DEFAULT_NEW_TOKENS, GRAMMARS, Generation, Runtime

MOST_BYTES = 1 << 20  # of a file
SEEDS = 2**31 - 1  # of the servers, llama.cpp takes the fewest
NO_FIELD = "the server has no field for it"

# -- the fields that requests have: as a server describes itself, else as its kind is known ----------------------------

_SHARED = {
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "stop",
    "presence_penalty", "frequency_penalty", "logit_bias", "seed",
}  # fmt: skip
COMPLETIONS = frozenset(_SHARED | {"prompt", "echo"})  # of OpenAI's reference
CHAT = frozenset(_SHARED | {"messages", "top_logprobs", "response_format"})

# `owned_by` in the list of models -> fields besides those of OpenAI
KINDS: dict[str, set[str]] = {
    "vllm": {
        "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output",
        "structured_outputs", "response_format", "chat_template_kwargs",
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
}  # fmt: skip
LLAMA_CPP_PYTHON = "llama-cpp-python"
OPENAI = ("openai", "openai-internal", "system")


def fields_of(description: Any, kind: str, *, chat: bool) -> frozenset[str]:
    """The fields of requests: those of an OpenAPI document, else those of a kind of server."""
    with suppress(KeyError, TypeError, AttributeError):
        path = description["paths"][f"/v1{path_of(chat=chat)}"]
        content = path["post"]["requestBody"]["content"]["application/json"]["schema"]
        reference = content.get("$ref", "")
        schema = description["components"]["schemas"][reference.rpartition("/")[2]] if reference else content
        if isinstance(schema["properties"], Mapping):
            return frozenset(map(str, schema["properties"]))
    fields = (CHAT if chat else COMPLETIONS) | KINDS.get(kind, set())
    return fields - {"max_tokens"} | {"max_completion_tokens"} if chat and kind in OPENAI else fields


def path_of(*, chat: bool) -> str:
    """The path of requests below the server's base."""
    return "/chat/completions" if chat else "/completions"


def kind_of(description: Any, owner: str) -> str:
    """The kind of a server: who owns its models, or its title."""
    info = description.get("info") if isinstance(description, dict) else None
    title = info.get("title", "") if isinstance(info, dict) else ""
    return LLAMA_CPP_PYTHON if "llama.cpp Python" in str(title) else owner


# -- settings ----------------------------------------------------------------------------------------------------------

# knob -> the names that servers have for it, with the same meaning
FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (
        "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
        "dynatemp_exponent", "smoothing_factor", "smoothing_curve", "presence_penalty", "frequency_penalty",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", "bad_words", "stop_token_ids",
    )},
    "min_new_tokens": ("min_tokens",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "penalty_last_n": ("repeat_last_n",),
    "stop_strings": ("stop",),
}  # fmt: skip
# Sent even where they change nothing: a server may have other defaults.
EXPLICIT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
# Knobs that `sampling_fields` itself reads, or that do not concern tokens.
OWN = {
    "do_sample", "temperature", "max_new_tokens", "max_time", "num_return_sequences", "mirostat_tau", "mirostat_eta",
    "logit_bias", "keep_stop", "pad_token_id", "ban_file", *GRAMMARS,
}  # fmt: skip
# settings of the run that no server takes
_HERE = (
    "prompt_cache", "draft_corpus", "truncate", "chat_template", "tools", "processed_logprobs", "src_lang", "tgt_lang",
)  # fmt: skip


def sampling_fields(
    resolved: Resolved, fields: frozenset[str], *, chat: bool, kind: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The fields for the choice of tokens, and why each other setting cannot be done (`knob = value: …`).

    Raises UsageError for a grammar's file that cannot be read.
    """
    generation, origins = resolved.generation, resolved.origins
    problems: list[str] = []

    def refuse(knob: str, why: str = NO_FIELD) -> None:
        problems.append(f"{knob} = {shown(getattr(generation, knob))} ({origins.get(knob, 'default')}): {why}")

    def send(knob: str, forms: Mapping[str, Any], **more: Any) -> None:
        """Send the first form of a knob that the server has, or refuse the knob."""
        if (name := next((name for name in forms if name in fields), None)) is None:
            refuse(knob)
        else:
            body.update({name: forms[name], **more})

    most = "max_completion_tokens" if "max_completion_tokens" in fields and "max_tokens" not in fields else "max_tokens"
    body: dict[str, Any] = {most: generation.max_new_tokens or DEFAULT_NEW_TOKENS}
    body["temperature"] = generation.temperature if generation.draws else 0.0
    for knob, item in params.knobs().items():
        if item.metadata["sampling"] and not generation.draws:
            continue  # a greedy search needs no field of sampling
        value, neutral = getattr(generation, knob), (None, default(knob), item.metadata["neutral"])
        names = FIELDS.get(knob, ())
        name = next((name for name in names if name in fields), None)
        # the built-in default of top_k keeps 50 tokens: it is sent, but no server is refused for the lack of it
        changes = value not in neutral or (knob == "top_k" and value != 0)
        is_default = knob == "top_k" and origins.get(knob, "default") == "default"
        if name is not None and (changes or knob in EXPLICIT):
            body[name] = EXPLICIT.get(knob) if value is None else value
        elif name is None and changes and knob not in OWN and not (is_default and names):
            refuse(knob)
    if generation.draws and (tau := generation.mirostat_tau) is not None:
        forms = {"mirostat": 2, "mirostat_mode": 2}
        send("mirostat_tau", forms, mirostat_tau=tau, mirostat_eta=generation.mirostat_eta)
    if generation.keep_stop and generation.stop_strings is not None:
        send("keep_stop", {"include_stop_str_in_output": True})
    if biases := generation.logit_bias:
        by_id = {key[1:]: value for key, value in biases.items() if key[:1] == "#" and key[1:].isdigit()}
        if len(by_id) < len(biases):
            refuse("logit_bias", 'the server knows only ids, such as "#123"')
        else:
            send("logit_bias", {"logit_bias": by_id})
    if structures := {name: value for name in GRAMMARS if (value := getattr(generation, name)) is not None}:
        if len(structures) > 1:
            raise UsageError(f"{' and '.join(structures)} cannot be combined: each says what the whole text is")
        knob, value = next(iter(structures.items()))
        send(knob, _forms(knob, value, by_format=chat or knob not in fields, kind=kind))
    if variables := variables_of(replace(resolved.runtime, tools=None)):
        if chat and "chat_template_kwargs" in fields:
            body["chat_template_kwargs"] = variables
        else:
            why = NO_FIELD if chat else "the server reads no chat"
            problems.append(f"chat_template_kwargs = {shown(variables)}: {why}")
    return body, [*problems, *_runtime_problems(resolved, fields)]


def logprob_fields(top: int, *, chat: bool) -> dict[str, Any]:
    """The fields of log-probabilities. At least one alternative: for none, some servers give nothing."""
    return {"logprobs": True, "top_logprobs": max(top, 1)} if chat else {"logprobs": max(top, 1)}


def _forms(knob: str, value: Any, *, by_format: bool, kind: str) -> dict[str, Any]:
    """The fields that hold the text to a schema, an expression or a grammar, in the order of preference.

    `by_format`: a schema may be a `response_format`. Raises UsageError for a broken file.
    """
    try:
        if names_file(knob, value):
            value = reader.text(Path(value).expanduser(), MOST_BYTES, regular=True)
        if knob == "json_schema" and isinstance(value, str):
            value = reader.loads(value)
    except BadJson as error:
        raise UsageError(f"json_schema: {error}") from None
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~ of a user who is not there
        reason = error if isinstance(error, Unreadable) else "no such file"
        raise UsageError(cannot_read(value, reason, knob)) from None
    if knob != "json_schema":
        return {"structured_outputs": {knob: value}, knob: value, **({"ebnf": value} if knob == "grammar" else {})}
    forms: dict[str, Any] = {"structured_outputs": {"json": value}}
    if by_format:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": value}}
        own = {"type": "json_object", "schema": value}
        forms["response_format"] = own if kind == LLAMA_CPP_PYTHON else schema
    return {**forms, knob: json.dumps(value) if kind == "sglang" else value}


def _runtime_problems(resolved: Resolved, fields: frozenset[str]) -> Iterator[str]:
    """Settings of where and how a checkpoint runs, which the server has decided already; lists of own functions."""
    for knob, item in params.knobs(Runtime).items():
        value, setting = getattr(resolved.runtime, knob), resolved.settings.get(knob)
        if value == default(knob) or setting is None:
            continue
        words = f"{knob} = {shown(value)} ({resolved.origins.get(knob, 'default')})"
        is_local = item.metadata["group"] == params.MODEL and knob not in ("model", "backend", "tokenizer")
        if is_local and (setting.typed or setting.kind == "command"):
            yield f"{words}: the server has loaded its model already"
        elif knob in _HERE or (knob == "seed" and resolved.generation.draws and "seed" not in fields):
            yield f"{words}: {NO_FIELD}"
    for name in ("processors", "stopping"):
        if getattr(resolved, name) is not None:
            yield f"{name} ({resolved.origins.get(name, 'preset')}): the server runs no {name} of its callers"


def messages_of(
    prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, system: str | None
) -> list[dict[str, Any]]:
    """The messages of a chat: those of a row, or a prompt as the user's; a system message goes first.

    Arguments of tools are JSON texts, as the interface has them.
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


def incomplete(generation: Generation, text: str) -> str:
    """The knob whose structure a text that was cut off does not have; "" where that is not known."""
    if generation.json_schema is not None:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "json_schema"
    if generation.regex is not None:
        with suppress(re.error):
            return "" if re.fullmatch(generation.regex, text, re.DOTALL) else "regex"
    return ""
