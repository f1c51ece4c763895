"""Who computes a checkpoint: the native runtime for what it knows, transformers' classes for the rest; and which."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.errors import ModelError, UsageError
from genctl.models import check, hub, runtime_choice
from genctl.native import load
from genctl.native.runtime import NativeModel
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.hostile.damage import edit
from tests.tiny import checkpoint
from tests.warm import python


def native(folder: Path, *, trust: bool = False, **options: Any) -> bool:
    loaded = hub.load(Runtime(**{"model": str(folder), "runtime": "auto", **options}), trust_remote_code=trust)
    assert loaded.runtime.startswith("native (" if isinstance(loaded.model, NativeModel) else "transformers (")
    return isinstance(loaded.model, NativeModel)


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run here runs natively where it can."""
    monkeypatch.setenv("GENCTL_RUNTIME", "auto")


def test_auto_takes_what_is_known_and_equal(llama: Path, tmp_path: Path) -> None:
    assert native(llama)
    assert native(llama, pack=False)
    assert native(llama, device="cpu", dtype="float32")
    assert native(llama, dtype="bfloat16")
    assert native(llama, dtype="float16")
    assert native(llama, quantize="int8")
    assert not native(llama, trust=True)
    assert not native(llama, runtime="transformers")
    assert not native(checkpoint("mamba", tmp_path))


def changed(folder: Path, **fields: Any) -> Path:
    edit("config.json", **fields)(checkpoint("llama", folder))
    return folder


def test_a_field_that_is_not_known_is_transformers(tmp_path: Path) -> None:
    folder = changed(tmp_path, attention_twice=True)
    assert not native(folder)
    with pytest.raises(ModelError, match=r"--runtime native: config\.json: attention_twice"):
        native(folder, runtime="native")


def on(device: str, folder: Path, runtime: Runtime) -> str:
    made = check.inspect(folder, allow_pickle=False, trust_remote_code=False, need_tokenizer=False)
    plan, _ = runtime_choice.plan(runtime, made, trust_remote_code=False)
    assert plan is not None
    return runtime_choice.device_reason(runtime, torch.device(device))


@pytest.mark.parametrize("arch", ["llama", "t5"])
def test_a_gpu_runs_natively_what_a_cpu_does(arch: str, tmp_path: Path) -> None:
    folder = checkpoint(arch, tmp_path)
    for runtime in (Runtime(), Runtime(runtime="native")):
        assert on("cuda", folder, runtime) == on("cuda:1", folder, runtime) == on("cpu", folder, runtime) == ""
    assert on("mps", folder, Runtime()) == "the device is mps"
    with pytest.raises(UsageError, match="native runs on the CPU and on CUDA devices, not on mps"):
        on("mps", folder, Runtime(runtime="native"))


@pytest.mark.parametrize(("dtype", "read"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_tensors_are_moved_as_they_are_read(
    llama: Path, dtype: str, read: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for a GPU: it has no numbers, and a product that is not plain would fail there."""

    class Device:
        type = "cuda"

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (0, 0))  # a build with CUDA asks a driver
    given: list[Any] = []

    plain = load.read

    def to_meta(*args: Any, device: Any, **kwargs: Any) -> Any:
        given.append(device)
        return plain(*args, device=torch.device("meta"), **kwargs)

    monkeypatch.setattr(load, "read", to_meta)
    runtime = Runtime(model=str(llama), runtime="native", dtype=dtype)  # type: ignore[arg-type]
    made = check.inspect(llama, allow_pickle=False, trust_remote_code=False, need_tokenizer=False)
    plan, _ = runtime_choice.plan(runtime, made, trust_remote_code=False)
    assert plan is not None
    looked: list[str] = []
    device: Any = Device()
    found, notes = runtime_choice.load(
        plan, runtime, made, device, lambda name, tensor: looked.append(tensor.device.type), None
    )
    assert given == [device]
    assert {(tensor.device.type, tensor.dtype) for _, tensor in found.named_tensors()} == {("meta", read)}
    assert {product.form for product in found.products()} == {"plain"}
    assert found.device.type == "meta"
    assert set(looked) == {"cpu"}  # each is looked at before it moves
    told = ["float32 weights are read as bfloat16 on this GPU; --dtype float32 keeps them"]
    assert notes == (told if dtype == "auto" else [])


def test_special_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = checkpoint("gpt2", tmp_path, eos=[2, 5])
    ours = hub.load(Runtime(model=str(folder))).model.generation_config
    theirs = hub.load(Runtime(model=str(folder), runtime="transformers")).model.generation_config
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)


RUN = (
    "import sys; from genctl.commands.app import run; status = run(sys.argv[1:]);"
    "found = sorted(name for name in sys.modules if name.split('.')[0] == 'transformers');"
    "print(found[:3], file=sys.stderr); sys.exit(status or bool(found))"
)


def warm_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that has torch, and nothing of transformers."""
    return subprocess.run([*python(), "-c", RUN, *arguments], capture_output=True, text=True, check=False)


STORIES = ("builtin:stories", "-n", "6", "Once upon a time")
NUMBERS = ("builtin:numbers", "12345")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (STORIES, []),
        (STORIES, ["--num-beams", "3"]),
        (STORIES, ["--do-sample", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2", "--seed", "1"]),
        (STORIES, ["--penalty-alpha", "0.6", "--top-k", "4"]),
        (STORIES, ["--chat"]),
        (STORIES, ["--cache", "quantized", "--stop-strings", "the"]),
        (STORIES, ["--prompt-lookup-num-tokens", "3"]),
        (NUMBERS, []),
        (NUMBERS, ["--num-beams", "4", "--length-penalty", "0.5", "--num-return-sequences", "2"]),
        (NUMBERS, ["--do-sample", "--top-p", "0.9", "--seed", "1"]),
        (NUMBERS, ["--penalty-alpha", "0.6", "--top-k", "4"]),
        (NUMBERS, ["--cache", "static"]),
        (NUMBERS, ["--cache", "quantized"]),
        (NUMBERS, ["--cache", "off"]),
    ],
    ids=str,
)
def test_a_native_run_imports_no_transformers(model: tuple[str, ...], options: list[str]) -> None:
    done = warm_run("run", "-m", *model, *options)
    assert done.returncode == 0, done.stderr
    if model == NUMBERS and "--do-sample" not in options:
        assert done.stdout.splitlines()[0] == "twelve thousand three hundred forty five"
    assert done.stdout


MODULES = 128  # of genctl that a plain run may import, packages included
PLAIN = (
    "import gc, sys; from genctl import process; from genctl.commands.app import run;"
    "process.pause_collector(); status = run(sys.argv[1:]);"
    "assert gc.isenabled(); assert gc.get_freeze_count() > 100_000;"
    "strategies = {f'genctl.strategies.{name}' for name in ('beam', 'constrained', 'contrastive')};"
    "needless = {'rich', 'jinja2', 'transformers', 'huggingface_hub', 'llguidance', 'genctl.commands.run.run_view'};"
    "needless |= strategies;"
    "found = sorted(needless & set(sys.modules));"
    "own = [name for name in sys.modules if name.split('.')[0] == 'genctl'];"
    f"found += [f'{{len(own)}} modules of genctl, of which the newest are {{own[-5:]}}'] * (len(own) > {MODULES});"
    "sys.exit(status or (str(found) if found else 0))"
)


def test_a_plain_run_in_a_pipe_imports_no_more_than_it_needs_and_freezes_it() -> None:
    arguments = ["run", "-m", "builtin:stories", "-n", "3", "Once upon a time"]
    done = subprocess.run([sys.executable, "-c", PLAIN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_the_collector_of_another_program_is_left_alone(llama: Path) -> None:
    """Only a process that is ours is frozen: `process.pause_collector` was not called here."""
    before = gc.get_freeze_count()
    gc.disable()
    try:
        native(llama)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(
    ("arch", "name"), [("gpt2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("gemma2", "GemmaTokenizerFast")]
)
def test_nor_does_a_tokenizer_of_a_known_class(arch: str, name: str, tmp_path: Path) -> None:
    folder = checkpoint(arch, tmp_path)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text())
    chat = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    path.write_text(json.dumps({**told, "tokenizer_class": name, "unk_token": "<pad>", "chat_template": chat}))
    arguments = ["run", "-m", str(folder), "-n", "6", "--chat", "the cat"]
    done = warm_run(*arguments)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_left_to_transformers_is_named(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "a_field_of_tomorrow": 1}))
    done = genctl("run", "the cat", "-m", str(folder), "-n", "2", "-v")
    assert done.status == 0, done.err
    assert "runtime: native (llama)" in done.err
    assert "tokenizer: transformers (tokenizer_config.json has the field 'a_field_of_tomorrow')" in " ".join(
        done.err.split()
    )


def test_a_native_run_may_need_transformers_later(llama: Path, tmp_path: Path) -> None:
    """A processor and an assistant of transformers' in a process that runs its model natively."""
    assistant = changed(tmp_path, attention_twice=False)  # a field that only transformers' classes ignore
    arguments = ["run", "the cat", "-m", str(llama), "--assistant-model", str(assistant), "-n", "4", "-v"]
    command = [*python(), "-m", "genctl", *arguments, "--do-sample", "--typical-p", "0.9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "note: runtime: native (llama)" in done.stderr
