"""Every text architecture of the installed transformers: what `generate` writes, or a sentence that says why not.

`scripts/test -m zoo --dist load` runs them all, on every core. `python -m tests.zoo NAME` shows one, case by case.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from genctl.models.packed_layers import pack
from genctl.transformers.runtime import TransformersRuntime
from tests.cli.tool import genctl
from tests.zoo import recipes
from tests.zoo.__main__ import table
from tests.zoo.compare import CASES, PROMPTS, compare, quiet

# Kinds of cache and of positions that tests/tiny.py does not have: in every run, with the first three cases.
SAMPLE: dict[str, str] = {
    "causal/bart": "learned positions, counted by the cache",
    "causal/deepseek_v3": "latent attention, experts",
    "causal/gemma3n_text": "a window, and layers that share keys and values",
    "causal/llama4_text": "chunked attention, layers without positions",
    "causal/lfm2": "convolutions beside attention",
    "causal/openai-gpt": "no cache at all",
    "causal/phi3+longrope": "frequencies that change with the length",
    "causal/xlnet": "states that a pass returns",
    "causal/qwen3_next": "gated delta nets",
    "causal/recurrent_gemma": "states that live in the module",
}
HERE = [name for name in recipes.NAMES if recipes.split(name)[1] in recipes.TABLES[recipes.split(name)[0]]]
BRIEF = ("greedy", "beams", "sampling")
# name -> a pattern that the sentence matches
REFUSED: dict[str, str] = {
    "causal/emu3": r"^Emu3ForConditionalGeneration is none of the classes with which transformers continues a text"
}


def check(name: str, folder: Path, cases: Sequence[str] = tuple(CASES)) -> None:
    report = compare(name, folder, cases)
    found = table(report)
    if name in REFUSED:
        assert report.word == "refused", found
        for verdict in report.cases.values():
            assert verdict.word == "equal" or re.search(REFUSED[name], verdict.note), found
    else:
        assert report.word == "equal", found


@pytest.mark.parametrize("name", SAMPLE)
def test_one_of_each_kind_writes_what_generate_writes(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, BRIEF)


@pytest.mark.night
@pytest.mark.parametrize("name", HERE)
def test_every_text_architecture_writes_what_generate_writes(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.night
@pytest.mark.parametrize("name", HERE)
def test_what_is_trusted_is_also_found_by_trying(name: str) -> None:
    with quiet():
        model = recipes.build(name).eval()
        trusted, forward = TransformersRuntime(model).trusted, TransformersRuntime(model, trust=False)
    if trusted:
        able = forward.abilities
        able.supports_cache, able.together, able.pads, able.pads_behind  # noqa: B018
        assert not forward.is_encoder_decoder or able.pads_sources
        assert forward.findings == []
        assert not able.supports_cache or able.recurrent or able.reads_several(cached=True)
        assert able.reads_several(cached=False)


@pytest.mark.night
@pytest.mark.parametrize("name", HERE)
def test_every_text_architecture_computes_the_same_packed(name: str) -> None:
    """Code that reads a weight past its layer finds it, because such a layer is not packed."""
    with quiet(), torch.no_grad():
        model = copy.deepcopy(recipes.build(name)).requires_grad_(False)
        ids = torch.tensor([PROMPTS[0]] * 2)
        given = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
        wanted = model(**given, return_dict=True).logits
        assert pack(model, smallest=0).packed
        torch.testing.assert_close(model(**given, return_dict=True).logits, wanted, rtol=0.0, atol=1e-3)


def test_verbose_says_what_was_found_out_about_an_architecture(tmp_path: Path) -> None:
    recipes.make("causal/bart", tmp_path)
    arguments = ("run", "-m", str(tmp_path), "-n", "3", "the cat sat", "once upon a time there was a girl")
    assert "note: padding changes the output of BartForCausalLM" in genctl(*arguments, "-v").err
    assert "padding" not in genctl(*arguments).err
