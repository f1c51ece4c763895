"""The two tiers of tests.

Every day: run by `scripts/test` and CI, six minutes on two cores. Each claim is tested once: each mode, processor, kind
of cache and command; of a product of forms, sizes and families, enough cells that each value occurs.
Every night: `scripts/test --everything`, which a release runs too. It adds inherently long tests (marked
`night`: dozens of kills, ranks, every architecture of transformers) and the other cells of large products.
`tiers.toml` lists the products.
"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent

_TABLE = tomllib.loads((ROOT / "tiers.toml").read_text(encoding="utf-8"))
WIDE: dict[str, dict[str, int | list[str]]] = _TABLE["everyday"]
OLDEST: list[str] = _TABLE["oldest"]


def name_of(path: Path) -> str:
    """The name of a test file in these tables."""
    return path.relative_to(ROOT).as_posix()


def is_everyday(path: Path, name: str, cell: int) -> bool:
    """Whether a test of the file `path` runs every day: `name` with its parameters, cell number `cell` of its test."""
    test, _, parameters = name.removesuffix("]").partition("[")
    stays = WIDE.get(name_of(path), {}).get(test)
    if stays is None:
        return True
    if isinstance(stays, int):
        return stays > 0 and cell % stays == 0
    return any(fnmatchcase(parameters, pattern) for pattern in stays)
