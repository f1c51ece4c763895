"""Chi-square tests: assisted sampling draws from the model's own distribution, however bad the drafts are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import Drafter, ModelDrafter, PromptLookup
from tests.strategies.assisted.table import Table

VOCABULARY, LENGTH, DRAWS = 3, 4, 600
PROMPT = (0, 1, 2, 0, 1)

TARGET = Table(torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)))
OTHER = Table(2 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)))


def less_of_the_same(history: Tensor, scores: Tensor) -> Tensor:
    """A processor that reads the row: the more often a token occurs in it, the less likely the token is."""
    counts = torch.nn.functional.one_hot(history, VOCABULARY).sum(1)
    return scores / 0.7 - 0.4 * counts


def draw(drafter: Drafter, confidence: float) -> Counter[tuple[int, ...]]:
    strategy = Assisted(drafter, True, 2, False, confidence)
    fixed = {"processors": (less_of_the_same,), "use_cache": False}
    lanes = (Lane(str(i), PROMPT, strategy, LENGTH, seed=i, **fixed) for i in range(DRAWS))
    found = list(decode(TARGET, lanes))
    assert not [event for event in found if isinstance(event, events.Failed)]
    return Counter(event.hypotheses[0].tokens for event in found if isinstance(event, events.Finished))


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of Pearson's test; rare sequences (fewer than 5 expected) are counted as one."""
    pairs = [(counts[made], DRAWS * part) for made, part in expected.items()]
    often = [pair for pair in pairs if pair[1] >= 5]
    rare = [pair for pair in pairs if pair[1] < 5]
    if rare:
        often.append((sum(count for count, _ in rare), sum(part for _, part in rare)))
    statistic = sum((count - part) ** 2 / part for count, part in often)
    return float(torch.special.gammaincc(torch.tensor((len(often) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize(
    ("drafter", "confidence"),
    [(ModelDrafter(OTHER), 0.0), (ModelDrafter(OTHER), 0.5), (PromptLookup(2), 0.0)],
    ids=["model", "model-stops-when-unsure", "prompt-lookup"],
)
def test_draws_follow_the_models_processed_distribution(drafter: Drafter, confidence: float) -> None:
    counts = draw(drafter, confidence)
    assert p_value(counts, TARGET.distribution(PROMPT, LENGTH, less_of_the_same)) > 0.01
    # the test would detect the assistant's distribution, and missing processors
    assert p_value(counts, OTHER.distribution(PROMPT, LENGTH, less_of_the_same)) < 1e-6
    assert p_value(counts, TARGET.distribution(PROMPT, LENGTH)) < 1e-6


def test_an_assistant_that_is_the_model_is_always_right() -> None:
    strategy = Assisted(ModelDrafter(TARGET), True, 4, False, 0.0)
    lane = Lane("0", PROMPT, strategy, 31, seed=3, use_cache=False)
    steps = [event for event in decode(TARGET, [lane]) if isinstance(event, events.Stepped)]
    drafted = sum(step.drafted for step in steps)
    assert (drafted, sum(step.accepted for step in steps)) == (24, 24)
