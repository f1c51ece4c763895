"""What each drafter proposes, and how it keeps up with the row."""

from __future__ import annotations

import pytest
import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import Pass
from genctl.decode.stopping import Stop
from genctl.errors import ModelError
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import LookupDraftWriter, PromptLookup, early_exit
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.tiny import tiny


@pytest.mark.parametrize(
    ("text", "longest", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 2, 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),  # beyond the end what was drafted
        ([5, 2, 7, 1, 2, 8, 1, 2], 2, 1, [8]),  # a longer n-gram wins over an earlier place
        ([1, 2, 8, 5, 2, 7, 1, 2], 1, 1, [7]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 1, [4]),  # of several places the latest
        ([5, 6, 1, 2, 3, 6, 1, 2, 4, 5, 6, 1, 2], 9, 1, [3]),  # unless more of the last tokens agree: 1, 2, 4, …
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 3, 1, [3]),  # and as many as are asked for
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 2, 1, [4]),
        ([1, 2, 3, 4], 2, 3, []),
        ([6, 6, 6], 2, 5, [6] * 5),
        ([1, 2, 9, 4, 1, 2], 2, 3, []),  # 9 is EOS: not drafted, nor what follows it
        ([1, 2, 3, 9, 1, 2], 2, 3, [3]),
        ([3], 2, 3, []),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_newest_ngram(
    text: list[int], longest: int, count: int, expected: list[int]
) -> None:
    assert LookupDraftWriter(longest, [], (9,))(text, count).tokens == expected
    # the same when the text came in pieces
    gradually = LookupDraftWriter(longest, [], (9,))
    for length in range(1, len(text) + 1):
        drafted = gradually(text[:length], count).tokens
    assert drafted == expected


def test_prompt_lookup_looks_through_the_source_first() -> None:
    assert LookupDraftWriter(2, [4, 5, 6, 7], ())([0, 4, 5], 2).tokens == [6, 7]


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3", "t5"])
def test_a_follower_that_goes_back_says_what_it_would_have_said(arch: str) -> None:
    forward = runtimes.forward(tiny(arch))
    source = forward.encode(PROMPTS[0]) if forward.is_encoder_decoder else None
    follower = ReadAlong(forward, cuts=True, source=source)
    text = list(PROMPTS[1]) * 2
    follower([text])
    # 4 lies before what a window keeps after the crop at 15
    for length, more in ((20, [7, 8]), (15, [9]), (16, [10, 11, 12]), (4, [13]), (0, [5, 6])):
        follower.cut(length)
        text = text[:length] + more
        expected = ReadAlong(forward, source=source, use_cache=False)([text])
        torch.testing.assert_close(follower([text]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_neox", "opt", "bloom", "phi"])
def test_early_exit_reads_the_head_after_the_first_layers(arch: str) -> None:
    model = tiny(arch, **({"n_layer": 3} if arch in ("gpt2", "bloom") else {"num_hidden_layers": 3}))
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        before = model(ids, output_hidden_states=True)
        decoder = model.get_decoder()
        norm = next(
            getattr(decoder, name)
            for name in ("norm", "ln_f", "final_layer_norm", "final_layernorm")
            if getattr(decoder, name, None) is not None
        )
        expected = model.get_output_embeddings()(norm(before.hidden_states[2]))
        made = early_exit(runtimes.forward(model), 2).forward(Pass(ids, None)).logits
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids).logits, before.logits)  # the model itself is as it was


def test_an_exit_before_or_behind_the_layers_is_refused() -> None:
    forward = runtimes.forward(tiny("llama"))
    for layer in (0, 2, 5):
        with pytest.raises(ModelError, match="it can leave after 1 to 1"):
            early_exit(forward, layer)
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        early_exit(runtimes.forward(tiny("bart")), 1)


def test_a_draft_beyond_the_end_of_a_row_may_leave_no_token() -> None:
    """What the processors would say there is of no account. Where the row goes on it fails, as without drafts."""
    one = Case("llama")

    def sevens(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -torch.inf)
        if history.shape[1] < 10:
            scores[:, 7] = 0.0
        return scores

    for stop in (lambda written: Stop("stop") if written.count == 3 else None, lambda written: None):
        found = []
        for way in (Sample(), Assisted(PromptLookup(2), num_assistant_tokens=8)):
            lane = one.lane([7] * 5, way, processors=(sevens,), criteria=(stop,), max_new_tokens=20)
            told = list(decode(one.forward, [lane]))
            found.append([event for event in told if isinstance(event, (events.Finished, events.Failed))])
        (plain,), (drafted,) = found
        assert type(plain) is type(drafted)
        assert getattr(plain, "hypotheses", plain) == getattr(drafted, "hypotheses", drafted)
