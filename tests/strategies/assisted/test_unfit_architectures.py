"""Architectures whose layers or heads DoLa, contrastive search and early exit cannot read: one sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import genctl
from genctl.errors import GenctlError
from tests.zoo import recipes
from tests.zoo.compare import PROMPTS, quiet

DOLA, CONTRASTIVE = {"dola_layers": "high"}, {"penalty_alpha": 0.6, "top_k": 4}
EXIT = {"assistant_early_exit": 1}
HEAD = r"^DoLa: the output head of \w+ cannot read the states of earlier layers$"
EXIT_ALONE = r"assistant_early_exit = 1: \w+ cannot run with its first layers alone$"
SEVERAL = "several hidden states of a token"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("causal/opt+post", DOLA, HEAD),
        ("causal/opt+post", {**DOLA, "runtime": "transformers"}, HEAD),
        ("causal/reformer", DOLA, HEAD),
        ("causal/electra", DOLA, HEAD),
        ("causal/roformer", DOLA, HEAD),
        ("causal/gemma3n_text", DOLA, SEVERAL),
        ("causal/gemma3n_text", CONTRASTIVE, SEVERAL),
        ("causal/hy_v4", DOLA, HEAD),
        ("causal/prophetnet", EXIT, "no single number of layers"),
        ("causal/blt", EXIT, "no single list of layers"),
        ("causal/blt", DOLA, "no single list of layers"),
        *(("causal/" + name, EXIT, f"^{EXIT_ALONE}") for name in ("gemma3n_text", "gemma4_text", "gemma4", "lfm2")),
        ("causal/xlnet", DOLA, "^DoLa reads one state of each layer, and XLNetLMHeadModel reports several$"),
        ("causal/longcat_flash", {"dola_layers": [2]}, "has no layer 2; its layers before the last are 0 to 1"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    name: str, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    runtime = {"runtime": settings["runtime"]} if "runtime" in settings else {}
    settings = {key: value for key, value in settings.items() if key != "runtime"}
    with quiet():
        model = genctl.load(str(recipes.make(name, tmp_path)), device="cpu", **runtime)
        with pytest.raises(GenctlError, match=sentence):
            model.generate([list(PROMPTS[0])], max_new_tokens=4, **settings)


def test_a_head_of_another_width_than_the_layers_is_refused(tmp_path: Path) -> None:
    config = recipes.config("causal/rembert")
    config.output_embedding_size = config.hidden_size * 2
    with quiet():
        model = recipes.auto_class("causal/rembert").from_config(config).eval()
        recipes.tiny.save(model, tmp_path)
        loaded = genctl.load(str(tmp_path), device="cpu")
        with pytest.raises(GenctlError, match=HEAD):
            loaded.generate([list(PROMPTS[0])], max_new_tokens=4, **DOLA)


def test_nemotron_h_compares_candidates(tmp_path: Path) -> None:
    with quiet():
        model = genctl.load(str(recipes.make("causal/nemotron_h", tmp_path)), device="cpu")
        found = model.generate([list(PROMPTS[0])], max_new_tokens=6, **CONTRASTIVE)
    assert len(found[0].sequences[0].tokens) == 6


def test_a_block_of_two_attention_layers_is_one_layer_to_dola(tmp_path: Path) -> None:
    """The last candidate must not be the last layer: a contrast with itself is rounding noise, which batches change."""
    with quiet():
        model = genctl.load(str(recipes.make("causal/longcat_flash", tmp_path)), device="cpu")
        prompts = [list(PROMPTS[0]), [*PROMPTS[2][:5]]]
        found, named = (
            [[token.id for token in result.sequences[0].tokens] for result in model.generate(prompts, **settings)]
            for settings in ({**DOLA, "max_new_tokens": 8}, {"dola_layers": [1], "max_new_tokens": 8, "batch_size": 1})
        )
    assert found == named


def test_early_exit_without_a_cache_needs_no_layer_with_attention(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 6, "use_cache": False}
    with quiet():
        model = genctl.load(str(recipes.make("causal/lfm2", tmp_path)), device="cpu")
        drafted, greedy = (model.generate([list(PROMPTS[0])], **settings, **way) for way in (EXIT, {}))
    assert [token.id for token in drafted[0].sequences[0].tokens] == [t.id for t in greedy[0].sequences[0].tokens]
