"""Which variant of the compiled library is used here. Nothing needs torch, so a process that computes nothing can ask.

`GENCTL_PRODUCTS` names another variant (a slower instruction set), or `torch` for none.
"""

from __future__ import annotations

import os
import shlex
from functools import cache
from pathlib import Path

from genctl.errors import UsageError
from genctl.kernels import build

VARIABLE = "GENCTL_PRODUCTS"
FOLDER = build.HERE
AGAIN = f"python {shlex.quote(str(FOLDER / 'build.py'))} compiles them again"
OUTDATED = f"the compiled products are older than their sources; {AGAIN}"


def file_of(name: str) -> Path:
    """The library of a variant."""
    return FOLDER / f"{name}.so"


@cache
def choice() -> tuple[str, str]:
    """The variant to use, or "" and why there is none. Raises UsageError for a named one that is not there."""
    wanted = os.environ.get(VARIABLE, "")
    known = list(build.variants())
    if wanted and wanted not in (*known, "torch"):
        raise UsageError(f"{VARIABLE}={wanted}: this platform has {', '.join([*known, 'torch'])}")
    if wanted == "torch":
        return "", f"{VARIABLE}=torch"
    if not known:
        return "", "no products are compiled for this platform"
    try:
        cpu = build.Cpu(file_of(build.CPU))
    except OSError:
        return "", "the products of this installation are not compiled"
    except AttributeError:  # it lacks a function that its sources have today
        return "", OUTDATED
    if cpu.built_from != build.digest():
        return "", OUTDATED
    if wanted and wanted not in cpu.known:
        raise UsageError(
            f"{VARIABLE}={wanted}: the compiler of this installation did not know it, only {', '.join(cpu.known)}"
        )
    able = [name for name in cpu.known if cpu.runs(name)]
    if wanted and wanted not in able:
        raise UsageError(f"{VARIABLE}={wanted}: this CPU runs {', '.join(able)}")
    if wanted and wanted not in cpu.variants:
        raise UsageError(
            f"{VARIABLE}={wanted}: this installation has {', '.join(cpu.variants)}",
            hint=f"{build.VARIABLE}=runnable compiles all that this CPU runs, when genctl is installed",
        )
    there = [name for name in able if name in cpu.variants]
    if not there:
        return "", f"the products of this installation are for another CPU ({', '.join(cpu.variants)}); {AGAIN}"
    return wanted or next((name for name in there if cpu.suits(name)), there[0]), ""


def runnable() -> list[str]:
    """The variants of this installation that this CPU runs, best first; empty where none is used."""
    if not choice()[0]:
        return []
    cpu = build.Cpu(file_of(build.CPU))
    return [name for name in cpu.variants if cpu.runs(name)]
