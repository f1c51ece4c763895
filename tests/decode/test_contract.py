"""Model code that does not use its cache as generation requires is refused, on every way in, and no other is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from genctl import compat, events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.errors import ContractError
from genctl.strategies.sample import Sample
from genctl.transformers import contract
from genctl.transformers.abilities import Probe
from genctl.transformers.runtime import TransformersRuntime
from tests.cli.tool import Done, genctl
from tests.decode.driver import PROMPTS
from tests.tiny import EOS, tiny
from tests.versions import CACHE
from tests.zoo import recipes
from tests.zoo.compare import quiet

Forward = Callable[..., Any]


def ignores_its_cache(forward: Forward, **inputs: Any) -> Any:
    """As after a renaming: the cache ends up among the arguments that nobody reads."""
    return forward(**{**inputs, CACHE: None})


def returns_a_new_one(forward: Forward, **inputs: Any) -> Any:
    return forward(**{**inputs, CACHE: copy.deepcopy(inputs.get(CACHE))})


def returns_a_copy(forward: Forward, **inputs: Any) -> Any:
    """The cache that was passed in grows, but the pass returns a copy of it."""
    output = forward(**inputs)
    setattr(output, CACHE, copy.deepcopy(inputs.get(CACHE)))
    return output


def stands_still(forward: Forward, **inputs: Any) -> Any:
    """Every step has the position of the first."""
    positions = inputs.get("position_ids")
    if positions is not None and positions.shape[1] == 1:
        inputs["position_ids"] = positions.clamp(max=3)
    return forward(**inputs)


def begins_again(forward: Forward, **inputs: Any) -> Any:
    """The keys and values are kept, but a step does not read them."""
    if inputs.get(CACHE) is None or inputs["input_ids"].shape[1] > 1:
        return forward(**inputs)
    held, inputs[CACHE] = inputs[CACHE], None
    output = forward(**inputs)
    forward(**{**inputs, CACHE: held})
    setattr(output, CACHE, held)
    return output


FAULTS = {fault.__name__: fault for fault in (ignores_its_cache, returns_a_new_one, returns_a_copy)}
SCORES = {fault.__name__: fault for fault in (stands_still, begins_again)}
WORDS = {
    "ignores_its_cache": "returns another cache|keeps nothing in its cache",
    "returns_a_new_one": "returns another cache",
    "returns_a_copy": "returns another cache",
    "stands_still": "computes other scores for a step",
    "begins_again": "computes other scores for a step",
}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Forward], None]:
    """Give a class of transformers a fault, behind the signature of its forward."""

    def planted(name: str, fault: Forward) -> None:
        model = getattr(transformers, name)
        right = model.forward

        @functools.wraps(right)
        def forward(self: Any, **inputs: Any) -> Any:
            return fault(functools.partial(right, self), **inputs)

        monkeypatch.setattr(model, "forward", forward)

    return planted


def refused(done: Done, name: str, words: str) -> None:
    assert done.status == 3, done
    line = next(line for line in done.err.splitlines() if line.startswith("error: "))
    installed = compat.version("transformers")
    assert line.startswith(f"error: {name} of transformers {installed} "), line
    assert any(word in line for word in words.split("|")), line
    assert "hint: use_cache = false reads the whole text at each step" in done.err
    assert "Traceback" not in done.err


WAYS: dict[str, tuple[str, ...]] = {
    "run": ("run", "the cat sat"),
    "sampling": ("run", "--do-sample", "--seed", "1", "--set", "num_return_sequences=3", "the cat sat"),
    "beams": ("beam", "--num-beams", "3", "the cat sat"),
    "a batch with padding": ("run", "--batch-size", "3", "the cat sat", "a dog", "once upon a time there was"),
    "static": ("run", "--set", "cache_implementation='static'", "the cat sat"),
    "quantized": ("run", "--set", "cache_implementation='quantized'", "the cat sat"),
    "offloaded": ("run", "--set", "cache_implementation='offloaded'", "the cat sat"),
    "prompt lookup": ("run", "--set", "prompt_lookup_num_tokens=3", "the cat sat on the cat sat on"),
    "contrastive": ("run", "--set", "penalty_alpha=0.6", "--set", "top_k=4", "the cat sat"),
    "compare": ("compare", "the cat sat", "--strategy", "greedy", "--strategy", "beam"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *SCORES])
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_is_refused_by_every_way_in(
    way: str, fault: str, plant: Any, gpt2: Path, clean_environment: None
) -> None:
    plant("GPT2LMHeadModel", {**FAULTS, **SCORES}[fault])
    done = genctl(*WAYS[way], "-m", str(gpt2), "--runtime", "transformers", "-n", "4")
    refused(done, "GPT2LMHeadModel", WORDS[fault])


@pytest.mark.parametrize("fault", ["ignores_its_cache", "stands_still"])
def test_exploring_scoring_and_talking_refuse_too(
    fault: str, plant: Any, gpt2: Path, tmp_path: Path, clean_environment: None
) -> None:
    plant("GPT2LMHeadModel", {**FAULTS, **SCORES}[fault])
    model = ("-m", str(gpt2), "--runtime", "transformers")
    for arguments in (
        ("explore", "the cat sat", "--expand", "mass=0.3,depth=3", "--format", "jsonl"),
        ("score", "--rank", "--context", "the cat", " sat on the mat", " barks at the log"),
    ):
        refused(genctl(*arguments, *model), "GPT2LMHeadModel", WORDS[fault])
    refused(genctl("chat", *model, "-n", "4", stdin="the cat\n"), "GPT2LMHeadModel", WORDS[fault])


def test_whole_texts_are_scored_without_a_cache_and_without_a_check(
    plant: Any, gpt2: Path, clean_environment: None
) -> None:
    model = ("-m", str(gpt2), "--runtime", "transformers", "--format", "jsonl")
    right = genctl("score", "the cat sat on the mat", *model).out
    plant("GPT2LMHeadModel", ignores_its_cache)
    assert genctl("score", "the cat sat on the mat", *model).out == right


def test_without_a_cache_the_text_is_right(plant: Any, gpt2: Path, clean_environment: None) -> None:
    arguments = ("run", "the cat sat", "-m", str(gpt2), "--runtime", "transformers", "-n", "6")
    right = genctl(*arguments).out
    plant("GPT2LMHeadModel", ignores_its_cache)
    assert genctl(*arguments, "--set", "use_cache=false").out == right != ""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("arch", "name"), [("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration")]
)
def test_an_encoder_decoder_is_refused(
    arch: str, name: str, fault: str, plant: Any, tmp_path: Path, clean_environment: None
) -> None:
    tiny(arch, tmp_path)
    plant(name, FAULTS[fault])
    for strategy in ("run", "beam"):
        done = genctl(strategy, "the cat sat", "-m", str(tmp_path), "--runtime", "transformers", "-n", "4")
        refused(done, name, WORDS[fault])


def test_a_draft_model_is_refused(plant: Any, gpt2: Path, tmp_path: Path, clean_environment: None) -> None:
    recipes.make("causal/helium", tmp_path)  # no native family
    plant("HeliumForCausalLM", ignores_its_cache)
    drafting = ("num_assistant_tokens=3", f"assistant_model='{tmp_path}'")
    settings = [word for setting in drafting for word in ("--set", setting)]
    done = genctl("run", "the cat sat", "-m", str(gpt2), "-n", "9", *settings)
    refused(done, "HeliumForCausalLM", WORDS["ignores_its_cache"])


@pytest.mark.parametrize(("arch", "name"), [("mamba", "MambaForCausalLM"), ("jamba", "JambaForCausalLM")])
def test_states_that_stay_as_they_are_are_refused(
    arch: str, name: str, plant: Any, tmp_path: Path, clean_environment: None
) -> None:
    inherited = transformers.GenerationMixin.prepare_inputs_for_generation
    argument = compat.cache_argument(getattr(transformers, name).forward, inherited)

    def forgets(forward: Forward, **inputs: Any) -> Any:
        """A step reads the state and does not write it."""
        if inputs["input_ids"].shape[1] > 1 or inputs.get(argument) is None:
            return forward(**inputs)
        cache = inputs[argument]
        held = copy.deepcopy(cache.layers)
        output = forward(**inputs)
        for layer, before in zip(cache.layers, held, strict=True):
            for states in ("conv_states", "recurrent_states"):
                if hasattr(before, states):
                    setattr(layer, states, getattr(before, states))
        return output

    tiny(arch, tmp_path)
    plant(name, forgets)
    done = genctl("run", "the cat sat", "-m", str(tmp_path), "-n", "4")
    refused(done, name, "does not change its recurrent states")


def test_states_that_are_not_returned_are_refused(plant: Any, tmp_path: Path, clean_environment: None) -> None:
    def returns_none(forward: Forward, **inputs: Any) -> Any:
        output = forward(**inputs)
        output.mems = None
        return output

    recipes.make("causal/xlnet", tmp_path)
    plant("XLNetLMHeadModel", returns_none)
    refused(genctl("run", "the cat sat", "-m", str(tmp_path), "-n", "4"), "XLNetLMHeadModel", "returns no state")


# -- no false alarm ----------------------------------------------------------------------------------------------------

# each kind of cache and of rounding; tests/zoo runs them all in float32
KINDS = (
    "causal/mistral",
    "causal/gemma3_text",
    "causal/mixtral",
    "causal/qwen3_moe",
    "causal/deepseek_v3",
    "causal/mamba",
    "causal/mamba2",
    "causal/jamba",
    "causal/granitemoehybrid",
    "causal/recurrent_gemma",
    "causal/qwen3_next",
    "causal/lfm2",
    "causal/phi3+longrope",
    "causal/llama+dynamic",
    "seq2seq/t5",
    "seq2seq/bart",
    "seq2seq/switch_transformers",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_rounding_is_no_fault(name: str, dtype: torch.dtype) -> None:
    with quiet():
        model = copy.deepcopy(recipes.build(name)).to(dtype)
        contract.check_scores(TransformersRuntime(model, abilities=TransformersRuntime(model).abilities))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ["gpt2", "llama", "opt"])
def test_a_cache_that_is_not_read_is_found_in_every_type(
    arch: str, dtype: torch.dtype, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny(arch)).to(dtype)
    plant(type(model).__name__, begins_again)
    forward = TransformersRuntime(model)
    with pytest.raises(ContractError, match="other scores"):
        list(decode(forward, [lane()]))


def lane(**fields: Any) -> Lane:
    return Lane("0", tuple(PROMPTS[0]), Sample(), **{"max_new_tokens": 4, "eos": (EOS,), **fields})


def test_the_check_is_made_once_costs_few_tokens_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    tries = Probe._pass
    monkeypatch.setattr(
        Probe, "_pass", lambda self, rows, feed, keep=1: read.append(feed.numel()) or tries(self, rows, feed, keep)
    )
    forward = TransformersRuntime(tiny("gpt2"))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    told = list(decode(forward, [lane(), lane()]))
    passes, tokens = len(read), sum(read)
    assert (passes, tokens) == (5, 14)
    assert torch.equal(torch.get_rng_state(), state)
    list(decode(forward, [lane()]))
    assert len(read) == passes
    assert forward.forwards == 12  # none of the check's
    monkeypatch.setattr(contract, "check_scores", lambda forward: None)
    again = list(decode(TransformersRuntime(tiny("gpt2")), [lane(), lane()]))
    finished = [[one.logprob for one in event.hypotheses] for event in told if isinstance(event, events.Finished)]
    assert finished == [
        [one.logprob for one in event.hypotheses] for event in again if isinstance(event, events.Finished)
    ]


def test_passes_that_somebody_watches_are_only_his_own() -> None:
    model = copy.deepcopy(tiny("gpt2"))
    forward, seen = TransformersRuntime(model), []
    handle = model.register_forward_pre_hook(lambda module, given, inputs: seen.append(inputs), with_kwargs=True)
    list(decode(forward, [lane()]))
    assert len(seen) == forward.forwards
    handle.remove()


@pytest.mark.parametrize("changes", [{"sliding_window": 1}, {"sliding_window": 2}, {"max_position_embeddings": 4}])
def test_where_both_ways_may_differ_nothing_is_compared(changes: dict[str, Any]) -> None:
    model = tiny("mistral", **changes)
    contract.check_scores(TransformersRuntime(model, abilities=TransformersRuntime(model).abilities))


def test_the_difference_allows_for_the_last_digit_of_large_scores() -> None:
    anew = torch.tensor([[1000.0, 1000.5, 1001.0, -torch.inf]])
    ulp = torch.finfo(torch.bfloat16).eps
    assert float(contract.difference(anew + 4.0, anew, ulp)) == 0.0
    assert float(contract.difference(anew + 4.0, anew, 0.0)) > 1.0
    assert float(contract.difference(torch.zeros(1, 4), anew, ulp)) == float("inf")  # a token that only one forbids
    assert float(contract.difference(anew.flip(-1).nan_to_num(neginf=1.0), anew, 0.0)) > 1.0
