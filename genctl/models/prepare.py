"""Prepare a model that was read: check its numbers, repack its layers, check its device; and one larger than memory."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import errors
from genctl.errors import ModelError, UsageError, reason_of
from genctl.models.weights import shown
from genctl.params import Runtime
from genctl.process import use_own_compile_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# -- models larger than memory: each pass reads the weights that `--device-map` leaves on the disk ---------------------


_MEMORY = re.compile(r"(cpu|disk|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMGT]i?B)", re.IGNORECASE)
_PROBE = 1 << 16  # bytes written to check that a folder is writable


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


def placement(runtime: Runtime) -> dict[str, Any]:
    """Arguments for accelerate's big-model loading; {} without --device-map. Raises UsageError."""
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
    arguments: dict[str, Any] = {"device_map": runtime.device_map}
    if runtime.max_memory is not None:
        arguments["max_memory"] = max_memory(runtime.max_memory)
    if runtime.offload_folder is not None:
        if not runtime.offload_folder:
            raise UsageError("--offload-folder is empty, and an empty text names no folder")
        check_folder(runtime.offload_folder)
        arguments["offload_folder"] = str(Path(runtime.offload_folder).expanduser())
    return arguments


def check_folder(name: str) -> None:
    """Make the folder of --offload-folder and write a file there. Raises UsageError if that fails."""
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--offload-folder {shown(name)}: it is a file, not a folder") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--offload-folder {shown(name)} cannot be written to: {reason_of(error)}") from error


# -- a model that was read -------------------------------------------------------------------------------------------


_SCANNED = 2 << 30  # bytes of weights up to which every number is checked


def check_options(runtime: Runtime) -> None:
    """Refuse conflicting options before torch is imported. Raises UsageError."""
    quantize, device_map = f"--quantize {runtime.quantize}", f"--device-map {runtime.device_map}"
    is_set = {
        "--compile": runtime.compile,
        "--tensor-parallel": runtime.tensor_parallel,
        "--adapter": runtime.adapter is not None,
        "--prompt-cache": runtime.prompt_cache is not None,
        "--dequantize": runtime.dequantize,
        "--no-pack": not runtime.pack,
        "--dtype float16": runtime.dtype == "float16",
        quantize: runtime.quantize is not None,
        device_map: runtime.device_map is not None,
    }
    one_device = "the model has to be on one device"
    conflicts = [
        ("--compile", quantize, "8-bit layers are opaque to a compiler"),
        ("--compile", device_map, one_device),
        *(
            ("--tensor-parallel", flag, "each rank holds a part of the model")
            for flag in ("--compile", quantize, device_map, "--adapter", "--prompt-cache")
        ),
        ("--adapter", device_map, one_device),
        ("--dequantize", "--quantize gguf", "one unpacks what the other does not"),
        (quantize, "--no-pack", f"{runtime.quantize} weights are packed ones"),
        (quantize, device_map, one_device),
        (quantize, "--dtype float16", "it computes in float32 or bfloat16"),
    ]
    for flag, other, why in conflicts:
        if is_set[flag] and is_set.get(other):
            raise UsageError(f"{flag} and {other} contradict each other: {why}")
    if runtime.compile:
        use_own_compile_cache()


def check_device(runtime: Runtime, device: torch.device | None, *, native: bool) -> None:
    """Refuse a device that does not support the options. `native`: the runtime. Raises UsageError."""
    if runtime.compile and device is not None:
        if device.type not in ("cpu", "cuda"):
            chosen = "" if runtime.device == "auto" else f" (--device {runtime.device})"
            raise UsageError(f"--compile runs on the CPU and on CUDA devices, not on {device.type}{chosen}")
        if device.type == "cpu" and cpp_compiler() is None:
            raise UsageError(
                "--compile on the CPU needs a C++ compiler, and none is found",
                hint="install g++ or clang++, or name one in the environment variable CXX",
            )
    if runtime.quantize is not None and device is not None and device.type != "cpu":
        own = runtime.quantize in ("int8", "int4") and device.type == "cuda"
        if own and native:
            return
        classes = " on transformers' classes" if own else ""
        chosen = "" if runtime.device == "auto" else f" (--device {runtime.device})"
        raise UsageError(
            f"--quantize {runtime.quantize}{classes} runs on the CPU, not on {device.type}{chosen}",
            hint="add --device cpu",
        )


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on the CPU; None if it is missing."""
    usual = "clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++"
    return shutil.which(os.environ.get("CXX") or usual)


def dtype_on_gpu(stored: str, *, bfloat16: bool) -> tuple[str, list[str]]:
    """The dtype of `--dtype auto` on a GPU for a checkpoint stored as `stored`, and a note if it is another.

    A GPU computes float32 at a fraction of its speed: it becomes bfloat16, or float16 if the GPU has no `bfloat16`.
    """
    if stored != "float32":
        return stored, []
    chosen = "bfloat16" if bfloat16 else "float16"
    return chosen, [f"{stored} weights are read as {chosen} on this GPU; --dtype {stored} keeps them"]


def prepare_for_device(
    model: nn.Module, runtime: Runtime, device: torch.device | None, config: dict[str, Any]
) -> list[str]:
    """Check the numbers, and repack the layers if the model computes on the CPU; notes for --verbose.

    Raises ModelError for NaN and infinite weights. Above 2 GiB they are not checked; logits still are, at every step.
    """
    if runtime.tensor_parallel:  # each rank checks its own part
        from genctl.models import rank_group

        rank_group.share_outputs(model)
        parts = list(rank_group.own_parts(model))
        check_part = finite_check(sum(part.nbytes for _, part in parts))
        for name, part in parts:
            check_part(name, part)
        return []
    size = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    check_tensor = finite_check(size)
    packs = runtime.pack and not runtime.compile  # packed layers are opaque to a compiler, and it fuses by itself
    if device is None or device.type != "cpu" or not packs:
        for name, weight in model.named_parameters():
            check_tensor(name, weight)
        return []
    from genctl.models.packed_layers import pack, weights_bytes

    if runtime.quantize is not None and config.get("quantization_config"):
        raise ModelError(f"--quantize {runtime.quantize}: the checkpoint is quantised already, by its config.json")
    report = pack(model, quantize=runtime.quantize, check_tensor=check_tensor)
    if runtime.quantize is not None and not report.packed:
        raise ModelError(f"--quantize {runtime.quantize}: no layer of this model can hold such weights{_left(report)}")
    if not report.packed and not set(report.left) - {"small"}:  # nothing to gain, so no note
        return []
    how = f"weights in {runtime.quantize}" if runtime.quantize is not None else "genctl's own products"
    note = f"{report.packed} linear layers with {how}{_left(report)}"
    if runtime.quantize is not None:
        note += f"; all weights {errors.size(weights_bytes(model))}, {errors.size(size)} as read"
    return [note]


def finite_check(size: int) -> Callable[[str, Tensor], None]:
    """A check of each tensor that raises ModelError. Of more than `_SCANNED` bytes of weights it checks nothing."""
    return _check_finite if size <= _SCANNED else lambda name, weight: None


def _left(report: Any) -> str:
    return "".join(f", {count} left ({why})" for why, count in sorted(report.left.items()))


def _check_finite(name: str, weight: Tensor) -> None:
    import torch

    if type(weight) not in (torch.Tensor, torch.nn.Parameter):  # codes and scales in one tensor, torchao's
        if not hasattr(weight, "dequantize"):
            return
        weight = weight.dequantize()
    if weight.device.type == "meta" or not weight.is_floating_point() or not weight.numel():
        return
    # one pass: the extremes of a tensor are finite exactly if all its numbers are
    low, high = torch.aminmax(weight.detach().float() if weight.element_size() < 2 else weight.detach())
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(weight.detach().float())).sum())
        why = "the weights are damaged"
        if weight.dtype == torch.float16:
            why = f"{why}, or too large for float16 (--dtype bfloat16 and float32 hold them)"
        raise ModelError(f"tensor {shown(name)} holds {bad:,} NaN or infinite numbers: {why}")
