"""Which families the native runtime knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genctl.native import gpt_families as gpt
from genctl.native import llama_families as llama
from genctl.native.config import Config, NotNative
from genctl.native.names import Found

FAMILIES: dict[str, Callable[[Config], Found]] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "gemma": llama.gemma,
    "gemma2": llama.gemma2,
    "gemma3_text": llama.gemma3_text,
    "granite": llama.granite,
    "olmo": llama.olmo,
    "olmo2": llama.olmo2,
    "stablelm": llama.stablelm,
    "starcoder2": llama.starcoder2,
    "phi": llama.phi,
    "phi3": llama.phi3,
    "gpt2": gpt.gpt2,
    "gptj": gpt.gptj,
    "gpt_neox": gpt.gpt_neox,
    "opt": gpt.opt,
    "bloom": gpt.bloom,
    "falcon": gpt.falcon,
}

# What config.json calls their language models.
CLASSES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
}

# Names of the activation functions that `decoder` has.
ACTIVATIONS = frozenset(
    {"silu", "swish", "relu", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"}
)


def spec_of(config: dict[str, Any]) -> Found:
    """The spec of a checkpoint with this config.json, and its tensors' names. Raises NotNative with the reason."""
    family = config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise NotNative(f"{family!r:.80} is not a family that the native runtime knows")
    reader = Config(config)
    try:
        spec, names = read(reader)
    except (TypeError, ValueError, ArithmeticError) as error:  # config.json is what a stranger wrote
        raise NotNative(f"config.json has a field of another type than {family} has: {error}") from error
    reader.rest()
    if not isinstance(spec.activation, str) or spec.activation not in ACTIVATIONS:
        raise NotNative(f"config.json: activation {spec.activation!r:.40} is not known to the native runtime")
    if spec.heads % spec.kv_heads:
        raise NotNative(f"{spec.heads} heads cannot share {spec.kv_heads}")
    return spec, names
