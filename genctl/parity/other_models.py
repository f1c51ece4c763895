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
    for other in (10000.0, 500000.0, 1000000.0) if isinstance(theta, (int, float)) else ():
        if other != theta:
            changed = {} if rope is None else {"rope_parameters": {**rope, "rope_theta": other}}
            yield "rope-theta-ignored", f"{other:g}", {"rope_theta": other, **changed}
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


def other_models(
    side: LocalSide, others: Sequence[str], stack: ExitStack
) -> Iterator[tuple[str, str, Callable[[], LocalSide]]]:
    """Key and parameter of a cause, and what loads its model in place of a side's. Loading raises ModelError.

    `others`: checkpoints that may run in its place. `stack`: removes the folders of changed config files.
    """

    def load(change: Config) -> LocalSide:
        session = side.loaded_again(replace(side.session.planner.runtime, **change))
        if session.forward.vocab_size != side.vocabulary:
            session.close()
            raise ValueError
        return LocalSide(side.name, session, side.resolved, whole=True)

    def changed(field: str, source: Path, name: str, change: Config) -> LocalSide:
        """The side with a folder whose config file of this name has other values; null takes one away."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genctl-audit-")))
        for path in source.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path.resolve())
        own = json.loads((source / name).read_text(encoding="utf-8"))
        # null is not the same as nothing, which may stand for a default
        config = {key: value for key, value in (own | change).items() if value is not None or key in own}
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
        return load({field: str(folder)})

    loaded, adapter = side.session.loaded, side.session.planner.runtime.adapter
    if adapter is not None:
        folder, name = Path(str(adapter)), "adapter_config.json"
        yield "adapter-missing", "", partial(load, {"adapter": None})
        own = json.loads((folder / name).read_text(encoding="utf-8"))
        yield (
            "adapter-doubled",
            "",
            partial(changed, "adapter", folder, name, {"lora_alpha": 2 * own.get("lora_alpha", 8)}),
        )
    if loaded.checkpoint is not None and not loaded.checkpoint.gguf:
        for key, parameter, config in changes(loaded.checkpoint.config):
            yield key, parameter, partial(changed, "model", loaded.path, "config.json", config)
    for name in others:
        change = {"model": name, "revision": None, "quantize": None, "dequantize": name.endswith(".gguf")}
        yield "checkpoint-other", name, partial(load, change)
