"""`--compile` on the command line: what takes long is said, and what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.models import runtime_choice
from tests.cli.tool import genctl

needs_compiler = pytest.mark.skipif(runtime_choice.cpp_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs as it is, without the compiler."""

    def same(step: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return step

    monkeypatch.setattr(torch, "compile", same)


@needs_compiler
@pytest.mark.usefixtures("uncompiled")
def test_compiling_is_said_aloud_and_the_text_is_the_same(gpt2: Path) -> None:
    plain = genctl("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu")
    aloud = genctl("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu", "--compile")
    assert aloud.status == 0
    assert aloud.raw == plain.raw
    lines = aloud.err.splitlines()
    assert lines[0] == "note: compiling the step for several rows …"
    assert len(lines) == len(plain.err.splitlines()) + 1
    quiet = genctl("run", "the cat", "a dog", "-m", str(gpt2), "-n", "6", "--device", "cpu", "--compile", "-q")
    assert (quiet.raw, quiet.err) == (plain.raw, "")


@needs_compiler
@pytest.mark.usefixtures("uncompiled")
def test_compare_and_inspect_cache_say_it_too(gpt2: Path) -> None:
    options = ("-m", str(gpt2), "--device", "cpu", "--compile")
    for done in (
        genctl("compare", "the cat", "--strategy", "a:num_beams=2", "--strategy", "b:num_beams=1", "-n", "4", *options),
        genctl("inspect-cache", "the cat", "--steps", "2", *options),
    ):
        assert done.status == 0, done.err
        assert "note: compiling the step for " in done.err


@needs_compiler
def test_an_encoder_decoder_is_refused(t5: Path) -> None:
    done = genctl("run", "the cat", "-m", str(t5), "--device", "cpu", "--compile")
    assert done.status == 3
    assert done.err.startswith("error: --compile: T5ForConditionalGeneration is an encoder-decoder")


def test_contradictions_are_found_before_anything_is_loaded() -> None:
    done = genctl("run", "the cat", "-m", "nowhere/at-all", "--compile", "--cache", "quantized")
    assert done.status == 2
    first, second = "compile = true (flag --compile)", 'cache_implementation = "quantized" (flag --cache)'
    assert f"{first} cannot be combined with {second}" in done.err


def test_score_has_no_steps_to_compile(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert genctl("score", "the cat", "-m", str(gpt2), "--compile").status == 2
    monkeypatch.setenv("GENCTL_COMPILE", "true")
    done = genctl("score", "the cat", "-m", str(gpt2), "--device", "cpu")
    assert done.status == 0
    assert done.err == "note: compile (GENCTL_COMPILE) is not used: genctl score reads every text as a whole\n"
