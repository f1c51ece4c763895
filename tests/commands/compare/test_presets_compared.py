"""Every shipped preset can be compared on both built-in checkpoints, all of them at once."""

from __future__ import annotations

import pytest

from genctl.config.presets import shipped_folder
from tests.cli.tool import genctl

SHIPPED = sorted(path.stem for path in shipped_folder().glob("*.toml"))


@pytest.mark.parametrize(("model", "prompt"), [("builtin:stories", "Once upon a time"), ("builtin:numbers", "307")])
def test_all_presets_at_once(model: str, prompt: str) -> None:
    flags = [word for name in SHIPPED for word in ("-p", name)]
    done = genctl("compare", prompt, "-m", model, *flags, "-n", "8", "--seed", "1", "--format", "jsonl")
    assert done.status == 0, done.err
    assert list(dict.fromkeys(record["run"] for record in done.records)) == SHIPPED
    assert all(record["usage"]["new_tokens"] for record in done.records)
