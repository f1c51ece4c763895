"""A model without weights: built on the meta device from config.json alone, to measure its sizes.

Only the headers of weight files are read, and no tensor is allocated. The contents of a cache are found by running a
few tokens through the code that decodes, on tensors with shapes and types but no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from genctl import compat
from genctl.decode.cache.cache import Cache, new_cache
from genctl.decode.cache.foreign import new_cache as new_transformers_cache
from genctl.decode.cache.growing import GrowingLayer
from genctl.decode.cache.layer import CROSS, CacheLayer
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Source
from genctl.engines.runtime import runtime_of
from genctl.errors import ModelError, UsageError
from genctl.models import check, hub, packed_layers, prepare, resolve, runtime_choice, weights, with_transformers
from genctl.models.check import GenerationSettings
from genctl.models.libraries import brief, guarded, quiet
from genctl.native.graphs import obstacle
from genctl.native.quantized import GROUP, int4_bytes
from genctl.native.spec import Spec
from genctl.params import Runtime

PROBE = 8  # tokens of the trial
MOST_LAYERS = 1024  # each becomes a module
MOST_EXPERTS = 1 << 17  # layers times experts

_LAYERS = re.compile(r"(^|_)layers?$|^depth$|^num_blocks$")
_EXPERTS = re.compile(r"^(num|n)_.*experts$")


@dataclass
class Skeleton:
    """A model with its parameters on the meta device."""

    name: str  # as the user typed it
    model: Any
    device: str  # where it would compute: cpu, cuda, cuda:1, …
    generation: GenerationSettings
    notes: list[str] = field(default_factory=list)
    native: Spec | None = None  # the native runtime's spec; None on transformers' classes

    @property
    def config(self) -> Any:
        return self.model.config

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
    device = _device(runtime)
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
        dtype = getattr(torch, runtime_choice.dtype_of(runtime, checkpoint))
        if runtime.dtype == "auto" and device.startswith("cuda") and not checkpoint.config.get("quantization_config"):
            able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()  # no GPU here: assume a new one
            dtype = getattr(torch, prepare.dtype_on_gpu(str(dtype).removeprefix("torch."), bfloat16=able)[0])
        model = guarded(lambda: _model(kind, config, dtype, trust_remote_code), "config.json cannot be used")
    if checkpoint.config.get("quantization_config"):
        notes.append(
            "config.json has a quantization_config, which a plan does not apply: weights count as "
            f"{str(dtype).removeprefix('torch.')}, more than they will take"
        )
    at = torch.device(device)
    native = runtime_choice.spec_of_run(runtime, checkpoint, at, trust_remote_code=trust_remote_code)
    prepare.check_device(runtime, at if runtime.device_map is None else None, native=native is not None)
    return Skeleton(runtime.model, model, device, checkpoint.generation, notes, native)


def probe(skeleton: Skeleton, form: str) -> list[dict[str, Any]]:
    """The contents of a cache of the form (`cache_implementation`) after `PROBE` tokens in one row: see `describe`.

    [] if nothing is kept. If the architecture's code depends on numbers, the sizes are those of its config. Raises
    ModelError if the config does not have them, or if the architecture cannot run with it.
    """
    if skeleton.native is not None and form != "off":
        native = _native_cache(skeleton.native, skeleton.model.dtype)
        if skeleton.device.startswith("cuda") and not obstacle(skeleton.native):
            native.use_slots(windows=True)
        native.convert(form)
        return native.describe()
    forward = runtime_of(skeleton.model)
    if form == "off" or not forward.abilities.supports_cache:
        return []
    forward.device = torch.device("meta")
    with quiet():
        try:
            cache = _tried(forward, skeleton.model)
        except Exception as error:  # any architecture's code may fail on tensors without numbers
            if "meta" not in str(error).lower():
                problem = f"{skeleton.name} cannot be run as config.json has it"
                raise ModelError(f"{problem}: {brief(error)}") from error
            cache = _from_fields(skeleton)
            skeleton.notes.append("this architecture cannot be tried without weights: sizes are those in config.json")
        if cache is None:
            return []
        cache.convert(form)
        return sorted(cache.describe(), key=lambda entry: (entry["kind"] == CROSS, entry["layer"]))


def _native_cache(spec: Spec, dtype: torch.dtype) -> Cache:
    """A cache of the native runtime with `PROBE` tokens in one row, and as many of a source."""
    cache = new_cache(spec.windows)
    if spec.encoder is not None:
        cache.cross = [GrowingLayer() for _ in spec.windows]
    _fill([*cache.layers, *(cache.cross or ())], spec.kv_heads, spec.head_dim, dtype)
    return cache


def _fill(layers: Sequence[CacheLayer], heads: int, size: int, dtype: torch.dtype) -> None:
    for layer in layers:
        columns = torch.empty(1, heads, PROBE, size, dtype=dtype, device="meta")
        layer.update(columns, columns)


def weights_bytes(skeleton: Skeleton, runtime: Runtime) -> int:
    """Bytes of the loaded model's parameters and buffers, tied ones once, in the layout of its device.

    With --quantize the weights of linear layers take 8 or 4 bits (`models.packed_layers`, `native.linear`): a tied one
    is then kept in both forms. The native runtime has no buffers but those in the files.
    """
    model, native = skeleton.model, skeleton.native is not None
    tensors = model.state_dict(keep_vars=True).values() if native else (*model.parameters(), *model.buffers())
    held = {id(tensor): tensor.nbytes for tensor in tensors}
    if skeleton.native is not None and skeleton.native.padding is not None:  # tables that no file holds
        held |= {id(table): table.nbytes for name, table in model.named_buffers() if name.endswith("positions.weights")}
    if skeleton.native is not None and skeleton.native.weight_plus_one:  # float32, see `native.norms.RMSNorm`
        named = model.named_parameters()
        held |= {id(tensor): 4 * tensor.numel() for name, tensor in named if name.endswith("norm.weight")}
    if runtime.quantize is None:
        return int(sum(held.values()))
    users: dict[int, int] = {}
    packed: list[nn.Module] = []
    places = packed_layers.places_of(model)
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
        if packed_layers.is_linear(module) and (  # the native runtime: small ones too
            native or not packed_layers.unfit(model, places[id(module)], runtime.quantize)
        ):
            packed.append(module)
    head = model.get_output_embeddings()
    extra = 0
    if skeleton.native is not None and skeleton.native.experts is not None:
        extra, experts = _experts_bytes(skeleton, model, skeleton.native.experts.inner, runtime.quantize)
        users |= dict.fromkeys(experts, 0)
    for module in packed:
        weight: Any = module.weight
        users[id(weight)] -= 1
        inputs = getattr(module, "in_features", None) or weight.shape[0]
        outputs = weight.numel() // inputs
        if native and runtime.quantize == "int4" and module is not head and inputs % GROUP == 0:
            extra += int4_bytes(outputs, inputs, torch.device(skeleton.device).type)
        else:
            extra += weight.numel() + 4 * outputs  # int8 numbers, a float32 scale for each output
    return int(sum(size for key, size in held.items() if users.get(key, 1)) + extra)


def _experts_bytes(skeleton: Skeleton, model: nn.Module, inner: int, quantize: str) -> tuple[int, set[int]]:
    """What the matrices of all experts take with `--quantize`; and the `id` of the tensors that hold them."""
    size, replaced, device = 0, set(), torch.device(skeleton.device).type
    assert skeleton.native is not None
    for name, tensor in model.named_parameters():
        if ".experts." in name and tensor.ndim == 3:
            inputs = inner if "down" in name.rpartition(".")[2] else skeleton.native.hidden
            outputs = tensor.numel() // inputs
            rounded = int4_bytes(outputs, inputs, device) if quantize == "int4" and inputs % GROUP == 0 else None
            size += tensor.numel() + 4 * outputs if rounded is None else rounded
            replaced.add(id(tensor))
    return size, replaced


# -- finding the config ------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, allow_pickle: bool, trust_remote_code: bool) -> check.Checkpoint:
    """The folder, with every check that its files allow: weights are optional."""
    config = check.read_config(folder)
    check.check_numbers(config)
    _check_effort(config)
    if _has_weights(folder, config):
        return check.inspect(
            folder, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, need_tokenizer=False
        )
    check.check_code(config, trust_remote_code)
    generation = check.read_settings(folder, config)
    return check.Checkpoint(folder, config, generation, weights.WeightFiles((), {}), has_tokenizer=False)


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
    """Refuse configs that take long to build without weights: modules are built one by one. Raises ModelError."""
    for part, where in check.parts(config):
        layers = experts = 1
        for name, value in part.items():
            if type(value) is not int:
                continue
            if _LAYERS.search(name):
                layers = max(layers, value)
                if value > MOST_LAYERS:
                    problem = f"config.json says {where}{name} = {value:,}"
                    raise ModelError(f"{problem}, more than a plan takes ({MOST_LAYERS:,})")
            elif _EXPERTS.search(name):
                experts = max(experts, value)
        if layers * experts > MOST_EXPERTS:
            problem = f"config.json says {experts:,} experts in each of {layers:,} layers"
            raise ModelError(f"{problem}, more than a plan takes ({MOST_EXPERTS:,} in all)")


# -- building ----------------------------------------------------------------------------------------------------------


def _device(runtime: Runtime) -> str:
    """Where the model would compute. The device need not exist here: a plan may be for another machine."""
    try:
        device = hub.device_of("auto") if runtime.device == "auto" else torch.device(runtime.device)
    except RuntimeError as error:
        raise UsageError(f"--device {runtime.device!r} is no device that torch knows") from error
    return str(device)


def _model(kind: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
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


def _tried(forward: ModelRuntime, model: Any) -> Cache | None:
    tokens = [0] * PROBE
    source = None
    if forward.is_encoder_decoder:
        ids = torch.zeros(1, PROBE, dtype=torch.long, device="meta")
        with torch.no_grad():  # not `forward.encode`, which reads its mask
            states = model.get_encoder()(input_ids=ids, return_dict=True).last_hidden_state
        source = Source(ids, states)
    return forward.prefill(tokens, source).cache


def _from_fields(skeleton: Skeleton) -> Cache:
    """A cache with the number and size of heads in the config."""
    config = skeleton.config.get_text_config(decoder=True)
    cache = new_transformers_cache(skeleton.config, encoder_decoder=skeleton.is_encoder_decoder)
    latent = getattr(config, "kv_lora_rank", None) is not None  # latent attention: all heads in one tensor
    queries = None if latent else getattr(config, "num_attention_heads", None)
    parts: list[Sequence[CacheLayer]] = [cache.layers] if cache.cross is None else [cache.layers, cache.cross]
    for layers in parts:
        grouped = None if latent or layers is cache.cross else getattr(config, "num_key_value_heads", None)
        heads = grouped or queries
        hidden = getattr(config, "hidden_size", None)
        whole = type(hidden) is int and type(queries) is int and queries > 0
        size = getattr(config, "head_dim", None) or (hidden // queries if whole else None)  # type: ignore[operator]
        if type(heads) is not int or type(size) is not int or not all(layer.only_columns for layer in layers):
            raise ModelError(f"{skeleton.name}: what its layers keep cannot be told from config.json alone")
        _fill(layers, heads, size, skeleton.model.dtype)
    return cache
