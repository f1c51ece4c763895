"""How many workers this machine has memory for: each has its own copy of the weights, unless they stay in their files.

The native runtime maps weights from safetensors files, which all processes share, if it computes in their dtype.
"""

from __future__ import annotations

import math

from genctl.errors import GenctlError, UsageError, size
from genctl.params import Runtime

# -- the bytes of a checkpoint's weights that each process needs for itself, known before they are read ----------------


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}


def own_weights(runtime: Runtime, trust: dict[str, bool]) -> int:
    """Bytes of the weights that each process needs for itself; 0 if they are shared, or if their size is not known."""
    from genctl.models import check, runtime_choice
    from genctl.models.resolve import resolve
    from genctl.native.plan import DTYPES

    try:
        place = resolve(runtime.model, revision=runtime.revision, offline=True, allow_pickle=trust["allow_pickle"])
        if place.gguf is not None:
            return place.gguf.stat().st_size
        checkpoint = check.inspect(place.folder, need_tokenizer=False, **trust)
        native, _ = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust["trust_remote_code"])
    except (GenctlError, OSError):
        return 0  # not downloaded yet, or unusable: a worker reports the reason
    dtype = runtime_choice.dtype_of(runtime, checkpoint)
    tensors = checkpoint.weights.tensors.values()
    if native is not None and runtime.quantize is None and {DTYPES.get(tensor.dtype) for tensor in tensors} == {dtype}:
        return 0
    if not tensors:
        return sum(path.stat().st_size for path in checkpoint.weights.files)
    number = sum(math.prod(tensor.shape) for tensor in tensors)
    return int(number * _BYTES.get(runtime.quantize or dtype, 2))


PROCESS = 400 << 20  # bytes of a worker besides weights: Python, torch and Ray


def check_memory(workers: int, runtime: Runtime, trust: dict[str, bool]) -> None:
    """Raises UsageError for more workers than memory is free for. Where their size is not known, nothing is checked."""
    import psutil

    weights = own_weights(runtime, trust)
    free = int(psutil.virtual_memory().available)
    fitting = free // (weights + PROCESS)
    if workers > 1 and workers > fitting:
        fits = max(int(fitting), 1)
        raise UsageError(
            f"--workers {workers}: each needs {size(weights + PROCESS)} of memory (weights: {size(weights)}), and "
            f"{size(free)} are free",
            hint=f"--workers {fits} fits" if fitting else "not even one worker is sure to fit",
        )
