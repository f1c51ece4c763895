"""A GGUF file as a checkpoint: its metadata as fields of a config.json, with a row for each architecture. No torch.

Keys are those of llama.cpp without the name of the architecture (gguf-py/gguf/constants.py, `Keys`). Values without a
key come from llama.cpp's code (src/models/), or from the tensors. A key that the table lacks is an error: its meaning
would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from genctl.errors import ModelError
from genctl.models import check, config_limits
from genctl.models.architectures import facts_of
from genctl.models.check import GenerationSettings
from genctl.models.fingerprint import stamps
from genctl.models.gguf import HARMLESS, Header, decimal, their_config, tokenizer_header
from genctl.models.libraries import guarded
from genctl.models.weights import WeightFiles, shown

Config = dict[str, Any]
_NONE: Mapping[str, Any] = MappingProxyType({})
_PATTERN = "attention.sliding_window_pattern"


def inspect(path: Path, *, need_tokenizer: bool) -> check.Checkpoint:
    """Check a GGUF file and read its config. Raises ModelError."""
    name, header = shown(path.name), tokenizer_header(path, needed=need_tokenizer)
    for key in (f"{header.architecture}.{kind}block_count" for kind in ("", "decoder_")):
        # before a library builds lists of such lengths; a layer has several tensors
        if (count := header.metadata.get(key, 1)) not in range(1, len(header.tensors)):
            raise ModelError(f"{name} holds {len(header.tensors)} tensors, but {key} is {count!r:.40}")
    if header.architecture in ROWS:
        config = config_of(name, header)
    else:
        config = guarded(lambda: their_config(path, header), f"the metadata of {name} cannot be used")
    # activations are in float32 if matrices have blocks or float16
    dtypes = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    dtype = "bfloat16" if "BF16" in dtypes else "float32"
    weights = WeightFiles(header.files, {**header.tensors}, dtype=dtype)
    config_limits.check_numbers(config, source=name)
    config_limits.check_size(config, weights, source=name)
    files = stamps(path.parent, header.files, code=False)
    own, ends = {file.name: files[file.name] for file in header.files}, header.ends()
    further = ends and ends != (header.metadata.get("tokenizer.ggml.eos_token_id"),)  # the config has this one
    settings = GenerationSettings({"eos_token_id": list(ends)} if further else {}, name)
    return check.Checkpoint(path.parent, config, settings, weights, bool(header.tokens), own, path.name)


class _File:
    """The metadata and the tensors of a file. Keys that were taken are `known`."""

    def __init__(self, name: str, header: Header) -> None:
        self.name, self.header, self.begin = name, header, f"{header.architecture}."
        self.known: set[str] = {*HARMLESS}

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; a list with one value for all layers becomes that value."""
        self.known.add(key)
        value = self.header.metadata.get(self.begin + key, default)
        if isinstance(value, list) and key != _PATTERN and len(set(value)) == 1:
            return value[0]
        return decimal(value)

    def number(self, key: str, default: float = 0.0) -> float:
        """A finite number. Raises ModelError."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refused(key, "a number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError."""
        value = self.take(key, default)
        if type(value) is not int or value <= 0:
            raise self.refused(key, "a size")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Raises ModelError if the key has another value than these."""
        if self.take(key, allowed[0]) not in allowed:
            raise self.refused(key, " or ".join(map(str, allowed)))

    def refused(self, key: str, wanted: str) -> ModelError:
        value = self.header.metadata.get(self.begin + key, "missing")
        return ModelError(f"{self.name}: {shown(self.begin + key, 60)} is {value!r:.40}; known here is {wanted}")

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def holds(self, tensor: str) -> bool:
        """Whether the first layer has a tensor; queries, keys and values may be one matrix."""
        names = (f"blk.0.{name}" for name in (tensor, tensor.replace("attn_q.", "attn_qkv.")))
        return any(name in self.header.tensors for name in names)


class _GgufRow(NamedTuple):
    """The facts about an architecture."""

    model_type: str
    keys: Mapping[str, str]  # key -> field of the config
    fixed: Mapping[str, Any] = _NONE  # fields without a key
    present: Mapping[str, str] = _NONE  # field that is true if the first layer has this tensor
    # the field for the rotary share of a head; "": the whole head; None: no rotary positions
    rotary: str | None = ""
    theta: str = "rope_theta"
    own_angles: bool = False  # layers with a window have their own rotary settings
    period: int = 0  # one in so many layers has no window, if no key says which
    only: Mapping[str, tuple[Any, ...]] = _NONE  # keys with the only values that are supported
    finish: Callable[[_File, Config], None] | None = None  # for what needs code


def config_of(name: str, header: Header) -> Config:
    """The config of a file whose architecture has a row; `name` is for messages. Raises ModelError."""
    row = ROWS[header.architecture]
    file = _File(name, header)
    config: Config = {"model_type": row.model_type, **row.fixed}
    for key, what in row.keys.items():
        if (value := file.take(key)) is not None and key != _PATTERN:
            config[what] = value
    config |= {what: file.holds(tensor) for what, tensor in row.present.items()}
    embedding = header.tensors.get("token_embd.weight")
    config["vocab_size"] = file.take("vocab_size") or (embedding.shape[0] if embedding is not None else 0)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    heads, size = file.size("attention.head_count"), file.head_dim
    if "attention.key_length" in row.keys:
        config["head_dim"] = size
    else:
        file.only("attention.key_length", file.size("embedding_length") // heads)
    file.only("attention.value_length", size)
    if "attention.head_count_kv" in row.keys:
        config.setdefault(row.keys["attention.head_count_kv"], heads)
    else:
        file.only("attention.head_count_kv", heads)
    if row.rotary is not None:
        _angles(file, row, config)
    if row.period:
        _windows(file, row.period, config)
    if row.finish is not None:
        row.finish(file, config)
    for key, values in {"attention.causal": (True,), **row.only}.items():
        file.only(key, *values)
    own = (key.removeprefix(file.begin) for key in header.metadata if key.startswith(file.begin))
    if (unknown := next((key for key in own if key not in file.known), None)) is not None:
        value = f"{shown(file.begin + unknown, 80)} = {header.metadata[file.begin + unknown]!r:.40}"
        raise ModelError(f"{name}: {value} is not known, and texts may depend on it")
    if (native := facts_of(config["model_type"]).native) is not None:
        config["architectures"] = [native.model_class]
    for what, kind in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if type(id := header.metadata.get(f"tokenizer.ggml.{kind}_token_id")) is int:
            config[f"{what}_token_id"] = id
    return config


def _angles(file: _File, row: _GgufRow, config: Config) -> None:
    """Rotary positions: their base, the rotary share of a head, and their scaling."""
    config[row.theta] = file.number("rope.freq_base", 10000.0)
    size = file.head_dim
    turning = file.size("rope.dimension_count", size)
    if row.rotary:
        share = turning / size
        config[row.rotary] = share if int(size * share) == turning else math.nextafter(share, 2)
    elif turning != size:
        raise file.refused("rope.dimension_count", str(size))
    if not row.own_angles:  # layers with a window rotate like the others
        file.only("rope.freq_base_swa", config[row.theta])
    if scaling := _scaling(file, turning):
        config["rope_scaling"] = scaling


def _scaling(file: _File, turning: int) -> Config:
    """`rope_scaling`; {} without one."""
    factor = file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0
    kind = file.take("rope.scaling.type", "linear")
    context = file.size("context_length")
    original = file.size("rope.scaling.original_context_length", context)
    attention, own = (file.number(f"rope.scaling.{name}", 1.0) for name in ("attn_factor", "yarn_attn_factor"))
    mscale = file.number("rope.scaling.yarn_log_multiplier")
    betas = {name: file.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    short, long = (list(file.header.factors(f"rope_factors_{which}.weight")) for which in ("short", "long"))
    if short or long or kind == "longrope":
        if {len(short), len(long)} != {turning // 2}:
            raise ModelError(f"{file.name} stretches positions as longrope, without {turning // 2} factors for them")
        found = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return found | {"original_max_position_embeddings": original, "factor": context / original}
    if kind == "yarn":
        file.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        found |= {name: value for name, value in betas.items() if value}
        if own != 1.0 or attention != 1.0:
            sharp = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
            found["attention_factor"] = own if own != 1.0 else sharp * attention
        elif mscale:
            found |= {"mscale": 1.0, "mscale_all_dim": mscale}
        return found
    if kind not in ("linear", "none"):
        raise file.refused("rope.scaling.type", "linear, yarn, longrope or none")
    file.only("rope.scaling.attn_factor", 1.0)
    return {} if factor == 1.0 or kind == "none" else {"rope_type": "linear", "factor": factor}


def _windows(file: _File, period: int, config: Config) -> None:
    """`layer_types`: the layers with a window, by the file's array or period, or by the period of llama.cpp's code."""
    layers, pattern = file.size("block_count"), file.take(_PATTERN, period)
    if isinstance(pattern, list) and len(pattern) == layers:
        sliding = [bool(each) for each in pattern]
    elif type(pattern) is int and pattern >= 0:  # 0: all; 1: none
        sliding = [pattern == 0 or number % pattern < pattern - 1 for number in range(layers)]
    else:
        raise file.refused(_PATTERN, f"a list of {layers} or a number")
    if not file.take("attention.sliding_window"):
        config["sliding_window"], sliding = None, [False] * layers
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in sliding]


# -- code for some architectures ---------------------------------------------------------------------------------------


def _llama(file: _File, config: Config) -> None:
    """Mixtral's files have this architecture, too."""
    count = file.take("expert_count", 0)
    if not count:
        file.only("expert_used_count", 0)
        return
    config |= {"model_type": "mixtral", "num_local_experts": count, "sliding_window": None}
    config["num_experts_per_tok"] = file.size("expert_used_count")
    for name in ("attention_bias", "mlp_bias", "hidden_act"):
        config.pop(name, None)


def _granite(file: _File, config: Config) -> None:
    """In llama.cpp a multiplier of 0 means that there is none."""
    config["attention_multiplier"] = config.get("attention_multiplier") or file.head_dim**-0.5
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        config[name] = config.get(name) or 1.0


def _gemma(largest: int, file: _File, config: Config) -> None:
    """Scores are divided by the root of the head size; in the `largest` model, by that of hidden / heads."""
    is_largest = file.size("block_count") == largest
    whole = file.size("embedding_length") // file.size("attention.head_count")
    config["query_pre_attn_scalar"] = whole if is_largest else file.head_dim


def _gemma3(file: _File, config: Config) -> None:
    _gemma(62, file, config)
    config["rope_local_base_freq"] = file.number("rope.freq_base_swa", 10000.0)


def _olmo2(file: _File, config: Config) -> None:
    """OLMo 3 is OLMo 2 with windows; layers with a window have no rope scaling."""
    if config["sliding_window"] is None:
        del config["sliding_window"], config["layer_types"]
        return
    theta, scaling = config["rope_theta"], config.pop("rope_scaling", {"rope_type": "default"})
    config["model_type"] = "olmo3"
    config["rope_parameters"] = {
        "full_attention": {**scaling, "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", theta)},
    }


def _phi3(file: _File, config: Config) -> None:
    config["sliding_window"] = config.get("sliding_window") or None  # 0 in Phi-4
    context = file.size("context_length")
    config["original_max_position_embeddings"] = file.size("rope.scaling.original_context_length", context)


def _falcon(file: _File, config: Config) -> None:
    """One head of keys and values (7B), or groups of heads with two norms (40B) or one (Falcon 2)."""
    two = file.holds("attn_norm_2.weight")
    if config["num_kv_heads"] == 1 and not two:
        config |= {"multi_query": True, "new_decoder_architecture": False}
    else:
        config |= {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}


def _bloom(file: _File, config: Config) -> None:
    file.only("feed_forward_length", 4 * file.size("embedding_length"))


def _mpt(file: _File, config: Config) -> None:
    clip, bias = file.number("attention.clamp_kqv"), file.number("attention.max_alibi_bias", 8.0)
    config["attn_config"] = {"alibi": bias != 0, "alibi_bias_max": int(bias), "clip_qkv": clip or None}
    _bloom(file, config)


# -- the table ---------------------------------------------------------------------------------------------------------


def _sizes(layers: str, context: str, hidden: str, heads: str, **more: str) -> dict[str, str]:
    """The keys that every architecture has, with the fields of its config."""
    names = {"inner": "feed_forward_length", "kv": "attention.head_count_kv", "norm": "attention.layer_norm_epsilon"}
    found = {"block_count": layers, "context_length": context, "embedding_length": hidden}
    return found | {"attention.head_count": heads} | {names[name]: what for name, what in more.items()}


_USUAL = ("num_hidden_layers", "max_position_embeddings", "hidden_size", "num_attention_heads")
_SIZES = _sizes(*_USUAL, inner="intermediate_size", kv="num_key_value_heads")
_RMS = {**_SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_NORM = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
_HEAD = {**_RMS, "attention.key_length": "head_dim"}
_GPT = _sizes("n_layer", "n_positions", "n_embd", "n_head", inner="n_inner", norm="layer_norm_epsilon")
_WINDOW = {"attention.sliding_window": "sliding_window", _PATTERN: "layer_types"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
# routers that choose by a softmax, without groups and factors
_SOFTMAX = {"expert_gating_func": (1, 0), "expert_weights_scale": (1.0, 0.0)}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_SILU, _GELU = {"hidden_act": "silu"}, {"hidden_activation": "gelu_pytorch_tanh"}
_QWEN = {**_SILU, "use_sliding_window": False, "sliding_window": None}
_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_BIAS, "mlp_bias": "ffn_up.bias"}
_PARTIAL = "partial_rotary_factor"
_LLAMA = _GgufRow("llama", _HEAD, _SILU, _BIASES, finish=_llama)
ROWS = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": _GgufRow("qwen2", _RMS, _QWEN),
    "qwen3": _GgufRow("qwen3", _HEAD, _QWEN, _BIAS),
    "qwen2moe": _GgufRow(
        "qwen2_moe", {**_RMS, **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {**_QWEN, "norm_topk_prob": False}, only={**_SOFTMAX, "expert_weights_norm": (False,)},
    ),
    "qwen3moe": _GgufRow(
        "qwen3_moe", {**_HEAD, **_EXPERTS}, {**_QWEN, "norm_topk_prob": True}, _BIAS,
        only={**_SOFTMAX, "expert_weights_norm": (True,)},
    ),
    "gemma": _GgufRow("gemma", _HEAD, {"hidden_act": "gelu_pytorch_tanh"}, _BIAS),
    "gemma2": _GgufRow(
        "gemma2", {**_HEAD, **_WINDOW, **_CAPS}, {**_GELU, "attn_logit_softcapping": 50.0}, _BIAS,
        period=2, finish=partial(_gemma, 46),
    ),
    "gemma3": _GgufRow(
        "gemma3_text", {**_HEAD, **_WINDOW, **_CAPS}, {**_GELU, "final_logit_softcapping": None}, _BIAS,
        own_angles=True, period=6, finish=_gemma3,
    ),
    "granite": _GgufRow(
        "granite", {**_RMS, **_MULTIPLIERS}, _SILU, _BIASES, finish=_granite,
        only={"rope.scaling.finetuned": (True,), "expert_count": (0,)},  # llama.cpp: without the first nothing rotates
    ),
    "olmo": _GgufRow(
        "olmo", {**_SIZES, "attention.clamp_kqv": "clip_qkv"}, _SILU, _BIAS,
        only={"attention.layer_norm_epsilon": (1e-5,)},
    ),
    "olmo2": _GgufRow("olmo2", {**_RMS, **_WINDOW}, _SILU, _BIAS, own_angles=True, period=4, finish=_olmo2),
    "stablelm": _GgufRow(
        "stablelm", {**_NORM, **_PARALLEL}, _SILU,
        {"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"}, rotary=_PARTIAL,
    ),
    "starcoder2": _GgufRow(
        "starcoder2", {**_NORM, "attention.layer_norm_epsilon": "norm_epsilon"},
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}, {"use_bias": "attn_q.bias"},
    ),
    "phi2": _GgufRow("phi", _NORM, {"hidden_act": "gelu_new"}, {"qk_layernorm": "attn_q_norm.weight"}, rotary=_PARTIAL),
    "phi3": _GgufRow(
        "phi3", {**_RMS, "attention.sliding_window": "sliding_window"}, _SILU, rotary=_PARTIAL, finish=_phi3
    ),
    "smollm3": _GgufRow("smollm3", _HEAD, {**_SILU, "no_rope_layers": None, "no_rope_layer_interval": 4}, _BIASES),
    "glm4": _GgufRow("glm4", _HEAD, _SILU, _BIAS, rotary=_PARTIAL),
    "ernie4_5": _GgufRow("ernie4_5", _HEAD, _SILU, {"use_bias": "attn_q.bias"}),
    "cohere2": _GgufRow("cohere2", {**_NORM, **_WINDOW, "logit_scale": "logit_scale"}, _SILU, _BIAS, period=4),
    "gpt2": _GgufRow("gpt2", _GPT, {"activation_function": "gelu_new"}, rotary=None),
    "starcoder": _GgufRow(
        "gpt_bigcode", {**_GPT, "attention.head_count_kv": "num_key_value_heads"},
        {"activation_function": "gelu_pytorch_tanh", "multi_query": True}, rotary=None,
        only={"attention.head_count_kv": (1,)},
    ),
    "gptneox": _GgufRow(
        "gpt_neox", {**_sizes(*_USUAL, inner="intermediate_size", norm="layer_norm_eps"), **_PARALLEL},
        {"hidden_act": "gelu"}, {"attention_bias": "attn_qkv.bias"}, rotary="rotary_pct", theta="rotary_emb_base",
    ),
    "bloom": _GgufRow(
        "bloom", _sizes("n_layer", "seq_length", "hidden_size", "n_head", norm="layer_norm_epsilon"),
        rotary=None, finish=_bloom,
    ),
    "mpt": _GgufRow(
        "mpt", _sizes("n_layers", "max_seq_len", "d_model", "n_heads", norm="layer_norm_epsilon"),
        rotary=None, finish=_mpt,
    ),
    "falcon": _GgufRow(
        "falcon", _sizes(*_USUAL, inner="ffn_hidden_size", kv="num_kv_heads", norm="layer_norm_epsilon"),
        {"activation": "gelu", "alibi": False, "parallel_attn": True}, {"bias": "attn_qkv.bias"}, finish=_falcon,
    ),
}  # fmt: skip
