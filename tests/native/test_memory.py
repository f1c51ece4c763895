"""What a packed, quantised or converted weight replaces does not stay in memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from genctl.native import kernels, linear, pages
from genctl.native.files import mapped
from genctl.native.linear import Float16, Mapped, Products
from genctl.native.products.library import library
from tests.tiny import save, tiny
from tests.warm import python

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident")

RUN = """
import json, re, sys
from pathlib import Path
import torch
from genctl.models.hub import load
from genctl.native.runtime import NativeRuntime
from genctl.params import Runtime

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def resident():
    held, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]: inside = line.endswith(".safetensors")
        elif inside and line.startswith("Rss:"): held += int(line.split()[1])
    return held * 1024

load(Runtime(model="builtin:stories", runtime="native"))  # what any run takes
options = json.loads(sys.argv[2])
before = anonymous()
model = load(Runtime(model=sys.argv[1], runtime="native", **options)).model
runtime = NativeRuntime(model)
cache = runtime.new_cache(room=8)
tokens = torch.ones(1, 4, dtype=torch.long)
runtime(tokens, cache, first=True)
runtime(tokens[:, :1], cache)
print(json.dumps({"anonymous": anonymous() - before, "file": resident(), "bytes": model.bytes()}))
"""


@pytest.mark.parametrize(
    ("stored", "options", "most"),
    [
        ("float32", {}, 1.0),
        ("bfloat16", {}, 1.0),
        ("float32", {"dtype": "bfloat16"}, 0.5),
        ("bfloat16", {"dtype": "float32"}, 2.0),
        ("float32", {"quantize": "int8"}, 0.25),
        ("bfloat16", {"quantize": "int8"}, 0.5),
        ("float32", {"quantize": "int4"}, 0.1875),
    ],
)
def test_a_run_holds_each_weight_once(stored: str, options: dict[str, str], most: float, tmp_path: Path) -> None:
    """After a prompt and a token, GPT-2's weights take `most` of the file's size, and little beside it."""
    plain, own = stored == "float32" and not options, library() is not None
    if not plain and not own and not (kernels.has_float16() and kernels.has_onednn(torch.bfloat16)):
        pytest.skip("this CPU multiplies with weights as they are")
    torch.manual_seed(0)
    model = tiny("gpt2", n_embd=512, n_layer=6, tie_word_embeddings=True)
    folder = save(model.to(getattr(torch, stored)), tmp_path)
    done = subprocess.run(
        [*python(), "-c", RUN, str(folder), json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    size = (folder / "model.safetensors").stat().st_size
    stays = not options if own else plain and kernels.has_columns(torch.float32)  # read as it lies in the file
    assert held["file"] < (1.05 if stays else 0.1) * size  # else all but embeddings, norms and biases is let go
    assert held["anonymous"] < (0.1 if stays else 1.25 * most) * size + (6 << 20)


def test_links_to_files_without_a_suffix_are_known(tmp_path: Path) -> None:
    """The Hub's cache keeps a file under its hash, with a link from its name."""
    (tmp_path / "blobs").mkdir()
    save_file({"weight": torch.ones(1 << 16)}, tmp_path / "blobs" / "abcdef")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "abcdef")
    weight = mapped([tmp_path / "model.safetensors"])("weight")
    assert pages.release(weight, pages.mapped_files()) >= weight.nbytes - 8192
    assert weight.sum() == 1 << 16  # read again


@pytest.mark.parametrize("transposed", [False, True])
def test_panels_of_slices_compute_what_those_of_the_whole_do(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.has_float16():
        pytest.skip("FBGEMM is not here")
    torch.manual_seed(0)
    matrix, bias = torch.randn(1001, 96).bfloat16(), torch.randn(1001).bfloat16()
    if transposed:
        matrix = matrix.t().contiguous().t()
    whole = Float16(matrix, bias)
    monkeypatch.setattr(linear, "SLICE", 1 << 14)
    sliced = Float16(matrix, bias)
    assert len(whole.panels) == 1
    assert len(sliced.panels) == 7
    for rows in (1, 5, 40):
        x = torch.randn(rows, 1, 96).bfloat16()
        assert torch.equal(sliced(x), whole(x))


@pytest.mark.parametrize("across", [False, True])
def test_a_converted_weight_is_made_again_when_it_is_asked_for(across: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "library", lambda: None)
    if not kernels.has_onednn(torch.float32):
        pytest.skip("oneDNN is not here")
    torch.manual_seed(0)
    stored = torch.randn(768, 512).half()
    products = Products()

    def made() -> Tensor:
        weight = products.converted(stored, torch.float32)
        return weight.t() if across else weight

    product = products.linear(made())
    assert isinstance(product, Mapped)
    numbers = stored.float().t() if across else stored.float()
    prompt, rows = torch.randn(1, 9, numbers.shape[1]), torch.randn(5, 1, numbers.shape[1])
    before = product(prompt)
    assert product.held is not None
    product(rows)  # packs
    assert product.held is None
    assert product.tensors()[0].nbytes == numbers.nbytes
    assert torch.equal(product(prompt), before)
    assert torch.equal(product.weight, numbers)
    assert product.weight.is_contiguous() != across
