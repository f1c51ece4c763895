"""Falcon's grouped heads, of which the runtimes cache different numbers: plans and saved prompts follow the runtime.

transformers repeats keys and values for each query head before it stores them; the native runtime stores them once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl import events
from genctl.commands.inspect.plan import plan
from genctl.config.layers import flags_layer
from genctl.engines.protocol import Flow, Request
from genctl.engines.session import Session
from genctl.errors import InputError
from genctl.params import Generation, Runtime
from tests.native import variations
from tests.tiny import HEADS, LAYERS, tokenizer

PROMPT = "the cat sat on the mat"
NEW = 6
HELD = {"native": 2, "transformers": HEADS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("falcon")
    variations.model("falcon, new").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def session(folder: Path, kind: str, **options: Any) -> Session:
    return Session.load(Runtime(model=str(folder), runtime=kind, **options))  # type: ignore[arg-type]


def request(session: Session, **more: Any) -> Request:
    return Request("0", session.resolve([flags_layer({"max_new_tokens": NEW, **more})]), 1, PROMPT)


def test_auto_takes_the_native_runtime(folder: Path) -> None:
    assert session(folder, "auto").loaded.runtime == "native (falcon)"


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("form", ["dynamic", "static", "quantized"])
def test_a_plan_is_what_is_measured(folder: Path, kind: str, form: str) -> None:
    here = session(folder, kind)
    told = list(here.stream([request(here, cache_implementation=form)], None, Flow(watch=True)))
    read = [event for event in told if isinstance(event, events.CacheRead)][-1]
    length = read.layers[0].get("filled", read.layers[0]["shape"][2])
    runtime = Runtime(model=str(folder), runtime=kind, device="cpu")  # type: ignore[arg-type]
    made = plan(runtime, Generation(cache_implementation=form), batch=1, length=length)
    assert [layer["shape"][1] for layer in made["layers"]] == [HELD[kind]] * LAYERS
    assert made["layers"] == [{key: value for key, value in layer.items() if key != "new"} for layer in read.layers]


def test_a_plan_without_weights_follows_config_json(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for kind, held in (*HELD.items(), ("auto", 2)):
        runtime = Runtime(model=str(tmp_path), runtime=kind, device="cpu")  # type: ignore[arg-type]
        assert plan(runtime, Generation(), batch=1)["layers"][0]["shape"][1] == held
    elsewhere = Runtime(model=str(tmp_path), device="cuda", runtime="transformers")
    assert plan(elsewhere, Generation(), batch=1)["layers"][0]["shape"][1] == HEADS
    named = Runtime(model=str(tmp_path), device="cuda")
    layer = plan(named, Generation(), batch=1)["layers"][0]
    assert (layer["shape"][1], layer["kind"]) == (HELD["native"], "static")  # steps of one shape, for CUDA graphs
    quantized = plan(named, Generation(cache_implementation="quantized"), batch=1)["layers"][0]
    assert (quantized["shape"][1], quantized["kind"]) == (HELD["native"], "quantised")


@pytest.mark.parametrize("kind", HELD)
def test_a_saved_prompt_serves_the_runtime_that_made_it(folder: Path, kind: str, tmp_path: Path) -> None:
    here = session(folder, kind)
    content, length = here.saved_prompt(request(here))
    (tmp_path / "prompt").write_bytes(content)
    plain = [event for event in here.stream([request(here)]) if isinstance(event, events.Finished)]
    again = session(folder, kind, prompt_cache=str(tmp_path / "prompt"))
    told = list(again.stream([request(again)]))
    assert [event.hypotheses[0].tokens for event in told if isinstance(event, events.Finished)] == [
        event.hypotheses[0].tokens for event in plain
    ]
    assert next(event.reused for event in told if isinstance(event, events.Prefilled)) == length - 1
    with pytest.raises(InputError, match="keeps keys and values in another way"):
        session(folder, next(name for name in HELD if name != kind), prompt_cache=str(tmp_path / "prompt"))
