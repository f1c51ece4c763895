"""The class that transformers' `AutoTokenizer` uses for a checkpoint folder, by the rules of version 5.

tokenizer_config.json or config.json may name a class, and each model type has a registered one. Since version 5 a class
rebuilds parts of the tokenizer instead of taking them from tokenizer.json (`tokenizer_recipes`); all other folders use
tokenizer.json unchanged, which is called `BACKEND` here.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

BACKEND = "TokenizersBackend"
# Names of that class, and of classes that it replaces.
_BACKENDS = frozenset({BACKEND, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "BloomTokenizer"})
_SAME = {"BartTokenizer": "RobertaTokenizer"}
CLASSES = frozenset(
    {"GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer", "GemmaTokenizer", "LlamaTokenizer"}
    | {"PegasusTokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "T5Tokenizer"}
)

# model type -> the class that is registered for it; None for none. Model types that are not here are not known.
REGISTERED: dict[str, str | None] = {
    "bart": "RobertaTokenizer",
    "bloom": None,
    "falcon": None,
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "gptj": "GPT2Tokenizer",
    "granite": BACKEND,
    "llama": None,
    "mistral": BACKEND,  # or one that reads tekken.json, where mistral-common is installed
    "mt5": "T5Tokenizer",
    "olmo": "GPTNeoXTokenizer",
    "olmo2": BACKEND,
    "opt": "GPT2Tokenizer",
    "pegasus": "PegasusTokenizer",
    "phi": "GPT2Tokenizer",
    "phi3": BACKEND,
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "stablelm": BACKEND,
    "starcoder2": "GPT2Tokenizer",
    "t5": "T5Tokenizer",
}
# Model types whose registered class is taken whatever class is named.
_REGISTERED_WINS = frozenset({"phi3", "qwen2"})
_TAKES_TEKKEN = frozenset({"mistral"})
# Paths as they are given, in lower case, of checkpoints whose tokenizer.json is taken as it is.
NAMES_OF_BACKENDS = (
    "deepseek-ai/deepseek-r1-distill-llama-*",
    "deepseek-ai/deepseek-coder-*",
    "allenai/dolma2-tokenizer",
    "google/umt5-small",
    "naver-clova-ix/donut-*",
    "salesforce/blip2-opt-*",
    "salesforce/blip2-flan-t5-*",
    "salesforce/instructblip-flan-t5-*",
    "stepfun-ai/step-3.7-*",
)


class UnsupportedTokenizer(Exception):
    """Why a tokenizer is left to transformers."""


def class_of(
    place: str, config: dict[str, Any], tokenizer_config: dict[str, Any], *, byte_level: Callable[[], bool]
) -> str:
    """`BACKEND` or one of `CLASSES`. `byte_level` returns whether tokenizer.json has a ByteLevel part.

    Raises UnsupportedTokenizer for any other class.
    """
    model_type = config.get("model_type")
    if model_type not in REGISTERED:
        raise UnsupportedTokenizer(f"model type {model_type!r:.40} has rules of its own")
    if tokenizer_config.get("auto_map") is not None or "model_name" in config:
        raise UnsupportedTokenizer("its class may be another than the one that is named")
    if any(fnmatch(place.lower(), name) for name in NAMES_OF_BACKENDS):
        return BACKEND
    named = tokenizer_config.get("tokenizer_class")
    named = config.get("tokenizer_class") if named is None else named
    if named is not None and (not isinstance(named, str) or not named):
        raise UnsupportedTokenizer(f"tokenizer_class = {named!r:.40}")
    registered = REGISTERED[model_type]
    if named is None:
        return registered or BACKEND
    name = named.removesuffix("Fast")
    wins = model_type in _REGISTERED_WINS
    if name == "LlamaTokenizer" and not wins and model_type not in _TAKES_TEKKEN and byte_level():
        return BACKEND
    if registered is not None and registered != name:
        if registered == BACKEND:
            return BACKEND
        name = registered if wins else name
    return _known(name)


def _known(name: str) -> str:
    name = _SAME.get(name, name)
    if name in _BACKENDS:
        return BACKEND
    if name not in CLASSES:
        raise UnsupportedTokenizer(f"{name:.60} is not known to genctl")
    return name
