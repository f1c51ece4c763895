"""What numbers depend on, for comparing it later: checkpoints (`models.fingerprint`) and versions.

This file imports nothing at first: `genctl --version` is answered before anything is imported.
"""

from __future__ import annotations

__version__ = "0.3.0"
PREFIX = "sha256:"  # fingerprints of the first version were bare hex, and saw a sample of each tensor only


def is_outdated(fingerprint: object) -> bool:
    """Whether it has the first version's format, which may be equal for different weights."""
    return not (isinstance(fingerprint, str) and fingerprint.startswith(PREFIX))


def brief(fingerprint: object) -> str:
    """A fingerprint, shortened for a sentence."""
    return f"{str(fingerprint).removeprefix(PREFIX):.12}…"


def versions(*packages: str) -> dict[str, str]:
    """The versions of genctl and of `packages`."""
    from importlib import metadata

    found = {"genctl": __version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def sources() -> str:
    """A digest of genctl's own sources, as they lie beside this file."""
    from hashlib import sha256
    from pathlib import Path

    home = Path(__file__).parent
    whole = sha256()
    for path in sorted(path for kind in ("py", "c", "h") for path in home.rglob(f"*.{kind}")):
        whole.update(f"{path.relative_to(home).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:12]
