"""Every command on a GPU: a fake one (`fake_cuda`), or with `-m gpu` the machine's own.

In float32, so that the texts are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.tool import Done, genctl, ok
from tests.fake_cuda import fake_gpu
from tests.tiny import checkpoint

pytestmark = pytest.mark.usefixtures("clean_environment")

STORIES = "builtin:stories"
TEXT = "Once upon a time"
RUN = ("run", "-m", STORIES, TEXT, "-n", "12")
# commands with the same output as on a CPU
SAME: dict[str, tuple[str, ...]] = {
    "a prompt": RUN,
    "prompts together": (*RUN, "The dog ran", "A", "--batch-size", "2"),
    "beams": (*RUN, "--num-beams", "3"),
    "groups": (*RUN, "--num-beams", "4", "--num-beam-groups", "2", "--diversity-penalty", "0.5"),
    "forced words": (*RUN, "--num-beams", "3", "--force-words", "dog"),
    "static": (*RUN, "--cache", "static"),
    "offloaded": (*RUN, "--cache", "offloaded"),
    "no cache": (*RUN, "--cache", "off"),
    "lookup": (*RUN, "--prompt-lookup-num-tokens", "3"),
    "assistant": (*RUN, "--assistant-model", STORIES),
    "early exit": (*RUN, "--assistant-early-exit", "1"),
    "contrastive": (*RUN, "--penalty-alpha", "0.6", "--top-k", "4"),
    "dola": (*RUN, "--dola-layers", "low"),
    "guidance": (*RUN, "--guidance-scale", "1.5"),
    "grammar": (*RUN, "--regex", "[a-z ]+"),
    "processors": (*RUN, "--repetition-penalty", "1.2", "--no-repeat-ngram-size", "2", "--set", "suppress_tokens=[5]"),
    "stop": (*RUN, "--stop-strings", ","),
    "top tokens": (*RUN, "--format", "text", "--top-logprobs", "3"),
    "int8": (*RUN, "--quantize", "int8"),
    "int4": (*RUN, "The dog ran", "--quantize", "int4"),
    "transformers": (*RUN, "--runtime", "transformers"),
    "draws by their place": (*RUN, "The dog", "--do-sample", "--seed", "1", "--top-k", "0", "--sampler", "counter"),
    "drawn drafts": (*RUN, "--prompt-lookup-num-tokens", "3", "--do-sample", "--seed", "1", "--sampler", "counter"),
    "few draws by their place": (
        *RUN, "--do-sample", "--seed", "2", "--num-return-sequences", "3", "--sampler", "counter",
    ),
}  # fmt: skip
# commands that print figures with uncertain last digits, or that sample
OTHERS: dict[str, tuple[str, ...]] = {
    "samplers": (*RUN, "--do-sample", "--seed", "1", "--top-p", "0.9", "--top-k", "9", "--min-p", "0.1"),
    "mirostat": (*RUN, "--do-sample", "--seed", "1", "--typical-p", "0.9", "--temperature", "1.5"),
    "8-bit cache": (*RUN, "--cache", "quantized"),
    "score": ("score", "-m", STORIES, "Once upon a time there was a dog"),
    "rank": ("score", "-m", STORIES, "--rank", TEXT, "The dog ran"),
    "inspect": ("inspect-cache", "-m", STORIES, TEXT, "--steps", "3", "--num-beams", "3"),
    "expand": ("explore", "-m", STORIES, TEXT, "--expand", "depth=2,nodes=20"),
    "compare": ("compare", "-m", STORIES, TEXT, "-p", "greedy", "-p", "creative", "-n", "6"),
    "parity": ("parity", STORIES, f"{STORIES}@batch_size=1", TEXT, "-n", "6"),
}
PAIRS = {
    "native on both": ("device=cuda", "device=cpu"),
    "the other way": ("device=cpu", "device=cuda"),
    "transformers on the CPU": ("device=cuda", "device=cpu,runtime=transformers"),
    "bfloat16": ("device=cuda,dtype=float32", "device=cuda,dtype=bfloat16"),
    "8 bits on both": ("device=cuda,quantize=int8", "device=cpu,quantize=int8"),
    "4 bits and none": ("device=cuda,quantize=int4", "device=cpu"),
}
KINDS = ("llama", "gpt2", "mistral", "gemma2", "bloom", "mixtral", "t5", "bart", "mamba")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_gpu(monkeypatch):
        yield


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> None:
    """A GPU: the fake one, or the machine's."""
    if request.param == "fake":
        if torch.cuda.is_available():
            pytest.skip("there is a real one")
        request.getfixturevalue("fake")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def on(device: str, *words: str, dtype: str = "float32", stdin: str | None = None) -> Done:
    return genctl(*words, "--device", device, "--dtype", dtype, stdin=stdin)


@pytest.mark.parametrize("name", SAME)
def test_texts_are_those_of_a_cpu(name: str, gpu: None) -> None:
    wanted, found = on("cpu", *SAME[name]), on("cuda", *SAME[name])
    assert (found.status, found.out) == (0, wanted.out), found.err


@pytest.mark.parametrize("name", OTHERS)
def test_commands_end_well(name: str, gpu: None) -> None:
    done = on("cuda", *OTHERS[name])
    assert done.status == 0, done.err
    assert done.out


@pytest.mark.parametrize("name", PAIRS)
def test_two_devices_are_compared(name: str, gpu: None, llama: Path) -> None:
    sides = [f"{llama}@{settings}" for settings in PAIRS[name]]
    done = ok("parity", *sides, "a b c d", "e f", "-n", "3", "--layers", "--format", "jsonl")
    assert done.records[0]["verdict"] in ("tie", "drift")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_writes_what_it_writes_on_a_cpu(kind: str, gpu: None, tmp_path: Path) -> None:
    words = ("run", "-m", str(checkpoint(kind, tmp_path)), "a b c d", "e", "f g a b c", "-n", "9", "--batch-size", "3")
    for more in ((), ("--num-beams", "2")):
        wanted, found = on("cpu", *words, *more), on("cuda", *words, *more)
        assert (found.status, found.out) == (0, wanted.out), found.err


def test_a_chat_goes_on_with_what_it_has_read(gpu: None) -> None:
    words = ("chat", "-m", STORIES, "-n", "8")
    wanted, found = (on(device, *words, stdin="hello\nand you?\n") for device in ("cpu", "cuda"))
    assert (found.status, found.out) == (0, wanted.out), found.err


@pytest.mark.parametrize(("saved", "used"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_a_saved_prompt_is_used(saved: str, used: str, gpu: None, tmp_path: Path) -> None:
    path = str(tmp_path / "prompt.safetensors")
    done = on(saved, "inspect-cache", "-m", STORIES, TEXT, "--steps", "1", "--save-cache", path)
    assert done.status == 0, done.err
    found = on(used, *RUN, "--prompt-cache", path)
    assert (found.status, found.out) == (0, on("cpu", *RUN).out), found.err


def test_a_golden_file_of_a_cpu_is_checked(gpu: None, tmp_path: Path, llama: Path) -> None:
    path = str(tmp_path / "golden.jsonl")
    done = on("cpu", "parity", str(llama), "a b c d", "-n", "6", "--save", path)
    assert done.status == 0, done.err
    done = on("cuda", "parity", str(llama), "--expect", path)
    assert done.status == 0, done.err


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("how", ["--merge-adapter", "--no-merge-adapter"])
def test_an_adapter_changes_the_same_tokens(how: str, gpu: None, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.models.test_adapter import lora

    base = checkpoint("llama", tmp_path / "base")
    words = ("run", "-m", str(base), "a b c d", "-n", "9")
    adapted = (*words, "--adapter", str(lora(base, tmp_path / "adapter")), how)
    wanted, found = on("cpu", *adapted), on("cuda", *adapted)
    assert (found.status, found.out) == (0, wanted.out), found.err
    assert found.out != on("cpu", *words).out


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_it_is_said_why_torch_multiplies_with_rounded_weights(quantize: str, gpu: None) -> None:
    done = on("cuda", *RUN, "--quantize", quantize, "-v")
    why = "the kernels compute in bfloat16 and float16, not in float32"
    assert f"note: torch multiplies with {quantize} weights: {why}\n" in done.err
    assert "17 linear layers with weights in" in done.err


def test_tokens_on_two_devices_do_not_meet(fake: None) -> None:
    """The purpose of the fake GPU."""
    add: Callable[[], object] = lambda: torch.zeros(2, device="cuda") + torch.ones(2)  # noqa: E731
    with pytest.raises(RuntimeError, match="same device"):
        add()
