"""Which families the native runtime knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from genctl.native import gpt_families as gpt
from genctl.native import llama_families as llama
from genctl.native.config import Config, NotNative
from genctl.native.names import Found

Read = TypeVar("Read", bound=tuple[Any, Any])  # a spec, and the names of its tensors

# config.json's `model_type` -> what reads the rest of it, and the name of the class of its language model.
FAMILIES: dict[str, tuple[Callable[[Config], Found], str]] = {
    "llama": (llama.llama, "LlamaForCausalLM"),
    "mistral": (llama.mistral, "MistralForCausalLM"),
    "qwen2": (llama.qwen2, "Qwen2ForCausalLM"),
    "qwen3": (llama.qwen3, "Qwen3ForCausalLM"),
    "gemma": (llama.gemma, "GemmaForCausalLM"),
    "gemma2": (llama.gemma2, "Gemma2ForCausalLM"),
    "gemma3_text": (llama.gemma3_text, "Gemma3ForCausalLM"),
    "granite": (llama.granite, "GraniteForCausalLM"),
    "olmo": (llama.olmo, "OlmoForCausalLM"),
    "olmo2": (llama.olmo2, "Olmo2ForCausalLM"),
    "stablelm": (llama.stablelm, "StableLmForCausalLM"),
    "starcoder2": (llama.starcoder2, "Starcoder2ForCausalLM"),
    "phi": (llama.phi, "PhiForCausalLM"),
    "phi3": (llama.phi3, "Phi3ForCausalLM"),
    "gpt2": (gpt.gpt2, "GPT2LMHeadModel"),
    "gptj": (gpt.gptj, "GPTJForCausalLM"),
    "gpt_neox": (gpt.gpt_neox, "GPTNeoXForCausalLM"),
    "opt": (gpt.opt, "OPTForCausalLM"),
    "bloom": (gpt.bloom, "BloomForCausalLM"),
    "falcon": (gpt.falcon, "FalconForCausalLM"),
}

# `max_position_embeddings` where config.json does not say it, as transformers' classes have it.
CONTEXT = {
    "llama": 2048,
    "mistral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "gemma": 8192,
    "gemma2": 8192,
    "gemma3_text": 131072,
    "granite": 2048,
    "olmo": 2048,
    "olmo2": 2048,
    "stablelm": 4096,
    "starcoder2": 4096,
    "phi": 2048,
    "phi3": 4096,
    "gpt_neox": 2048,
    "opt": 2048,
    "falcon": 2048,
    "bart": 1024,
    "mbart": 1024,
    "marian": 1024,
    "pegasus": 1024,
}

# Names of the activation functions that `decoder` has.
ACTIVATIONS = frozenset(
    {"silu", "swish", "relu", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"}
)


def spec_of(config: dict[str, Any]) -> Found:
    """The spec of a checkpoint with this config.json, and its tensors' names. Raises NotNative with the reason."""
    spec, names = read_config(config, FAMILIES)
    if spec.heads % spec.kv_heads:
        raise NotNative(f"{spec.heads} heads cannot share {spec.kv_heads}")
    return spec, names


def read_config(config: dict[str, Any], families: Mapping[str, tuple[Callable[[Config], Read], str]]) -> Read:
    """What the function of its family makes of a config.json. Raises NotNative with the reason."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in families:
        raise NotNative(f"{family!r:.80} is not a family that the native runtime knows")
    longest = {"max_position_embeddings": CONTEXT[family]} if family in CONTEXT else {}
    reader = Config({**longest, **config})
    try:
        found = families[family][0](reader)
    except (TypeError, ValueError, ArithmeticError) as error:  # config.json is what a stranger wrote
        raise NotNative(f"config.json has a field of another type than {family} has: {error}") from error
    reader.rest()
    activation = found[0].activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise NotNative(f"config.json: activation {activation!r:.40} is not known to the native runtime")
    return found
