"""How many workers this machine has memory for: each has its own copy of the weights, unless they stay in their files.

The native runtime maps weights from safetensors files, which all processes share, if it computes in their dtype.
"""

from __future__ import annotations

from genctl.engines.pool.own_weights import own_weights
from genctl.errors import UsageError, size
from genctl.params import Runtime

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
