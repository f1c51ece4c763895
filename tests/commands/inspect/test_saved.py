"""A saved prompt gives the same results as reading it again, and no other file is accepted as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl import events
from genctl.decode import prompts as saved_prompt
from genctl.decode.loop import decode
from genctl.decode.prefix_cache import KeptTexts
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Prefix, Strategy
from genctl.errors import InputError
from genctl.events import shared_length
from genctl.strategies.beam import Beam
from genctl.strategies.contrast import Contrastive
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.hostile import prompts
from tests.tiny import ARCHITECTURES, CAUSAL, tiny

IDENTITY = saved_prompt.PromptIdentity("sha256:" + "f" * 64, "the/model", "float32", "5.23.0")
PROMPT = tuple(range(5, 25))
SOURCE = tuple(range(5, 16))
RECURRENT = ("mamba", "jamba")
FORMS = ("dynamic", "static", "quantized", "offloaded")


def lane_of(forward: ModelRuntime, strategy: Strategy, form: str = "dynamic") -> Lane:
    if forward.is_encoder_decoder:
        return Lane("a", (2,), strategy, 8, source=SOURCE, cache=form, returned=2)
    return Lane("a", PROMPT, strategy, 8, cache=form, returned=2)


def written(forward: ModelRuntime, lane: Lane, prefix: Prefix | None = None) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of a lane's hypotheses, and how many tokens of its prompt were reused."""
    texts = None if prefix is None else KeptTexts(saved=prefix)
    told = list(decode(forward, [lane], texts=texts))
    last = told[-1]
    assert isinstance(last, events.Finished), last
    reused = next(event.reused for event in told if isinstance(event, events.Prefilled))
    return [one.tokens for one in last.hypotheses], reused


def whole(forward: ModelRuntime, ids: tuple[int, ...], *, hidden: bool = False) -> Prefix:
    source = forward.encode(SOURCE) if forward.is_encoder_decoder else None
    return forward.prefill((2,) if source is not None else ids, source, whole=True, hidden=hidden)


def through_disk(prefix: Prefix, forward: ModelRuntime, path: Path) -> Prefix:
    path.write_bytes(saved_prompt.packed(prefix, IDENTITY))
    return saved_prompt.load(path, IDENTITY, forward)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_prompt_gives_the_same_tokens(arch: str, form: str, tmp_path: Path) -> None:
    forward = runtimes.forward(tiny(arch))
    prefix = through_disk(whole(forward, PROMPT[:15]), forward, tmp_path / "prompt")
    for strategy in (Sample(), Beam(3)):
        lane = lane_of(forward, strategy, form)
        expected, none = written(forward, lane)
        assert none == 0
        found, reused = written(forward, lane, prefix)
        assert found == expected
        assert reused == (len(SOURCE) if forward.is_encoder_decoder else 15)


def test_searches_that_look_at_hidden_states_reuse_them_too(tmp_path: Path) -> None:
    forward = runtimes.forward(tiny("gpt2"))
    lane = lane_of(forward, Contrastive(top_k=3, penalty_alpha=0.6))
    expected, _ = written(forward, lane)
    prefix = through_disk(whole(forward, PROMPT[:12], hidden=True), forward, tmp_path / "prompt")
    assert written(forward, lane, prefix) == (expected, 12)
    blind = through_disk(whole(forward, PROMPT[:12]), forward, tmp_path / "blind")
    assert written(forward, lane, blind) == (expected, 0)


@pytest.mark.parametrize("form", ["dynamic", "static", "quantized", "offloaded"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_form_of_cache_writes_the_same_tokens_as_none(arch: str, form: str) -> None:
    forward = runtimes.forward(tiny(arch))
    for strategy in (Sample(), Beam(3)):
        lane = lane_of(forward, strategy, form)
        expected, _ = written(forward, replace(lane, cache="dynamic", use_cache=False))
        found, _ = written(forward, lane)
        if form == "quantized":  # lossy: close, and complete
            assert [len(one) for one in found] == [len(one) for one in expected]
            assert found[0][0] == expected[0][0]  # the prompt itself is read with exact numbers
        else:
            assert found == expected


IDS = st.lists(st.integers(5, 8), min_size=1, max_size=14).map(tuple)


@settings(max_examples=60, deadline=None)
@given(first=IDS, second=IDS)
@pytest.mark.parametrize("arch", ["gpt2", "gemma2"])
def test_the_longest_common_beginning_is_reused_and_no_more(
    arch: str, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    forward = runtimes.forward(tiny(arch))
    prefix, reused = forward.resume(whole(forward, first), second, None)
    common = next((n for n in range(min(len(first), len(second)), 0, -1) if first[:n] == second[:n]), 0)
    assert shared_length(first, second) == common
    assert reused == min(common, len(second) - 1)
    assert (prefix is None) == (reused == 0)
    if prefix is not None:
        alone = forward.prefill(second, None)
        torch.testing.assert_close(prefix.logits, alone.logits, atol=1e-4, rtol=1e-4)
        assert prefix.cache.length == len(second)
        for mine, theirs in zip(prefix.cache.layers, alone.cache.layers, strict=True):
            assert type(mine) is type(theirs)  # windows are windows again
            torch.testing.assert_close(mine.content()[0], theirs.content()[0], atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(first=IDS, second=IDS)
@pytest.mark.parametrize("arch", RECURRENT)
def test_a_recurrent_state_is_reused_whole_or_not_at_all(
    arch: str, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    forward = runtimes.forward(tiny(arch))
    prefix, reused = forward.resume(whole(forward, first), second, None)
    goes_on = len(second) > len(first) and second[: len(first)] == first
    assert reused == (len(first) if goes_on else 0)
    if prefix is not None:
        torch.testing.assert_close(prefix.logits, forward.prefill(second, None).logits, atol=1e-4, rtol=1e-4)


def test_using_a_saved_prompt_does_not_change_it() -> None:
    forward = runtimes.forward(tiny("gpt2"))
    prefix = whole(forward, PROMPT[:15])
    before = [tensor.clone() for layer in prefix.cache.layers for tensor in layer.content()]
    for form in FORMS:
        written(forward, lane_of(forward, Beam(3), form), prefix)
    after = [tensor for layer in prefix.cache.layers for tensor in layer.content()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content() -> bytes:
    return saved_prompt.packed(whole(runtimes.forward(tiny("gpt2")), PROMPT[:3]), IDENTITY)


def refused(data: bytes, path: Path, identity: saved_prompt.PromptIdentity = IDENTITY) -> str:
    path.write_bytes(data)
    with pytest.raises(InputError) as refusal:
        saved_prompt.load(path, identity, runtimes.forward(tiny("gpt2")))
    assert "\n" not in refusal.value.message
    return refusal.value.message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"checkpoint": "sha256:" + "0" * 64, "model": "another/model"}, "it was made with the/model ("),
        ({"checkpoint": "sha256:" + "0" * 64}, "the checkpoint the/model has changed ("),
        ({"dtype": "bfloat16"}, "dtype float32 → bfloat16"),
        ({"transformers": "6.0.0"}, "transformers 5.23.0 → 6.0.0"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, str], words: str, content: bytes, tmp_path: Path) -> None:
    assert words in refused(content, tmp_path / "file", saved_prompt.PromptIdentity(**{**vars(IDENTITY), **changed}))


def test_a_file_whose_checkpoint_was_only_sampled_is_refused(tmp_path: Path) -> None:
    """The first version's fingerprints may be equal although the weights are not."""
    sampled = saved_prompt.PromptIdentity(**{**vars(IDENTITY), "checkpoint": "f" * 64})
    old = saved_prompt.packed(whole(runtimes.forward(tiny("gpt2")), PROMPT[:3]), sampled)
    message = refused(old, tmp_path / "file")
    assert "made by a version of genctl that did not look at all bytes of a checkpoint" in message


def test_a_name_is_only_told_and_a_checkpoint_may_move(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    moved = saved_prompt.PromptIdentity(**{**vars(IDENTITY), "model": "elsewhere"})
    loaded = saved_prompt.load(tmp_path / "file", moved, runtimes.forward(tiny("gpt2")))
    assert tuple(loaded.tokens[0].tolist()) == PROMPT[:3]


def test_every_truncated_file_is_refused(content: bytes, tmp_path: Path) -> None:
    for length in [0, 1, 7, 8, 9, 100, *range(200, len(content), 97), len(content) - 1]:
        assert "damaged" in refused(content[:length], tmp_path / "file")


def test_one_flipped_bit_anywhere_is_refused(content: bytes, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, header, 3), *range(header, len(content), 41)]
    for number, place in enumerate(places):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (number % 8)
        refused(bytes(damaged), tmp_path / "file")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_damage_is_one_sentence(content: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.binary(min_size=1, max_size=12))
    damaged = content[:place] + new + content[place + len(new) :]
    if damaged != content:
        refused(damaged, tmp_path_factory.getbasetemp() / "damaged")


def test_other_files_are_no_prompt_caches(tmp_path: Path) -> None:
    from safetensors.torch import save

    assert "not a prompt cache" in refused(save({"a": torch.zeros(1)}), tmp_path / "file")
    assert "not a prompt cache" in refused(b"Once upon a time\n", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "self.1.keys",
            lambda tensor: tensor[..., :-1],
            "self.1.keys is float32 [1, 4, 3, 7], not float32 [1, 4",
        ),
        ("self.0.values", lambda tensor: tensor[:, :, :-1], "self.0.values is float32 [1, 4, 2, 8]"),
        ("self.0.values", lambda tensor: tensor.double(), "self.0.values is float64 [1, 4, 3, 8], not float32"),
        ("self.0.keys", lambda tensor: None, "it lacks self.0.keys"),
        ("self.9.keys", lambda tensor: torch.zeros(1), "the model has no place for 'self.9.keys'"),
        ("tokens", lambda tensor: tensor[:0], "is damaged: "),
        ("tokens", lambda tensor: tensor[0], "tokens is int64 [], not int64 [1]"),
        ("tokens", lambda tensor: tensor.float(), "tokens is float32 [3], not int64 [3]"),
        ("hidden", lambda tensor: torch.zeros(1, 3, 5), "hidden is float32 [1, 3, 5], not float32 [1, 3, 32]"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused_though_the_digest_is_right(
    name: str, change: Any, words: str, content: bytes, tmp_path: Path
) -> None:
    """Anybody can compute the digest. Regression: without a layer's keys, the run wrote other tokens."""
    path = tmp_path / "file"
    path.write_bytes(content)
    metadata, tensors = prompts.content(path)
    changed = change(tensors.pop(name, None))
    prompts.signed(path, metadata, tensors if changed is None else {**tensors, name: changed})
    assert words in refused(path.read_bytes(), path)


@pytest.mark.parametrize("arch", CAUSAL)
def test_what_is_on_disk_is_what_was_in_memory(arch: str, tmp_path: Path) -> None:
    forward = runtimes.forward(tiny(arch))
    prefix = whole(forward, PROMPT, hidden=True)
    loaded = through_disk(prefix, forward, tmp_path / "file")
    assert loaded.tokens.tolist() == prefix.tokens.tolist()
    assert prefix.hidden is not None
    assert loaded.hidden is not None
    assert torch.equal(loaded.hidden, prefix.hidden)
    mine, theirs = (one.cache.state_dict() for one in (loaded, prefix))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
