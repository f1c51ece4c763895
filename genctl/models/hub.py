"""Load a checkpoint: weights on their device, the tokenizer, and its generation settings.

JSON files and headers are checked first (`check`), so that a damaged or hostile folder is refused before torch is
imported and before anything is allocated. transformers and torch are imported inside the functions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import process
from genctl.decode.step_costs import Threads
from genctl.errors import UsageError
from genctl.models import check, runtime_choice
from genctl.models.check import GenerationSettings, known_ids
from genctl.models.libraries import OnEvent, guarded, quiet, without_panic_reports
from genctl.models.resolve import CheckpointFolder, resolve
from genctl.params import Quantized, Runtime

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from genctl.models.adapter import Adapter
    from genctl.native.runtime import NativeConfig, NativeModel


_PIECE = 1 << 21  # bytes; Linux reads no more than a few MiB for one piece of advice


def read_ahead(files: Iterable[Path]) -> threading.Thread | None:
    """Read these files in the background while Python imports torch, if the system can and half of the memory holds
    them. A thread gives the advice piece by piece, because the call blocks on a slow disk. No result depends on it.
    """
    paths = list(files)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not hasattr(os, "posix_fadvise") or sum(path.stat().st_size for path in paths) > memory // 2:
            return None
    except (AttributeError, OSError, ValueError):
        return None

    def advise() -> None:
        with suppress(OSError):
            for path in paths:
                with path.open("rb") as file:
                    for start in range(0, path.stat().st_size, _PIECE):
                        os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_WILLNEED)

    thread = threading.Thread(target=advise, name="read-ahead", daemon=True)
    thread.start()
    return thread


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
    checkpoint: check.Checkpoint
    notes: tuple[str, ...] = ()  # for stderr
    runtime: str = ""  # with the reason: "native (llama)", "transformers (--compile)"
    adapter: Adapter | None = None
    tokenizer_of: str = ""  # if not genctl's own: "transformers (there is no tokenizer.json)"
    quantize: Quantized | None = None  # the form of its weights; "gguf": as in the file
    unpacked: str = ""  # why blocks are unpacked although no option requests it

    @property
    def verbose_notes(self) -> tuple[str, ...]:
        """Notes for --verbose."""
        from genctl.compat import untested_versions  # with torch

        tokenizer = f"tokenizer: {self.tokenizer_of}" if self.tokenizer_of else ""
        products = "" if self._products in self.remarks else self._products
        return (*self.notes, f"runtime: {self.runtime}", *filter(None, (tokenizer, products)), *untested_versions())

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes that are always shown: why everything is slow, or takes several times the memory of the file."""
        from genctl.kernels.ops import is_unusable

        return tuple(filter(None, (self.unpacked, self._products if is_unusable() else "")))

    @property
    def _products(self) -> str:
        """Why torch computes the matrix products of the native runtime; "" if it does not."""
        if not self.runtime.startswith("native") or self.model.device.type != "cpu":
            return ""
        from genctl.kernels.ops import why_not

        return f"matrix products: torch ({why_not()})" if why_not() else ""

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: larger ids cannot be read."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def fingerprint(self) -> str:
        """A digest of every byte of the weights, configs, tokenizer and templates, and of Python files that it runs.

        Raises ModelError for a checkpoint whose files have changed since it was loaded.
        """
        own = self.checkpoint.fingerprint()
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
    runtime_choice.check_options(runtime)
    placement = runtime_choice.placement(runtime)
    with quiet():
        place, checkpoint = _find(runtime, allow_pickle, trust_remote_code, need_tokenizer, on_event)
        if before_weights is not None:
            before_weights(checkpoint.generation)
        added = None
        if runtime.adapter is not None:
            from genctl.models import adapter

            added = adapter.find(runtime.adapter, merge=runtime.merge_adapter)
        read_ahead(checkpoint.weights.files)
        native, reason = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust_remote_code)
        device = device_of(runtime.device) if runtime.device_map is None else None
        process.resume_collector()  # torch is imported now
        if threads is not None:
            threads.apply(checkpoint.weights.bytes, device="cpu" if device is None else device.type)
        unpacked = ""
        if checkpoint.gguf:
            runtime, unpacked = runtime_choice.as_it_lies(runtime, checkpoint, native, device, reason)
        runtime_choice.check_device(runtime, device, native=native is not None)
        if native is not None and device is not None:
            reason = runtime_choice.device_reason(runtime, device)
        model: Any
        if native is not None and device is not None and not reason:
            from genctl.native import pages

            # before the weights: parsing the tokenizer's files takes several times the memory of the result
            tokenizer, left_to = tokenizer_of(checkpoint)
            pages.trim_rest()
            finite = check.finite_check(checkpoint.weights.bytes)
            on_cpu, at, plan, how = device.type == "cpu", device, native, runtime
            model, notes = guarded(
                lambda: runtime_choice.load(plan, how, checkpoint, at, finite, on_event),
                f"{checkpoint.folder} cannot be loaded" if on_cpu else f"cannot move the model to {device}",
            )
            computed_by = f"native ({native.spec.family})"
        else:
            from genctl.models import with_transformers

            model, notes = with_transformers.load(
                checkpoint, runtime, device, placement, added, trust_remote_code, on_event
            )
            tokenizer, left_to = tokenizer_of(checkpoint, by_transformers=True, trust_remote_code=trust_remote_code)
            computed_by = f"transformers ({reason})"
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=runtime.model,
        path=place.folder,
        is_encoder_decoder=bool(getattr(model.config, "is_encoder_decoder", False)),
        generation=checkpoint.generation,
        checkpoint=checkpoint,
        runtime=computed_by,
        adapter=added,
        tokenizer_of=f"transformers ({left_to})" if left_to else "",
        quantize=runtime.quantize,
        unpacked=unpacked,
    )
    loaded.generation, unknown = known_ids(loaded.generation, loaded.vocab_size)
    beyond = [] if tokenizer is None else check.check_vocabulary(tokenizer, loaded.vocab_size)
    loaded.notes = (*place.notes, *notes, *unknown, *beyond)
    return loaded


def generation_settings(
    runtime: Runtime, *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> GenerationSettings:
    """The generation settings of `runtime.model`, without reading its weights. Raises as `load` does."""
    with quiet():
        return _find(runtime, allow_pickle, trust_remote_code, need_tokenizer=False)[1].generation


def _find(
    runtime: Runtime, allow_pickle: bool, trust_remote_code: bool, need_tokenizer: bool, on_event: OnEvent | None = None
) -> tuple[CheckpointFolder, check.Checkpoint]:
    """The folder of `runtime.model`, downloaded if necessary, and checked."""
    flags = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    place = resolve(runtime.model, revision=runtime.revision, offline=runtime.offline, on_event=on_event, **flags)
    if place.gguf is not None:
        from genctl.models import gguf_config

        return place, gguf_config.inspect(place.gguf, need_tokenizer=need_tokenizer)
    return place, check.inspect(place.folder, need_tokenizer=need_tokenizer, **flags)


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


def tokenizer_of(
    checkpoint: check.Checkpoint, *, by_transformers: bool = False, trust_remote_code: bool = False
) -> tuple[Any, str]:
    """The tokenizer of a checkpoint (None: it has none), and why transformers loads it ("" if the settings say so).

    Raises ModelError.
    """

    def read() -> tuple[Any, str]:
        from genctl.models import tokenizer, tokenizer_limits
        from genctl.models.tokenizer import UnsupportedTokenizer

        if checkpoint.gguf:
            from genctl.models import gguf_tokenizer

            return gguf_tokenizer.plain(checkpoint.folder / checkpoint.gguf), ""
        reason = ""
        try:
            if not by_transformers:
                return tokenizer.plain(checkpoint.folder, checkpoint.config), ""
        except UnsupportedTokenizer as error:
            reason = str(error)
        tokenizer_limits.forget()
        from transformers import AutoTokenizer

        how = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        return AutoTokenizer.from_pretrained(checkpoint.folder, **how), reason

    if not checkpoint.has_tokenizer:
        return None, ""
    with without_panic_reports():
        return guarded(read, f"the tokenizer in {checkpoint.folder} cannot be loaded")
