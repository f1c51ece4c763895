"""Plant small faults in the code, one at a time, and see whether the everyday tests catch them.

    python scripts/mutants.py                      every fault of mutants.toml, with the tests that it names
    python scripts/mutants.py --only "exit status" those whose name or file holds these words
    python scripts/mutants.py --table FILE         the table as TSV: fault, file, the first test that failed, seconds
    python scripts/mutants.py -- --everything      further arguments go to pytest

Each is put back before the next one. Ends with 1 if a fault was caught by no test.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_suffix(".toml")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A fault in one place of a file: `before`, which must occur exactly once, is replaced by `after`."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]  # files or folders that must catch it

    @property
    def path(self) -> Path:
        return ROOT / self.file

    def planted(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError if `before` does not occur exactly once."""
        if (times := text.count(self.before)) != 1:
            raise ValueError(f"{self.file} holds the place of the fault {self.name!r} {times} times, not once")
        return text.replace(self.before, self.after)


def faults() -> list[Fault]:
    """All faults of mutants.toml."""
    entries = tomli.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant the fault in its file, and restore the file at the end."""
    sound = fault.path.read_text(encoding="utf-8")
    fault.path.write_text(fault.planted(sound), encoding="utf-8")
    try:
        yield
    finally:
        fault.path.write_text(sound, encoding="utf-8")


def first_failure(fault: Fault, arguments: list[str]) -> str:
    """The test that catches the fault; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE"]
    # .pyc files record modification times in whole seconds: one of the previous fault must not be used
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments, *fault.tests], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8"
    )
    if done.returncode in (0, 5):
        return ""
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the fault's name or file")
    parser.add_argument("--table", type=Path)
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    missed, lines = 0, []
    for fault in faults():
        if options.only not in f"{fault.name} {fault.file}":
            continue
        began = time.monotonic()
        with planted(fault):
            test = first_failure(fault, options.arguments)
        missed += not test
        line = f"{fault.name}\t{fault.file}\t{test or 'CAUGHT BY NO TEST'}\t{time.monotonic() - began:.0f}"
        print(line, flush=True)
        lines.append(line)
        if options.table is not None:
            options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines) - missed} of {len(lines)} faults were caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
