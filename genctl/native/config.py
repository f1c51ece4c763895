"""Read config.json field by field. A field that is neither read nor known to be harmless raises NotNative."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from genctl.config.names import FIELDS
from genctl.native.spec import Found, Rope

_REQUIRED: Any = object()
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Names of the activation functions that `mlp` has.
ACTIVATIONS = frozenset(
    {"silu", "swish", "relu", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"}
)

# Fields that change nothing in a forward pass.
HARMLESS = frozenset(
    {
        # the checkpoint's origin and training setup
        "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "transformers_version",
        "tokenizer_class", "task_specific_params", "initializer_range", "init_std", "pretraining_tp",
        "is_decoder", "gradient_checkpointing", "seq_length", "n_ctx", "transformers_weights", "is_llama_config",
        "transformers.js_config", "unsloth_version", "unsloth_fixed", "_commit_hash", "_flash_attn_2_enabled",
        "max_sequence_length", "scale_attention_softmax_in_fp32", "initializer_factor",
        # tokens and labels
        "vocab_size", "sep_token_id", "cls_token_id", "unk_token_id",
        "id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task", "prefix",
        # dropout and other training options
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "layerdrop",
        "classifier_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "activation_dropout", "classif_dropout", "dropout_rate", "encoder_layerdrop",
        "decoder_layerdrop", "summary_last_dropout", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout", "torchscript", "use_bfloat16", "masked_softmax_fusion",
        "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion", "attention_softmax_in_fp32",
        # what a pass returns: genctl sets this in each call
        "return_dict", "keys_to_ignore_at_inference", "output_past",
        # how to generate (see `generation_settings`)
        "force_bos_token_to_be_generated", *FIELDS,
    }
)  # fmt: skip

# Fields that are harmless with these values only.
HARMLESS_AS: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    # read by some families only, or only by the checkpoint's own code
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "rotary_scaling_factor": (1.0,),
    "_attn_implementation": ("sdpa", "eager", None),
    "attn_implementation": ("sdpa", "eager", None),
    "_attn_implementation_autoset": (True, False, None),
}


class NotNative(Exception):
    """Why the native runtime cannot run a checkpoint, in a few words."""


class Unfit(NotNative):
    """The weight files do not match config.json: no other runtime can read them either."""


class Config:
    """config.json. `take` reads a field; `rest` raises NotNative for fields that were not read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.read: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a field, or `default` if it is missing. Raises NotNative if there is no default either."""
        self.read.add(name)
        if name in self.values:
            return self.values[name]
        if default is _REQUIRED:
            raise NotNative(f"config.json has no {name}")
        return default

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """A positive whole number."""
        value = self.take(name, default)
        if type(value) is not int or value <= 0:
            raise NotNative(f"config.json: {name} = {value!r:.40} is no size")
        return value

    def either(self, *names: str) -> int:
        """A size that may be stored under any of several names. Raises NotNative if they disagree."""
        sizes = {self.size(name) for name in names if name in self.values}
        if not sizes:
            return self.size(names[0])
        if len(sizes) > 1:
            raise NotNative(f"config.json: {' and '.join(names)} disagree")
        return sizes.pop()

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise NotNative(f"config.json: {name} = {value!r:.40} is no number")
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A finite number, or None."""
        return None if self.take(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise NotNative(f"config.json: {name} = {value!r:.40} is neither true nor false")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Read a field that must be missing or have one of these values. Raises NotNative."""
        if self.take(name, allowed[0]) not in allowed:
            raise NotNative(f"config.json: {name} = {self.values[name]!r:.40} is not supported")

    def windows(self, layers: int, window: int | None, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
        """The window of each layer: from `layer_types` if present, else for layers where `sliding(number)` is true."""
        kinds = self.take("layer_types", None)
        if kinds is None:
            kinds = [_LAYER_TYPES[bool(window and sliding(number))] for number in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {*_LAYER_TYPES}:
            raise NotNative(f"config.json: layer_types = {kinds!r:.60}")
        if window is None and "sliding_attention" in kinds:
            raise NotNative("config.json: sliding layers without a sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def window(self, default: int | None = None) -> int | None:
        """`sliding_window`, or None."""
        return None if self.take("sliding_window", default) is None else self.size("sliding_window", default)

    def rest(self) -> None:
        """Raises NotNative for a field that was not read and is not known to be harmless."""
        for name, value in self.values.items():
            harmless = name in HARMLESS or any(value == known for known in HARMLESS_AS.get(name, ()))
            if name not in self.read and not harmless:
                raise NotNative(f"config.json: {name} = {value!r:.40} is not known to the native runtime")

    # -- what several families have in common --------------------------------------------------------------------------

    def rope(
        self, head_dim: int, *, partial: float | None = None, theta: str = "rope_theta", base: float = 10000.0
    ) -> Rope:
        """Rotary positions from `rope_parameters`, or from `rope_scaling` and the older fields beside it.

        `partial` is the default share of a head that is rotated; None if the family always rotates whole heads.
        `theta` is the name of the field for the base, and `base` its default.
        """
        scaling, parameters = self.take("rope_scaling", None), self.take("rope_parameters", None)
        base, original = self.number(theta, base), self.take("original_max_position_embeddings", None)
        return self.one_rope(scaling or parameters or {}, head_dim, theta=base, partial=partial, original=original)

    def ropes(self, head_dim: int, *, theta: float, local_theta: float) -> tuple[Rope, Rope]:
        """Rotary positions of full-attention layers, and of layers with a window: `rope_parameters` by kind."""
        plain = {"rope_type": "default"}  # so a `type` in `rope_scaling`, the older name of the key, is ignored
        kinds = {**dict.fromkeys(_LAYER_TYPES, plain), **(self.take("rope_parameters", None) or {})}
        if set(kinds) != {*_LAYER_TYPES}:
            raise NotNative("config.json: rope_parameters are not those of the two kinds of layers")
        kinds["full_attention"] = {**(kinds["full_attention"] or {}), **(self.take("rope_scaling", None) or {})}
        if any("truncate" in (entry or {}) for entry in kinds.values()):  # transformers ignores it here
            raise NotNative("config.json: truncate in rope_parameters of one kind of layers")
        self.take("original_max_position_embeddings", None)  # ignored outside `rope_parameters`
        rope = self.one_rope(kinds["full_attention"], head_dim, theta=theta)
        return rope, self.one_rope(kinds["sliding_attention"] or {}, head_dim, theta=local_theta)

    def one_rope(
        self, parameters: Any, head_dim: int, *, theta: float, partial: float | None = None, original: int | None = None
    ) -> Rope:
        """One entry of `rope_parameters`. Raises NotNative for an unknown key or kind.

        `original` is the training context length, if the config has it outside the entry.
        """
        if not isinstance(parameters, dict):
            raise NotNative(f"config.json: rope_parameters = {parameters!r:.40}")
        part = Config(parameters)
        older = part.take("type", "default")
        kind = part.take("rope_type", older)
        share = part.number("partial_rotary_factor", 1.0 if partial is None else partial)
        size = int(head_dim * share)
        if size <= 0 or size % 2 or size > head_dim or (partial is None and size != head_dim):
            raise NotNative(f"{size} of {head_dim} features of a head turn")
        read = _KINDS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise NotNative(f"config.json: rope_type = {kind!r:.40} is not known to the native runtime")
        plain = Rope(size, part.number("rope_theta", theta), context=self.size("max_position_embeddings"))
        if plain.theta <= 0:
            raise NotNative(f"config.json: rope_theta = {plain.theta:g}, which has no powers")
        rope = read(part, plain, original)
        part.rest()
        return rope


def _plain(part: Config, rope: Rope, original: int | None) -> Rope:
    part.take("factor", None)  # transformers ignores both too
    part.take("original_max_position_embeddings", None)
    return rope


def _linear(part: Config, rope: Rope, original: int | None) -> Rope:
    part.take("original_max_position_embeddings", None)
    return replace(rope, kind="linear", factor=_factor(part))


def _dynamic(part: Config, rope: Rope, original: int | None) -> Rope:
    part.take("original_max_position_embeddings", None)
    if not rope.context or rope.size <= 2:
        raise NotNative("rope_type dynamic without max_position_embeddings")
    return replace(rope, kind="dynamic", factor=part.number("factor"))


def _llama3(part: Config, rope: Rope, original: int | None) -> Rope:
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    rope = replace(rope, kind="llama3", factor=_factor(part), low_freq_factor=low, high_freq_factor=high)
    return replace(rope, original=_original(part, rope, original))


def _yarn(part: Config, rope: Rope, original: int | None) -> Rope:
    old = _original(part, rope, original)
    factor = _factor(part, rope.context / old)
    mscale, mscale_all = part.optional("mscale"), part.optional("mscale_all_dim")
    attention = part.optional("attention_factor")
    if attention is None:  # section 3.4 of the paper: attention sharpens as the context is extended
        attention = _sharpness(factor)
        if mscale and mscale_all:
            attention = _sharpness(factor, mscale) / _sharpness(factor, mscale_all)
    # `or`: 0 counts as null, as in transformers
    fast, slow = part.optional("beta_fast") or 32.0, part.optional("beta_slow") or 1.0
    rope = replace(rope, kind="yarn", factor=factor, attention_factor=attention, original=old)
    return replace(rope, beta_fast=fast, beta_slow=slow, truncate=part.flag("truncate", True))


def _longrope(part: Config, rope: Rope, original: int | None) -> Rope:
    old = _original(part, rope, original)
    factor = part.optional("factor")
    if factor is None:
        factor = rope.context / old
    attention = part.optional("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(old))
    factors = []
    for name in ("short_factor", "long_factor"):
        values = part.take(name)
        if not isinstance(values, list) or len(values) != rope.size // 2:
            raise NotNative(f"config.json: {name} does not have {rope.size // 2} numbers")
        factors.append(tuple(Config({name: value}).number(name) for value in values))
    rope = replace(rope, kind="longrope", factor=factor, attention_factor=attention, original=old)
    return replace(rope, short_factor=factors[0], long_factor=factors[1])


_KINDS = {
    "default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip


def _original(part: Config, rope: Rope, original: int | None) -> int:
    """The training context length: from the config's own field, else the entry's, else the whole context."""
    inner = part.take("original_max_position_embeddings", None)
    length = original if original is not None else inner if inner is not None else rope.context
    if type(length) is not int or length <= 1:
        raise NotNative(f"config.json: original_max_position_embeddings = {length!r:.40}")
    return length


def _factor(part: Config, default: float | None = None) -> float:
    """The factor by which frequencies are divided. `default` replaces null."""
    value = part.take("factor")
    if value is None and default is not None:
        return default
    if value == 0:
        raise NotNative("config.json: factor = 0, by which frequencies are divided")
    return part.number("factor")


def _sharpness(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_config(config: dict[str, Any], read: Callable[[Config], Found], context: int | None = None) -> Found:
    """The spec and the tensor names for a config.json; `read` is its family's function. Raises NotNative.

    `context` stands in for `max_position_embeddings` if config.json lacks it.
    """
    longest = {} if context is None else {"max_position_embeddings": context}
    reader = Config({**longest, **config})
    try:
        spec, names = read(reader)
    except (TypeError, ValueError, ArithmeticError) as error:  # config.json is untrusted
        family = config.get("model_type")
        raise NotNative(f"config.json has a field of another type than {family} has: {error}") from error
    reader.rest()
    if not isinstance(spec.activation, str) or spec.activation not in ACTIVATIONS:
        raise NotNative(f"config.json: activation {spec.activation!r:.40} is not known to the native runtime")
    for what in ("scaling", "logits_scale", "softcap", "final_softcap"):
        if getattr(spec, what) == 0:  # transformers divides by it, or uses another value instead
            raise NotNative(f"config.json: a {what} of 0")
    if spec.heads % spec.kv_heads:
        raise NotNative(f"{spec.heads} heads cannot share {spec.kv_heads}")
    return spec, names


def whole_heads(hidden: int, heads: int) -> None:
    """Raises NotNative unless a head has a whole number of features."""
    if hidden % heads:
        raise NotNative(f"{heads} heads do not divide {hidden} features")
