"""`--check-runtime` sees what differs: a native model of which one number is changed."""

from __future__ import annotations

import pytest

from genctl.commands.run.checks import compare_runtimes
from genctl.engines.local.session import Session
from genctl.engines.protocol import Request
from genctl.errors import UsageError
from genctl.native.norms import RMSNorm
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import Runtime


@pytest.mark.parametrize(("name", "prompt"), [("stories", "Once upon a time"), ("numbers", "12345")])
def test_a_changed_number_is_seen(name: str, prompt: str) -> None:
    session = Session.load(Runtime(model=f"builtin:{name}", runtime="native"))
    request = Request("0", session.resolve([]), 1, prompt)
    plain, explained = compare_runtimes(session, request)
    assert explained
    assert share(plain) < 1e-5
    model = session.loaded.model
    assert isinstance(model, NativeModel)
    weights = model.decoder.weights
    assert isinstance(weights.final_norm, RMSNorm)
    weights.final_norm.weight = weights.final_norm.weight * 1.01
    if isinstance(session.forward, NativeRuntime):
        session.forward.steps = None  # lists of calls have the weights with which they were made
    changed, explained = compare_runtimes(session, request)
    assert not explained
    assert share(changed) > 1e-3
    assert "times the rounding" in changed
    assert ("over a source" in changed) == (name == "numbers")


def share(found: str) -> float:
    """The difference as a share of the largest logit."""
    return float(found.partition("(")[2].partition(" of the largest logit")[0])


def test_what_cannot_be_compared_is_refused_with_the_reason() -> None:
    session = Session.load(Runtime(model="builtin:stories", quantize="int8"))
    request = Request("0", session.resolve([]), 1, "One day")
    with pytest.raises(UsageError, match="--check-runtime and --quantize int8 contradict each other: rounded weights"):
        compare_runtimes(session, request)
    session = Session.load(Runtime(model="builtin:stories", runtime="transformers"))
    with pytest.raises(UsageError, match="which run LlamaForCausalLM") as raised:
        compare_runtimes(session, request)
    assert raised.value.hint == "leave out --runtime transformers"
