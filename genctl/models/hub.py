"""A checkpoint, loaded: weights on their device, the tokenizer, and what the checkpoint says of generating.

What json and headers can tell is checked first (`check`), so that a damaged or hostile folder is refused before torch
is imported and before anything is allocated. transformers and torch are imported inside the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import collection
from genctl.errors import ModelError, UsageError
from genctl.models import architecture, check, layout, leftover, panics, runtime_choice, tokenizer_files
from genctl.models.guarded import guarded
from genctl.models.progress import OnEvent, quiet, weights_bar
from genctl.models.read_ahead import read_ahead
from genctl.models.resolve import Place, resolve
from genctl.models.weights import few
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from genctl.native.checkpoint import AnyPlan
    from genctl.native.model import NativeConfig, NativeModel

_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MEMORY = re.compile(r"(cpu|disk|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMGT]i?B)", re.IGNORECASE)


@dataclass
class Loaded:
    """A model that is ready to generate."""

    model: PreTrainedModel | NativeModel  # in eval mode, on its device
    tokenizer: PreTrainedTokenizerBase | None
    config: PreTrainedConfig | NativeConfig
    name: str  # as the user typed it; what records say
    path: Path
    is_encoder_decoder: bool
    generation: dict[str, Any]  # generation_config.json, raw keys, without what is None
    notes: tuple[str, ...] = ()  # what the user should be told on stderr
    checkpoint: check.Checkpoint | None = None
    runtime: str = ""  # who computes, and why: "native (llama)", "transformers (--compile)"
    tokenizer_of: str = ""  # who tokenises, where that is not who computes: "transformers (there is no tokenizer.json)"

    @property
    def told(self) -> tuple[str, ...]:
        """What to tell with --verbose."""
        tokenizer = (f"tokenizer: {self.tokenizer_of}",) if self.tokenizer_of else ()
        return (*self.notes, f"runtime: {self.runtime}", *tokenizer)

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: ids from this on cannot be read."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def fingerprint(self) -> str:
        """A digest of every byte of the weights, configs, tokenizer and templates, and of Python files that it runs.

        Raises ModelError for a checkpoint whose files have changed since it was loaded.
        """
        made = self.checkpoint or check.inspect(
            self.path, allow_pickle=True, trust_remote_code=True, need_tokenizer=False
        )
        return made.fingerprint()


def load(
    runtime: Runtime,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    need_tokenizer: bool = False,
    on_event: OnEvent | None = None,
    before_weights: Callable[[dict[str, Any]], object] | None = None,
) -> Loaded:
    """Resolve, check and load `runtime.model`. `before_weights` is given its generation_config and may raise.

    Without a tokenizer a checkpoint takes token ids alone; `need_tokenizer` refuses such a one before it is read.
    Raises ModelError for a checkpoint that is missing, damaged or unfit, UsageError for options that contradict each
    other or name a device that is not here. `on_event` hears of bytes downloaded and tensors read.
    """
    layout.check_options(runtime)
    placement = _placement(runtime)
    with quiet():
        place = resolve(
            runtime.model,
            revision=runtime.revision,
            offline=runtime.offline,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            on_event=on_event,
        )
        checkpoint = check.inspect(
            place.folder,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            need_tokenizer=need_tokenizer,
        )
        if before_weights is not None:
            before_weights(checkpoint.generation)
        read_ahead(checkpoint.weights.files)
        native, reason = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust_remote_code)
        device = _device(runtime.device) if runtime.device_map is None else None
        collection.resume()  # torch is imported, and no part of a model is made, which may have to be collected
        layout.check_device(runtime, device)
        if native is not None and device is not None:
            reason = runtime_choice.device_reason(native.spec, runtime, device)
            if not reason:
                return _native(native, runtime, place, checkpoint, device, on_event)
        config = architecture.read_config(checkpoint, trust_remote_code)
        kind = architecture.auto_class(checkpoint, config, trust_remote_code)
        dtype, told = _dtype(checkpoint, config, runtime, device)
        model, notes = _model(checkpoint, kind, config, runtime, dtype, placement, trust_remote_code, on_event)
        notes += told
        tokenizer = _tokenizer(checkpoint, trust_remote_code) if checkpoint.has_tokenizer else None
        notes += layout.settle(model, runtime, device, checkpoint.config)
        if device is not None:
            model = guarded(lambda: model.to(device), f"cannot move the model to {device}")
    loaded = Loaded(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=runtime.model,
        path=place.folder,
        is_encoder_decoder=bool(getattr(model.config, "is_encoder_decoder", False)),
        generation=checkpoint.generation,
        notes=(*place.notes, *notes),
        checkpoint=checkpoint,
        runtime=f"transformers ({reason})",
    )
    loaded.notes += _vocabulary_notes(loaded)
    return loaded


def _native(
    plan: AnyPlan,
    runtime: Runtime,
    place: Place,
    checkpoint: check.Checkpoint,
    device: torch.device,
    on_event: OnEvent | None,
) -> Loaded:
    size = sum(tensor.end - tensor.begin for tensor in checkpoint.weights.tensors.values())

    def read() -> tuple[NativeModel, list[str]]:
        return runtime_choice.load(plan, runtime, checkpoint, device, layout.looker(size), on_event)

    model, notes = read() if device.type == "cpu" else guarded(read, f"cannot move the model to {device}")
    tokenizer, left_to = _plain_tokenizer(checkpoint) if checkpoint.has_tokenizer else (None, "")
    loaded = Loaded(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=runtime.model,
        path=place.folder,
        is_encoder_decoder=model.config.is_encoder_decoder,
        generation=checkpoint.generation,
        notes=(*place.notes, *notes),
        checkpoint=checkpoint,
        runtime=f"native ({plan.spec.family})",
        tokenizer_of=f"transformers ({left_to})" if left_to else "",
    )
    loaded.notes += _vocabulary_notes(loaded)
    return loaded


def generation_config(
    runtime: Runtime, *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """The generation_config of `runtime.model`, without reading its weights. Raises as `load` does."""
    with quiet():
        place = resolve(
            runtime.model,
            revision=runtime.revision,
            offline=runtime.offline,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
    return check.inspect(
        place.folder, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, need_tokenizer=False
    ).generation


def max_memory(text: str) -> dict[int | str, str]:
    """`0=20GiB,cpu=64GiB` as accelerate wants it. Raises UsageError."""
    limits: dict[int | str, str] = {}
    for item in text.split(","):
        match = _MEMORY.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"--max-memory {text!r}: {item.strip()!r} is not like 0=20GiB or cpu=64GiB")
        where = match[1].lower()
        key = int(where) if where.isdigit() else where
        if key in limits:
            raise UsageError(f"--max-memory {text!r} names {where} twice")
        limits[key] = match[2].replace(" ", "")
    return limits


def _placement(runtime: Runtime) -> dict[str, Any]:
    """Arguments for accelerate's big-model loading; {} without --device-map."""
    if runtime.device_map is None:
        for name, value in (("--max-memory", runtime.max_memory), ("--offload-folder", runtime.offload_folder)):
            if value is not None:
                raise UsageError(f"{name} needs --device-map")
        return {}
    if runtime.device != "auto":
        raise UsageError(f"--device-map {runtime.device_map} and --device {runtime.device} both say where weights go")
    kinds = ("auto", "balanced", "balanced_low_0", "sequential")
    if runtime.device_map not in kinds:
        raise UsageError(f"--device-map {runtime.device_map!r} is none of {', '.join(kinds)}")
    placement: dict[str, Any] = {"device_map": runtime.device_map}
    if runtime.max_memory is not None:
        placement["max_memory"] = max_memory(runtime.max_memory)
    if runtime.offload_folder is not None:
        placement["offload_folder"] = runtime.offload_folder
    return placement


def _device(name: str) -> torch.device:
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    here = [*(f"cuda:{index}" for index in range(torch.cuda.device_count() if cuda else 0)), *(["mps"] * mps), "cpu"]
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise UsageError("--device meta holds no numbers, so nothing can be computed there")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(f"--device {name!r} is not available; here there are: {', '.join(here)}") from error
    return device


def _dtype(
    checkpoint: check.Checkpoint, config: PreTrainedConfig, runtime: Runtime, device: torch.device | None
) -> tuple[Any, list[str]]:
    """The dtype to load with, "auto" for the checkpoint's own, and what to tell of it with --verbose.

    `device` is None where accelerate places the weights: on the GPUs, if there are any.
    """
    import torch

    if runtime.dtype != "auto":
        return getattr(torch, runtime.dtype), []
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    if not cuda or checkpoint.config.get("quantization_config"):
        return "auto", []
    said = getattr(config, "dtype", None)  # as transformers decides: the config's word, else the first tensor
    stored = str(said).removeprefix("torch.") if isinstance(said, torch.dtype) else ""
    if not stored:
        found = (tensor.dtype for tensor in checkpoint.weights.tensors.values() if tensor.dtype in _STORED)
        stored = _STORED[next(found, "F32")]
    chosen = layout.dtype_on("cuda", stored, torch.cuda.is_bf16_supported())
    if chosen == stored:
        return "auto", []
    return getattr(torch, chosen), [layout.dtype_note(stored, chosen)]


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
    def read() -> Any:
        return kind.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            use_safetensors=not checkpoint.weights.pickled,
            weights_only=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **placement,
        )

    with weights_bar(on_event, runtime.model):
        model, told = guarded(read, f"{checkpoint.folder} cannot be loaded")
    missing = sorted(told["missing_keys"])
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in told["mismatched_keys"])
    if mismatched:
        raise ModelError(f"{few(mismatched)}: the shape in the weight files is not the one that config.json implies")
    if missing:
        raise ModelError(f"the weight files lack {len(missing)} tensors that the model needs: {few(missing)}")
    notes = []
    unused = leftover.check(model, told["unexpected_keys"], checkpoint.weights.tensors, checkpoint.config)
    if unused:
        notes.append(f"{len(unused)} tensors in the weight files are not used: {few(unused)}")
    model.eval().requires_grad_(False)
    return model, notes


def _tokenizer(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer_files.forget()
    with panics.unreported():
        return guarded(
            lambda: AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True
            ),
            f"the tokenizer in {checkpoint.folder} cannot be loaded",
        )


def _plain_tokenizer(checkpoint: check.Checkpoint) -> tuple[Any, str]:
    """The tokenizer without transformers; or as transformers makes it, and why."""
    from genctl.models import tokenizer
    from genctl.models.tokenizer_class import NotPlain

    def plain() -> tuple[Any, str]:
        try:
            return tokenizer.plain(checkpoint.folder, checkpoint.config), ""
        except NotPlain as error:
            return None, str(error)

    with panics.unreported():
        made, reason = guarded(plain, f"the tokenizer in {checkpoint.folder} cannot be loaded")
    return (made, "") if made is not None else (_tokenizer(checkpoint, False), reason)


def _vocabulary_notes(loaded: Loaded) -> tuple[str, ...]:
    config = loaded.config
    start = getattr(config, "decoder_start_token_id", None)
    start = loaded.generation.get("decoder_start_token_id", start)
    for name, value in {"decoder_start_token_id": start, **_special(loaded.generation)}.items():
        values = value if isinstance(value, list) else [value]
        for each in values:
            if each is None or (each == -1 and name == "pad_token_id"):  # an old way of saying "none"
                continue
            if type(each) is not int or not 0 <= each < loaded.vocab_size:
                raise ModelError(f"{name} is {each!r:.40}, but the model's ids are 0 to {loaded.vocab_size - 1:,}")
    if loaded.tokenizer is not None and len(loaded.tokenizer) > loaded.vocab_size:
        return (
            f"the tokenizer has {len(loaded.tokenizer):,} tokens, the model only {loaded.vocab_size:,}: "
            "prompts that use the others are refused",
        )
    return ()


def _special(generation: dict[str, Any]) -> dict[str, Any]:
    return {name: generation[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id") if name in generation}
