"""The models that an engine may have run in place of a checkpoint: its weights with another config.json, and others."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from genctl.models.hub import LoadedModel
from genctl.parity.sides import LocalSide

Config = dict[str, Any]
Change = tuple[str, str, Config]  # the key of a cause, its parameter, and what config.json would say


def changes(config: Mapping[str, Any]) -> Iterator[Change]:
    """What an engine may have taken a config.json for."""
    rope = config.get("rope_parameters") if isinstance(config.get("rope_parameters"), dict) else None
    scaling = config.get("rope_scaling") if isinstance(config.get("rope_scaling"), dict) else None
    kind = str((scaling or rope or {}).get("rope_type", (scaling or rope or {}).get("type", "default")))
    theta = (rope or {}).get("rope_theta", config.get("rope_theta"))
    if kind != "default":
        plain = {"rope_type": "default", **({"rope_theta": theta} if theta is not None else {})}
        yield "rope-scaling-ignored", "", {"rope_parameters": plain, "rope_scaling": None}
    elif theta is not None or rope is not None:
        trained = int(config.get("max_position_embeddings") or 0)
        for name in ("linear", "yarn"):
            for factor in (2.0, 4.0, 8.0):
                scaled: Config = {"rope_type": name, "factor": factor, "rope_theta": theta or 10000.0}
                if name == "yarn":
                    scaled["original_max_position_embeddings"] = trained
                yield "rope-scaling-added", f"{name} by {factor:g}", {"rope_parameters": scaled, "rope_scaling": None}
    if isinstance(theta, (int, float)):
        for other in (10000.0, 500000.0, 1000000.0):
            if other != theta:
                yield "rope-theta-ignored", f"{other:g}", {
                    "rope_theta": other,
                    **({} if rope is None else {"rope_parameters": {**rope, "rope_theta": other}}),
                }  # fmt: skip
    window = config.get("sliding_window")
    if isinstance(window, int) and window > 1 and config.get("use_sliding_window") is not False:
        longest = max(window, 1 << 24) + 1  # than any text
        yield "window-ignored", "", {"sliding_window": longest}
        for other in (window - 1, window + 1):
            yield "window-off-by-one", str(other), {"sliding_window": other}
    for name, words in (("final_logit_softcapping", "logits"), ("attn_logit_softcapping", "scores")):
        if config.get(name):
            yield "softcap-missing", words, {name: None}
    for name in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"):
        if isinstance(eps := config.get(name), float):
            for other in (1e-5, 1e-6, 1e-12):
                if other != eps:
                    yield "epsilon", f"{other:g}", {name: other}


class OtherModels:
    """Loads models that differ from that of a side. A context manager: their folders are temporary."""

    def __init__(self, side: LocalSide, others: Sequence[str] = ()) -> None:
        """`others`: checkpoints that may run in its place."""
        self._side, self._others, self._stack = side, others, ExitStack()

    def __enter__(self) -> OtherModels:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def all(self) -> Iterator[tuple[str, str, Callable[[], LocalSide]]]:
        """Key and parameter of a cause, and what loads its model. Loading raises ModelError."""
        loaded, runtime = self._side.session.loaded, self._side.session.planner.runtime
        if (adapter := runtime.adapter) is not None:
            yield "adapter-missing", "", lambda: self._load({"adapter": None})
            yield "adapter-doubled", "", lambda: self._doubled(Path(str(adapter)))
        if loaded.checkpoint is not None and not loaded.checkpoint.gguf:
            for key, parameter, config in changes(loaded.checkpoint.config):
                yield key, parameter, partial(self._with_config, loaded, config)
        for name in self._others:
            change = {"model": name, "revision": None, "quantize": None, "dequantize": name.endswith(".gguf")}
            yield "checkpoint-other", name, partial(self._load, change)

    def _load(self, change: Mapping[str, Any]) -> LocalSide:
        session = self._side.loaded_again(replace(self._side.session.planner.runtime, **change))
        if session.forward.vocab_size != self._side.vocabulary:
            session.close()
            raise ValueError
        return LocalSide(self._side.name, session, self._side.resolved, whole=True)

    def _with_config(self, loaded: LoadedModel, change: Config) -> LocalSide:
        """The files of a checkpoint beside another config.json."""

        def changed(own: Config) -> Config:
            # null is not the same as nothing, which may stand for a default
            return {key: value for key, value in (own | change).items() if value is not None or key in own}

        return self._load({"model": self._copy(loaded.path, "config.json", changed)})

    def _doubled(self, adapter: Path) -> LocalSide:
        """An adapter with twice the effect."""
        twice = self._copy(
            adapter, "adapter_config.json", lambda own: own | {"lora_alpha": 2 * own.get("lora_alpha", 8)}
        )
        return self._load({"adapter": twice})

    def _copy(self, source: Path, name: str, change: Callable[[Config], Config]) -> str:
        """A folder with the files of another one, and a changed config that has this name there."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="genctl-audit-")))
        for path in source.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path.resolve())
        config = change(json.loads((source / name).read_text(encoding="utf-8")))
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
        return str(folder)
