"""Load a checkpoint with transformers' classes: its weights on their device, with an adapter, and the tokenizer.

The native runtime needs nothing of this module, except a tokenizer that it cannot read itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.errors import ModelError
from genctl.models import adapter, architecture, check, prepare, runtime_choice, tokenizer_files, unused_tensors
from genctl.models.library_errors import guarded, without_panic_reports
from genctl.models.progress import OnEvent, weights_bar
from genctl.models.weights import few, with_whole_index
from genctl.params import Runtime

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load(
    checkpoint: check.Checkpoint,
    runtime: Runtime,
    device: torch.device | None,
    placement: dict[str, Any],
    added: adapter.Adapter | None,
    trust_remote_code: bool,
    on_event: OnEvent | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, list[str]]:
    """The model with the adapter `added`, its tokenizer, and notes for --verbose. Raises ModelError or UsageError.

    `placement` are arguments for accelerate, which then places the weights; `device` is None.
    """
    config = architecture.read_config(checkpoint, trust_remote_code)
    kind = architecture.auto_class(checkpoint, config, trust_remote_code)
    if runtime.tensor_parallel:
        from genctl.models import tensor_parallel

        placement = tensor_parallel.placement(config)
    dtype, dtype_notes = dtype_on(device, checkpoint, runtime)
    model, notes = _model(checkpoint, kind, config, runtime, dtype, placement, trust_remote_code, on_event)
    notes += dtype_notes
    if added is not None:
        model, note = adapter.apply(model, added, merge=runtime.merge_adapter)
        notes.append(note)
    words = tokenizer(checkpoint, trust_remote_code) if checkpoint.has_tokenizer else None
    notes += prepare.prepare_for_device(model, runtime, device, checkpoint.config)
    if device is not None and not runtime.tensor_parallel:
        model = guarded(lambda: model.to(device), f"cannot move the model to {device}")
    if runtime.fsdp:
        from genctl.models import fully_sharded

        fully_sharded.shard(model)
    return model, words, notes


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

    def read(folder: Path) -> Any:
        return kind.from_pretrained(
            folder,
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

        unused = gguf.check_read(model, sorted(report["unexpected_keys"]), checkpoint.folder / checkpoint.gguf)
    else:
        unused = unused_tensors.check(model, report["unexpected_keys"], checkpoint.weights.tensors, checkpoint.config)
    if unused:
        notes.append(f"{len(unused)} tensors in the weight files are not used: {few(unused)}")
    model.eval().requires_grad_(False)
    return model, notes


def tokenizer(checkpoint: check.Checkpoint, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of transformers. Raises ModelError."""
    from transformers import AutoTokenizer

    tokenizer_files.forget()
    with without_panic_reports():
        return guarded(
            lambda: AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True, **checkpoint.place
            ),
            f"the tokenizer in {checkpoint.folder} cannot be loaded",
        )
