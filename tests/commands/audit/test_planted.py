"""Causes that scripts/make_traces.py plants in weights, caches, adapters, soft caps and chats are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.parity import rereading
from scripts import make_traces
from tests.commands.audit.test_audit import PROMPTS, audit, causes, chosen, ids_of, written

pytestmark = [
    pytest.mark.usefixtures("clean_environment"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]

STORIES = make_traces.BUILTIN / "stories"
PLANTED = (
    "int8-weights", "int4", "int4-128", "nf4", "fp8", "cache-fp8", "cache-bfloat16", "adapter-missing",
    "adapter-doubled", "softcap-missing", "window-off-by-one", "system-lost", "no-generation-prompt",
    "special-as-text", "template-missing", "template-other",
)  # fmt: skip


Planted = dict[str, tuple[make_traces.Rows, dict[str, Any]]]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[make_traces.Rows, dict[str, Any]]]:
    """Traces by their cause, written as far as they are asked for."""
    engine = make_traces.Transformers(STORIES)
    same = [(ids_of(text),) * 2 for text in PROMPTS]

    def make(prompts: Any = same, engine: Any = engine) -> make_traces.Rows:
        return make_traces.rows(engine, prompts, 100, 0, each=25)

    folder: Path = tmp_path_factory.mktemp("planted")
    left, found = make_traces.planted(STORIES, folder, make), Planted()

    def trace(wanted: str) -> tuple[make_traces.Rows, dict[str, Any]]:
        while wanted not in found:
            _, cause, rows, asked = next(left)
            found[cause] = rows, asked
        return found[wanted]

    return trace


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named(cause: str, planted: Any, tmp_path: Path) -> None:
    rows, asked = planted(cause)
    words = [f"--{key}={value}" for key, value in asked.items() if key != "model"]
    done = audit(written(tmp_path, rows), *words, model=asked["model"])
    assert causes(done) == [cause], done.records[0]["reason"]


@pytest.mark.parametrize("cause", ["int8-weights", "cache-fp8"])
def test_a_planted_cause_is_named_by_a_large_model(
    cause: str, planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits on the row that is read first was dropped for another that is a little likelier there."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    rows, _ = planted(cause)
    done = audit(written(tmp_path, chosen(rows) if cause == "int8-weights" else rows))
    assert causes(done) == [cause], done.records[0]["reason"]


def _overflowing(engine: make_traces.Transformers) -> None:
    """Give an engine 8-bit products as processors without VNNI compute them: in int16, two at a time."""

    def codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 127 / rows.abs().amax(-1, keepdim=True)
        return (rows * scale).round(), scale

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (first, by), (second, scale) = codes(x[0]), codes(weight)
        products = ((first + 128).long()[:, None] * second.long()).view(len(first), len(second), -1, 2).sum(-1)
        sums = products.clamp(-32768, 32767).sum(-1) - 128 * second.long().sum(-1)
        return (sums / by / scale[:, 0])[None]

    for module in engine.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = partial(forward, weight=module.weight.detach().clone())
    own, scale = codes(engine.model.model.embed_tokens.weight.detach())
    engine.model.model.embed_tokens.weight = torch.nn.Parameter(own / scale)


def test_sums_of_codes_that_overflow_are_known(tmp_path: Path) -> None:
    """CTranslate2's int8 was unexplained, even where int8 was declared."""
    engine = make_traces.Transformers(STORIES)
    _overflowing(engine)
    rows = make_traces.rows(engine, [(ids_of(text),) * 2 for text in PROMPTS], 60, 0, each=20)
    path = written(tmp_path, rows)
    done = audit(path)
    assert causes(done) == ["int8"]
    assert "overflow 16 bits" in done.records[0]["reason"]
    declared = audit(f"{path}@quantize=int8").records[0]
    assert declared["verdict"] == "same"
    assert any("without VNNI" in note for note in declared["notes"])


@pytest.mark.parametrize("dear", [rereading.DEAR, 0])
def test_a_cause_beside_codes_that_are_declared_is_named(
    dear: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What codes of another engine may change hid a temperature of 0.9: the verdict was same."""
    monkeypatch.setattr(rereading, "DEAR", dear)  # on a row of a large model, every cause may be beaten
    engine = make_traces.Transformers(
        make_traces.with_weights(STORIES, tmp_path / "coded", partial(make_traces.linears, change=_blocks))
    )
    prompts = [(ids_of(text),) * 2 for text in PROMPTS]
    for number, expected in ((make_traces.plain, []), (make_traces.warm(0.9), ["temperature"])):
        rows = make_traces.rows(engine, prompts, 100, 0, each=25, number=number)
        assert causes(audit(f"{written(tmp_path, rows)}@quantize=int8")) == expected


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """8-bit codes in blocks of 32, which are not those of rows."""
    blocks = rows.view(len(rows), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scale) * scale).view_as(rows)
