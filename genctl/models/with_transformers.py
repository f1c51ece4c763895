"""Load a checkpoint with transformers' classes: its config, its weights on their device, and an adapter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from genctl import errors
from genctl.errors import ModelError
from genctl.models import adapter, check, gguf, runtime_choice
from genctl.models.architectures import facts_of
from genctl.models.config_limits import LAYERS, parts
from genctl.models.libraries import OnEvent, guarded, weights_bar
from genctl.models.weights import few, shown
from genctl.native.spec import COMPUTED
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def load(
    checkpoint: check.Checkpoint,
    runtime: Runtime,
    device: torch.device | None,
    placement: dict[str, Any],
    added: adapter.Adapter | None,
    trust_remote_code: bool,
    on_event: OnEvent | None,
) -> tuple[PreTrainedModel, list[str]]:
    """The model with the adapter `added`, and notes for --verbose. Raises ModelError or UsageError.

    `placement` are arguments for accelerate, which then places the weights; `device` is None.
    """
    config = read_config(checkpoint, trust_remote_code)
    kind = auto_class(checkpoint, config, trust_remote_code)
    if runtime.tensor_parallel:
        placement = _over_ranks(config)
    dtype, dtype_notes = dtype_on(device, checkpoint, runtime)
    how = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code, **placement}
    with weights_bar(on_event, runtime.model):
        model, notes = _read(checkpoint, kind, how)
    notes += dtype_notes
    if added is not None:
        model, note = adapter.apply(model, added, merge=runtime.merge_adapter)
        notes.append(note)
    notes += _prepare(model, runtime, device, checkpoint.config)
    if device is not None and not runtime.tensor_parallel:
        model = guarded(lambda: model.to(device), f"cannot move the model to {device}")
    return model, notes


def _over_ranks(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` to distribute a model over all ranks. Raises ModelError if it cannot be."""
    import torch.distributed
    from transformers.distributed import DistributedConfig

    if not torch.distributed.is_initialized():
        raise ModelError("--tensor-parallel: this process has no others; genctl run and genctl beam start them")
    size = torch.distributed.get_world_size()
    check_plan(config, size)
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def check_plan(config: Any, ranks: int) -> None:
    """Raises ModelError for an architecture without a plan, and for heads that cannot be divided evenly."""
    text = config.get_text_config(decoder=True)
    if not (getattr(config, "base_model_tp_plan", None) or getattr(text, "base_model_tp_plan", None)):
        raise ModelError(f"--tensor-parallel: transformers has no plan for {config.model_type}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ModelError(f"--tensor-parallel: {name} = {heads} cannot be shared out evenly over {ranks} ranks")


def read_config(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    """transformers' config of a checkpoint. Raises ModelError for an architecture that it does not know."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from genctl import compat  # imports torch

    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("config.json: architectures is not a list of names")
    kind = checkpoint.model_type
    if kind not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if "auto_map" in checkpoint.config:
            raise ModelError(
                f"{kind!r:.80} is an architecture that transformers has no code for; the checkpoint brings its own, "
                "which runs only with --trust-remote-code"
            )
        if facts_of(kind).compared and compat.older_transformers():
            raise compat.transformers_needed(f"the architecture {kind!r}")
        raise ModelError(f"transformers {transformers.__version__} knows no architecture {kind!r:.80}")
    if checkpoint.gguf:
        what = f"the metadata of {shown(checkpoint.gguf)} cannot be used"
        config = guarded(lambda: AutoConfig.for_model(**checkpoint.config), what)
    else:
        how = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        config = guarded(lambda: AutoConfig.from_pretrained(checkpoint.folder, **how), "config.json cannot be used")
    compat.correct_config(kind, config)
    # the caller chooses what a forward pass returns
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    return config


def auto_class(checkpoint: check.Checkpoint, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class that loads this checkpoint, usually an auto class. Raises ModelError if it cannot continue a text.

    Models of audio and text that transformers lists as encoder-decoders are decoders for text alone. For models of
    images and text, AutoModelForCausalLM loads the text model if it supports it.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sequences = dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    kind = checkpoint.model_type
    names = checkpoint.config.get("architectures") or []
    is_seq2seq = bool(getattr(config, "is_encoder_decoder", False))
    if trust_remote_code and "auto_map" in checkpoint.config:
        return AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    described = few(names) or f"architecture {kind!r:.80}"
    if why := next(filter(None, (facts_of(name).unfit for name in (kind, *names))), ""):
        raise ModelError(f"{described} {why}, so it cannot continue a text")
    # of models of images and text; transformers does not find the text model of Emu3
    mixed = _names(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - {"Emu3ForConditionalGeneration"}
    heads = _names(causal) | _names(sequences) | (mixed if kind in causal else set())
    # an encoder-decoder that was saved without its head, which is the embeddings
    is_bare = is_seq2seq and kind in sequences and names == [auto.MODEL_MAPPING_NAMES.get(kind)]
    if not names or is_bare or heads & set(names):
        encodes = not names and kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        encodes = encodes and not getattr(config, "is_decoder", False)
        if kind in causal and not encodes and not is_seq2seq:
            return AutoModelForCausalLM
        if kind in sequences:
            return AutoModelForSeq2SeqLM
        for name in [] if is_seq2seq else names:  # a text model that the table lists as part of a larger one (Mllama)
            own = getattr(transformers, name, None) if name in _names(causal) else None
            if own is not None and getattr(own, "config_class", None) is type(config):
                return own
    if any(name.endswith("ForConditionalGeneration") for name in names):
        raise ModelError(f"{described} is none of the classes with which transformers continues a text")
    raise ModelError(f"{described} has no language-model head, so it cannot generate text")


def _names(table: dict[str, Any]) -> set[str]:
    """The class names in a table of transformers, which has one or several for an architecture."""
    return {name for value in table.values() for name in ([value] if isinstance(value, str) else value)}


def dtype_on(device: torch.device | None, checkpoint: check.Checkpoint, runtime: Runtime) -> tuple[Any, list[str]]:
    """The dtype to load with, "auto" for the checkpoint's own, and notes for --verbose.

    `device` is None if accelerate places the weights: on the GPUs, if there are any.
    """
    import torch

    if runtime.dtype != "auto":
        return getattr(torch, runtime.dtype), []
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    if not cuda or checkpoint.config.get("quantization_config"):
        return "auto", []
    stored = runtime_choice.dtype_of(runtime, checkpoint)
    chosen, notes = runtime_choice.dtype_on_gpu(stored, bfloat16=torch.cuda.is_bf16_supported())
    return ("auto" if chosen == stored else getattr(torch, chosen)), notes


def _read(checkpoint: check.Checkpoint, kind: Any, how: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """The model with all of its weights, and notes. Raises ModelError for tensors that are missing or left over."""
    from genctl.compat import attention_for  # with torch

    read = {
        **({"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}),
        "use_safetensors": not checkpoint.weights.pickled,
        "weights_only": True,
        "local_files_only": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused below, by name
        **attention_for(how["config"]),
        **how,
    }
    model, report = guarded(
        lambda: kind.from_pretrained(checkpoint.folder, **read), f"{checkpoint.folder} cannot be loaded"
    )
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"])
    if checkpoint.gguf and mismatched:
        mismatched = gguf.read_gates(model, mismatched, checkpoint.folder / checkpoint.gguf)
    if mismatched:
        raise ModelError(f"{few(mismatched)}: the shape in the weight files is not the one that config.json implies")
    if missing:
        raise ModelError(f"the weight files lack {len(missing)} tensors that the model needs: {few(missing)}")
    if checkpoint.gguf:
        unused = gguf.check_read(model, unexpected, checkpoint.folder / checkpoint.gguf)
    else:
        unused = unexpected
        _check_unused(model, unused, checkpoint)
    model.eval().requires_grad_(False)
    return model, [f"{len(unused)} tensors in the weight files are not used: {few(unused)}"] if unused else []


# -- tensors of a checkpoint that its model does not use: errors, or parts for other purposes --------------------------
# A config with fewer layers than the weight files hold, or without a bias that they hold, gives a model that runs and
# writes other text. So an unused tensor is an error if it belongs to the loaded model:
# - a layer whose number is beyond those that the model has (`model.layers.7` of four);
# - anything else inside a part that the model has (`model.layers.0.self_attn.q_proj.bias`, `model.final_norm.weight`).
# It is ignored, with a note for --verbose, if the model computes it or another program needs it:
# - buffers: rotary frequencies, position ids and the triangular masks that older files hold;
# - layers that predict further tokens (MTP), heads for other tasks, and the towers of other modalities;
# - tensors outside all parts of the model (`value_head.weight`).
# transformers' own lists of ignored names were applied before. A quantised checkpoint also holds numbers of its
# quantisation, which its library may not need: there only complete layers are errors.


# A part of a name: modules that text does not need.
_ELSEWHERE = re.compile(
    r".*(vision|visual|image|img|pixel|video|audio|speech|sound|mel_|talker|codec|code2wav|token2wav|vocoder"
    r"|projector|connector|aligner|resampler|perceiver|qformer|abstractor).*"
    r"|(mtp|nextn|eagle|medusa).*"
    r"|pooler|classifier|score|qa_outputs|seq_relationship|(?!lm_).*_head"
)
# Modules that only an MTP layer has (DeepSeek-V3, GLM-4.5)
_PREDICTS_FURTHER = re.compile(r"(.*\.\d+)\.(eh_proj|enorm|hnorm|shared_head)\..*")


def _check_unused(model: nn.Module, names: list[str], checkpoint: check.Checkpoint) -> None:
    """Raises ModelError for `names` of unused tensors that belong to the model."""
    import torch

    modules = dict(model.named_modules(remove_duplicate=False))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    prefix, unused = str(getattr(model, "base_model_prefix", "")), set(names)
    held = checkpoint.weights.tensors
    # transformers ignores one layer by number, for any config, because of one public checkpoint: check all names
    every = sorted({*names, *held})
    further = tuple(f"{match[1]}." for name in every if (match := _PREDICTS_FURTHER.fullmatch(name)))
    beyond, owned = list[tuple[str, int]](), list[str]()  # lists of layers, with numbers beyond them; others
    for name in every:
        path, after = _part_of(name, modules, prefix)
        first, _, rest = after.partition(".")
        if not path or any(_ELSEWHERE.fullmatch(part) for part in (*name.split(".")[:-1], after)):
            continue
        if rest and first.isdecimal() and len(first) < 8:
            is_list = isinstance(modules[path], (torch.nn.ModuleList, torch.nn.Sequential))
            if is_list and not name.startswith(further):
                beyond.append((path, int(first)))
        elif name in unused and first != "encoder":  # of an encoder-decoder whose decoder alone is loaded
            # `attn.bias` of GPT-2 and similar: the triangular mask of a module that contains projections
            attends = "att" in path.rpartition(".")[2].lower() and any(True for _ in modules[path].children())
            is_mask = after == "bias" and attends and (name not in held or len(held[name].shape) > 2)
            is_computed = f"{path}.{after}" in buffers or COMPUTED.fullmatch(name.rpartition(".")[2])
            if not (is_mask or is_computed):
                owned.append(name)
    if beyond:
        path, number = min(beyond)
        last = max(other for at, other in beyond if at == path)
        count = sum(1 for _ in modules[path].children())
        several = f"{shown(path)}.{number}" + (f" to {shown(path)}.{last}" if last > number else "")
        fields = [
            f"{where}{key} = {count}"
            for part, where in parts(checkpoint.config)
            for key in LAYERS
            if part.get(key) == count
        ]
        stated = f"config.json says {' and '.join(fields)}" if fields else f"by config.json the model has {count}"
        raise ModelError(f"the weight files hold {several}, but {stated}")
    if owned and not checkpoint.config.get("quantization_config"):
        what, them = ("tensor that belongs", "it") if len(owned) == 1 else ("tensors that belong", "them")
        problem = f"the weight files hold {len(owned)} {what} to the model, but config.json makes one without {them}"
        raise ModelError(f"{problem}: {few(owned)}")


def _part_of(name: str, modules: dict[str, nn.Module], prefix: str) -> tuple[str, str]:
    """The longest part of the model that the name begins with, with the model's prefix or without, and the rest."""
    found = "", name
    for full_name in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        at = full_name.rfind(".")
        while at > len(found[0]):
            if full_name[:at] in modules and full_name[:at] != (prefix if full_name != name else None):
                found = full_name[:at], full_name[at + 1 :]
            at = full_name.rfind(".", 0, at)
    return found


# -- a loaded model ----------------------------------------------------------------------------------------------------


def _prepare(model: nn.Module, runtime: Runtime, device: torch.device | None, config: dict[str, Any]) -> list[str]:
    """Check the numbers, and repack the layers if the model computes on the CPU; notes for --verbose.

    Raises ModelError for NaN and infinite weights. Above 2 GiB they are not checked; logits still are, at every step.
    """
    if runtime.tensor_parallel:  # each rank checks its own part
        own = {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in model.named_parameters()}
        check_part = check.finite_check(sum(part.nbytes for part in own.values()))
        for name, part in own.items():
            check_part(name, part)
        return []
    size = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    check_tensor = check.finite_check(size)
    packs = runtime.pack and not runtime.compile  # packed layers are opaque to a compiler, and it fuses by itself
    if device is None or device.type != "cpu" or not packs:
        for name, weight in model.named_parameters():
            check_tensor(name, weight)
        return []
    from genctl.models.packed_layers import pack, weights_bytes

    if runtime.quantize is not None and config.get("quantization_config"):
        raise ModelError(f"--quantize {runtime.quantize}: the checkpoint is quantised already, by its config.json")
    report = pack(model, quantize=runtime.quantize, check_tensor=check_tensor)
    left = "".join(f", {count} left ({why})" for why, count in sorted(report.left.items()))
    if runtime.quantize is not None:
        if not report.packed:
            raise ModelError(f"--quantize {runtime.quantize}: no layer of this model can hold such weights{left}")
        sizes = f"all weights {errors.size(weights_bytes(model))}, {errors.size(size)} as read"
        return [f"{report.packed} linear layers with weights in {runtime.quantize}{left}; {sizes}"]
    gained = report.packed or report.left.keys() - {"small"}
    return [f"{report.packed} linear layers with genctl's own products{left}"] if gained else []
