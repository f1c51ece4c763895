"""A model without weights, built from config.json: the bytes of its weights, and what its cache holds.

All tensors are on the meta device, where they have shapes and types but no numbers. A model of the native runtime is
built from its `Spec`, any other one from its class in transformers. Of weight files only the headers are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genctl import compat
from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.cache.foreign import new_cache as new_transformers_cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import CROSS, CacheLayer
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Source
from genctl.engines.runtime import runtime_of
from genctl.errors import ModelError, UsageError
from genctl.models import (
    check,
    config_limits,
    hub,
    packed_layers,
    prepare,
    resolve,
    runtime_choice,
    weights,
    with_transformers,
)
from genctl.models.architectures import read_native
from genctl.models.check import Checkpoint, GenerationSettings
from genctl.models.libraries import brief, guarded, quiet
from genctl.native.graphs import obstacle
from genctl.native.linear import Linear, Plain, Products, Weight
from genctl.native.load import build as build_native
from genctl.native.plan import Shapes, StackPlan, WeightPlan
from genctl.native.quantized import GROUP, int4_bytes
from genctl.native.runtime import NativeModel, SpecialTokens
from genctl.native.spec import Names, Spec
from genctl.params import Runtime

PROBE = 8  # tokens that are put into a cache to see what it holds
MOST_LAYERS = 1024  # each becomes a module
MOST_EXPERTS = 1 << 17  # layers times experts

_LAYERS = re.compile(r"(^|_)layers?$|^depth$|^num_blocks$")
_EXPERTS = re.compile(r"^(num|n)_.*experts$")


@dataclass
class Skeleton:
    """A model with all tensors on the meta device."""

    name: str  # as the user typed it
    model: Any  # a `NativeModel`, or a model of transformers
    config: Any  # of transformers
    device: str  # where it would compute: cpu, cuda, cuda:1, …
    generation: GenerationSettings
    notes: list[str] = field(default_factory=list)

    @property
    def is_native(self) -> bool:
        return isinstance(self.model, NativeModel)

    @property
    def dtype(self) -> str:
        """The type of its weights, such as "bfloat16"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))


def build(runtime: Runtime, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Skeleton:
    """The model that `runtime` names, without its weights; of a Hub checkpoint only the configs are downloaded.

    Raises ModelError for a config that is missing, damaged, absurd or of no language model; UsageError for conflicting
    options.
    """
    prepare.check_options(runtime)
    try:  # the device need not exist here: a plan may be for another machine
        device = hub.device_of("auto") if runtime.device == "auto" else torch.device(runtime.device)
    except RuntimeError as error:
        raise UsageError(f"--device {runtime.device!r} is no device that torch knows") from error
    with quiet():
        place = resolve.resolve(
            runtime.model,
            revision=runtime.revision,
            offline=runtime.offline,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            configs_only=True,
        )
        if place.gguf is not None:
            raise ModelError(f"{place.gguf} is a GGUF file, and a plan is made of a config.json")
        checkpoint = _checkpoint(place.folder, allow_pickle, trust_remote_code)
        config = with_transformers.read_config(checkpoint, trust_remote_code)
        kind = with_transformers.auto_class(checkpoint, config, trust_remote_code)
        notes = list(place.notes)
        if runtime.dtype == "auto" and not runtime_choice.stored_dtype(checkpoint):
            notes.append("config.json names no dtype: float32 is taken; --dtype says otherwise")
        name, quantized = runtime_choice.dtype_of(runtime, checkpoint), checkpoint.config.get("quantization_config")
        if runtime.dtype == "auto" and device.type == "cuda" and not quantized:
            able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()  # no GPU here: assume a new one
            name = prepare.dtype_on_gpu(name, bfloat16=able)[0]
        if quantized:
            notes.append(
                "config.json has a quantization_config, which a plan does not apply: weights count as "
                f"{name}, more than they will take"
            )
        dtype = getattr(torch, name)
        spec = runtime_choice.spec_of_run(runtime, checkpoint, device, trust_remote_code=trust_remote_code)
        prepare.check_device(runtime, device if runtime.device_map is None else None, native=spec is not None)
        model = guarded(
            lambda: (
                _transformers_model(kind, config, dtype, trust_remote_code)
                if spec is None
                else _native_model(checkpoint, dtype, _SizedProducts(runtime.quantize, device.type))
            ),
            "config.json cannot be used",
        )
    return Skeleton(runtime.model, model, config, str(device), checkpoint.generation, notes)


# -- the cache ---------------------------------------------------------------------------------------------------------


def probe(skeleton: Skeleton, form: str) -> list[dict[str, Any]]:
    """The contents of a cache of the form (`cache_implementation`) with `PROBE` tokens in one row: see `describe`.

    [] for a model without a cache. Raises ModelError if the architecture cannot run with this config, or if its code
    depends on numbers and the config does not have the sizes of its heads.
    """
    model = skeleton.model
    if isinstance(model, NativeModel) and form != "off":
        spec = model.spec
        cache = new_cache(spec.windows)
        cache.cross = None if spec.encoder is None else [GrowingLayer() for _ in spec.windows]
        _fill([*cache.layers, *(cache.cross or ())], spec.kv_heads, spec.head_dim, model.dtype)
        if skeleton.device.startswith("cuda") and not obstacle(spec):
            cache.use_slots(windows=True)
        cache.convert(form)
        return cache.describe()
    if form == "off":
        return []
    forward = runtime_of(model)
    if not forward.abilities.supports_cache:
        return []
    forward.device = torch.device("meta")
    with quiet():
        try:
            found = _prefilled(forward, model)
        except Exception as error:  # any architecture's code may fail on tensors without numbers
            if "meta" not in str(error).lower():
                problem = f"{skeleton.name} cannot be run as config.json has it"
                raise ModelError(f"{problem}: {brief(error)}") from error
            found = _from_fields(skeleton)
            skeleton.notes.append("this architecture cannot be tried without weights: sizes are those in config.json")
        if found is None:
            return []
        found.convert(form)
        return sorted(found.describe(), key=lambda entry: (entry["kind"] == CROSS, entry["layer"]))


def _prefilled(forward: ModelRuntime, model: Any) -> Cache | None:
    """The cache after a pass of `PROBE` tokens, and as many of a source."""
    source = None
    if forward.is_encoder_decoder:
        ids = torch.zeros(1, PROBE, dtype=torch.long, device="meta")
        with torch.no_grad():  # not `forward.encode`, which reads its mask
            states = model.get_encoder()(input_ids=ids, return_dict=True).last_hidden_state
        source = Source(ids, states)
    return forward.prefill([0] * PROBE, source).cache


def _from_fields(skeleton: Skeleton) -> Cache:
    """A cache with the number and size of heads in the config."""
    config = skeleton.config.get_text_config(decoder=True)
    cache = new_transformers_cache(skeleton.config, encoder_decoder=skeleton.is_encoder_decoder)
    latent = getattr(config, "kv_lora_rank", None) is not None  # latent attention: all heads in one tensor
    queries = None if latent else getattr(config, "num_attention_heads", None)
    grouped = None if latent else getattr(config, "num_key_value_heads", None)
    size, hidden = getattr(config, "head_dim", None), getattr(config, "hidden_size", None)
    if not size and type(hidden) is int and type(queries) is int and queries > 0:
        size = hidden // queries
    for layers, heads in ((cache.layers, grouped or queries), (cache.cross or (), queries)):
        if layers and (type(heads) is not int or type(size) is not int or not all(one.only_columns for one in layers)):
            raise ModelError(f"{skeleton.name}: config.json alone does not say what its layers cache")
        _fill(layers, heads, size, skeleton.model.dtype)
    return cache


def _fill(layers: Sequence[CacheLayer], heads: Any, size: Any, dtype: torch.dtype) -> None:
    """Put `PROBE` columns of one row, with `heads` heads of `size` features, into each layer."""
    for layer in layers:
        columns = torch.empty(1, heads, PROBE, size, dtype=dtype, device="meta")
        layer.update(columns, columns)


# -- the weights -------------------------------------------------------------------------------------------------------


def weights_bytes(skeleton: Skeleton, runtime: Runtime) -> int:
    """Bytes of the loaded model's weights, tied ones once, in the layout of its device."""
    model = skeleton.model
    if isinstance(model, NativeModel):
        return model.bytes()
    sizes: dict[int, int] = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    if runtime.quantize is None:
        return sum(sizes.values())
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    places, rounded = packed_layers.places_of(model), 0
    for module in filter(packed_layers.is_linear, model.modules()):
        if packed_layers.unfit(model, places[id(module)], runtime.quantize):
            continue
        users[id(module.weight)] -= 1  # a tied weight is kept in both forms
        inputs = getattr(module, "in_features", None) or module.weight.shape[0]
        rounded += _int8_bytes(module.weight.numel() // inputs, inputs)
    return rounded + sum(size for key, size in sizes.items() if users.get(key, 1))


def _int8_bytes(outputs: int, inputs: int) -> int:
    """A code for each number, and a float32 scale for each output."""
    return outputs * inputs + 4 * outputs


class _SizedProducts(Products):
    """Products on the meta device: a rounded weight is as many bytes as its codes and scales take."""

    def __init__(self, quantize: str | None, device: str) -> None:
        super().__init__(quantize, pack=False)
        self.device = device

    def _made(self, weight: Weight, bias: Tensor | None, quantize: str | None) -> Linear:
        assert isinstance(weight, Tensor)
        if quantize is None:
            return Plain(weight, bias)
        outputs, inputs = weight.shape
        in_groups = quantize == "int4" and inputs % GROUP == 0
        size = int4_bytes(outputs, inputs, self.device) if in_groups else _int8_bytes(outputs, inputs)
        return Plain(torch.empty(size, dtype=torch.uint8, device="meta"), bias)


def _native_model(checkpoint: Checkpoint, dtype: torch.dtype, products: Products) -> NativeModel:
    spec, names = read_native(checkpoint.config)
    shapes = {name: tensor.shape for name, tensor in checkpoint.weights.tensors.items()} or _saved(spec, names)
    return build_native(
        WeightPlan(spec, names, shapes),
        lambda name: torch.empty(shapes[name], dtype=dtype, device="meta"),
        checkpoint.config,
        SpecialTokens({}),
        dtype=dtype,
        products=products,
    )


def _saved(spec: Spec, names: Names) -> Shapes:
    """The tensors that the files of this model hold, where they are not there: each tied matrix once."""
    stacks = [(spec, names)]
    if spec.encoder is not None and names.encoder is not None:
        stacks.append((spec.encoder, names.encoder))
    shapes: Shapes = {}
    for part, theirs in stacks:
        # StackPlan looks these names up among those of the files
        held: Shapes = {theirs.prefix: (), f"{theirs.prefix}{theirs.positions}.weight": ()}
        stack = StackPlan(part, theirs, held)
        shapes |= stack.wanted()
        if part is spec or not (spec.tied and spec.shared):
            shapes[stack.embed] = (part.vocab, part.width)
    head = names.heads[0]
    if not spec.tied:
        shapes[f"{head}.weight"] = (spec.vocab, spec.width)
    if spec.head_bias:
        shapes[f"{head}.bias"] = (spec.vocab,)
    if names.logits_bias:
        shapes[names.logits_bias[0]] = (1, spec.vocab)
    return shapes


def _transformers_model(kind: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    # forms of attention and experts that read no numbers; the default ones read masks and chosen experts
    plain = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **plain)
        else:
            model = compat.from_config(kind, config, dtype=dtype, **plain)
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *args, **kwargs: None
    # as `from_pretrained`: some architectures keep some weights in float32
    for pattern, exact_dtype in compat.kept_dtypes(model, dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(exact_dtype)
    return model.eval()


# -- the config --------------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, allow_pickle: bool, trust_remote_code: bool) -> Checkpoint:
    """The folder, with every check that its files allow: weights are optional."""
    config = check.read_config(folder)
    config_limits.check_numbers(config)
    _check_effort(config)
    if _has_weights(folder, config):
        return check.inspect(
            folder, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, need_tokenizer=False
        )
    check.check_code(config, trust_remote_code)
    generation = check.read_settings(folder, config)
    return Checkpoint(folder, config, generation, weights.WeightFiles((), {}), has_tokenizer=False)


def _has_weights(folder: Path, config: dict[str, Any]) -> bool:
    """Whether all safetensors files are there: an incomplete cache folder still has a config."""
    if isinstance(config.get("transformers_weights"), str):
        return (folder / str(config["transformers_weights"])).is_file()
    if (folder / weights.SINGLE).is_file():
        return True
    if not (folder / weights.INDEX).is_file():
        return False
    shards = weights.read_json(folder / weights.INDEX, weights.INDEX).get("weight_map")
    return isinstance(shards, dict) and all((folder / str(shard)).is_file() for shard in shards.values())


def _check_effort(config: dict[str, Any]) -> None:
    """Raises ModelError for a config that takes long to build even without weights: modules are built one by one."""
    for part, where in config_limits.parts(config):
        sizes = {name: value for name, value in part.items() if type(value) is int}
        depths = {name: value for name, value in sizes.items() if _LAYERS.search(name)}
        for name, value in depths.items():
            if value > MOST_LAYERS:
                problem = f"config.json says {where}{name} = {value:,}"
                raise ModelError(f"{problem}, more than a plan takes ({MOST_LAYERS:,})")
        layers = max(depths.values(), default=1)
        experts = max((value for name, value in sizes.items() if _EXPERTS.search(name)), default=1)
        if layers * experts > MOST_EXPERTS:
            problem = f"config.json says {experts:,} experts in each of {layers:,} layers"
            raise ModelError(f"{problem}, more than a plan takes ({MOST_EXPERTS:,} in all)")
