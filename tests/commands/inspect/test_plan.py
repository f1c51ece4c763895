"""What fits, what is printed, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genctl.commands.inspect.job import show_plan
from genctl.commands.inspect.options import CONFLICTS, InspectOptions
from genctl.commands.inspect.plan import Part, Size, largest, plan, rows_of, total
from genctl.commands.inspect.skeleton import MOST_LAYERS
from genctl.commands.options import memory_bytes
from genctl.commands.table import check
from genctl.config.layers import resolve
from genctl.errors import GenctlError, ModelError, UsageError
from genctl.models.hub import load
from genctl.params import Generation, Runtime
from tests.cli.tool import genctl
from tests.decode.driver import Case
from tests.fake_cuda import fake_gpu
from tests.models.hub_standin import serve
from tests.tiny import checkpoint
from tests.warm import python

ROOT = Path(__file__).parents[3]
MEASURED = {
    "schema", "model", "cache", "layers", "total_bytes", "reserved_bytes", "weights_bytes", "bytes_per_token",
    "bytes_per_row", "share_of_weights", "steps",
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only a config: a window of 8 in one layer, none in the other; context 256."""
    whole = checkpoint("gemma2", tmp_path_factory.mktemp("whole"))
    folder = tmp_path_factory.mktemp("config") / "gemma"
    folder.mkdir()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    return folder


def on_disk(folder: Path, **changes: Any) -> Path:
    """A folder with only a Llama's config.json, with changes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def report(folder: Path, *, generation: Generation | None = None, **asked: Any) -> dict[str, Any]:
    runtime = Runtime(model=str(folder), device="cpu")
    return plan(runtime, generation or Generation(), **{"batch": 1, **asked})


def show(
    capsys: pytest.CaptureFixture[str], model: str | Path, *, generation: Generation | None = None, **asked: Any
) -> tuple[int, str, str]:
    """Run the command as the command line does. Returns its exit status and its output."""
    runtime = Runtime(model=str(model), device="cpu")
    early = replace(resolve([], tentative=True), runtime=runtime, generation=generation or Generation())
    options = InspectOptions(plan=True, **asked)
    check(options, CONFLICTS)
    status = show_plan(options, early)
    written = capsys.readouterr()
    return status, written.out, written.err


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_the_largest_that_fits_is_found_exactly() -> None:
    for edge in range(40):
        assert largest(lambda number: 3 * number, 3 * edge + 2) == edge
        for most in range(1, 40):
            assert largest(lambda number: 3 * number, 3 * edge + 2, most) == min(edge, most)
    assert largest(lambda number: 0, 0) is None
    assert largest(lambda number: 0, 0, 7) == 7
    assert largest(lambda number: 5, -1, 7) == 0


KINDS = st.sampled_from(["full", "static", "quantised", "sliding window", "cross-attention", "recurrent state"])


@given(
    st.lists(st.tuples(KINDS, st.integers(1, 4096)), max_size=5),
    st.tuples(*[st.integers(1, 60)] * 4),
    st.tuples(*[st.integers(0, 60)] * 3),
)
def test_more_is_never_less(kinds: list[tuple[str, int]], size: tuple[int, ...], more: tuple[int, ...]) -> None:
    parts = [
        Part({"layer": i, "kind": kind, "window": 9 if kind == "sliding window" else None}, cell)
        for i, (kind, cell) in enumerate(kinds)
    ]
    batch, beams, length, source = size
    small = Size(batch, batch * beams, length, source)
    batch, length, source = batch + more[0], length + more[1], source + more[2]
    assert total(parts, small) <= total(parts, Size(batch, batch * beams, length, source))


def test_longest_and_largest_are_the_last_that_fit_beside_the_weights(gemma: Path) -> None:
    beams = Generation(num_beams=3)
    weights = report(gemma, length=1)["weights_bytes"]
    wanted = report(gemma, generation=beams, batch=2, length=100)["total_bytes"]
    for spare, fits in ((0, True), (-1, False), (1, True)):
        memory = weights + wanted + spare
        made = report(gemma, generation=beams, batch=2, length=100, memory=memory)["plan"]
        assert (made["fits"], made["memory_bytes"], made["length_bound"]) == (fits, memory, "memory")
        assert (made["longest_length"], made["largest_batch"]) == ((100, 2) if fits else (99, 1))
        for number, holds in ((made["longest_length"], True), (made["longest_length"] + 1, False)):
            again = report(gemma, generation=beams, batch=2, length=number, memory=memory)
            assert (again["total_bytes"] + weights <= memory) == again["plan"]["fits"] == holds


def test_the_context_bounds_the_length(gemma: Path) -> None:
    made = report(gemma, memory=1 << 40)["plan"]
    assert (made["length"], made["context"], made["longest_length"], made["length_bound"]) == (256, 256, 256, "context")
    assert made["largest_batch"] * report(gemma)["total_bytes"] <= 1 << 40


def test_weights_that_do_not_fit_leave_room_for_nothing(gemma: Path) -> None:
    made = report(gemma, memory=1000)["plan"]
    assert (made["fits"], made["longest_length"], made["largest_batch"]) == (False, 0, 0)


def test_a_state_fits_any_length_or_none(tmp_path: Path) -> None:
    mamba = checkpoint("mamba", tmp_path)
    free = report(mamba, length=5, memory=1 << 30)
    assert free["total_bytes"] == report(mamba, length=5000)["total_bytes"]
    assert (free["plan"]["longest_length"], free["plan"]["length_bound"], free["plan"]["fits"]) == (None, None, True)
    tight = report(mamba, length=5, memory=free["weights_bytes"] + free["total_bytes"] - 1)["plan"]
    assert (tight["longest_length"], tight["largest_batch"], tight["fits"]) == (0, 0, False)


def test_without_a_memory_nothing_is_said_of_it(gemma: Path) -> None:
    made = report(gemma)["plan"]
    assert {made[key] for key in ("memory_bytes", "longest_length", "length_bound", "largest_batch", "fits")} == {None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 << 30), ("1.5 TiB", 3 << 39), ("80GB", 80 * 10**9), ("2kb", 2000), ("3 MiB", 3 << 20),
        ("0.3B", None), ("1000", 1000), ("7 bytes", 7), ("0.1KiB", 102), ("24G", None), ("", None), ("-1GiB", None),
        ("GiB", None), ("0", None), ("1e9", None), ("nan", None), ("9" * 40, None), ("1PiB", None), ("٣GiB", None),
    ],
)  # fmt: skip
def test_memory_is_read_with_its_unit(text: str, expected: int | None) -> None:
    if expected is not None:
        assert memory_bytes(text) == expected
        return
    with pytest.raises(UsageError, match="--memory: "):
        memory_bytes(text)


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {},
    ],
)
def test_rows_are_those_that_the_strategy_feeds(knobs: dict[str, Any]) -> None:
    from genctl import events
    from genctl.decode.loop import decode
    from genctl.strategies.factory import choose

    case = Case("llama")
    strategy = choose(Generation(**knobs))
    lane = case.lane((5, 6, 7), strategy, max_new_tokens=4, eos=(), returned=1)
    seen = [event for event in decode(case.forward, [lane], watch=True) if isinstance(event, events.CacheRead)]
    assert rows_of(Generation(**knobs)) == seen[-1].layers[0]["shape"][0]


def test_samples_to_choose_among_are_rows() -> None:
    assert rows_of(Generation(do_sample=True, best_of=5)) == 5
    assert rows_of(Generation(do_sample=True, mbr_samples=6, num_return_sequences=2)) == 6


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_json_has_the_keys_of_a_measurement(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = show(capsys, gemma, batch=2, length=20, memory="1MB", format="json")
    made = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert set(made) == {*MEASURED, "plan"}
    assert made["steps"] == []
    assert made["total_bytes"] == sum(layer["bytes"] for layer in made["layers"])
    assert made["reserved_bytes"] == 2 * 2 * 2 * 2 * 20 * 8 * 4  # the layer with a window has room for all 20, too
    assert made["layers"][0] == {
        "layer": 0, "kind": "sliding window", "shape": [2, 2, 7, 8], "dtype": "float32", "device": "cpu",
        "bytes": 2 * 2 * 2 * 7 * 8 * 4, "window": 8,
    }  # fmt: skip
    assert made["share_of_weights"] == made["total_bytes"] / made["weights_bytes"]


def test_tsv_has_a_line_for_each_layer(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = show(capsys, gemma, length=20, format="tsv")
    head, *lines = [line.split("\t") for line in out.splitlines()]
    assert (status, tuple(head)) == (0, ("layer", "kind", "shape", "dtype", "device", "bytes"))
    assert lines == [
        ["0", "sliding window", "[1, 2, 7, 8]", "float32", "cpu", "896"],
        ["1", "full", "[1, 2, 20, 8]", "float32", "cpu", "2560"],
    ]


def test_a_plan_that_does_not_fit_is_shown_and_fails_the_check(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for format in ("text", "json", "tsv"):
        status, out, _ = show(capsys, gemma, memory="2 KB", format=format)
        assert status == 4
        assert "sliding window" in out
    status, out, _ = show(capsys, gemma, memory="2 KB")
    assert "does not fit: the weights alone need" in out
    assert "activations and the framework's own memory are not counted" in out


def test_colour_comes_only_if_asked_for(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b[2mcache     \x1b[0m3,456 bytes" in show(capsys, gemma, color="always", length=20)[1]
    assert "\x1b" not in show(capsys, gemma, length=20)[1]


def test_a_note_goes_to_standard_error(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = show(capsys, gemma, generation=Generation(guidance_scale=2.0), format="json")
    assert err.startswith("note: what guidance_scale needs beside this")
    assert json.loads(out)["plan"]["notes"] == [err.removeprefix("note: ").strip()]


def test_what_is_not_counted_is_said(gemma: Path) -> None:
    for knobs in ({"assistant_model": "builtin:stories"}, {"guidance_scale": 2.0}, {"prompt_lookup_num_tokens": 3}):
        (note,) = report(gemma, generation=Generation(**knobs))["plan"]["notes"]  # type: ignore[arg-type]
        assert note == f"what {next(iter(knobs))} needs beside this (weights, caches, drafts) is not counted"
    assert report(gemma)["plan"]["notes"] == []


def test_beams_of_the_checkpoints_own_settings_are_not_passed_over(tmp_path: Path) -> None:
    folder = on_disk(tmp_path / "llama")
    (folder / "generation_config.json").write_text('{"num_beams": 4, "num_return_sequences": null}')
    (note,) = report(folder, length=3)["plan"]["notes"]
    assert note == "generation_config.json says num_beams = 4, which a run follows; this plan has num_beams = 1"
    assert report(folder, length=3, generation=Generation(num_beams=2))["plan"]["notes"] == []


# -- where configs come from -------------------------------------------------------------------------------------------


def test_no_tensor_is_allocated_however_large_the_model(tmp_path: Path) -> None:
    huge = on_disk(tmp_path / "huge", hidden_size=1 << 18, intermediate_size=1 << 22, vocab_size=1 << 22)
    for runtime in ("native", "transformers"):
        made = plan(Runtime(model=str(huge), device="cpu", runtime=runtime), Generation(), batch=1, length=3)  # type: ignore[arg-type]
        assert made["weights_bytes"] > 1 << 44  # each matrix is larger than any machine's memory


def test_a_folder_whose_shards_are_missing_still_has_a_config(tmp_path: Path) -> None:
    folder = on_disk(tmp_path / "partial")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert report(folder, length=3)["total_bytes"] == report(on_disk(tmp_path / "whole"), length=3)["total_bytes"]


HUB = """
import json, sys
from genctl.commands.inspect.plan import plan
from genctl.commands.inspect.options import CONFLICTS, InspectOptions
from genctl.commands.table import check
from genctl.config.layers import resolve
from genctl.errors import GenctlError
from genctl.params import Generation, Runtime
for asked in json.loads(sys.argv[1]):
    try:
        made = plan(Runtime(device="cpu", **asked), Generation(), batch=1, length=20)
        print(json.dumps([made["total_bytes"], made["weights_bytes"]]))
    except GenctlError as error:
        print(json.dumps(error.message))
"""


def ask(home: Path, requests: list[dict[str, Any]], **environment: str) -> list[Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    settings = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", **environment}
    command = [*python(), "-c", HUB, json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **settings}, check=False, cwd=home)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_of_a_hub_checkpoint_only_the_configs_are_fetched(tmp_path: Path) -> None:
    whole = checkpoint("gemma2", tmp_path / "whole")
    expected = report(whole, length=20)
    with serve({"someone/gemma": whole}) as hub:
        made, absent = ask(tmp_path, [{"model": "someone/gemma"}, {"model": "someone/else"}], HF_ENDPOINT=hub.url)
    assert made == [expected["total_bytes"], expected["weights_bytes"]]
    assert "no checkpoint on the Hub is called someone/else" in absent
    fetched = {line.rpartition("/")[2] for line in hub.asked if "/resolve/" in line}
    assert fetched == {"config.json", "generation_config.json"}
    offline = ask(tmp_path, [{"model": "someone/gemma", "offline": True}, {"model": "a/b", "offline": True}])
    assert offline[0] == made
    assert "a/b is not in the cache" in offline[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 10**9}, "hidden_size = 1000000000, far above what any model has"),
        ({"num_hidden_layers": MOST_LAYERS + 1}, "more than a plan takes"),
        ({"num_experts": 60000, "num_hidden_layers": 100}, "experts in each of 100 layers, more than a plan takes"),
        ({"hidden_size": 0}, "not a positive whole number"),
        ({"num_attention_heads": 0}, "cannot be used"),
        ({"head_dim": 1 << 62}, "config.json cannot be used"),
        ({"head_dim": "x"}, "cannot be used"),
        ({"vocab_size": -5}, "not a positive whole number"),
        ({"model_type": "no_such"}, "knows no architecture 'no_such'"),
        ({"architectures": ["LlamaForTokenClassification"]}, "no language-model head"),
        ({"_attn_implementation": "someone/kernel"}, "refused without --trust-remote-code"),
        ({"rope_parameters": {"rope_type": "no_such", "rope_theta": 1.0}}, "cannot be used"),
    ],
)
def test_a_hostile_config_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        report(on_disk(tmp_path / "hostile", **changes))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("llama", {"length": 257}, "--length 257: the context of .* is 256 tokens"),
        ("llama", {"source_length": 4}, "--source-length 4 is for encoder-decoders"),
        ("llama", {"batch": 0}, "--batch 0: must be at least 1"),
        ("llama", {"length": 0}, "--length 0: must be at least 1"),
        ("llama", {"memory": "much"}, "--memory: 'much' is not a size"),
        ("llama", {"generation": Generation(num_return_sequences=2)}, "would return identical sequences"),
        ("llama", {"generation": Generation(num_beams=2, num_return_sequences=3)}, "cannot exceed num_beams = 2"),
        ("builtin:numbers", {}, "needs --length"),
        ("no/such/folder", {}, "no such folder"),
        ("builtin:nothing", {}, "no built-in checkpoint"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_nothing_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, asked: dict[str, Any], said: str
) -> None:
    name = str(on_disk(tmp_path / "llama")) if model == "llama" else model
    with pytest.raises(GenctlError, match=said):
        show(capsys, name, **asked)
    assert capsys.readouterr().out == ""


def test_the_encoder_of_a_model_has_a_context_of_its_own(tmp_path: Path) -> None:
    for arch in ("bart", "encoder_decoder"):
        folder = checkpoint(arch, tmp_path / arch)
        made = report(folder, length=10)
        assert made["plan"]["source_length"] == 256
        assert {layer["shape"][2] for layer in made["layers"]} == {10, 256}
        with pytest.raises(UsageError, match=r"the encoder of .* reads 256 tokens at most"):
            report(folder, length=10, source_length=257)
    assert report(Path("builtin:numbers"), length=10)["plan"]["source_length"] == 10


def test_a_device_that_is_elsewhere_can_be_planned_for(tmp_path: Path) -> None:
    folder = on_disk(tmp_path / "llama")
    for device in ("cuda", "cuda:1", "mps"):
        made = plan(Runtime(model=str(folder), device=device), Generation(), batch=1, length=3)
        assert {layer["device"] for layer in made["layers"]} == {device}
    with pytest.raises(UsageError, match="no device that torch knows"):
        plan(Runtime(model=str(folder), device="abacus"), Generation(), batch=1, length=3)
    with pytest.raises(UsageError, match="int8 runs on the CPU"):
        plan(Runtime(model=str(folder), device="mps", quantize="int8"), Generation(), batch=1, length=3)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_plan_knows_what_rounded_weights_take_on_a_gpu(
    quantize: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = Runtime(model=str(checkpoint("llama", tmp_path)), device="cuda", quantize=quantize)
    planned = plan(runtime, Generation(), batch=1, length=3)["weights_bytes"]
    with fake_gpu(monkeypatch):
        model: Any = load(runtime).model
        assert planned == model.bytes()


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cuda:1", "bfloat16"), ("cpu", "float32")])
def test_a_plan_knows_that_a_gpu_reads_float32_as_bfloat16(device: str, dtype: str, tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path)
    made = plan(Runtime(model=str(folder), device=device), Generation(), batch=1, length=3)
    assert {layer["dtype"] for layer in made["layers"]} == {dtype}
    asked = plan(Runtime(model=str(folder), device=device, dtype="float32"), Generation(), batch=1, length=3)
    assert {layer["dtype"] for layer in asked["layers"]} == {"float32"}


def test_a_window_of_1_keeps_every_column(tmp_path: Path) -> None:
    folder = checkpoint("mistral", tmp_path / "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 1}))
    done = genctl("inspect-cache", "--plan", "-m", str(folder), "--length", "12", "--format", "json")
    (planned,) = done.records
    assert [layer["shape"][2] for layer in planned["layers"]] == [12] * len(planned["layers"])
