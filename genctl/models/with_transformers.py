"""Load a checkpoint with transformers' classes: its config, its weights on their device, and an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import adapter, check, prepare, runtime_choice
from genctl.models.architectures import facts_of
from genctl.models.config_limits import LAYERS, parts
from genctl.models.libraries import OnEvent, guarded, weights_bar
from genctl.models.weights import Tensor, few, shown, with_whole_index
from genctl.native.spec import COMPUTED
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def read_config(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
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
        import transformers

        raise ModelError(f"transformers {transformers.__version__} knows no architecture {kind!r:.80}")

    def made() -> Any:
        if checkpoint.gguf:
            return AutoConfig.for_model(**checkpoint.config)
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True)

    config = guarded(
        made,
        f"the metadata of {shown(checkpoint.gguf)} cannot be used" if checkpoint.gguf else "config.json cannot be used",
    )
    compat.correct_config(kind, config)
    # the caller chooses what a forward pass returns
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    return config


def auto_class(checkpoint: check.Checkpoint, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class that loads this checkpoint, an auto class in general. Raises ModelError if it cannot continue a text.

    Models of audio and text that transformers lists as encoder-decoders are decoders for text alone. For models of
    images and text, AutoModelForCausalLM loads the text model if it supports it.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sequences = dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    masked = dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    kind = checkpoint.model_type
    names = checkpoint.config.get("architectures") or []
    if trust_remote_code and "auto_map" in checkpoint.config:
        return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    described = few(names) or f"architecture {kind!r:.80}"
    for name in (kind, *names):
        if why := facts_of(name).unfit or _UNFIT_CLASSES.get(name):
            raise ModelError(f"{described} {why}, so it cannot continue a text")
    mixed = _names(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    heads = _names(causal) | _names(sequences)
    # an encoder-decoder that was saved without its head, which is the embeddings
    bare = config.is_encoder_decoder and kind in sequences and names == [auto.MODEL_MAPPING_NAMES.get(kind)]
    if names and not bare and not (heads | (mixed if kind in causal else set())) & set(names):
        raise _unfit(described, set(names), auto)
    if getattr(config, "is_encoder_decoder", False):
        if kind not in sequences:
            raise _unfit(described, {kind}, auto)
        return AutoModelForSeq2SeqLM
    encodes = not names and kind in masked and not getattr(config, "is_decoder", False)
    if kind in causal and not encodes:
        return AutoModelForCausalLM
    if kind in sequences:
        return AutoModelForSeq2SeqLM
    for name in names:  # a text model alone, which the table has as part of a larger one (Mllama)
        own = getattr(transformers, name, None) if name in _names(causal) else None
        if own is not None and getattr(own, "config_class", None) is type(config):
            return own
    raise _unfit(described, {kind}, auto)


# Classes among those of language models that cannot continue a text; for architectures see `Architecture.unfit`.
_UNFIT_CLASSES = {
    "Emu3ForConditionalGeneration": "reads pictures, and transformers does not find its text model by itself"
}


def _unfit(described: str, known: set[str], auto: Any) -> ModelError:
    """The error for a class or architecture that cannot be loaded."""

    def among(*tables: str) -> bool:
        return any(known & ({*table} | _names(table)) for table in (dict(getattr(auto, name)) for name in tables))

    if among("MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES"):
        return ModelError(f"{described} writes sound, not text")
    if among(
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ):
        return ModelError(f"{described} reads pictures or sound, and genctl loads models that are made for text")
    if any(name.endswith("ForConditionalGeneration") for name in known):
        return ModelError(f"{described} is none of the classes with which transformers continues a text")
    return ModelError(f"{described} has no language-model head, so it cannot generate text")


def _names(table: dict[str, Any]) -> set[str]:
    """The class names in a table of transformers, which has one or several for an architecture."""
    return {name for value in table.values() for name in ([value] if isinstance(value, str) else value)}


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
_PREDICTS_FURTHER = re.compile(
    r"eh_proj|enorm|hnorm|shared_head"
)  # modules that only an MTP layer has (DeepSeek-V3, GLM-4.5)


def check_unused(
    model: nn.Module, unexpected: Iterable[str], held: Mapping[str, Tensor], config: dict[str, Any]
) -> list[str]:
    """The names that may be ignored, sorted. Raises ModelError for those that belong to the model.

    `unexpected` are the model's names of tensors that were not used; `held` is the content of safetensors headers, and
    `config` is config.json.
    """
    names = sorted(set(unexpected))
    modules = _Parts(model)
    # transformers ignores a layer by its number in one public checkpoint, for any config: check again
    layers = modules.beyond([*names, *held])
    if layers:
        path, numbers = next(iter(layers.items()))
        raise ModelError(_too_few(path, numbers, modules.count(path), config))
    missed = [name for name in names if modules.owns(name, held.get(name))]
    if missed and not config.get("quantization_config"):
        what, them = (
            ("1 tensor that belongs", "it") if len(missed) == 1 else (f"{len(missed)} tensors that belong", "them")
        )
        raise ModelError(
            f"the weight files hold {what} to the model, but config.json makes one without {them}: {few(missed)}"
        )
    return names


class _Parts:
    """The modules of a model by name."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.prefix = str(getattr(model, "base_model_prefix", ""))

    def count(self, path: str) -> int:
        return sum(1 for _ in self.modules[path].children())

    def beyond(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Lists of layers that are longer in the files than in the model: the path of each, and the extra numbers."""
        import torch

        lists = (torch.nn.ModuleList, torch.nn.Sequential)
        beyond: dict[str, set[int]] = {}
        further: set[tuple[str, int]] = set()
        for name in names:
            for path, after in self._splits(name):
                number, _, rest = after.partition(".")
                if not (rest and number.isdecimal() and len(number) < 8):
                    continue
                if not isinstance(self.modules[path], lists) or int(number) < self.count(path):
                    continue
                if any(_ELSEWHERE.fullmatch(part) for part in path.split(".")):
                    continue
                beyond.setdefault(path, set()).add(int(number))
                if any(_PREDICTS_FURTHER.fullmatch(part) for part in rest.split(".")):
                    further.add((path, int(number)))
        left = {path: sorted(n for n in numbers if (path, n) not in further) for path, numbers in beyond.items()}
        return {path: numbers for path, numbers in left.items() if numbers}

    def owns(self, name: str, tensor: Tensor | None) -> bool:
        """Whether a tensor belongs to a part of the model, and is not computed by it."""
        path, after = max(self._splits(name), key=lambda split: len(split[0]), default=("", name))
        *_, last = name.split(".")
        if not path or f"{path}.{after}" in self.buffers or COMPUTED.fullmatch(last):
            return False
        if any(_ELSEWHERE.fullmatch(part) for part in name.split(".")[:-1]) or _ELSEWHERE.fullmatch(after):
            return False
        # `attn.bias` of GPT-2 and similar: the triangular mask of a module that contains projections
        attends = "att" in path.rpartition(".")[2].lower() and any(True for _ in self.modules[path].children())
        if after == "bias" and attends and (tensor is None or len(tensor.shape) > 2):
            return False
        first, _, rest = after.partition(".")
        if first == "encoder":  # an encoder-decoder of which only the decoder is loaded
            return False
        return not (first.isdecimal() and rest)  # a layer that was not refused predicts further tokens

    def _splits(self, name: str) -> Iterator[tuple[str, str]]:
        """Each part of the model that the name may begin with, and the rest: with the model's prefix or without."""
        for full_name in (name, f"{self.prefix}.{name}", name.removeprefix(f"{self.prefix}.")):
            at = full_name.find(".")
            while at > 0:
                if full_name[:at] in self.modules and full_name[:at] != (self.prefix if full_name != name else None):
                    yield full_name[:at], full_name[at + 1 :]
                at = full_name.find(".", at + 1)


def _too_few(path: str, numbers: list[int], count: int, config: dict[str, Any]) -> str:
    path = shown(path)
    held = f"{path}.{numbers[0]}" + (f" to {path}.{numbers[-1]}" if len(numbers) > 1 else "")
    fields = [f"{where}{key} = {count}" for part, where in parts(config) for key in LAYERS if part.get(key) == count]
    stated = f"config.json says {' and '.join(fields)}" if fields else f"by config.json the model has {count} of them"
    return f"the weight files hold {held}, but {stated}"


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
        from genctl.models import rank_group

        placement = rank_group.placement(config)
    dtype, dtype_notes = dtype_on(device, checkpoint, runtime)
    model, notes = _model(checkpoint, kind, config, runtime, dtype, placement, trust_remote_code, on_event)
    notes += dtype_notes
    if added is not None:
        model, note = adapter.apply(model, added, merge=runtime.merge_adapter)
        notes.append(note)
    notes += prepare.prepare_for_device(model, runtime, device, checkpoint.config)
    if device is not None and not runtime.tensor_parallel:
        model = guarded(lambda: model.to(device), f"cannot move the model to {device}")
    return model, notes


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
    chosen, notes = prepare.dtype_on_gpu(stored, bfloat16=torch.cuda.is_bf16_supported())
    return ("auto" if chosen == stored else getattr(torch, chosen)), notes


def _model(
    checkpoint: check.Checkpoint,
    kind: Any,
    config: PreTrainedConfig,
    runtime: Runtime,
    dtype: Any,
    placement: dict[str, Any],
    trust_remote_code: bool,
    on_event: OnEvent | None,
) -> tuple[PreTrainedModel, list[str]]:
    from genctl.compat import attention_for  # with torch

    attention = attention_for(config)

    def read(folder: Path) -> Any:
        return kind.from_pretrained(
            folder,
            **({"gguf_file": checkpoint.gguf} if checkpoint.gguf else {}),
            config=config,
            dtype=dtype,
            use_safetensors=not checkpoint.weights.pickled,
            weights_only=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **attention,
            **placement,
        )

    with weights_bar(on_event, runtime.model), with_whole_index(checkpoint.folder) as folder:
        model, report = guarded(lambda: read(folder), f"{checkpoint.folder} cannot be loaded")
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"])
    if mismatched:
        raise ModelError(f"{few(mismatched)}: the shape in the weight files is not the one that config.json implies")
    if missing:
        raise ModelError(f"the weight files lack {len(missing)} tensors that the model needs: {few(missing)}")
    notes = []
    if checkpoint.gguf:
        from genctl.models import gguf

        unused = gguf.check_read(model, checkpoint.folder / checkpoint.gguf)
    else:
        unused = check_unused(model, report["unexpected_keys"], checkpoint.weights.tensors, checkpoint.config)
    if unused:
        notes.append(f"{len(unused)} tensors in the weight files are not used: {few(unused)}")
    model.eval().requires_grad_(False)
    return model, notes
