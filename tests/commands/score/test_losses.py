"""The summed score is the model's own loss, whatever the architecture, the batch and the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from genctl.decode.runtime import ModelRuntime, Pass
from genctl.engines import score_passes as passes
from genctl.engines.protocol import Detail
from genctl.engines.score_passes import Passes, Piece
from genctl.errors import ModelError
from genctl.events import Token
from tests import runtimes
from tests.commands.score.oracle import loss, plain
from tests.tiny import ARCHITECTURES, CAUSAL, SEQ2SEQ, VOCABULARY, tiny

LENGTHS = (23, 7, 2, 14, 23)
CLOSE = 1e-5  # nats per token


def ids(length: int, seed: int) -> tuple[int, ...]:
    made = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(made.tolist())


def pieces(model: Any) -> list[Piece]:
    """Texts of several lengths; the longer ones begin with a context of three tokens that is not scored."""
    made = []
    for seed, length in enumerate(LENGTHS):
        if model.config.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id
            made.append(Piece((start, *ids(length, seed)), 1, ids(5 + 3 * seed, 100 + seed)))
        else:
            made.append(Piece(ids(length, seed), 3 if length > 10 else 1))
    return made


def mean(tokens: Sequence[Token]) -> float:
    return -math.fsum(token.logprob for token in tokens) / len(tokens)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_alone_or_padded_among_others_a_text_has_the_loss_of_the_model(arch: str) -> None:
    model = tiny(arch)
    reader = Passes(runtimes.forward(model), batch_size=8)
    wanted = pieces(model)
    expected = [loss(model, piece.ids, piece.first, piece.source) for piece in wanted]
    together = reader.read(wanted)
    assert [len(tokens) for tokens in together] == [len(piece.ids) - piece.first for piece in wanted]
    for piece, told, tokens in zip(wanted, expected, together, strict=True):
        assert mean(tokens) == pytest.approx(told, abs=CLOSE)
        assert mean(reader.read([piece])[0]) == pytest.approx(told, abs=CLOSE)
        assert [token.id for token in tokens] == list(piece.ids[piece.first :])


@pytest.mark.parametrize("arch", CAUSAL)
def test_candidates_have_the_loss_of_the_model_with_the_context_masked(arch: str) -> None:
    model = tiny(arch)
    forward = runtimes.forward(model)
    context = ids(19, 7)  # longer than the sliding windows
    endings = [ids(length, 50 + length) for length in (1, 12, 4, 1, 20)]
    found = Passes(forward, batch_size=3).continuations(context, endings)
    for ending, tokens in zip(endings, found, strict=True):
        assert [token.id for token in tokens] == list(ending)
        assert mean(tokens) == pytest.approx(loss(model, (*context, *ending), len(context)), abs=CLOSE)


@pytest.mark.parametrize("arch", SEQ2SEQ)
def test_candidates_of_one_source_have_the_loss_of_the_model(arch: str) -> None:
    model = tiny(arch)
    start = model.generation_config.decoder_start_token_id
    source, endings = ids(9, 3), [ids(length, length) for length in (3, 11, 1)]
    found = Passes(runtimes.forward(model), batch_size=2).continuations((start,), endings, source)
    for ending, tokens in zip(endings, found, strict=True):
        assert mean(tokens) == pytest.approx(loss(model, (start, *ending), 1, source), abs=CLOSE)


def fed(forward: ModelRuntime, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes that go through the model from now on."""
    shapes: list[tuple[int, ...]] = []
    original = type(forward).__call__

    def watched(self: Any, given: Pass) -> Any:
        shapes.append(tuple(given.feed.shape))
        return original(self, given)

    monkeypatch.setattr(type(forward), "__call__", watched)
    return shapes


def test_the_context_of_candidates_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runtimes.forward(tiny("llama"))
    shapes = fed(forward, monkeypatch)
    Passes(forward, batch_size=8).continuations(ids(30, 1), [ids(4, 2), ids(6, 3), ids(1, 4)])
    assert shapes == [(1, 30), (2, 5)]  # 3 candidates, one of which needs only the context's logits


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gemma2", "bloom", "mistral", "mamba"])
def test_a_row_too_large_for_one_pass_is_read_piece_by_piece(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(arch)
    forward = runtimes.forward(model)
    whole = Piece(ids(40, 2), 5)
    expected = loss(model, whole.ids, 5)
    monkeypatch.setattr(passes, "LARGEST", 10 * VOCABULARY)
    monkeypatch.setattr(passes, "AT_ONCE", 3 * VOCABULARY)
    shapes = fed(forward, monkeypatch)
    reader = Passes(forward, batch_size=4)
    (found,) = reader.read([whole])
    assert mean(found) == pytest.approx(expected, abs=CLOSE)
    assert [token.id for token in found] == list(whole.ids[5:])
    # a recurrent state cannot be continued by several tokens at once
    assert shapes == ([(1, 39)] if arch == "mamba" else [(1, 10), (1, 10), (1, 10), (1, 9)])


def test_batches_are_bounded_by_rows_and_by_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Passes(runtimes.forward(tiny("gpt2")), batch_size=3)
    wanted = [Piece(ids(length, length), 1) for length in (4, 30, 5, 31, 6, 7, 8)]
    assert list(reader.batches(wanted)) == [[3, 1, 6], [5, 4, 2], [0]]
    monkeypatch.setattr(passes, "LARGEST", 40 * VOCABULARY)
    assert list(reader.batches(wanted)) == [[3], [1], [6, 5, 4], [2, 0]]


def test_rank_entropy_and_alternatives_are_those_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "AT_ONCE", 4 * VOCABULARY)
    model = tiny("llama")
    piece = Piece(ids(12, 9), 1)
    (found,) = Passes(runtimes.forward(model), batch_size=1, detail=Detail(True, 3)).read([piece])
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([piece.ids])).logits[0, :-1].double().log_softmax(-1)
    for token, row in zip(found, logprobs, strict=True):
        order = row.argsort(descending=True).tolist()
        assert token.rank == order.index(token.id) + 1
        assert token.entropy == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-4)
        assert [id for id, _, _ in token.top] == order[:3]
        assert [value for _, _, value in token.top] == pytest.approx(row[order[:3]].tolist(), abs=1e-4)
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)


def test_without_detail_nothing_but_the_log_probability_is_told() -> None:
    model = tiny("gpt2")
    piece = Piece(ids(6, 1), 1)
    (found,) = Passes(runtimes.forward(model), batch_size=1).read([piece])
    assert [token.logprob for token in found] == pytest.approx(plain(model, piece.ids), abs=1e-4)
    assert {(token.rank, token.entropy, token.top) for token in found} == {(None, None, ())}


def test_a_token_that_cannot_be_written_has_probability_zero_and_no_nan_entropy() -> None:
    reader = Passes(runtimes.forward(tiny("gpt2")), batch_size=1, detail=Detail(True))
    logits = torch.tensor([[[0.0, -math.inf, 0.0, 0.0]]])
    (token,) = reader._measure(logits, [0], [0], [1])
    assert (token.logprob, token.rank) == (-math.inf, 4)
    assert token.entropy == pytest.approx(math.log(3))


@pytest.mark.parametrize(("target", "logits"), [(0, [math.nan, 0.0]), (5, [0.0, 0.0])])
def test_numbers_that_are_none_and_ids_beyond_the_head_are_said(target: int, logits: list[float]) -> None:
    reader = Passes(runtimes.forward(tiny("gpt2")), batch_size=1)
    with pytest.raises(ModelError, match=r"not finite|above 1"):
        reader._measure(torch.tensor([[logits]]), [0], [0], [target])
