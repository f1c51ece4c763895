"""The report on a pass equals what happened in the model: shapes and inputs against hooks on its modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl import events
from genctl.commands.inspect.measurement import Measurement, per_token
from genctl.config.layers import flags_layer
from genctl.engines.protocol import Flow, Request
from genctl.engines.session import Session
from genctl.params import Runtime
from tests.tiny import WINDOW, checkpoint
from tests.versions import CACHE

PROMPT = "the cat sat on the mat"
STEPS = 4


def measured(session: Session, *prompts: str, steps: int = STEPS, **knobs: Any) -> Measurement:
    """An observed run, as the command performs it."""
    resolved = session.resolve([flags_layer({"max_new_tokens": steps + 1, **knobs})])
    found = Measurement(steps)
    requests = [Request(str(place), resolved, 7 + place, prompt) for place, prompt in enumerate(prompts)]
    for event in session.stream(requests, None, Flow(len(requests), watch=True)):
        found.feed(event)
    return found


def open_folder(folder: Path) -> Session:
    return Session.load(Runtime(model=str(folder), runtime="transformers"))  # whose modules have hooks


class Hooks:
    """The shapes in the cache of every attention module of the decoder after it has run, pass by pass."""

    def __init__(self, model: Any) -> None:
        self.passes: list[dict[tuple[str, int], list[int]]] = []
        self.fed: list[list[list[int]]] = []
        decoder = model.get_decoder() if model.config.is_encoder_decoder else model
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        for module in decoder.modules():
            if type(module).__name__ in ("GPT2Attention", "T5Attention", "MistralAttention", "Gemma2Attention"):
                module.register_forward_hook(self._attended, with_kwargs=True)

    def _begin(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        self.passes.append({})
        self.fed.append(ids.tolist())

    def _attended(self, module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        cache = named[CACHE]
        source = named.get("key_value_states")
        if hasattr(cache, "self_attention_cache"):
            cache = cache.self_attention_cache if source is None else cache.cross_attention_cache
        keys = cache.layers[module.layer_idx].keys
        self.passes[-1]["self" if source is None else "cross", module.layer_idx] = list(keys.shape)


def reported(entry: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    return {
        ("cross" if layer["kind"] == "cross-attention" else "self", layer["layer"]): layer["shape"]
        for layer in entry["layers"]
    }


@pytest.mark.parametrize("arch", ["gpt2", "t5", "mistral", "gemma2"])
def test_shapes_equal_those_that_a_hook_on_the_model_finds(arch: str, tmp_path: Path) -> None:
    session = open_folder(checkpoint(arch, tmp_path / arch))
    hooks = Hooks(session.loaded.model)
    found = measured(session, PROMPT)
    assert len(found.passes) == STEPS + 1
    assert hooks.passes == [reported(entry) for entry in found.passes]
    assert hooks.fed == [entry["input_ids"] for entry in found.passes]
    if arch in ("mistral", "gemma2"):
        windows = [layer for layer in found.passes[-1]["layers"] if layer["kind"] == "sliding window"]
        assert {layer["shape"][2] for layer in windows} == {WINDOW - 1}


def test_an_encoder_decoder_grows_in_one_part_and_keeps_the_other(tmp_path: Path) -> None:
    session = open_folder(checkpoint("t5", tmp_path / "t5"))
    hooks = Hooks(session.loaded.model)
    found = measured(session, PROMPT, num_beams=3)
    source = len(session.planner.read(Request("", session.resolve([]), 0, PROMPT)).ids)
    for step, entry in enumerate(found.passes):
        own = [layer["shape"] for layer in entry["layers"] if layer["kind"] == "full"]
        cross = [layer for layer in entry["layers"] if layer["kind"] == "cross-attention"]
        rows = 1 if step == 0 else 3
        assert own == [[rows, 4, step + 1, 8]] * 2
        assert [layer["shape"] for layer in cross] == [[1, 4, source, 8]] * 2  # one row in memory, shared by all
        assert [layer["new"] for layer in cross] == [source if step == 0 else 0] * 2
        assert entry["cross_attention"] == ("computed" if step == 0 else "kept")
        # the model itself sees one row for each beam
        assert hooks.passes[step]["cross", 0] == [rows, 4, source, 8]


def test_reordering_is_reported_as_it_was_done(tmp_path: Path) -> None:
    session = open_folder(checkpoint("gpt2", tmp_path / "gpt2"))
    found = measured(session, PROMPT, num_beams=4)
    kept: list[list[int]] = [[]]
    moves = 0
    for entry in found.passes:
        rows = entry["reordered"] or (range(len(kept)) if len(kept) == len(entry["input_ids"]) else [0] * 4)
        moves += bool(entry["reordered"])
        kept = [[*kept[row], *new] for row, new in zip(rows, entry["input_ids"], strict=True)]
    assert moves
    # the rows that the model has read are the beginnings of its hypotheses
    written = {tuple(row[len(kept[0]) - STEPS :]) for row in kept}
    finished = {one[:STEPS] for one in found.written()["0"]}
    assert finished <= written


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    session = open_folder(checkpoint("llama", tmp_path / "llama"))
    held = []
    resolved = session.resolve([flags_layer({"max_new_tokens": 3, "num_beams": 2})])
    found = Measurement(2)
    for event in session.stream([Request("0", resolved, 1, PROMPT)], None, Flow(watch=True)):
        found.feed(event)
        if isinstance(event, events.CacheRead):
            cache = session.forward.watch.passed.cache  # type: ignore[union-attr]
            tensors = [tensor for layer in cache.layers for tensor in layer.content()]
            held.append((sum(tensor.numel() * tensor.element_size() for tensor in tensors), found.passes[-1]))
    assert [bytes_ for bytes_, _ in held] == [entry["total_bytes"] for _, entry in held]
    grown = [entry["growth_bytes"] for _, entry in held]
    assert sum(grown) == held[-1][1]["total_bytes"]
    report = found.report(1000, "dynamic")
    assert (
        report["bytes_per_token"] == grown[-1] / 2 == 2 * 2 * 2 * 8 * 4
    )  # layers, keys and values, heads, size, float32
    assert report["bytes_per_row"] == held[-1][0] / 2
    assert report["share_of_weights"] == held[-1][0] / 1000


def test_without_a_cache_everything_is_given_again_and_the_same_tokens_come(tmp_path: Path) -> None:
    for arch in ("gpt2", "t5"):
        session = open_folder(checkpoint(arch, tmp_path / arch))
        found, beside = measured(session, PROMPT), measured(session, PROMPT, use_cache=False)
        report = found.report(1, "dynamic", beside=beside)
        assert report["tokens_agree"]
        given: list[int] = []
        for entry in report["steps"]:
            given += entry["input_ids"][0]
            assert entry["without_cache"]["input_ids"] == [given]
            assert entry["without_cache"]["past_length"] == 0
            assert entry["past_length"] == len(given) - len(entry["input_ids"][0])
            assert entry["cache_position"] == list(range(entry["past_length"], len(given)))
        assert not beside.passes[-1]["layers"]


def test_prompts_share_a_batch_and_shorter_ones_are_masked(tmp_path: Path) -> None:
    session = open_folder(checkpoint("gpt2", tmp_path / "gpt2"))
    found = measured(session, "the cat", PROMPT)
    short, long = (len(entry["input_ids"][0]) for entry in found.passes[:2])
    assert [(entry["step"], entry["rows"]) for entry in found.passes] == [
        (0, [0]),
        (0, [1]),
        *((step, [0, 1]) for step in range(1, STEPS + 1)),
    ]
    first = found.passes[2]
    assert first["attention_mask"] == [[0] * (long - short) + [1] * (short + 1), [1] * (long + 1)]
    assert first["position_ids"] == [[short], [long]]
    assert first["growth_bytes"] == first["total_bytes"] - sum(entry["total_bytes"] for entry in found.passes[:2])
    report = found.report(1, "dynamic")
    assert [prompt["prompt_tokens"] for prompt in report["prompts"]] == [short, long]
    assert "prompt" not in report


def test_equal_prompts_are_read_once(tmp_path: Path) -> None:
    session = open_folder(checkpoint("gpt2", tmp_path / "gpt2"))
    found = measured(session, PROMPT, PROMPT)
    assert [entry["step"] for entry in found.passes] == [0, *range(1, STEPS + 1)]
    first, second = found.passes[:2]
    assert second["growth_bytes"] == second["total_bytes"] - first["total_bytes"]


def test_a_state_has_no_positions_and_does_not_grow(tmp_path: Path) -> None:
    found = measured(open_folder(checkpoint("mamba", tmp_path / "mamba")), PROMPT)
    assert [entry["growth_bytes"] for entry in found.passes[1:]] == [0] * STEPS
    assert all(entry["cache_position"] == [] for entry in found.passes)
    assert {layer["kind"] for layer in found.passes[-1]["layers"]} == {"recurrent state"}
    assert found.report(1, "dynamic")["bytes_per_token"] == 0


def test_an_early_end_is_told(tmp_path: Path) -> None:
    session = open_folder(checkpoint("gpt2", tmp_path / "gpt2"))
    tokens = measured(session, PROMPT).written()["0"][0]
    found = measured(session, PROMPT, eos_token_id=tokens[2])
    assert found.report(1, "dynamic")["ended"] == {"reason": "eos", "steps": tokens.index(tokens[2])}
    whole = measured(session, PROMPT, steps=0)
    assert len(whole.passes) == 1
    assert whole.report(1, "dynamic")["ended"] == {"reason": "steps", "steps": 0}


def test_a_search_that_looks_ahead_is_cut_at_the_steps_asked_for(tmp_path: Path) -> None:
    session = open_folder(checkpoint("gpt2", tmp_path / "gpt2"))
    found = measured(session, PROMPT, penalty_alpha=0.6, top_k=3)
    assert [entry["step"] for entry in found.passes] == list(range(STEPS + 1))
    assert [len(entry["input_ids"]) for entry in found.passes] == [1, 3, 3, 3, 3]


def test_growth_per_token_is_that_of_a_pass_that_only_adds() -> None:
    def entry(step: int, rows: int, past: int, growth: int, fed: int = 1) -> dict[str, Any]:
        return {
            "step": step,
            "rows": [0] * rows,
            "input_ids": [[5] * fed] * rows,
            "cache_position": [past],
            "past_length": past,
            "growth_bytes": growth,
        }

    prompt, forked = entry(0, 1, 0, 70, fed=7), entry(1, 3, 7, 170)
    assert per_token([prompt]) is None
    assert per_token([prompt, forked]) is None
    assert per_token([prompt, forked, entry(2, 3, 8, 30)]) == 10
    assert per_token([prompt, forked, entry(2, 3, 8, 30), entry(3, 2, 9, -50)]) == 10
    drafted = entry(2, 3, 8, 90, fed=3)
    assert per_token([prompt, forked, drafted]) == 10


def test_events_of_a_run_survive_json(tmp_path: Path) -> None:
    session = open_folder(checkpoint("t5", tmp_path / "t5"))
    resolved = session.resolve([flags_layer({"max_new_tokens": 3, "num_beams": 2})])
    mine, replayed = Measurement(2), Measurement(2)
    for event in session.stream([Request("0", resolved, 1, PROMPT)], None, Flow(watch=True)):
        mine.feed(event)
        replayed.feed(events.from_json(events.to_json(event)))
    assert mine.report(5, "dynamic") == replayed.report(5, "dynamic")


def test_half_precision_halves_the_bytes(tmp_path: Path) -> None:
    folder = checkpoint("gpt2", tmp_path / "gpt2")
    full = measured(open_folder(folder), PROMPT).passes[-1]
    half = measured(Session.load(Runtime(model=str(folder), dtype="bfloat16")), PROMPT).passes[-1]
    assert {layer["dtype"] for layer in half["layers"]} == {"bfloat16"}
    assert half["total_bytes"] * 2 == full["total_bytes"]


@pytest.mark.parametrize("arch", ["gpt2", "mistral", "gemma2", "llama", "bloom", "falcon", "gptj"])
def test_a_native_cache_is_told_as_that_of_transformers(arch: str, tmp_path: Path) -> None:
    folder = str(checkpoint(arch, tmp_path))
    for knobs in ({}, {"num_beams": 3}, {"cache_implementation": "static"}, {"cache_implementation": "quantized"}):
        both = [
            measured(Session.load(Runtime(model=folder, runtime=kind)), PROMPT, PROMPT * 3, **knobs)
            for kind in ("native", "transformers")
        ]
        assert both[0].passes == both[1].passes
