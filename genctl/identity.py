"""What a checkpoint's fingerprint looks like, to those who keep one and compare it later (`models.fingerprint`)."""

from __future__ import annotations

PREFIX = "sha256:"  # fingerprints of the first version were bare hex, and saw a sample of each tensor only


def is_outdated(fingerprint: object) -> bool:
    """Whether it is one of the first version, which may be equal although weights differ."""
    return not (isinstance(fingerprint, str) and fingerprint.startswith(PREFIX))


def brief(fingerprint: object) -> str:
    """A fingerprint in a sentence."""
    return f"{str(fingerprint).removeprefix(PREFIX):.12}…"
