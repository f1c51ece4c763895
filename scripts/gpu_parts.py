"""Parts of a check or a measurement on a GPU, with one deadline: parts that no longer fit are dropped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Parts:
    """The parts that ran, with their seconds and results; written to a file after each part."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.began = folder, time.monotonic()
        self.end = self.began + float(os.environ.get("GPU_SECONDS", seconds))
        self.found: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def run(self, name: str, part: Callable[[], Any], *, least: float) -> None:
        """Run a part that needs `least` seconds. Its result is a value for JSON; an exception fails only this part."""
        if self.left < least:
            self._note(name, {"dropped": f"{self.left:.0f} s were left"}, 0.0)
            return
        began = time.monotonic()
        try:
            value = part()
        except Exception as error:  # the other parts still run
            value = {"failed": f"{type(error).__name__}: {error}"[:600]}
        self._note(name, value, time.monotonic() - began)

    def _note(self, name: str, value: Any, seconds: float) -> None:
        self.found[name] = {"seconds": round(seconds, 1), "result": value}
        (self.folder / "result.json").write_text(json.dumps(self.found, indent=1) + "\n")
        if isinstance(value, dict) and (value.get("failed") or value.get("dropped")):
            print(
                f"{name}: {'failed: ' if value.get('failed') else 'dropped: '}{value.get('failed') or value['dropped']}"
            )

    @property
    def failed(self) -> bool:
        """Whether any part failed."""
        results = [each["result"] for each in self.found.values()]
        return any(isinstance(result, dict) and result.get("failed") for result in results)


def command(log: Path, words: Sequence[str], seconds: float, **environment: str) -> dict[str, Any]:
    """Run a command with its output in `log`. The result has the status, and "failed" unless that is 0."""
    with log.open("w") as out:
        running = subprocess.Popen(
            [sys.executable, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            status = running.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            status = 124
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    return {"status": status, "last": last[-200:], **({"failed": f"{log.name}: {last[-300:]}"} if status else {})}


def card() -> dict[str, Any]:
    """The GPU, and the versions of the libraries."""
    import torch
    import transformers

    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "memory_gb": round(found.total_memory / 1e9, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def no_gpu() -> str:
    """Why nothing can run; "" if there is a GPU."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
