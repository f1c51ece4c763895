"""Expected screens, stored as text files beside the tests so that people can read and review them."""

from __future__ import annotations

import os
from pathlib import Path


def check_screen(file: Path, text: str) -> None:
    """Compare a screen with a file, ignoring trailing spaces. GENCTL_TEST_UPDATE_SCREENS=1 rewrites the file."""
    shown = "\n".join(line.rstrip() for line in text.split("\n"))
    if os.environ.get("GENCTL_TEST_UPDATE_SCREENS") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")
