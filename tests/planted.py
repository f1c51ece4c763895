"""A hostile folder: modules that shadow others by name, each of which leaves a mark when it is run."""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = (
    *("genctl", "torch", "numpy", "transformers", "tokenizers", "safetensors", "ray", "grpc", "psutil", "pyarrow"),
    *("typing_extensions", "setproctitle", "uvloop", "colorama", "triton", "sympy", "ziglang", "httpx2", "lm_eval"),
    *("sitecustomize", "usercustomize", "__future__", "multiprocessing", "concurrent", "subprocess", "socket"),
    *("json", "ctypes", "signal", "enum", "traceback", "pickle", "copyreg", "runpy", "base64", "struct", "_strptime"),
)
MARK = "ran.txt"


def plant(folder: Path) -> Path:
    """Create the modules in the folder: half of them are packages."""
    for number, name in enumerate(NAMES):
        code = (
            "import os, sys\n"
            f"with open({str(folder / MARK)!r}, 'a') as mark:\n"
            "    print(__name__, getattr(sys, 'orig_argv', '')[:3], file=mark)\n"
        )
        file = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return folder


def what_ran(folder: Path) -> list[str]:
    """The modules that were run, each with the command that ran it."""
    mark = folder / MARK
    return mark.read_text().splitlines() if mark.exists() else []


def script(folder: Path, module: str = "genctl.__main__", name: str = "program") -> list[str]:
    """The beginning of a command line: a script as `pip install` makes one, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
    file.chmod(0o755)
    return [sys.executable, str(file)]
