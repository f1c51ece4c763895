"""Load a checkpoint: weights on their device, the tokenizer, and its generation settings.

JSON files and headers are checked first (`check`), so that a damaged or hostile folder is refused before torch is
imported and before anything is allocated. transformers and torch are imported inside the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.decode.threads import Threads
from genctl.errors import ModelError, UsageError
from genctl.models import (
    adapter,
    architecture,
    check,
    collection,
    offload,
    optional_packages,
    prepare,
    runtime_choice,
    rust_panics,
    tokenizer_files,
    unused_tensors,
)
from genctl.models.generation_settings import GenerationSettings, begins_with_bos, known_ids
from genctl.models.library_errors import guarded
from genctl.models.progress import OnEvent, quiet, weights_bar
from genctl.models.read_ahead import read_ahead
from genctl.models.resolve import CheckpointFolder, resolve
from genctl.models.weights import few
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from genctl.native.model import NativeConfig, NativeModel
    from genctl.native.plan import WeightPlan

_MEMORY = re.compile(r"(cpu|disk|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMGT]i?B)", re.IGNORECASE)


@dataclass
class LoadedModel:
    """A model that is ready to generate."""

    model: PreTrainedModel | NativeModel  # in eval mode, on its device
    tokenizer: PreTrainedTokenizerBase | None
    config: PreTrainedConfig | NativeConfig
    name: str  # as the user typed it; the name in records
    path: Path
    is_encoder_decoder: bool
    generation: GenerationSettings
    notes: tuple[str, ...] = ()  # for stderr
    checkpoint: check.Checkpoint | None = None
    runtime: str = ""  # with the reason: "native (llama)", "transformers (--compile)"
    adapter: adapter.Adapter | None = None
    bound: str = ""  # the least time for a token, if weights are on the disk
    tokenizer_of: str = ""  # if not genctl's own: "transformers (there is no tokenizer.json)"

    @property
    def verbose_notes(self) -> tuple[str, ...]:
        """Notes for --verbose."""
        from genctl.compat import untested_versions  # with torch

        tokenizer = (f"tokenizer: {self.tokenizer_of}",) if self.tokenizer_of else ()
        return (*self.notes, f"runtime: {self.runtime}", *tokenizer, *self._products, *untested_versions())

    @property
    def _products(self) -> tuple[str, ...]:
        """Why torch computes the matrix products of the native runtime, if it does."""
        if not self.runtime.startswith("native") or self.model.device.type != "cpu":
            return ()
        from genctl.native.products.library import why_not

        return (f"matrix products: torch ({why_not()})",) if why_not() else ()

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: larger ids cannot be read."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def fingerprint(self) -> str:
        """A digest of every byte of the weights, configs, tokenizer and templates, and of Python files that it runs.

        Raises ModelError for a checkpoint whose files have changed since it was loaded.
        """
        checkpoint = self.checkpoint or check.inspect(
            self.path, allow_pickle=True, trust_remote_code=True, need_tokenizer=False
        )
        own = checkpoint.fingerprint()
        return own if self.adapter is None else self.adapter.combined(own)


def load(
    runtime: Runtime,
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    need_tokenizer: bool = False,
    on_event: OnEvent | None = None,
    before_weights: Callable[[GenerationSettings], object] | None = None,
    threads: Threads | None = None,
) -> LoadedModel:
    """Resolve, check and load `runtime.model`. `before_weights` receives its generation settings and may raise.

    A checkpoint without a tokenizer accepts only token ids; `need_tokenizer` refuses it before it is read. Raises
    ModelError for a checkpoint that is missing, damaged or unsupported, UsageError for conflicting options or an
    unavailable device. `on_event` receives bytes downloaded and tensors read. `threads` is set before weights are read.
    """
    prepare.check_options(runtime)
    placement = _placement(runtime)
    with quiet():
        place, checkpoint = _find(runtime, allow_pickle, trust_remote_code, need_tokenizer, on_event)
        if before_weights is not None:
            before_weights(checkpoint.generation)
        optional_packages.check_quantization(checkpoint.config)
        added = adapter.find(runtime)
        read_ahead(checkpoint.weights.files)
        native, reason = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust_remote_code)
        device = device_of(runtime.device) if runtime.device_map is None else None
        collection.resume()  # torch is imported now
        if threads is not None:
            threads.apply(checkpoint.weights.bytes, device="cpu" if device is None else device.type)
        prepare.check_device(runtime, device)
        if native is not None and device is not None:
            reason = runtime_choice.device_reason(native.spec, runtime, device)
            if not reason:
                return _native(native, runtime, place, checkpoint, device, on_event)
        config = architecture.read_config(checkpoint, trust_remote_code)
        kind = architecture.auto_class(checkpoint, config, trust_remote_code)
        if runtime.tensor_parallel:
            from genctl.models import tensor_parallel

            placement = tensor_parallel.placement(config)
        dtype, dtype_notes = _dtype(checkpoint, runtime, device)
        model, notes = _model(checkpoint, kind, config, runtime, dtype, placement, trust_remote_code, on_event)
        notes += dtype_notes
        if added is not None:
            model, note = adapter.apply(model, added, merge=runtime.merge_adapter)
            notes.append(note)
        tokenizer = _tokenizer(checkpoint, trust_remote_code) if checkpoint.has_tokenizer else None
        notes += prepare.prepare_for_device(model, runtime, device, checkpoint.config)
        if device is not None and not runtime.tensor_parallel:
            model = guarded(lambda: model.to(device), f"cannot move the model to {device}")
        if runtime.fsdp:
            from genctl.models import fully_sharded

            fully_sharded.shard(model)
    loaded = _loaded(model, tokenizer, runtime, place, checkpoint, notes, f"transformers ({reason})")
    loaded.adapter = added
    if runtime.device_map is not None:
        loaded.bound = offload.bound(model, checkpoint.weights.files)
    return loaded


def _native(
    plan: WeightPlan,
    runtime: Runtime,
    place: CheckpointFolder,
    checkpoint: check.Checkpoint,
    device: torch.device,
    on_event: OnEvent | None,
) -> LoadedModel:
    size = checkpoint.weights.bytes

    def read() -> tuple[NativeModel, list[str]]:
        return runtime_choice.load(plan, runtime, checkpoint, device, prepare.finite_check(size), on_event)

    model, notes = read() if device.type == "cpu" else guarded(read, f"cannot move the model to {device}")
    tokenizer, left_to = _plain_tokenizer(checkpoint) if checkpoint.has_tokenizer else (None, "")
    loaded = _loaded(model, tokenizer, runtime, place, checkpoint, notes, f"native ({plan.spec.family})")
    loaded.tokenizer_of = f"transformers ({left_to})" if left_to else ""
    return loaded


def _loaded(
    model: Any,
    tokenizer: Any,
    runtime: Runtime,
    place: CheckpointFolder,
    checkpoint: check.Checkpoint,
    notes: Sequence[str],
    computed_by: str,
) -> LoadedModel:
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=runtime.model,
        path=place.folder,
        is_encoder_decoder=bool(getattr(model.config, "is_encoder_decoder", False)),
        generation=checkpoint.generation,
        notes=(*place.notes, *notes),
        checkpoint=checkpoint,
        runtime=computed_by,
    )
    loaded.generation, unknown = known_ids(loaded.generation, loaded.vocab_size)
    begins = begins_with_bos(loaded.generation) if loaded.is_encoder_decoder else []
    loaded.notes += (*unknown, *begins, *_vocabulary_notes(loaded))
    return loaded


def generation_settings(
    runtime: Runtime, *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> GenerationSettings:
    """The generation settings of `runtime.model`, without reading its weights. Raises as `load` does."""
    with quiet():
        return _find(runtime, allow_pickle, trust_remote_code, need_tokenizer=False)[1].generation


def _find(
    runtime: Runtime,
    allow_pickle: bool,
    trust_remote_code: bool,
    need_tokenizer: bool,
    on_event: OnEvent | None = None,
) -> tuple[CheckpointFolder, check.Checkpoint]:
    """The folder of `runtime.model`, downloaded if necessary, and checked."""
    flags = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    place = resolve(runtime.model, revision=runtime.revision, offline=runtime.offline, on_event=on_event, **flags)
    if place.gguf is not None:
        from genctl.models import gguf

        return place, gguf.inspect(place.gguf, need_tokenizer=need_tokenizer)
    return place, check.inspect(place.folder, need_tokenizer=need_tokenizer, **flags)


def max_memory(text: str) -> dict[int | str, str]:
    """`0=20GiB,cpu=64GiB` in accelerate's form. Raises UsageError."""
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
        if not runtime.offload_folder:
            raise UsageError("--offload-folder is empty, and an empty text names no folder")
        offload.check_folder(runtime.offload_folder)
        placement["offload_folder"] = str(Path(runtime.offload_folder).expanduser())
    return placement


def device_of(name: str) -> torch.device:
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


def _dtype(checkpoint: check.Checkpoint, runtime: Runtime, device: torch.device | None) -> tuple[Any, list[str]]:
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
    chosen = prepare.dtype_on("cuda", stored, torch.cuda.is_bf16_supported())
    if chosen == stored:
        return "auto", []
    return getattr(torch, chosen), [prepare.dtype_note(stored, chosen)]


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

    def read() -> Any:
        return kind.from_pretrained(
            checkpoint.folder,
            **checkpoint.place,
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

    with weights_bar(on_event, runtime.model):
        model, report = guarded(read, f"{checkpoint.folder} cannot be loaded")
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"])
    if mismatched:
        raise ModelError(f"{few(mismatched)}: the shape in the weight files is not the one that config.json implies")
    if missing:
        raise ModelError(f"the weight files lack {len(missing)} tensors that the model needs: {few(missing)}")
    notes = []
    if checkpoint.gguf:
        from genctl.models import gguf

        unused = gguf.check_read(model, sorted(report["unexpected_keys"]), checkpoint.folder / checkpoint.gguf)
    else:
        unused = unused_tensors.check(model, report["unexpected_keys"], checkpoint.weights.tensors, checkpoint.config)
    if unused:
        notes.append(f"{len(unused)} tensors in the weight files are not used: {few(unused)}")
    model.eval().requires_grad_(False)
    return model, notes


def _tokenizer(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer_files.forget()
    with rust_panics.without_panic_reports():
        return guarded(
            lambda: AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True, **checkpoint.place
            ),
            f"the tokenizer in {checkpoint.folder} cannot be loaded",
        )


def _plain_tokenizer(checkpoint: check.Checkpoint) -> tuple[Any, str]:
    """The tokenizer without transformers; or transformers' own, and the reason."""
    from genctl.models import tokenizer
    from genctl.models.tokenizer_class import UnsupportedTokenizer

    def plain() -> tuple[Any, str]:
        try:
            return tokenizer.plain(checkpoint.folder, checkpoint.config), ""
        except UnsupportedTokenizer as error:
            return None, str(error)

    with rust_panics.without_panic_reports():
        loaded, reason = guarded(plain, f"the tokenizer in {checkpoint.folder} cannot be loaded")
    return (loaded, "") if loaded is not None else (_tokenizer(checkpoint, False), reason)


def _vocabulary_notes(loaded: LoadedModel) -> tuple[str, ...]:
    if loaded.tokenizer is not None and len(loaded.tokenizer) > loaded.vocab_size:
        return (
            f"the tokenizer has {len(loaded.tokenizer):,} tokens, the model only {loaded.vocab_size:,}: "
            "prompts that use the others are refused",
        )
    return ()
