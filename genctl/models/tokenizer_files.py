"""The class that transformers' `AutoTokenizer` uses for a checkpoint folder, by the rules of version 5.

tokenizer_config.json or config.json may name a class, and each model type has a registered one. Since version 5 a class
rebuilds parts of the tokenizer instead of taking them from tokenizer.json (`tokenizer_recipes`); all other folders use
tokenizer.json unchanged, which is called `BACKEND` here.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from genctl.models.architectures import BACKEND as BACKEND
from genctl.models.architectures import LEFT_TO_TRANSFORMERS, NO_CLASS, facts_of

# Names of that class, and of classes that it replaces.
_BACKENDS = frozenset({BACKEND, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "BloomTokenizer"})
CLASSES = frozenset({"GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "LlamaTokenizer", "Qwen2Tokenizer"})

# Paths as they are given, in lower case, of checkpoints whose tokenizer.json is taken as it is.
NAMES_OF_BACKENDS = (
    "deepseek-ai/deepseek-r1-distill-llama-*", "deepseek-ai/deepseek-coder-*", "allenai/dolma2-tokenizer",
    "google/umt5-small", "naver-clova-ix/donut-*", "salesforce/blip2-opt-*", "salesforce/blip2-flan-t5-*",
    "salesforce/instructblip-flan-t5-*", "stepfun-ai/step-3.7-*",
)  # fmt: skip


class UnsupportedTokenizer(Exception):
    """Why a tokenizer is left to transformers."""


def class_of(
    place: str, config: dict[str, Any], tokenizer_config: dict[str, Any], *, byte_level: Callable[[], bool]
) -> str:
    """`BACKEND` or one of `CLASSES`. `byte_level` returns whether tokenizer.json has a ByteLevel part.

    Raises UnsupportedTokenizer for any other class.
    """
    model_type = config.get("model_type")
    facts = facts_of(model_type)
    if facts.tokenizer in ("", LEFT_TO_TRANSFORMERS):
        raise UnsupportedTokenizer(f"model type {model_type!r:.40} has rules of its own")
    if tokenizer_config.get("auto_map") is not None or "model_name" in config:
        raise UnsupportedTokenizer("its class may be another than the one that is named")
    if any(fnmatch(place.lower(), name) for name in NAMES_OF_BACKENDS):
        return BACKEND
    class_name = tokenizer_config.get("tokenizer_class")
    class_name = config.get("tokenizer_class") if class_name is None else class_name
    if class_name is not None and (not isinstance(class_name, str) or not class_name):
        raise UnsupportedTokenizer(f"tokenizer_class = {class_name!r:.40}")
    name, registered = class_name, None if facts.tokenizer == NO_CLASS else facts.tokenizer
    if name is None:
        name = registered or BACKEND
    else:
        name = name.removesuffix("Fast")
        if name == "LlamaTokenizer" and not facts.tokenizer_wins and not facts.reads_tekken and byte_level():
            return BACKEND
        if registered is not None and (registered == BACKEND or facts.tokenizer_wins):
            name = registered
    if name in _BACKENDS:
        return BACKEND
    if name not in CLASSES:
        raise UnsupportedTokenizer(f"{name:.60} is not known to genctl")
    return str(name)
