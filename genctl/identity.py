"""The format of a checkpoint's fingerprint, for comparing stored ones (`models.fingerprint`)."""

from __future__ import annotations

PREFIX = "sha256:"  # fingerprints of the first version were bare hex, and saw a sample of each tensor only


def is_outdated(fingerprint: object) -> bool:
    """Whether it has the first version's format, which may be equal for different weights."""
    return not (isinstance(fingerprint, str) and fingerprint.startswith(PREFIX))


def brief(fingerprint: object) -> str:
    """A fingerprint, shortened for a sentence."""
    return f"{str(fingerprint).removeprefix(PREFIX):.12}…"
