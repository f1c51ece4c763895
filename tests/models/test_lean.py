"""The command line starts without what decoding never uses; nothing is different for it, and nothing stays replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.models import lean, skeleton
from genctl.models.hub import load
from genctl.params import Runtime
from tests.tiny import ARCHITECTURES, SEQ2SEQ, checkpoint, tiny

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")


def inside(code: str, *arguments: str) -> Any:
    """What `code` leaves in `told`, run in a process of its own."""
    whole = f"import sys, json\n{code}\nsys.__stdout__.write('\\n' + json.dumps(told))"
    done = subprocess.run([sys.executable, "-c", whole, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ["gpt2", "llama", "mixtral", "t5"])
def test_the_command_line_writes_text_without_importing_what_it_does_not_use(arch: str, tmp_path: Path) -> None:
    checkpoint(arch, tmp_path)
    told = inside(
        "from genctl.cli.app import run\n"
        "folder = sys.argv[1]\n"
        "status = run(['run', '-m', folder, '-n', '5', '--format', 'jsonl', '-o', folder + '/out', 'the cat'])\n"
        f"told = [status, [name for name in {HEAVY} if name in sys.modules]]",
        str(tmp_path),
    )
    assert told == [0, []]
    ids = torch.tensor([tiny_ids("the cat")])
    model = tiny(arch)
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5)[0]
    wanted = wanted[1:] if arch in SEQ2SEQ else wanted[ids.shape[1] :]
    assert json.loads((tmp_path / "out").read_text())["token_ids"] == wanted.tolist()


def tiny_ids(text: str) -> list[int]:
    from tests.tiny import tokenizer

    found: list[int] = tokenizer()(text)["input_ids"]
    return found


def test_afterwards_everything_is_as_it_was(tmp_path: Path) -> None:
    """Whatever is imported later is whole: torch.compile, DTensor, every name of transformers."""
    told = inside(
        "import genctl.cli.app, genctl.models.hub as hub\n"
        "from genctl.params import Runtime\n"
        "hub.load(Runtime(model=sys.argv[1], runtime='transformers'))\n"
        "before = 'torch._dynamo' in sys.modules or 'torch._prims' in sys.modules\n"
        "import re, torch, transformers, transformers.utils, transformers.core_model_loading as loading\n"
        "from transformers.modeling_utils import PreTrainedModel\n"
        "answers = torch.distributed.is_available() and not transformers.utils.is_torch_distributed_available()\n"
        "stands = [name for name in list(sys.modules) if 'Waiting' in type(sys.modules[name]).__name__]\n"
        "names = [transformers.WhisperModel.__name__, 'VitsModel' in dir(transformers.models)]\n"
        "import torch._dynamo.config, torch.distributed.tensor\n"
        "finders = [str(finder) for finder in sys.meta_path if 'genctl' in str(finder)]\n"
        "from transformers.masking_utils import TransformGetItemToIndex\n"
        "from torch.overrides import TorchFunctionMode\n"
        "mode = isinstance(TransformGetItemToIndex(), TorchFunctionMode)\n"
        "marked = torch.compiler.disable(lambda: 1)\n"
        "told = [before, answers, stands, finders, names, mode, marked(), loading.re is re,\n"
        "    torch._dynamo.config.__name__, torch._dynamo is sys.modules['torch._dynamo'],\n"
        "    hasattr(marked, '_torchdynamo_disable'),\n"
        "    PreTrainedModel.get_init_context.__qualname__]",
        str(checkpoint("llama", tmp_path)),
    )
    assert told == [
        False,
        True,
        [],
        [],
        ["WhisperModel", True],
        True,
        1,
        True,
        "torch._dynamo.config",
        True,
        True,
        "PreTrainedModel.get_init_context",
    ]


def test_a_part_of_what_waits_is_imported_whole_when_it_is_asked_for() -> None:
    told = inside(
        "import genctl.cli.app\n"
        "from genctl.models import lean\n"
        "with lean.imports():\n"
        "    import torch\n"
        "    waiting = type(sys.modules['torch._dynamo']).__name__\n"
        "    import torch._dynamo.exc as exc\n"
        "    whole = type(sys.modules['torch._dynamo']).__name__\n"
        "told = [waiting, whole, exc is sys.modules['torch._dynamo.exc'], exc is torch._dynamo.exc]"
    )
    assert told == ["_Waiting", "module", True, True]


SHAPES = "torch._meta_registrations"


def test_every_architecture_writes_the_same_with_the_core_of_torch_alone(tmp_path: Path) -> None:
    """One process for all of them, in which torch cannot say in Python what becomes of tensors without numbers."""
    for arch in ARCHITECTURES:
        checkpoint(arch, tmp_path / arch)
    ways = (["-n", "70"], ["-n", "9", "--num-beams", "3", "--do-sample", "--seed", "3"])
    lines = (
        "from genctl.cli.app import run\n"
        "folder, *archs = sys.argv[1:]\n"
        f"ways, told = {ways!r}, []\n"
        "for arch in archs:\n"
        "    for number, way in enumerate(ways):\n"
        "        out = ['--format', 'jsonl', '-o', f'{folder}/{arch}/LABEL{number}']\n"
        "        told.append(run(['run', '-m', f'{folder}/{arch}', *way, *out, 'the cat sat on']))\n"
    )
    first = f"told.append({SHAPES!r} in sys.modules)"
    whole = inside("import torch\n" + lines.replace("LABEL", "whole") + first, str(tmp_path), *ARCHITECTURES)
    core = inside(lines.replace("LABEL", "core") + first, str(tmp_path), *ARCHITECTURES)
    assert whole == [*([0] * len(ways) * len(ARCHITECTURES)), True]
    assert core[:-1] == whole[:-1]
    for arch in ARCHITECTURES:
        for number in range(len(ways)):
            wanted, found = ((tmp_path / arch / f"{label}{number}").read_text() for label in ("whole", "core"))
            assert json.loads(found)["token_ids"] == json.loads(wanted)["token_ids"], (arch, ways[number])


def test_what_torch_lacks_comes_before_it_is_needed(tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def nothing(history, scores):\n"
        "    x = torch.empty(1, 2, 4, 8, device='meta')\n"
        "    assert torch.nn.functional.scaled_dot_product_attention(x, x, x).shape == x.shape\n"
        "    return scores\n"
    )
    preset = tmp_path / "mine.toml"
    preset.write_text('[[processors]]\nuse = "mine:nothing"\n')
    told = inside(
        "from genctl.cli.app import run\n"
        "folder, sys.path[:0] = sys.argv[1], [sys.argv[1]]\n"
        "plain = ['run', '-m', folder, '-n', '3', '--format', 'jsonl', '-o', folder + '/out', '--force', 'the cat']\n"
        f"told = [run(plain), {SHAPES!r} in sys.modules]\n"
        "told += [run([*plain, '-p', folder + '/mine.toml', '--allow-plugins']), run([*plain, '--device', 'meta'])]\n"
        "told += [run(['inspect-cache', '-m', folder, '--plan', '--format', 'json'])]\n"
        "import torch\n"
        "told += [torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item()]",
        str(tmp_path),
    )
    assert told == [0, False, 0, 2, 0, 2.0]


def test_only_the_command_line_imports_so(tmp_path: Path) -> None:
    told = inside(
        "import genctl.models.hub as hub, os\n"
        "from genctl.models import lean\n"
        "library = lean.possible()\n"
        "import genctl.cli.app\n"
        "line = lean.possible()\n"
        "os.environ['WORLD_SIZE'] = '2'\n"
        "told = [library, line, lean.possible()]"
    )
    assert told == [False, True, False]


def test_where_it_cannot_be_done_the_import_is_a_whole_one(tmp_path: Path) -> None:
    told = inside(
        "import genctl.cli.app, genctl.models.hub as hub\n"
        "from genctl.models import lean\n"
        "from genctl.params import Runtime\n"
        "lean._DYNAMO, before = 'torch._dynamo', lean._unmarked\n"
        "def broken(*_, **__): raise RuntimeError('a torch that does not bear it')\n"
        "lean._unmarked = broken\n"
        "model = hub.load(Runtime(model=sys.argv[1], runtime='transformers')).model\n"
        "told = [type(model).__name__, 'torch._dynamo' in sys.modules]",
        str(checkpoint("llama", tmp_path)),
    )
    assert told == ["LlamaForCausalLM", True]


def test_damage_is_told_once_and_in_the_same_words(tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    tiny("llama", intermediate_size=48).config.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "genctl", "run", "-m", str(tmp_path), "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("hint"))
    assert "the shape in the weight files is not the one that config.json implies" in line


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_is_built_without_numbers_and_read_as_it_was_saved(arch: str, tmp_path: Path) -> None:
    saved = tiny(arch)
    folder = checkpoint(arch, tmp_path)
    with skeleton.built():
        model = load(Runtime(model=str(folder), runtime="transformers")).model
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())
    tables = dict(model.named_buffers())
    for name, table in saved.named_buffers():
        torch.testing.assert_close(tables[name], table, rtol=0.0, atol=0.0)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_large_parameters_have_no_numbers_while_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    seen: list[bool] = []
    post = modeling_llama.LlamaForCausalLM.post_init

    def watched(self: Any) -> None:
        seen.extend(weight.is_meta for weight in self.parameters() if weight.ndim == 2)
        post(self)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "post_init", watched)
    folder = checkpoint("llama", tmp_path)
    with skeleton.built():
        load(Runtime(model=str(folder), runtime="transformers"))
    assert len(seen) == 16
    assert all(seen)


def test_an_architecture_that_does_not_bear_it_is_built_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def read() -> str:
        from transformers.modeling_utils import PreTrainedModel

        calls.append("contexts" in PreTrainedModel.get_init_context.__qualname__)
        if calls[-1]:
            raise RuntimeError("Tensor on device cpu is not on the expected device meta!")
        return "model"

    monkeypatch.delitem(sys.modules, "sympy", raising=False)
    assert skeleton.built_or_plain(read) == "model"
    assert calls == [True, False]
    assert skeleton.built_or_plain(read, wanted=False) == "model"
    assert calls == [True, False, False]


def test_in_this_process_nothing_is_lean() -> None:
    """transformers is imported already, and must not be touched."""
    assert not lean.possible()
