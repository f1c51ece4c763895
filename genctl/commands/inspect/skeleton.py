"""The sizes of a checkpoint, from config.json: the bytes of its weights, and the parts of its cache.

The model is built on the meta device, where tensors have shapes and types but no data: from its `Spec` in the native
runtime, else from its class in transformers, which reads one short prompt. Only the headers of weight files are read.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genctl import compat
from genctl.decode.cache.cache import new_cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import CROSS
from genctl.decode.types import Source
from genctl.engines.strategy_choice import runtime_of
from genctl.errors import ModelError, UsageError, count
from genctl.models import check, config_limits, hub, resolve, runtime_choice, with_transformers
from genctl.models.architectures import read_native
from genctl.models.check import Checkpoint, GenerationSettings
from genctl.models.libraries import brief, guarded, quiet
from genctl.models.weights import WeightFiles
from genctl.native.graphs import obstacle
from genctl.native.linear import Linear, Plain, Products, Weight
from genctl.native.load import build
from genctl.native.plan import Shapes, StackPlan, WeightPlan
from genctl.native.quantized import GROUP, int4_bytes
from genctl.native.runtime import SpecialTokens
from genctl.native.spec import Names, Spec
from genctl.params import Runtime

PROBE = 8  # tokens put into a cache to measure it
MOST_LAYERS = 1024  # each becomes a module
MOST_EXPERTS = 1 << 17  # layers times experts
MORE = "more than they will take"

_LAYERS = re.compile(r"(^|_)layers?$|^depth$|^num_blocks$")
_EXPERTS = re.compile(r"^(num|n)_.*experts$")


class Skeleton(NamedTuple):
    """The sizes of the model that a run with these options would load."""

    name: str  # as the user typed it
    config: Any  # of transformers
    settings: GenerationSettings
    device: str  # where it would compute: cpu, cuda, cuda:1, …
    dtype: str  # of its weights, such as "bfloat16"
    is_native: bool
    weights: int  # bytes, tied weights once, in the layout of its device
    cache: list[dict[str, Any]]  # `Cache.describe` with `PROBE` tokens in one row; [] without a cache
    notes: list[str]


def read(
    runtime: Runtime, form: str = "dynamic", *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Skeleton:
    """The model that `runtime` names, with a cache of a form (`cache_implementation`, or "off").

    From the Hub only configs are downloaded. Raises ModelError for a config that is missing, damaged, has absurd sizes
    or is not a language model's; UsageError for conflicting options.
    """
    runtime_choice.check_options(runtime)
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
        name, notes = _dtype(runtime, checkpoint, device)
        dtype = getattr(torch, name)
        spec = runtime_choice.spec_of_run(runtime, checkpoint, device, trust_remote_code=trust_remote_code)
        is_native = spec is not None
        runtime_choice.check_device(runtime, device if runtime.device_map is None else None, native=is_native)
        notes = [*place.notes, *notes]
        if spec is None and runtime.quantize:
            notes.append(f"{runtime.quantize} is counted of native models alone: weights count as {name}, {MORE}")

        def sizes() -> tuple[int, list[dict[str, Any]]]:
            if spec is not None:
                weights = _native_weights(checkpoint, dtype, _SizedProducts(runtime.quantize, device.type))
                return weights, [] if form == "off" else _native_cache(spec, dtype, device, form)
            model = _transformers_model(kind, config, dtype, trust_remote_code)
            cache = [] if form == "off" else _transformers_cache(model, runtime.model, form)
            return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())), cache  # tied weights once

        weights, cache = guarded(sizes, "config.json cannot be used")
    return Skeleton(runtime.model, config, checkpoint.generation, str(device), name, is_native, weights, cache, notes)


def _checkpoint(folder: Path, allow_pickle: bool, code: bool) -> Checkpoint:
    """The folder, with every check that its files allow; missing or incomplete weights are ignored."""
    config = check.read_config(folder)
    config_limits.check_numbers(config)
    for part, where in config_limits.parts(config):  # modules are built one by one, even without weights
        layers, experts = (
            max((value for name, value in part.items() if type(value) is int and names.search(name)), default=1)
            for names in (_LAYERS, _EXPERTS)
        )
        if layers > MOST_LAYERS or layers * experts > MOST_EXPERTS:
            several = f"{experts:,} experts in each of " if experts > 1 else ""
            numbers = several + count(layers, "layer")
            most = f"{MOST_LAYERS:,} layers, {MOST_EXPERTS:,} experts in all"
            raise ModelError(f"config.json says {where}{numbers}, more than a plan takes ({most})")
    with suppress(ModelError):
        return check.inspect(folder, allow_pickle=allow_pickle, trust_remote_code=code, need_tokenizer=False)
    check.check_code(config, code)
    return Checkpoint(folder, config, check.read_settings(folder, config), WeightFiles((), {}), has_tokenizer=False)


def _dtype(runtime: Runtime, checkpoint: Checkpoint, device: torch.device) -> tuple[str, list[str]]:
    """The compute type, and notes if config.json does not determine it or stores weights in another form."""
    name, notes = runtime_choice.dtype_of(runtime, checkpoint), []
    if runtime.dtype == "auto" and not runtime_choice.stored_dtype(checkpoint):
        notes.append("config.json names no dtype: float32 is taken; --dtype says otherwise")
    if checkpoint.config.get("quantization_config"):
        stored = "config.json has a quantization_config, which a plan does not apply"
        notes.append(f"{stored}: weights count as {name}, {MORE}")
    elif runtime.dtype == "auto" and device.type == "cuda":
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()  # no GPU here: assume a new one
        name, _ = runtime_choice.dtype_on_gpu(name, bfloat16=able)
    return name, notes


def _native_cache(spec: Spec, dtype: torch.dtype, device: torch.device, form: str) -> list[dict[str, Any]]:
    cache = new_cache(spec.windows)
    cache.cross = None if spec.encoder is None else [GrowingLayer() for _ in spec.windows]
    columns = torch.empty(1, spec.kv_heads, PROBE, spec.head_dim, dtype=dtype, device="meta")
    for layer in (*cache.layers, *(cache.cross or ())):
        layer.update(columns, columns)
    if device.type == "cuda" and not obstacle(spec):
        cache.use_slots(windows=True)
    cache.convert(form)
    return cache.describe()


def _native_weights(checkpoint: Checkpoint, dtype: torch.dtype, products: Products) -> int:
    spec, names = read_native(checkpoint.config)
    shapes = {name: tensor.shape for name, tensor in checkpoint.weights.tensors.items()} or _saved(spec, names)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan, config = WeightPlan(spec, names, shapes), checkpoint.config
    return build(plan, tensors.__getitem__, config, SpecialTokens({}), dtype=dtype, products=products).bytes()


def _saved(spec: Spec, names: Names) -> Shapes:
    """The tensors that the model's files would hold, if there are none: each tied matrix once."""
    shapes: Shapes = {}
    for part, theirs in ((spec, names), (spec.encoder, names.encoder)):
        if part is None or theirs is None:
            continue
        # StackPlan looks these names up among those of the files
        stack = StackPlan(part, theirs, {theirs.prefix: (), f"{theirs.prefix}{theirs.positions}.weight": ()})
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


class _SizedProducts(Products):
    """Products on the meta device: a quantised weight has the size of its codes and scales."""

    def __init__(self, quantize: str | None, device: str) -> None:
        super().__init__(quantize, pack=False)
        self.device = device

    def _made(self, weight: Weight, bias: Tensor | None, quantize: str | None) -> Linear:
        assert isinstance(weight, Tensor)
        if quantize is None:
            return Plain(weight, bias)
        outputs, inputs = weight.shape
        in_groups = quantize == "int4" and inputs % GROUP == 0
        # int8: a code for each number, and a float32 scale for each output
        size = int4_bytes(outputs, inputs, self.device) if in_groups else outputs * inputs + 4 * outputs
        return Plain(torch.empty(size, dtype=torch.uint8, device="meta"), bias)


def _transformers_model(kind: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    # implementations of attention and experts that read no values; the default ones read masks and chosen experts
    plain = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **plain)
        else:
            model = compat.from_config(kind, config, dtype=dtype, **plain)
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *args, **kwargs: None
    # as in `from_pretrained`: some architectures keep some weights in float32
    for pattern, exact_dtype in compat.kept_dtypes(model, dtype).items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(exact_dtype)
    return model.eval()


def _transformers_cache(model: Any, name: str, form: str) -> list[dict[str, Any]]:
    """The cache after a pass over `PROBE` tokens, and as many of a source. Raises ModelError if the pass fails."""
    forward = runtime_of(model)
    if not forward.abilities.supports_cache:
        return []
    forward.device, source = torch.device("meta"), None
    try:
        if forward.is_encoder_decoder:
            ids = torch.zeros(1, PROBE, dtype=torch.long, device="meta")
            with torch.no_grad():  # not `forward.encode`, which reads its mask
                source = Source(ids, model.get_encoder()(input_ids=ids, return_dict=True).last_hidden_state)
        cache = forward.prefill([0] * PROBE, source).cache
    except Exception as error:  # any architecture's code may fail on tensors without data
        hint = "a measurement needs the weights: leave out --plan"
        raise ModelError(f"{name} cannot be planned without its weights: {brief(error)}", hint=hint) from error
    if cache is None:
        return []
    cache.convert(form)
    return sorted(cache.describe(), key=lambda entry: (entry["kind"] == CROSS, entry["layer"]))
