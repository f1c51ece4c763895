"""`genctl audit`: answers of a real llama-server (b11434) for the built-in stories, with the server's flags.

For each run there are three texts of 20 tokens, with five listed alternatives for each token.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.commands.audit.traces import MARKS, audit, causes, written

pytestmark = MARKS
RECORDED = Path(__file__).parents[2] / "data" / "llama_server_traces.jsonl"


@cache
def recorded() -> dict[str, Any]:
    return {one["flags"]: one["rows"] for one in map(json.loads, RECORDED.read_text().splitlines())}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-fa off -ctk f32 -ctv f32", ""),
        ("", "flash attention in float16, as llama.cpp computes by default"),
        ("-ctk q8_0", "KV cache in 8-bit blocks, keys alone"),
        ("-ctv q8_0 -fa on", "KV cache in 8-bit blocks, values alone"),
        ("-ctk q4_0 -ctv q4_0 -fa on", "KV cache in Q4_0"),
        ("-m Q4_0 -fa off -ctk f32 -ctv f32", "GGUF Q4_0"),
        ("-m Q4_K_M -fa off -ctk f32 -ctv f32", "GGUF Q4_K_M"),
        ("--rope-scaling linear --rope-scale 2 -fa off -ctk f32 -ctv f32",
         "rope scaling that config.json does not have: linear by 2"),
    ],
)  # fmt: skip
def test_what_a_server_computed_is_named(flags: str, expected: str, tmp_path: Path) -> None:
    done = audit(written(tmp_path, recorded()[flags]))
    causes(done)
    found = done.records[0]
    assert " and ".join(one["words"] for one in found["causes"]) == expected, found["reason"]
    assert found["verdict"] == ("explained" if expected else "same")


def test_a_cause_beside_its_attention_is_named(tmp_path: Path) -> None:
    rows = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in recorded()[""]]
    assert sorted(causes(audit(written(tmp_path, rows)))) == ["bos-added", "flash-float16"]
