"""Sound checkpoints load: every architecture, where and as what they should."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genctl.errors import ModelError, UsageError
from genctl.events import Loading
from genctl.models.hub import LoadedModel, load
from genctl.models.runtime_choice import placement
from genctl.params import Runtime
from tests.tiny import ARCHITECTURES, EOS, SEQ2SEQ, tiny


def loaded(folder: Path, **options: object) -> LoadedModel:
    return load(Runtime(model=str(folder), **{"runtime": "transformers", **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_loads_as_it_was_saved(arch: str, tmp_path: Path) -> None:
    saved = tiny(arch, tmp_path)
    found = loaded(tmp_path)
    assert found.is_encoder_decoder == (arch in SEQ2SEQ)
    assert type(found.model) is type(saved)
    assert not found.model.training
    assert found.generation.values["eos_token_id"] == EOS
    assert found.vocab_size == 300
    ids = torch.tensor([[5, 60, 250, 7]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if arch in SEQ2SEQ else {})}
    with torch.no_grad():  # the last bits may follow how the weights lie in memory
        torch.testing.assert_close(found.model(**inputs).logits, saved(**inputs).logits, rtol=0.0, atol=1e-4)
    weights = found.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.state_dict().items())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_have_clear_winners_and_varied_text(arch: str) -> None:
    """What parity tests stand on: a flat or stuck model would hide a wrong cache or mask."""
    model = tiny(arch)
    gaps, longest = [], 0
    for prompt in ([11, 48, 205, 93, 160], [5, 60, 250, 7], [299, 3, 150]):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = torch.stack(made.scores)[:, 0]  # f32 [T, V]
        best = scores.topk(2).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
        longest = max(longest, len(set(made.sequences[0, -len(scores) :].tolist())))
    assert sum(gap < 1e-2 for gap in gaps) <= len(gaps) // 20
    assert longest >= 4


def test_progress_is_told_and_nothing_is_printed(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[Loading] = []
    load(Runtime(model=str(llama)), on_event=heard.append)
    assert [one.done for one in heard] == list(range(1, 22))
    assert heard[-1] == Loading(str(llama), 21, 21, "tensors")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "--device 'gpu' is not available; here there are: .*cpu"),
        ({"device": "cuda:99"}, "--device 'cuda:99' is not available"),
        ({"device": "meta"}, "--device meta holds no numbers"),
        ({"device": ""}, "--device '' is not available"),
        ({"device": "cpu", "device_map": "auto"}, "--device-map auto and --device cpu both say"),
        ({"device_map": "sideways"}, "--device-map 'sideways' is none of auto"),
        ({"max_memory": "cpu=1GB"}, "--max-memory needs --device-map"),
        ({"offload_folder": "x"}, "--offload-folder needs --device-map"),
        ({"device_map": "auto", "max_memory": "cpu"}, "'cpu' is not like 0=20GiB"),
        ({"device_map": "auto", "max_memory": "cpu=1GB,cpu=2GB"}, "names cpu twice"),
        ({"device_map": "auto", "max_memory": ""}, "'' is not like"),
        ({"revision": "main"}, "--revision main makes no sense with"),
        ({"model": ""}, "the model's name is empty"),
        ({"model": "a\0b"}, "holds a NUL"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, str], said: str, llama: Path) -> None:
    with pytest.raises(UsageError, match=said):
        load(Runtime(**{"model": str(llama), **options}))  # type: ignore[arg-type]


def test_max_memory_is_read_as_accelerate_wants_it() -> None:
    arguments = placement(Runtime(device_map="auto", max_memory="0=20GiB, cpu = 1.5 GB,disk=9TB"))
    assert arguments["max_memory"] == {0: "20GiB", "cpu": "1.5GB", "disk": "9TB"}


INDEX = "model.safetensors.index.json"


def sharded(folder: Path, place: Path) -> Path:
    """The checkpoint in several files."""
    made = Path(shutil.copytree(folder, place / "sharded"))
    (made / "model.safetensors").unlink()
    load(Runtime(model=str(folder), runtime="transformers")).model.save_pretrained(made, max_shard_size="50KB")
    assert (made / INDEX).is_file()
    return made


def test_an_index_of_shards_needs_no_metadata(llama: Path, tmp_path: Path) -> None:
    folder = sharded(llama, tmp_path)
    index = folder / INDEX
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    assert load(Runtime(model=str(folder), runtime="native")).vocab_size == 300


def test_a_shard_that_is_missing_or_elsewhere_is_named(llama: Path, tmp_path: Path) -> None:
    folder = sharded(llama, tmp_path)
    shard = sorted(folder.glob("model-0*.safetensors"))[0]
    other = shard.rename(shard.with_name(shard.name.replace("model", "Model")))
    with pytest.raises(ModelError, match=f"1 of 4 shards are missing: {shard.name}"):
        load(Runtime(model=str(folder)))
    index = folder / INDEX
    index.write_text(index.read_text().replace(shard.name, str(other)))
    with pytest.raises(ModelError, match="names a weight file outside the folder, or of another format: /"):
        load(Runtime(model=str(folder)))


def test_torch_and_transformers_are_not_imported_before_they_are_needed() -> None:
    code = (
        "import sys, genctl.models.hub, genctl.models.check, genctl.models.text, genctl.models.chat\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "from genctl.params import Runtime\n"
        "from genctl.errors import ModelError\n"
        "try:\n    genctl.models.hub.load(Runtime(model='./nowhere'))\n"
        "except ModelError:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
