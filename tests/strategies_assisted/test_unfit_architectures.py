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
HEAD = "DoLa reads the states of earlier layers with the output head"
SEVERAL = "several hidden states of a token|keep several"


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("causal/opt+post", DOLA, f"{HEAD}, and that of OPTForCausalLM takes 16 numbers where they have 32"),
        ("causal/opt+post", {**DOLA, "runtime": "transformers"}, HEAD),
        ("causal/reformer", DOLA, HEAD),
        ("causal/electra", DOLA, HEAD),
        ("causal/roformer", DOLA, HEAD),
        ("causal/gemma3n_text", DOLA, SEVERAL),
        ("causal/gemma3n_text", CONTRASTIVE, SEVERAL),
        ("causal/hy_v4", DOLA, SEVERAL),
        ("causal/prophetnet", EXIT, "no single number of layers"),
        ("causal/blt", EXIT, "no single list of layers"),
        ("causal/blt", DOLA, "no single list of layers"),
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
