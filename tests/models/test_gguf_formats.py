"""GGUF files run natively with the numbers that they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.errors import GenctlError, ModelError, UsageError
from genctl.kernels import ops
from genctl.models.hub import load
from genctl.native import linear
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import Runtime
from genctl.parity.measure import measure
from tests.cli.tool import genctl
from tests.models import gguf_blocks
from tests.models.test_gguf import written
from tests.parity.sides import requests_of_ids, side
from tests.tiny import tiny

gguf = pytest.importorskip("gguf")
GOLDEN = Path(__file__).parent.parent / "goldens" / "gguf.json"
IDS = torch.tensor([[5, 60, 250, 7, 9, 121, 30, 31]])


def native_logits(path: Path, **options: Any) -> Tensor:
    model = load(Runtime(model=str(path), **options)).model
    assert isinstance(model, NativeModel)
    return NativeRuntime(model)(Pass(IDS)).logits


def their_logits(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled products inputs are not rounded, so that only the weights are compared."""
    monkeypatch.setattr(linear, "library", lambda: None)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.usefixtures("exact_inputs")
def test_logits_are_those_of_transformers_on_the_unpacked_file(arch: str, tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", arch=arch)
    wanted = their_logits(path)
    assert (native_logits(path) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.usefixtures("exact_inputs")
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_tokens_are_those_of_llama_cpp(kind: str, dequantize: bool, tmp_path: Path) -> None:
    """`scripts/make_goldens_gguf.py`; of whole texts read at once, and written token by token."""
    path = gguf_blocks.written(tmp_path / "tiny.gguf", kind)
    model: Any = load(Runtime(model=str(path), dequantize=dequantize)).model
    compared = 0
    for case in json.loads(GOLDEN.read_text())["cases"]:
        if case["kind"] != kind:
            continue
        ids, new, clear = torch.tensor([case["prompt"] + case["new"]]), case["new"], case["clear"]
        best = NativeRuntime(model)(Pass(ids)).logits[0].argmax(-1).tolist()[len(case["prompt"]) - 1 :]
        assert [best[place] for place in clear] == [new[place] for place in clear]
        compared += len(clear)
        first = next((place for place in range(len(new)) if place not in clear), len(new))
        row = json.dumps({"prompt_ids": case["prompt"]})
        options = ("--dequantize",) if dequantize else ()
        how = ("-n", str(first or 1), "--input-format", "jsonl", "--format", "jsonl", *options)
        (record,) = genctl("run", "-m", str(path), *how, stdin=row).records
        assert record["token_ids"][:first] == new[:first]
    assert compared > 40


@pytest.mark.usefixtures("exact_inputs")
def test_factors_of_the_rotary_frequencies_are_read(tmp_path: Path) -> None:
    def factors(values: list[float]) -> Callable[[Any], object]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", torch.tensor(values).numpy())

    plain = written(tmp_path / "plain.gguf", arch="llama")
    ones = written(tmp_path / "ones.gguf", arch="llama", more=factors([1.0] * 4))
    path = written(tmp_path / "tiny.gguf", arch="llama", more=factors([1.0, 2.0, 8.0, 8.0]))
    loaded: Any = load(Runtime(model=str(path), runtime="transformers")).model
    with torch.no_grad():
        wanted = loaded(IDS).logits
    assert torch.equal(native_logits(ones), native_logits(plain))
    assert (native_logits(path) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert not torch.equal(native_logits(path), native_logits(plain))
    bad = written(tmp_path / "bad.gguf", arch="llama", more=factors([1.0, torch.nan, 8.0, 8.0]))
    with pytest.raises(ModelError, match=r"bad.gguf: rope_freqs.weight holds no factors"):
        native_logits(bad)
    with pytest.raises(ModelError, match=r"has no place: rope_freqs.weight"):
        native_logits(written(tmp_path / "short.gguf", arch="llama", more=factors([1.0, 2.0])))


def test_a_run_says_what_is_held_how(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": [5, 60, 250, 7]}) + "\n")
    done = genctl(
        *("run", "-m", str(path), "-i", str(tmp_path / "rows.jsonl"), "--format", "jsonl", "-v"),
        *("--max-new-tokens", "5", "--no-do-sample"),
    )
    assert done.status == 0, done.err
    found = ops.library()
    how = "plain, Q8_0" if found is None else f"Q8_0 by {found.variant}"
    assert f"note: 9 linear layers with weights in gguf (9 {how}); all weights " in done.err
    assert "note: runtime: native (qwen2)" in done.err
    assert len(done.records[0]["token_ids"]) == 5


def test_rows_have_their_bits_in_any_batch(tmp_path: Path) -> None:
    if ops.library() is None:
        pytest.skip("torch's products serve")
    runtime = NativeRuntime(load(Runtime(model=str(written(tmp_path / "a.gguf")))).model)  # type: ignore[arg-type]
    many = torch.cat([IDS, IDS.flip(1), IDS + 1])
    together = runtime(Pass(many, None)).logits
    for number, row in enumerate(many):
        assert torch.equal(runtime(Pass(row[None], None)).logits[0], together[number])


def test_what_cannot_run_so_is_refused(tmp_path: Path) -> None:
    def refused(model: Path | str, **options: Any) -> GenctlError:
        with pytest.raises(GenctlError) as said:
            load(Runtime(model=str(model), quantize="gguf", **options))
        return said.value

    path = written(tmp_path / "tiny.gguf")
    other = refused("builtin:stories")
    assert isinstance(other, UsageError)
    assert other.message == "--quantize gguf: builtin:stories is no GGUF file"
    both = refused(path, runtime="transformers")
    assert both.message == "--quantize gguf and --runtime transformers contradict each other: gguf is native only"
    unpacked = refused(path, pack=False)
    assert unpacked.message == "--quantize gguf and --no-pack contradict each other: gguf weights are packed ones"
    assert refused(path, compile=True).message.startswith("--compile and --quantize gguf contradict each other")
    cuda = refused(path, dequantize=True)
    assert cuda.message.startswith("--dequantize and --quantize gguf contradict each other")
    with pytest.raises(UsageError, match=r"--dequantize: builtin:stories is no GGUF file"):
        load(Runtime(model="builtin:stories", dequantize=True))


def test_what_stands_in_the_way_of_blocks_is_told_once(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf")
    for options, obstacle in (
        ({"runtime": "transformers"}, "--runtime transformers"),
        ({"pack": False}, "--no-pack"),
        ({"dtype": "float16"}, "--dtype float16"),
    ):
        loaded = load(Runtime(model=str(path), **options))
        assert (loaded.quantize, loaded.remarks) == (None, (f"{path} is unpacked: {obstacle}",))
    for wanted in ({"dequantize": True}, {"quantize": "int8"}, {"quantize": "int4"}):  # unpacked, as asked
        assert not load(Runtime(model=str(path), **wanted)).remarks  # type: ignore[arg-type]
    plain = written(tmp_path / "plain.gguf", packed=False)
    loaded = load(Runtime(model=str(plain), pack=False))
    assert (loaded.quantize, loaded.remarks) == (None, ())
    loaded = load(Runtime(model=str(path), dtype="bfloat16"))
    assert (loaded.quantize, loaded.model.dtype) == ("gguf", torch.bfloat16)


def test_matrices_that_nothing_multiplies_are_unpacked_beside_the_others(tmp_path: Path) -> None:
    from tests.models import converted

    kinds = {"blk.0.ffn_up.weight": "IQ4_NL", "blk.1.ffn_up.weight": "IQ4_NL"}
    path = converted.written(tmp_path / "tiny.gguf", "llama", kind="Q8_0", kinds=kinds)
    loaded = load(Runtime(model=str(path)))
    assert loaded.quantize == "gguf"
    assert loaded.remarks == (f"2 of 16 matrices of {path} are unpacked: they hold IQ4_NL, which nothing multiplies",)
    assert isinstance(loaded.model, NativeModel)
    forms = {product.form.partition(" by ")[0] for product in loaded.model.products()}
    assert any("Q8_0" in form for form in forms)
    with pytest.raises(ModelError, match=r"--quantize gguf: 2 of 16 matrices of .* hold IQ4_NL"):
        load(Runtime(model=str(path), quantize="gguf"))


def test_halves_stay_halves_where_activations_are_wide(tmp_path: Path) -> None:
    from tests.models import converted

    path = converted.written(tmp_path / "tiny.gguf", "llama, tied", kind="F16")
    loaded = load(Runtime(model=str(path)))
    assert isinstance(loaded.model, NativeModel)
    assert (loaded.quantize, loaded.model.dtype, loaded.remarks) == ("gguf", torch.float32, ())
    if ops.library() is not None:
        kinds = {tensor.dtype for name, tensor in loaded.model.named_tensors() if "norm" not in name}
        assert kinds == {torch.float16}
    exact = load(Runtime(model=str(path), dequantize=True)).model
    assert isinstance(exact, NativeModel)
    found, wanted = (NativeRuntime(model)(Pass(IDS)).logits for model in (loaded.model, exact))
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    brain = load(Runtime(model=str(converted.written(tmp_path / "brain.gguf", "llama", kind="BF16"))))
    assert (brain.quantize, brain.model.dtype) == (None, torch.bfloat16)


def test_a_second_model_need_not_be_a_gguf_file(tmp_path: Path) -> None:
    from tests.tiny import checkpoint

    path, folder = written(tmp_path / "tiny.gguf"), checkpoint("qwen2", tmp_path / "folder")
    row = json.dumps({"prompt_ids": [5, 60, 250, 7]})
    how = ("--input-format", "jsonl", "--format", "jsonl", "-n", "8", "--no-do-sample")
    alone = genctl("run", "-m", str(path), *how, stdin=row).records[0]["token_ids"]
    for more in ((), ("--dequantize",)):
        done = genctl("run", "-m", str(path), "--assistant-model", str(folder), *how, *more, stdin=row)
        assert done.status == 0, done.err
        assert more or done.records[0]["token_ids"] == alone
    done = genctl("run", "-m", str(folder), "--assistant-model", str(path), *how, stdin=row)
    assert done.status == 0, done.err


def test_a_job_in_blocks_is_not_resumed_unpacked(tmp_path: Path) -> None:
    path, rows, out = written(tmp_path / "tiny.gguf"), tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt_ids": [5, 60, 250, 7]}) + "\n")
    how = ("run", "-m", str(path), "-i", str(rows), "-o", str(out), "-n", "4", "--resume")
    assert genctl(*how).status == 0
    done = genctl(*how, "--dequantize")
    assert (done.status, "cannot be resumed: dequantize false → true" in done.err) == (2, True), done.err


def test_a_saved_prompt_is_of_the_weights_that_read_it(tmp_path: Path) -> None:
    path, saved = written(tmp_path / "tiny.gguf"), tmp_path / "saved.safetensors"
    assert genctl("inspect-cache", "-m", str(path), "the cat", "--save-cache", str(saved)).status == 0
    again = ("run", "-m", str(path), "the cat sat", "-n", "3", "--prompt-cache", str(saved))
    assert genctl(*again).status == 0
    done = genctl(*again, "--dequantize")
    assert (done.status, "dtype float32 with gguf weights → float32" in done.err) == (2, True), done.err


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    held = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    data[held.data_offset : held.data_offset + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up.weight holds 1 NaN or infinite numbers"):
        load(Runtime(model=str(path)))


def test_blocks_are_drift_for_parity(tmp_path: Path) -> None:
    """The weights are the file's: what is left is explained by inputs that are rounded to 8 bits."""
    path = written(tmp_path / "tiny.gguf")
    mine, theirs = (side(path, dequantize=each, generation={"max_new_tokens": 12}) for each in (True, False))
    found = measure(mine, theirs, requests_of_ids(mine, [(5, 60, 250, 7)]))
    assert found.verdict == "drift", (found.reason, found.noise)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_a_file_ties_with_the_folder_it_was_made_of(name: str, tmp_path: Path) -> None:
    from tests.models import converted

    path = converted.written(tmp_path / "tiny.gguf", name)
    converted.model(name).save_pretrained(tmp_path / "folder")
    mine, theirs = (side(each, generation={"max_new_tokens": 12}) for each in (tmp_path / "folder", path))
    found = measure(mine, theirs, requests_of_ids(mine, [(5, 60, 250, 7)]))
    assert found.verdict == "tie", found.reason


@pytest.mark.parametrize("options", [(), ("--dequantize",)])
def test_an_audit_of_blocks_by_their_file_is_the_same(options: tuple[str, ...], tmp_path: Path) -> None:
    """Whether the engine rounds what it multiplies with blocks, or unpacks them."""
    from tests.models import converted

    path = converted.written(tmp_path / "tiny.gguf", "stories", kind="Q8_0", vocabulary=True)
    rows, trace = tmp_path / "rows.jsonl", tmp_path / "trace.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": each}) + "\n" for each in ("Once upon a time", "The dog", "Lily had a"))
    )
    how = ("run", "-m", str(path), "-i", str(rows), "-o", str(trace), "-n", "12", "--top-logprobs", "5", *options)
    assert genctl(*how).status == 0
    done = genctl("audit", str(trace), "-m", str(path), "--format", "jsonl")
    assert (done.status, done.records[0]["verdict"]) == (0, "same"), done.out


def test_tensors_in_other_types_are_unpacked(tmp_path: Path) -> None:
    """A matrix whose rows are no whole blocks stays in float32, and TQ1_0, which has no product, is unpacked to it."""
    from gguf.quants import quantize

    from genctl.models.gguf import read
    from genctl.native.blocks import GgufFile
    from genctl.native.plan import GgufTensors

    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.TQ1_0
    numbers = tiny("llama").lm_head.weight.detach().flatten()[:2048].view(8, 256).numpy()
    writer.add_tensor("odd", quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("half", numbers.astype("float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    seen: list[str] = []
    file = GgufFile([path], GgufTensors(read(path).tensors, {}), lambda name, _: seen.append(name))
    assert file.blocks("odd") is None
    assert torch.equal(file.tensor("odd"), torch.from_numpy(gguf.quants.dequantize(quantize(numbers, kind), kind)))
    assert torch.equal(file.tensor("half"), torch.from_numpy(numbers).half())
    assert seen == ["odd", "half"]
