"""Log-probabilities: of the chosen tokens alone they are, bit for bit, those of the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from genctl import events
from genctl.decode.score import ROWS, ModelScores
from genctl.kernels.ops import log_softmax
from tests.decode.driver import PROMPTS, Case


@pytest.mark.parametrize("rows", [1, 2, ROWS, ROWS + 1, 5 * ROWS + 3])
@pytest.mark.parametrize("vocabulary", [7, 1000, 50257])
def test_of_one_token_for_each_row(rows: int, vocabulary: int) -> None:
    logits = 5 * torch.randn(rows, 1, vocabulary, generator=torch.Generator().manual_seed(rows))
    tokens = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(1))
    whole = log_softmax(logits)[:, 0].gather(1, tokens)
    scores = ModelScores(logits)
    assert torch.equal(scores.logprobs_of(torch.arange(rows), tokens), whole)
    assert "logprobs" not in vars(scores), "the whole vocabulary was kept"
    assert torch.equal(ModelScores(logits).map(lambda tensor: tensor[-1:]).logprobs, log_softmax(logits)[-1:])


@pytest.mark.parametrize("places", [1, 3])
def test_of_candidates_in_any_order(places: int) -> None:
    random = torch.Generator().manual_seed(places)
    logits = torch.randn(20, places, 50, generator=random)
    rows = torch.tensor([19, 0, 0, 7, *range(16)])
    for written in range(places + 1):
        tokens = torch.randint(50, (20, written), generator=random)
        found = ModelScores(logits).logprobs_of(rows, tokens)
        whole = log_softmax(logits)
        torch.testing.assert_close(whole, logits.log_softmax(-1))
        wanted = [
            [whole[row, place, token] for place, token in enumerate(own)] for row, own in zip(rows, tokens, strict=True)
        ]
        assert torch.equal(found, torch.tensor(wanted).reshape(20, written))


def test_greedy_search_computes_no_distribution_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama")
    lanes = [case.lane(PROMPTS[0][:3], name=str(number), max_new_tokens=4, eos=()) for number in range(ROWS + 2)]
    wanted = case.stream([replace(lane, scores=True) for lane in lanes], len(lanes))

    def refuse(self: ModelScores) -> torch.Tensor:
        raise AssertionError("log-probabilities of the whole vocabulary")

    monkeypatch.setattr(ModelScores, "logprobs", property(refuse))
    found = case.stream(lanes, len(lanes))
    written = [
        [[(token.id, token.logprob) for token in row.written] for row in event.children]
        for stream in (found, wanted)
        for event in stream
        if isinstance(event, events.Stepped)
    ]
    assert written[: len(written) // 2] == written[len(written) // 2 :]
    assert len(written) == 2 * 4 * len(lanes)
    with pytest.raises(AssertionError, match="whole vocabulary"):
        case.stream([replace(lanes[0], scores=True)])
