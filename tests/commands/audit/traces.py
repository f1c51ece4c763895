"""Traces of the built-in stories, and audits of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.parity.audit import Auditor
from genctl.parity.prompts import AuditPrompts
from genctl.parity.sides import LocalSide
from genctl.parity.traces import rows_of
from scripts import make_traces
from scripts.make_traces import Rows
from tests.cli.tool import Done, genctl
from tests.parity.sides import side

MARKS = [
    pytest.mark.usefixtures("clean_environment"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]
STORIES = make_traces.BUILTIN / "stories"
BOS = 1
PROMPTS = make_traces.PROMPTS[:4]
WARM = make_traces.warm(0.7)
engine = cache(make_traces.Transformers)


@cache
def reference() -> LocalSide:
    return side(STORIES, whole=True, dtype="float32")


def tokenizer() -> Any:
    return reference().session.loaded.tokenizer


def auditor(rows: Rows, dtype: torch.dtype = torch.float32) -> Auditor:
    """The auditor of these rows, without the command."""
    prompts = AuditPrompts(reference().session.loaded, reference().resolved, bos=BOS)
    read = [prompts.row(rows_of(row, "row", str(place))[0]) for place, row in enumerate(rows)]
    return Auditor(reference(), [row for row in read if row is not None], prompts, dtype=dtype)


@cache
def rollouts(dtype: str = "float32", texts: Sequence[str] = PROMPTS, most: int = 15, **how: Any) -> Rows:
    """`most` tokens after each text, in a trainer's format. `how`: arguments of `make_traces.rows`."""
    return make_traces.maker(STORIES, most * len(texts), each=most)(engine(STORIES, dtype), texts, **how)


def doubled(ids: list[int]) -> list[int]:
    return [BOS, *ids]


def chosen(rows: Rows) -> Rows:
    """The rows without the numbers of tokens that were not chosen."""
    return [{key: value for key, value in row.items() if key != "top_logprobs"} for row in rows]


def written(folder: Path, rows: Sequence[Any], name: str = "trace.jsonl") -> str:
    return str(make_traces.write(folder / name, [*rows]))


def audit(trace: str, *words: str, model: str | Path = STORIES) -> Done:
    return genctl("audit", trace, "-m", str(model), "--format", "jsonl", "-q", *words)


def causes(done: Done) -> list[str]:
    """The causes of the verdict."""
    one = done.records[0]
    assert (one["verdict"] == "explained") == bool(one["causes"]), one
    assert done.status == (0 if one["verdict"] == "same" else 4), done.err
    return [cause["key"] for cause in one["causes"]]
