"""The metadata of a GGUF file as the fields of a config.json: one table for each architecture. No torch.

Keys are those of llama.cpp without the name of the architecture (gguf-py/gguf/constants.py, `Keys`). Where no key says
something, it is what llama.cpp's code takes (src/models/), or what the tensors show. A key that the table lacks is an
error: whatever it means would be left out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from genctl.errors import ModelError
from genctl.models.architectures import facts_of
from genctl.models.gguf_header import Header
from genctl.models.weights import shown

Config = dict[str, Any]
_LARGEST = 3e38  # of float32, nearly
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # of longrope

# Keys that change nothing for a text, beside those that do not begin with the architecture (general.*, split.*).
HARMLESS = ("tensor_data_layout", "pooling_type", "classifier.output_labels", "rope.scaling.finetuned")

# Keys that are the same in every architecture, and the fields of most.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_GPT_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_HEAD = {"attention.key_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_MOE = {"expert_feed_forward_length": "moe_intermediate_size"}
_SCALING = tuple(
    f"rope.scaling.{name}"
    for name in (
        *("type", "factor", "original_context_length", "attn_factor", "yarn_log_multiplier", "yarn_ext_factor"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
    )
)
_QKV_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_QKV_BIAS, "mlp_bias": "ffn_up.bias"}


class _File:
    """The metadata and the tensors of a file. Every key that is taken is known."""

    def __init__(self, name: str, header: Header, factors: Mapping[str, tuple[float, ...]]) -> None:
        self.name, self.header, self.factors = name, header, factors
        self.begin = f"{header.architecture}."
        self.known: set[str] = {*HARMLESS}

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; a list of one value for all layers is that value."""
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
        """Raises ModelError for a key with another value than these."""
        if self.take(key, allowed[0]) not in allowed:
            raise self.refused(key, " or ".join(map(str, allowed)))

    def refused(self, key: str, wanted: str) -> ModelError:
        value = self.header.metadata.get(self.begin + key, "missing")
        return ModelError(f"{self.name}: {shown(self.begin + key, 60)} is {value!r:.40}; known here is {wanted}")

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def holds(self, tensor: str) -> bool:
        """Whether the first layer has a tensor; queries, keys and values may be one matrix."""
        names = (f"blk.0.{name}" for name in (tensor, tensor.replace("attn_q.", "attn_qkv.")))
        return any(name in self.header.tensors for name in names)

    def rest(self) -> None:
        """Raises ModelError for a key of the architecture that was not taken."""
        keys = (key.removeprefix(self.begin) for key in self.header.metadata if key.startswith(self.begin))
        for key in keys:
            if key not in self.known:
                value = f"{shown(self.begin + key, 80)} = {self.header.metadata[self.begin + key]!r:.40}"
                raise ModelError(f"{self.name}: {value} is not known, and texts may depend on it")


@dataclass(frozen=True)
class GgufArchitecture:
    """What is known of an architecture."""

    model_type: str
    keys: Mapping[str, str]  # key -> field of the config
    fixed: Config = field(default_factory=dict)  # fields without a key
    held: Mapping[str, str] = field(default_factory=dict)  # field that is true where the first layer has this tensor
    # the field for the share of a head that turns; "": whole heads turn; None: positions are no angles
    rotary: str | None = ""
    theta: str = "rope_theta"
    own_angles: bool = False  # the layers with a window have their own
    period: int = 0  # of the layers one in so many has no window, where no key says which
    only: Mapping[str, Any] = field(default_factory=dict)  # keys with the one value that is known
    finish: Callable[[_File, Config], None] | None = None  # what needs code


_PATTERN = "attention.sliding_window_pattern"


def config_of(name: str, header: Header, factors: Mapping[str, tuple[float, ...]]) -> Config | None:
    """The config of a file; None for an architecture that the table lacks. Raises ModelError.

    `name` is the file's, for messages; `factors` are the numbers of the tensors in `FACTORS`.
    """
    row = ROWS.get(header.architecture)
    if row is None:
        return None
    file = _File(name, header, factors)
    config: Config = {"model_type": row.model_type, **row.fixed}
    for key, what in row.keys.items():
        if (value := file.take(key)) is not None and key != _PATTERN:
            config[what] = value
    config |= {what: file.holds(tensor) for what, tensor in row.held.items()}
    embedding = header.tensors.get("token_embd.weight")
    config["vocab_size"] = file.take("vocab_size") or (embedding.shape[0] if embedding is not None else 0)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    _heads(file, row, config)
    if row.rotary is not None:
        _angles(file, row, config)
    if row.period:
        _windows(file, row.period, config)
    if row.finish is not None:
        row.finish(file, config)
    for key, value in {"attention.causal": True, **row.only}.items():
        file.only(key, value)
    file.rest()
    native = facts_of(config["model_type"]).native
    config["architectures"] = [_CLASSES[config["model_type"]] if native is None else native.model_class]
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}
    own = {what: header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for what, kind in ids.items()}
    return {**config, **{what: value for what, value in own.items() if type(value) is int}}


def decimal(value: Any) -> Any:
    """The shortest decimal number that is this one in float32: 1e-06, which the file has as 9.99999997e-07.

    Other values are returned as they are.
    """
    if not isinstance(value, float) or not abs(value) < _LARGEST:
        return value
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in short if struct.pack("<f", each) == struct.pack("<f", value)), value)


def _heads(file: _File, row: GgufArchitecture, config: Config) -> None:
    """The features of a head."""
    hidden, heads = file.size("embedding_length"), file.size("attention.head_count")
    size = file.head_dim
    if "attention.key_length" in row.keys:
        config["head_dim"] = size
    file.only("attention.key_length", size if "head_dim" in config else hidden // heads)
    file.only("attention.value_length", size)
    if "attention.head_count_kv" in row.keys:
        config.setdefault(row.keys["attention.head_count_kv"], heads)
    else:
        file.only("attention.head_count_kv", heads)


def _angles(file: _File, row: GgufArchitecture, config: Config) -> None:
    """Rotary positions: their base, how much of a head turns, and how they are stretched."""
    config[row.theta] = file.number("rope.freq_base", 10000.0)
    size = file.head_dim
    turning = file.size("rope.dimension_count", size)
    if row.rotary:
        share = turning / size
        config[row.rotary] = share if int(size * share) == turning else math.nextafter(share, 2)
    elif turning != size:
        raise file.refused("rope.dimension_count", str(size))
    if not row.own_angles:  # the layers with a window turn as the others
        file.only("rope.freq_base_swa", config[row.theta])
    if scaling := _scaling(file, size if not row.rotary else turning):
        config["rope_scaling"] = scaling


def _scaling(file: _File, turning: int) -> Config:
    """`rope_scaling`; {} without one."""
    for key in _SCALING:
        file.take(key)
    factor = file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0
    kind = file.take("rope.scaling.type", "linear")
    original = file.size("rope.scaling.original_context_length", file.size("context_length"))
    attention = file.number("rope.scaling.attn_factor", 1.0)
    if any(file.factors.values()) or kind == "longrope":
        short, long = (list(file.factors.get(name, ())) for name in FACTORS)
        if len(short) != turning // 2 or len(long) != turning // 2:
            raise ModelError(f"{file.name} stretches positions as longrope, without {turning // 2} factors for them")
        found = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return found | {"original_max_position_embeddings": original, "factor": file.size("context_length") / original}
    if kind == "yarn":
        file.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if value := file.number(f"rope.scaling.yarn_{name}"):
                found[name] = value
        if (own := file.number("rope.scaling.yarn_attn_factor", 1.0)) != 1.0 or attention != 1.0:
            sharp = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
            found["attention_factor"] = own if own != 1.0 else sharp * attention
        elif mscale := file.number("rope.scaling.yarn_log_multiplier"):
            found |= {"mscale": 1.0, "mscale_all_dim": mscale}
        return found
    if kind not in ("linear", "none"):
        raise file.refused("rope.scaling.type", "linear, yarn, longrope or none")
    file.only("rope.scaling.attn_factor", 1.0)
    return {} if factor == 1.0 or kind == "none" else {"rope_type": "linear", "factor": factor}


def _windows(file: _File, period: int, config: Config) -> None:
    """`layer_types`: the layers with a window, by an array, by a period, or by that of llama.cpp's code."""
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


# -- what needs code in the rows of some architectures -----------------------------------------------------------------


def _llama(file: _File, config: Config) -> None:
    """Mixtral's files have this architecture, too."""
    count = file.take("expert_count", 0)
    if not count:
        file.only("expert_used_count", 0)
        return
    config |= {"model_type": "mixtral", "num_local_experts": count, "sliding_window": None}
    config["num_experts_per_tok"] = file.size("expert_used_count")
    for name in (*_BIASES, "hidden_act"):
        config.pop(name, None)


def _experts(file: _File, config: Config) -> None:
    """Routers that choose by a softmax, without groups and factors."""
    file.only("expert_gating_func", 1, 0)
    file.only("expert_weights_scale", 1.0, 0.0)
    file.only("expert_weights_norm", config["norm_topk_prob"])


def _granite(file: _File, config: Config) -> None:
    """llama.cpp takes 0 for a multiplier that is not there."""
    config["attention_multiplier"] = config.get("attention_multiplier") or file.head_dim**-0.5
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        config[name] = config.get(name) or 1.0


def _gemma(largest: int) -> Callable[[_File, Config], None]:
    """Scores are divided by the root of the size of a head, but in the `largest` model by that of hidden / heads."""

    def finish(file: _File, config: Config) -> None:
        is_largest = file.size("block_count") == largest
        whole = file.size("embedding_length") // file.size("attention.head_count")
        config["query_pre_attn_scalar"] = whole if is_largest else file.head_dim

    return finish


def _gemma3(file: _File, config: Config) -> None:
    _gemma(62)(file, config)
    config["rope_local_base_freq"] = file.number("rope.freq_base_swa", 10000.0)
    config.setdefault("final_logit_softcapping", None)


def _olmo2(file: _File, config: Config) -> None:
    """OLMo 3 is OLMo 2 with windows, in whose layers angles are not stretched."""
    if config["sliding_window"] is None:
        del config["sliding_window"], config["layer_types"]
        return
    theta, scaling = config["rope_theta"], config.pop("rope_scaling", {"rope_type": "default"})
    config |= {
        "model_type": "olmo3",
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", theta)},
        },
    }


def _phi3(file: _File, config: Config) -> None:
    config["sliding_window"] = config.get("sliding_window") or None  # 0 of Phi-4
    context = file.size("context_length")
    config["original_max_position_embeddings"] = file.size("rope.scaling.original_context_length", context)


def _falcon(file: _File, config: Config) -> None:
    """One head of keys and values (7B), or groups of heads, with two norms (40B) or one (Falcon 2)."""
    two = file.holds("attn_norm_2.weight")
    if config["num_kv_heads"] == 1 and not two:
        config |= {"multi_query": True, "new_decoder_architecture": False}
    else:
        config |= {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}


def _mpt(file: _File, config: Config) -> None:
    clip, bias = file.number("attention.clamp_kqv"), file.number("attention.max_alibi_bias", 8.0)
    config["attn_config"] = {"alibi": bias != 0, "alibi_bias_max": int(bias), "clip_qkv": clip or None}
    file.only("feed_forward_length", 4 * file.size("embedding_length"))


def _bloom(file: _File, config: Config) -> None:
    file.only("feed_forward_length", 4 * file.size("embedding_length"))


# -- the table ---------------------------------------------------------------------------------------------------------

_LLAMA_KEYS = {**_SIZES, **_HEAD, **_RMS}
_LLAMA = GgufArchitecture("llama", _LLAMA_KEYS, {"hidden_act": "silu"}, _BIASES, finish=_llama)
_QWEN = {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_SHARED = {**_MOE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ROWS = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": GgufArchitecture("qwen2", {**_SIZES, **_RMS}, _QWEN),
    "qwen3": GgufArchitecture("qwen3", _LLAMA_KEYS, _QWEN, _QKV_BIAS),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe", {**_SIZES, **_RMS, **_EXPERTS, **_SHARED}, {**_QWEN, "norm_topk_prob": False}, finish=_experts
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", {**_LLAMA_KEYS, **_EXPERTS, **_MOE}, {**_QWEN, "norm_topk_prob": True}, _QKV_BIAS, finish=_experts
    ),
    "gemma": GgufArchitecture("gemma", _LLAMA_KEYS, {"hidden_act": "gelu_pytorch_tanh"}, _QKV_BIAS),
    "gemma2": GgufArchitecture(
        "gemma2", {**_LLAMA_KEYS, **_WINDOW, **_CAPS}, {**_GELU, "attn_logit_softcapping": 50.0}, _QKV_BIAS,
        period=2, finish=_gemma(46),
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", {**_LLAMA_KEYS, **_WINDOW, **_CAPS}, _GELU, _QKV_BIAS, own_angles=True, period=6, finish=_gemma3,
    ),
    "granite": GgufArchitecture(
        "granite",
        {
            **_SIZES, **_RMS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
        {"hidden_act": "silu"}, _BIASES, finish=_granite,
        only={"rope.scaling.finetuned": True, "expert_count": 0},  # llama.cpp: without the first nothing turns
    ),
    "olmo": GgufArchitecture(
        "olmo", {**_SIZES, "attention.clamp_kqv": "clip_qkv"}, {"hidden_act": "silu"}, _QKV_BIAS,
        only={"attention.layer_norm_epsilon": 1e-5},
    ),
    "olmo2": GgufArchitecture(
        "olmo2", {**_SIZES, **_RMS, **_WINDOW}, {"hidden_act": "silu"}, _QKV_BIAS, own_angles=True, period=4,
        finish=_olmo2,
    ),
    "stablelm": GgufArchitecture(
        "stablelm", {**_SIZES, **_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"}, {"hidden_act": "silu"},
        {"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"}, rotary="partial_rotary_factor",
    ),
    "starcoder2": GgufArchitecture(
        "starcoder2", {**_SIZES, "attention.layer_norm_epsilon": "norm_epsilon"},
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}, {"use_bias": "attn_q.bias"},
    ),
    "phi2": GgufArchitecture(
        "phi", {**_SIZES, **_LAYER_NORM}, {"hidden_act": "gelu_new"}, {"qk_layernorm": "attn_q_norm.weight"},
        rotary="partial_rotary_factor",
    ),
    "phi3": GgufArchitecture(
        "phi3", {**_SIZES, **_RMS, "attention.sliding_window": "sliding_window"}, {"hidden_act": "silu"},
        rotary="partial_rotary_factor", finish=_phi3,
    ),
    "smollm3": GgufArchitecture(
        "smollm3", _LLAMA_KEYS, {"hidden_act": "silu", "no_rope_layers": None, "no_rope_layer_interval": 4}, _BIASES
    ),
    "glm4": GgufArchitecture("glm4", _LLAMA_KEYS, {"hidden_act": "silu"}, _QKV_BIAS, rotary="partial_rotary_factor"),
    "ernie4_5": GgufArchitecture("ernie4_5", _LLAMA_KEYS, {"hidden_act": "silu"}, {"use_bias": "attn_q.bias"}),
    "cohere2": GgufArchitecture(
        "cohere2", {**_SIZES, **_LAYER_NORM, **_WINDOW, "logit_scale": "logit_scale"}, {"hidden_act": "silu"},
        _QKV_BIAS, period=4,
    ),
    "gpt2": GgufArchitecture("gpt2", _GPT_SIZES, {"activation_function": "gelu_new"}, rotary=None),
    "starcoder": GgufArchitecture(
        "gpt_bigcode", {**_GPT_SIZES, "attention.head_count_kv": "num_key_value_heads"},
        {"activation_function": "gelu_pytorch_tanh", "multi_query": True}, rotary=None,
        only={"attention.head_count_kv": 1},
    ),
    "gptneox": GgufArchitecture(
        "gpt_neox",
        {**{key: what for key, what in _SIZES.items() if key != "attention.head_count_kv"}, **_LAYER_NORM,
         "use_parallel_residual": "use_parallel_residual"},
        {"hidden_act": "gelu"}, {"attention_bias": "attn_qkv.bias"}, rotary="rotary_pct", theta="rotary_emb_base",
    ),
    "bloom": GgufArchitecture(
        "bloom",
        {"block_count": "n_layer", "context_length": "seq_length", "embedding_length": "hidden_size",
         "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        rotary=None, finish=_bloom,
    ),
    "mpt": GgufArchitecture(
        "mpt",
        {"block_count": "n_layers", "context_length": "max_seq_len", "embedding_length": "d_model",
         "attention.head_count": "n_heads", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        rotary=None, finish=_mpt,
    ),
    "falcon": GgufArchitecture(
        "falcon",
        {**_SIZES, "feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": "num_kv_heads",
         "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        {"activation": "gelu", "alibi": False, "parallel_attn": True}, {"bias": "attn_qkv.bias"}, finish=_falcon,
    ),
}  # fmt: skip
_CLASSES = {"qwen2_moe": "Qwen2MoeForCausalLM"}  # of those that are not native
