"""Prepare a model that was read: check its numbers, repack its layers, check its device."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genctl import errors
from genctl.errors import ModelError, UsageError
from genctl.models.weights import shown
from genctl.params import Runtime
from genctl.process import use_own_compile_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_SCANNED = 2 << 30  # bytes of weights up to which every number is checked


def check_options(runtime: Runtime) -> None:
    """Refuse conflicting options before torch is imported. Raises UsageError."""
    if runtime.compile:
        if runtime.quantize is not None:
            raise UsageError(
                f"--compile and --quantize {runtime.quantize} contradict each other: "
                "8-bit layers are opaque to a compiler"
            )
        if runtime.device_map is not None:
            raise UsageError(f"--compile and --device-map {runtime.device_map}: only a model that lies on one device")
        use_own_compile_cache()
    if runtime.tensor_parallel:
        conflicting = {
            "--compile": runtime.compile,
            f"--quantize {runtime.quantize}": runtime.quantize is not None,
            f"--device-map {runtime.device_map}": runtime.device_map is not None,
            "--adapter": runtime.adapter is not None,
            "--prompt-cache": runtime.prompt_cache is not None,
        }
        for conflict in (name for name, is_set in conflicting.items() if is_set):
            raise UsageError(f"--tensor-parallel and {conflict}: not for a model that is shared out over ranks")
    if runtime.adapter is not None and runtime.device_map is not None:
        raise UsageError(f"--adapter and --device-map {runtime.device_map}: only a model that lies on one device")
    if runtime.quantize is None:
        return
    flag = f"--quantize {runtime.quantize}"
    if not runtime.pack:
        raise UsageError(f"{flag} and --no-pack contradict each other: {runtime.quantize} weights are packed ones")
    if runtime.device_map is not None:
        raise UsageError(f"{flag} and --device-map {runtime.device_map}: only a model that lies on one device")
    if runtime.dtype == "float16":
        raise UsageError(f"{flag} computes in float32 or bfloat16, not in --dtype float16")


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

        rank_group.agree(model)
        parts = list(rank_group.own_parts(model))
        check_part = finite_check(sum(part.nbytes for _, part in parts))
        for name, part in parts if check_part is not None else ():
            assert check_part is not None
            check_part(name, part)
        return []
    size = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    check_tensor = finite_check(size)
    packs = runtime.pack and not runtime.compile  # packed layers are opaque to a compiler, and it fuses by itself
    if device is None or device.type != "cpu" or not packs:
        if check_tensor is not None:
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


def finite_check(size: int) -> Callable[[str, Tensor], None] | None:
    """A check of each tensor that raises ModelError; None for models with more than `_SCANNED` bytes of weights."""
    return _check_finite if size <= _SCANNED else None


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
