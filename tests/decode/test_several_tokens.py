"""Drafts are checked in one pass of several tokens. The text is greedy text, or the run is refused with the reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import genctl
from genctl.errors import GenctlError
from genctl.transformers.runtime import TransformersRuntime
from tests.cli.tool import genctl as tool
from tests.zoo import recipes
from tests.zoo.compare import PROMPTS, quiet

NEW = 14
SHORT, MIDDLE = list(PROMPTS[0]), list(PROMPTS[2])
REPEATING = [SHORT * 2 + SHORT[:2], (MIDDLE * 2)[:13], SHORT[:4] + SHORT[:3]]
OTHER_NUMBERS = "decoding checks several tokens in one pass; .* computes other numbers"
# An indexer chooses among equal scores by the shape of its input; a cache drops what the mask still shows; the rest
# compute other numbers for several tokens than for one.
BOUNDED = ["causal/axk2", "causal/deepseek_v32", "causal/glm_moe_dsa", "causal/hy_v4", "causal/moshi"]
REFUSED = ["causal/cpmant", "causal/xlm", "causal/prophetnet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> Path:
        with quiet():
            return recipes.make(name, tmp_path_factory.mktemp("model"))

    return made


def written(folder: Path, **settings: Any) -> list[list[int]]:
    with quiet():
        model = genctl.load(str(folder), device="cpu")
        results = model.generate(REPEATING, max_new_tokens=NEW, do_sample=False, batch_size=2, **settings)
    return [[token.id for token in result.sequences[0].tokens] for result in results]


def ways(folder: Path) -> list[dict[str, Any]]:
    return [
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": str(folder), "num_assistant_tokens": 5},
        {"assistant_early_exit": 1, "num_assistant_tokens": 4},
    ]


@pytest.mark.parametrize("name", BOUNDED)
def test_drafts_write_greedy_text_where_it_matters_how_a_text_is_cut(name: str, folder: Any) -> None:
    greedy = written(folder(name))
    for way in ways(folder(name)):
        assert written(folder(name), **way) == greedy, way


@pytest.mark.parametrize("name", REFUSED)
def test_drafts_are_refused_where_several_tokens_get_other_numbers(name: str, folder: Any) -> None:
    for way in ways(folder(name))[:2]:
        with pytest.raises(GenctlError, match=OTHER_NUMBERS):
            written(folder(name), **way)


@pytest.mark.parametrize("kinds", [["full_attention", "moe"], ["linear_attention", "full_attention"]])
def test_nemotron_h_drafts_where_none_of_its_layers_keeps_a_state(kinds: list[str], tmp_path: Path) -> None:
    fields = recipes.config("causal/nemotron_h").to_dict()
    for derived in ("layer_types", "hybrid_override_pattern", "num_hidden_layers"):
        fields.pop(derived, None)
    with quiet():
        config = recipes.CONFIG_MAPPING["nemotron_h"](**{**fields, "layers_block_type": kinds})
        torch.manual_seed(0)
        model = recipes.auto_class("causal/nemotron_h").from_config(config).eval()
        recipes.draw(model)
        recipes.tiny.save(recipes._with_ids(model), tmp_path)
    for way in ways(tmp_path):
        if "linear_attention" in kinds:
            with pytest.raises(GenctlError, match=r"takes back tokens that it tried|cannot run with its first layers"):
                written(tmp_path, **way)
        else:
            assert written(tmp_path, **way) == written(tmp_path), way


@pytest.mark.parametrize("name", ["causal/mistral", "causal/gemma3_text", "causal/openai-gpt", "causal/gpt2"])
def test_several_tokens_are_trusted_after_a_trial_where_they_are_right(name: str) -> None:
    with quiet():
        model = TransformersRuntime(recipes.build(name), trust=False)
        assert model.abilities.reads_several(cached=False)
        assert model.abilities.reads_several(cached=True) or not model.abilities.supports_cache


@pytest.mark.parametrize("name", ["causal/bamba", "causal/falcon_h1"])
def test_every_token_of_a_pass_has_logits_where_input_preparation_would_keep_the_last(name: str, folder: Any) -> None:
    greedy = written(folder(name), use_cache=False)
    assert written(folder(name), use_cache=False, prompt_lookup_num_tokens=4) == greedy
    assert tool("score", "-m", str(folder(name)), "the cat sat on the mat").status == 0


@pytest.mark.parametrize("arguments", [(), ("--cache", "off")])
@pytest.mark.parametrize("name", ["causal/prophetnet", "causal/cpmant", "seq2seq/fsmt"])
def test_a_note_says_that_a_cache_changes_the_text(name: str, arguments: tuple[str, ...], folder: Any) -> None:
    ran = tool("run", "-m", str(folder(name)), "-n", "2", "the cat sat on", *arguments)
    assert "computes other numbers with a cache than without" in ran.err
