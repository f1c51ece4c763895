"""What each drafter proposes, and how it follows the row."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.read_along import ReadAlong
from genctl.decode.runtime import Abilities, ModelRuntime, Output, Pass
from genctl.decode.stopping import Stop
from genctl.decode.types import Context, Prefix
from genctl.errors import ModelError
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import LookupDraftWriter, PromptLookup, early_exit
from genctl.strategies.sample import Sample
from genctl.strategies.universal import UniversalDrafter
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.tiny import tiny, tokenizer


@pytest.mark.parametrize(
    ("text", "longest", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 2, 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),  # beyond the end of the text, the draft itself
        ([5, 2, 7, 1, 2, 8, 1, 2], 2, 1, [8]),  # a longer n-gram wins over an earlier place
        ([1, 2, 8, 5, 2, 7, 1, 2], 1, 1, [7]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 1, [4]),  # the latest of several places
        ([5, 6, 1, 2, 3, 6, 1, 2, 4, 5, 6, 1, 2], 9, 1, [3]),  # unless another shares more of the end: 1, 2, 4, …
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 3, 1, [3]),  # and only as many as requested
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 2, 1, [4]),
        ([1, 2, 3, 4], 2, 3, []),
        ([6, 6, 6], 2, 5, [6] * 5),
        ([1, 2, 9, 4, 1, 2], 2, 3, []),  # 9 is EOS: neither it nor what follows is drafted
        ([1, 2, 3, 9, 1, 2], 2, 3, [3]),
        ([3], 2, 3, []),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_newest_ngram(
    text: list[int], longest: int, count: int, expected: list[int]
) -> None:
    assert LookupDraftWriter(longest, [], (9,))(text, count).tokens == expected
    # the same if the text arrives in pieces
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


# -- another tokenizer -------------------------------------------------------------------------------------------------


@cache
def letters() -> Any:
    """A tokenizer of single bytes, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{letter: i + 3 for i, letter in enumerate(alphabet)}}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


class Reciting(TransformersRuntime):
    """Recites one text, letter by letter, then EOS; `fed` lists the texts that it read."""

    def __init__(self, text: str, eos: int = 2) -> None:
        self.ids = [*letters()(text)["input_ids"], eos]
        self.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
        self.device = torch.device("cpu")
        self.is_encoder_decoder = False
        self.abilities = Abilities(supports_cache=False)
        self.fed: list[str] = []

    def __call__(self, given: Pass) -> Output:
        self.fed.append(letters().decode(given.feed[0]))
        logits = torch.full((1, 1, 300), -50.0)
        logits[0, 0, self.ids[min(given.feed.shape[1], len(self.ids) - 1)]] = 50.0
        return Output(logits, None)


TEXT = "the cat sat on the mat and the dog sat on the log. once upon a time"


def universal(forward: ModelRuntime) -> UniversalDrafter:
    return UniversalDrafter(forward, letters(), tokenizer())


def begun(drafter: UniversalDrafter, eos: tuple[int, ...] = ()) -> Any:
    prefix = Prefix(torch.zeros(1, 1, dtype=torch.long), None, torch.zeros(1, 300))
    context = Context(prefix, torch.Generator(), eos, 100, SimpleNamespace(is_encoder_decoder=False))
    return drafter.begin(context, None, 0.0)


def test_drafts_of_another_tokenizer_arrive_as_the_models_own_tokens() -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    forward = Reciting(TEXT)
    propose = begun(universal(forward))
    length, accepted = 3, 0
    while length < len(ids) - 4:
        drafted = propose(ids[:length], 12).tokens  # 12 letters are a few tokens
        right = next((i for i, token in enumerate(drafted) if token != ids[length + i]), len(drafted))
        assert right >= len(drafted) - 1  # the draft may end in the middle of a token
        assert drafted
        accepted += right
        length += right + 1
    assert accepted > len(ids) / 2
    assert TEXT.startswith(max(forward.fed, key=len))  # it read the row unchanged, every time


def test_the_assistants_end_becomes_the_models_end() -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    propose = begun(universal(Reciting(TEXT)), eos=(2,))
    assert propose(ids[:-2], 40).tokens == [*ids[-2:], 2]


def test_a_row_that_went_another_way_is_followed() -> None:
    said = tokenizer()("the cat sat on ")["input_ids"]
    other = [*said, *tokenizer()("a log and a dog")["input_ids"]]
    forward = Reciting(TEXT)
    propose = begun(universal(forward))
    propose(said, 12)
    forward.fed.clear()
    propose(other, 12)
    assert forward.fed[0] == "the cat sat on a log and a dog"


@pytest.mark.parametrize("assistant", ["llama", "mistral"])
def test_greedy_text_stays_as_it_is_with_another_tokenizer(assistant: str) -> None:
    case = Case("llama")
    other = runtimes.forward(tiny(assistant, seed=4))
    plain = case.ours([case.lane(PROMPTS[1], eos=(), max_new_tokens=30)])
    strategy = Assisted(universal(other), num_assistant_tokens=6, assistant_confidence_threshold=0.0)
    assert case.ours([case.lane(PROMPTS[1], strategy, eos=(), max_new_tokens=30)]) == plain


def test_another_tokenizer_and_an_encoder_decoder_are_refused() -> None:
    case = Case("t5")
    strategy = Assisted(universal(runtimes.forward(tiny("llama"))))
    failed = [e for e in decode(case.forward, [case.lane(PROMPTS[0], strategy)]) if isinstance(e, events.Failed)]
    assert "two decoder-only models" in failed[0].message


def test_a_draft_beyond_the_end_of_a_row_may_leave_no_token() -> None:
    """Processors may leave no token beyond the row's end. If the row continues, it fails, as it does without drafts."""
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
