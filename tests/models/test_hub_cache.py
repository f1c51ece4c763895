"""Hub ids: from a cache on disk, through a download, and when nobody answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.tiny import tiny
from tests.warm import python

from .hub_standin import COMMIT, lay_out, serve

ROOT = Path(__file__).parents[2]


def probe(home: Path, requests: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """Run the requests in a fresh process with HF_HOME = home; it must print its answer and nothing else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    settings = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", **environment}
    command = [*python(), "-m", "tests.models.hub_probe", json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **settings}, check=False, cwd=home)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads(done.stdout)
    assert all("\n" not in result.get("error", "") for result in results)
    return list(results)


def test_loads_from_the_cache_offline(tmp_path: Path, gpt2: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = lay_out(cache, "gpt2", gpt2)
    other = lay_out(cache, "openai-community/gpt2-medium", gpt2)
    lay_out(cache, "somebody/distilgpt2", gpt2)
    found, redirected, by_commit, stranger, pinned = probe(
        tmp_path,
        [
            {"model": "gpt2", "offline": True, "load": True},
            {"model": "gpt2-medium", "offline": True},
            {"model": "gpt2", "offline": True, "revision": COMMIT},
            {"model": "distilgpt2", "offline": True},
            {"model": "gpt2", "offline": True, "revision": "v9"},
        ],
    )
    assert (found["folder"], found["name"], found["tokens"], found["notes"]) == (str(snapshot), "gpt2", 300, [])
    assert redirected["folder"] == str(other)
    assert by_commit["folder"] == str(snapshot)
    assert stranger["error"] == "ModelError: distilgpt2 is not in the cache, and the Hub is not used (--offline)"
    assert "cached: gpt2, openai-community/gpt2-medium, somebody/distilgpt2" in stranger["hint"]
    assert "builtin:stories" in stranger["hint"]
    assert "gpt2 (v9) is not in the cache" in pinned["error"]


def test_the_environment_keeps_it_offline_and_an_empty_cache_says_so(tmp_path: Path) -> None:
    (missing,) = probe(tmp_path, [{"model": "gpt2"}], HF_HUB_OFFLINE="1")
    assert missing["error"] == "ModelError: gpt2 is not in the cache, and the Hub is not used (HF_HUB_OFFLINE is set)"
    assert f"nothing is cached in {tmp_path / 'hub'}" in missing["hint"]


def test_an_unreachable_hub_is_said_and_the_cache_used(tmp_path: Path, gpt2: Path) -> None:
    snapshot = lay_out(tmp_path / "elsewhere", "gpt2", gpt2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        cached, missing, exact = probe(
            tmp_path,
            [{"model": "gpt2"}, {"model": "org/other"}, {"model": "gpt2", "revision": COMMIT}],
            HF_ENDPOINT=endpoint,
            HF_HUB_CACHE=str(tmp_path / "elsewhere"),
            HF_TOKEN="hf_secret_token",
        )
    assert cached["folder"] == str(snapshot)
    (note,) = cached["notes"]
    assert note.startswith(f"the Hub ({endpoint}) cannot be reached: ")
    assert note.endswith("; using the cached gpt2")
    assert "org/other is not in the cache" in missing["error"]
    assert missing["hint"].startswith("cached: gpt2;")
    assert exact["notes"] == []
    assert "hf_secret_token" not in json.dumps([cached, missing])


def test_downloads_only_what_is_needed_and_tells_the_progress(tmp_path: Path, gpt2: Path) -> None:
    source = tmp_path / "source"
    tiny("gpt2", source)
    for name in ("pytorch_model.bin", "model.fp16.safetensors", "modeling_own.py", "README.md", "tf_model.h5"):
        (source / name).write_text("print('never downloaded')", encoding="utf-8")
    pickled, bare = tmp_path / "pickled", tmp_path / "bare"
    pickled.mkdir()
    bare.mkdir()
    (pickled / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    (bare / "data.csv").write_text("1", encoding="utf-8")
    repositories = {"org/tiny": source, "org/pickled": pickled, "org/bare": bare}
    with serve(repositories, gated=("org/gated",)) as hub:
        requests: list[dict[str, Any]] = [
            {"model": "org/tiny", "load": True},
            {"model": "org/tiny"},
            {"model": "org/tiny", "revision": "v2"},
            {"model": "org/nobody"},
            {"model": "org/gated"},
            {"model": "org/pickled"},
            {"model": "org/bare"},
            {"model": "org/tiny", "offline": True},
        ]
        results = probe(tmp_path, requests, HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    loaded, again, revision, nobody, gated, refused, bare_result, offline = results
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert loaded["folder"] == again["folder"] == offline["folder"] == str(snapshot)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in snapshot.iterdir()} == wanted
    bytes_heard = [(done, total) for what, done, total, unit in loaded["heard"] if what == "org/tiny" and unit == "B"]
    size = sum((source / name).stat().st_size for name in wanted)
    assert bytes_heard[-1] == (size, size)
    assert ["org/tiny", 29, 29, "tensors"] in loaded["heard"]
    assert revision["error"] == "ModelError: org/tiny has no revision 'v2' on the Hub"
    assert nobody["error"] == "ModelError: no local folder and no checkpoint on the Hub is called org/nobody"
    assert "org/gated is gated" in gated["error"]
    assert "only pickle weights, refused without --allow-pickle" in refused["error"]
    assert "it has no config.json, only data.csv" in bare_result["error"]
    assert not [line for line in hub.asked if line.startswith("GET") and line.endswith((".bin", ".py", ".h5"))]
