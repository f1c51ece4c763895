"""What a packed, quantised or converted weight replaces does not stay in memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from genctl.native import pages
from genctl.native.pages import mapped
from tests.tiny import save, tiny
from tests.warm import python

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident")

RUN = """
import ctypes, json, re, sys
from pathlib import Path
import torch
from genctl.decode.runtime import Pass
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
loaded = anonymous() - before
runtime = NativeRuntime(model)
cache = runtime.new_cache(room=8)
tokens = torch.ones(1, 4, dtype=torch.long)
runtime(Pass(tokens, cache, first=True))
runtime(Pass(tokens[:, :1], cache))
# torch's products unpack weights for each call: what they free is not held, but kept by the C library
getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
print(json.dumps({"loaded": loaded, "anonymous": anonymous() - before, "file": resident(), "bytes": model.bytes()}))
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
    """GPT-2's weights take about `most` times the file's size: while they load, and after a prompt and a token."""
    torch.manual_seed(0)
    model = tiny("gpt2", n_embd=512, n_layer=6, tie_word_embeddings=True)
    folder = save(model.to(getattr(torch, stored)), tmp_path)
    done = subprocess.run(
        [*python(), "-c", RUN, str(folder), json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    size = (folder / "model.safetensors").stat().st_size
    stays = not options  # read as it lies in the file
    assert held["file"] < (1.05 if stays else 0.1) * size  # else all but embeddings, norms and biases is released
    for moment in ("loaded", "anonymous"):
        assert held[moment] < (0.1 if stays else 1.25 * most) * size + (6 << 20), moment


TABLE = """
import json, sys
from pathlib import Path
from genctl.models.hub import load
from genctl.params import Runtime

def resident():
    held, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]: inside = line.endswith(".safetensors")
        elif inside and line.startswith("Rss:"): held += int(line.split()[1])
    return held * 1024

seen = []
load(Runtime(model=sys.argv[1], runtime="native", quantize=sys.argv[2]), on_event=lambda event: seen.append(resident()))
print(json.dumps(seen))
"""


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_table_that_was_checked_is_let_go_before_other_weights_are_rounded(quantize: str, tmp_path: Path) -> None:
    folder = save(tiny("gpt2", n_embd=64, vocab_size=1 << 16, tie_word_embeddings=True), tmp_path)
    done = subprocess.run([*python(), "-c", TABLE, str(folder), quantize], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    table = (1 << 16) * 64 * 4
    assert first >= table  # its numbers have just been read
    assert max(others) < table / 2


def test_links_to_files_without_a_suffix_are_known(tmp_path: Path) -> None:
    """The Hub's cache keeps a file under its hash, with a link from its name."""
    (tmp_path / "blobs").mkdir()
    save_file({"weight": torch.ones(1 << 16)}, tmp_path / "blobs" / "abcdef")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "abcdef")
    weight = mapped([tmp_path / "model.safetensors"])("weight")
    assert pages.release(weight, pages.mapped_files()) >= weight.nbytes - 8192
    assert weight.sum() == 1 << 16  # read again
