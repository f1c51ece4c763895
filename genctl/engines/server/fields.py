"""The fields that a server's requests have: what its own description says, else what its kind is known to take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
