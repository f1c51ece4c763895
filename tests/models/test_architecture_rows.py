"""The rows of `genctl/models/architectures.py`: none is missing, none is there twice, and each names what exists."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib import import_module

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from genctl.models.architectures import (
    ARCHITECTURES,
    BACKEND,
    LEFT_TO_TRANSFORMERS,
    NO_CLASS,
    ROWS,
    Architecture,
    facts_of,
    read_native,
)
from genctl.models.tokenizer import RECIPES
from genctl.native.config import NotNative

NATIVE = {row.name: row.native for row in ARCHITECTURES.values() if row.native is not None}


def test_every_native_family_names_its_function() -> None:
    for name, native in NATIVE.items():
        file, _, function = native.function.partition(".")
        families = import_module(f"genctl.native.{file}_families")
        assert callable(getattr(families, function, None)), f"{name}: {families.__name__} has no {function}"


def test_a_run_imports_the_functions_of_its_family_alone() -> None:
    code = (
        "import sys; from genctl.models.architectures import read_native\n"
        "sizes = dict(vocab_size=8, n_embd=8, n_head=2, n_layer=1, n_positions=8, tie_word_embeddings=True)\n"
        "read_native({'model_type': 'gpt2', **sizes})\n"
        "print(*sorted(name for name in sys.modules if name.endswith('_families')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["genctl.native.gpt_families", "genctl.native.llama_families"]  # what it builds on


def test_no_architecture_has_two_rows() -> None:
    assert [name for name, rows in Counter(row.name for row in ROWS).items() if rows > 1] == []


def test_every_tokenizer_has_a_recipe_or_is_left_to_others() -> None:
    rare = {"CohereTokenizer", "PegasusTokenizer", "RobertaTokenizer", "T5Tokenizer"}  # read by AutoTokenizer
    known = {"", BACKEND, NO_CLASS, LEFT_TO_TRANSFORMERS, *RECIPES, *rare}
    assert {row.name: row.tokenizer for row in ARCHITECTURES.values() if row.tokenizer not in known} == {}


def test_every_native_family_was_compared_and_names_a_class_of_transformers() -> None:
    assert len(NATIVE) >= 26
    for name, native in NATIVE.items():
        assert ARCHITECTURES[name].compared, f"{name}: say in its row as what it was compared with generate()"
        assert hasattr(transformers, native.model_class), f"{name}: transformers has no {native.model_class}"
        assert name in CONFIG_MAPPING_NAMES
        assert ARCHITECTURES[name].tokenizer, f"{name}: name the class that transformers registers for it"


@pytest.mark.parametrize("model_type", ["no such architecture", None, ["llama"], {}, 7])
def test_what_has_no_row_has_no_facts(model_type: object) -> None:
    assert facts_of(model_type) == Architecture("")
    with pytest.raises(NotNative, match="is not a family that the native runtime knows"):
        read_native({"model_type": model_type})
