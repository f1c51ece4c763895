"""Parts of an audit: passes over a trace, and parameters that are fitted to its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.parity import ggml, numbers, rereading, ways
from genctl.parity.audit import Auditor
from genctl.parity.causes import FORMS, Form
from genctl.parity.oracle import Oracle
from genctl.parity.prompts import AuditPrompts, AuditRow
from genctl.parity.values import Text
from genctl.parity.ways import Way
from scripts import make_traces
from tests.commands.audit.traces import BOS, MARKS, STORIES, auditor, reference, rollouts
from tests.parity.sides import side

pytestmark = MARKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [forms[0] for forms in FORMS.values() if forms[0].keys], ids=lambda form: form.keys)
def test_a_narrow_cache_changes_what_a_large_model_reads(
    form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the compiled attention reads a cache in its own dtype, so a narrow one had no effect in float32."""
    monkeypatch.setattr(rereading, "DEAR", 0)
    one = auditor(rollouts()[:1], dtype)
    with torch.inference_mode():
        moved = one._logits(Way(form=form), [0]) - one._logits(Way(dtype=dtype), [0])
    assert float(moved.abs().mean()) > 1e-4


def test_texts_are_read_side_by_side_as_far_as_their_logits_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a pass has logits from the shortest prompt's end on, so a long prompt among short ones took 1 GB."""
    one, widths = reference(), list[int]()
    together = one.together

    def counted(texts: Sequence[Text]) -> list[Tensor]:
        longest = max(len(text.prompt_ids) + len(text.token_ids) for text in texts)
        widths.append(len(texts) * (longest - min(len(text.prompt_ids) for text in texts)))
        return together(texts)

    monkeypatch.setattr(one, "together", counted)
    monkeypatch.setattr(rereading, "PADDED", 12 * one.vocabulary)
    texts = [Text(str(place), (BOS,) + (5,) * (60 if place % 2 else 3), (7, 9)) for place in range(6)]
    texts.insert(2, Text("none", (BOS,), ()))
    with torch.inference_mode():
        logits = rereading._read(one, texts)
        alone = torch.cat([rereading._read(one, [text]) for text in texts if text.token_ids])
        assert rereading._read(one, texts[2:3]).shape == (0, one.vocabulary)
    assert max(widths) == 6
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("planted", [
    numbers.Number(temperature=0.7), numbers.Number(temperature=0.8, filters=(("top-p", 0.9),)),
    numbers.Number(repetition=1.2),
])  # fmt: skip
def test_parameters_are_fitted_where_a_vocabulary_is_large(planted: numbers.Number) -> None:
    """Regression: a temperature took two minutes with 150,000 tokens, because each trial value read them all."""
    random = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(24, 20_000, generator=random, dtype=torch.float64)
    best = logits.topk(20).indices
    positions = torch.arange(len(logits)).repeat_interleave(20)
    before = tuple(((5, 9), tuple(best[:place, 1].tolist())) for place in range(len(logits)))
    chosen, follows = torch.arange(len(positions)) % 20 == 1, torch.ones(len(logits), dtype=torch.bool)
    places = numbers.Entries(
        best[:, 1], follows, positions, best.flatten(), chosen, torch.zeros(len(positions), dtype=torch.float64), before
    )
    places = replace(places, value=-numbers.remains(planted, logits, places))
    left = {one: float(places.sizes(numbers.remains(one, logits, places)).median())
            for one in numbers.numbers(logits, places)}  # fmt: skip
    found = min(left, key=lambda one: left[one])
    assert (found.temperature, found.filters, found.repetition) == (
        planted.temperature,
        planted.filters,
        planted.repetition,
    )
    assert left[found] < 1e-9


def test_a_parameter_that_changes_nothing_is_no_cause() -> None:
    """Regression: a temperature or a repetition penalty of 1 explained one wrong number among many."""
    for number in (numbers.Number(temperature=1.00001), numbers.Number(repetition=0.99999)):
        assert not number.changes_something
    for number in (numbers.Number(temperature=0.9995), numbers.Number(repetition=1.1), numbers.Number(shift=1)):
        assert number.changes_something


@pytest.mark.parametrize(
    ("ratio", "tail", "fits"), [(2.0, 5.0, True), (2.1, 5.0, False), (2.0, 5.1, False), (4.0, 10.0, False)]
)
def test_a_cause_fits_where_no_more_is_left_than_rounding_allows(ratio: float, tail: float, fits: bool) -> None:
    """Regression: a cause that leaves twice as much was accepted."""
    audit: Any = SimpleNamespace(noise=lambda dtype: SimpleNamespace(typical_allowed=2.0, allowed=5.0), _dtype=None)
    one: Any = SimpleNamespace(ratio=ratio, tail=tail, plausible=True, causes=("temperature",))
    assert Auditor._fits(audit, one) is fits


def test_what_the_weights_are_already_is_no_cause() -> None:
    """Regression: "float16 weights" was named for a float16 checkpoint, because a wider tolerance explains anything."""
    found = ways.arithmetic(auditor(rollouts()[:1])._oracle, torch.float32, None, tokens=ways.SEARCH)
    words = {way.cause.key: way.cause.sentence for way in found if way.cause is not None}
    assert "float16" not in words
    assert "bfloat16" in words
    assert words["q5_1"] == "GGUF Q5_1 (or Q5_K_S, the same here)"
    assert words["q8_0"] == "GGUF Q8_0 (or Q6_K, the same here)"
    assert not {"q5_k_s", "q6_k"} & words.keys()


def test_prompts_change_where_their_names_say() -> None:
    one = auditor(rollouts()[:1])
    ids = one._rows[0].text.prompt_ids
    end = reference().session.loaded.tokenizer.eos_token_id
    found = {key: prompts[0] for key, _, prompts in one._prompts.changes(one._rows)}
    assert found["bos-missing"] == ids[1:]
    assert found["bos-doubled"] == (BOS, *ids)
    assert found["eos-appended"] == (*ids, end)
    assert "bos-added" not in found
    without = [replace(row, text=replace(row.text, prompt_ids=ids[1:])) for row in one._rows]
    found = {key: prompts[0] for key, _, prompts in one._prompts.changes(without)}
    assert found["bos-added"] == ids
    assert not {"bos-missing", "bos-doubled"} & found.keys()


@pytest.mark.parametrize(("temperature", "verdict", "causes"), [(1.0, "same", []), (0.7, "explained", ["temperature"])])
def test_a_file_in_blocks_is_its_own_reference(
    temperature: float, verdict: str, causes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 9 of 12 files were accused. Rounding alone moves rows to other codes and changes all that follows."""
    random = torch.Generator().manual_seed(1)
    plain, size, beside = ggml.TYPES["q8_0"]

    def moved(blocks: Tensor) -> Tensor:
        return plain(blocks + 2e-4 * blocks.abs().amax(-1, True) * torch.randn(blocks.shape, generator=random))

    make_traces.gguf(STORIES, tmp_path / "stories.gguf", "Q4_0")
    one = side(tmp_path / "stories.gguf", whole=True, dtype="float32", dequantize=True)
    prompts = AuditPrompts(one.session.loaded, one.resolved, bos=BOS)
    rows = auditor(rollouts())._rows
    oracle = Oracle(one, "native")
    with torch.inference_mode():
        with monkeypatch.context() as context:
            context.setitem(ggml.TYPES, "q8_0", (moved, size, beside))
            texts = [row.text for row in rows]
            logits = oracle.exactly(torch.float32, lambda: rereading._read(oracle.side, texts), Form(weights="file"))
        spread = iter((logits / temperature).log_softmax(-1))
        audit = Auditor(one, [_with_numbers(row, spread) for row in rows], prompts, dtype=torch.float32)
        found = audit.run("stories")
    assert (found.verdict, [cause.key for cause in found.causes]) == (verdict, causes), found.reason


def _with_numbers(row: AuditRow, spread: Iterator[Tensor]) -> AuditRow:
    """A row with the numbers of an engine, and lists of ten."""
    own = [next(spread) for _ in row.text.token_ids]
    numbers = tuple(float(each[id]) for each, id in zip(own, row.text.token_ids, strict=True))
    best = [each.topk(10) for each in own]
    tops = (dict(zip(one.indices.tolist(), one.values.tolist(), strict=True)) for one in best)
    others = tuple({id: value for id, value in top.items() if id != chosen}
                   for top, chosen in zip(tops, row.text.token_ids, strict=True))  # fmt: skip
    return replace(row, numbers=numbers, tops=others)
