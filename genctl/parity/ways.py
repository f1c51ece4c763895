"""The ways in which an engine may have read texts, and hypotheses about them: how well each explains a trace.

docs/audit.md explains the test. M positions, E entries.

Also the models that an engine may have run instead of a checkpoint: its weights with another config.json, and others.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genctl.parity.causes import FORMS, GGUF, SEARCHED, Cause, Form, cause
from genctl.parity.numbers import CAP, RAW, Number
from genctl.parity.oracle import Oracle
from genctl.parity.prompts import Ids
from genctl.parity.sides import LocalSide

ERROR_RATE = 0.01  # the chance of naming a wrong cause, over all that are tried
FREEDOM = 4.0  # of Student's t, which models rounding: a few large deviations count little
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SEARCH = 2**12  # tokens that the cost of a cause must allow for, to try forms with searched codes


@dataclass(frozen=True)
class Way:
    """How the texts are read: another prompt for each row, another arithmetic, another model."""

    cause: Cause | None = None
    prompts: tuple[Ids, ...] | None = None  # of all rows
    dtype: torch.dtype | None = None
    form: Form | None = None
    load: Callable[[], LocalSide] | None = None

    @property
    def rounds(self) -> bool:
        """Whether it changes rounding, which is never known exactly for an engine."""
        return self.dtype is not None or self.form is not None

    def and_(self, other: Way) -> Way:
        """Both combined; `self` wins, and the cause stays its own."""
        form = self.form and other.form and self.form.and_(other.form)
        return replace(
            self, prompts=self.prompts or other.prompts, dtype=self.dtype or other.dtype,
            form=form or self.form or other.form, load=self.load or other.load,
        )  # fmt: skip


PLAIN = Way()


def declared(key: str | None) -> list[Form]:
    """The forms of the arithmetic that the engine is declared to use."""
    return [form for name, forms in FORMS.items() if key and name.startswith(key) for form in forms]


def honest(oracle: Oracle) -> Iterator[Form]:
    """How llama.cpp rounds activations in products with quantised weights, if the reference has such weights."""
    forms = (form for forms in FORMS.values() for form in forms if form.weights)
    is_gguf = any(part.type for part in oracle.parts.values())
    held = Form(weights="file") if is_gguf else next(filter(oracle.holds, forms), None)
    if held is not None and (held.activations or held.weights in ("file", *GGUF)):
        yield held


def arithmetic(oracle: Oracle, dtype: torch.dtype, declared: str | None, *, tokens: int) -> Iterator[Way]:
    """Roundings other than `dtype` and the declared ones. `tokens`: how many the cost of a cause allows."""
    model: Any = oracle.side.session.loaded.model
    is_wide = torch.float32 in oracle.stored and dtype == torch.float32
    heads = getattr(getattr(model, "spec", None), "head_dim", 1)
    for key in ("bfloat16", "float16"):
        if is_wide and not oracle.holds(FORMS[key][0]):  # else it would only allow for more rounding
            yield Way(cause(key), dtype=DTYPES[key])
    types = {key: oracle.types(FORMS[key][0]) if oracle.parts else (key,) for key in GGUF}
    alike: dict[tuple[str, ...], list[str]] = {}  # file types that give all matrices the same types, by these types
    for key in GGUF:
        alike.setdefault(types[key], []).append(key)
    for key, forms in FORMS.items():
        if (declared and key.startswith(declared)) or (key in DTYPES and not is_wide):
            continue
        first, *others = alike[types[key]] if key in GGUF else [key]
        same = f" (or {' and '.join(map(str.upper, others))}, the same here)" if others else ""
        for form in forms if key == first else ():
            slow = form.weights in SEARCHED and tokens < SEARCH
            if not (slow or (form.rotated and heads % 64) or (form.weights and oracle.holds(form))):
                yield Way(cause(key, form.parameter or same), form=form)


def cut(prompt: Ids, limit: int, *, keeps_first: bool) -> Ids:
    """The last `limit` tokens of a prompt; with `keeps_first`, its first and the last `limit - 1`."""
    return (*prompt[:1], *prompt[len(prompt) - limit + 1 :]) if keeps_first and limit > 1 else prompt[-limit:]


# -- hypotheses ------------------------------------------------------------------------------------------------------


@dataclass
class Explanation:
    """A hypothesis and what it leaves, [M] of the rows that it was tried on."""

    causes: tuple[Cause, ...]
    ways: tuple[Way, ...]
    number: Number
    sizes: Tensor  # f64, nats
    scale: Tensor  # f64, of the noise
    left: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64 [E], written less predicted
    likelihood: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64, its logarithm
    ratio: float = math.nan  # median ratio of sizes to noise
    tail: float = math.nan  # upper quantile of that ratio
    median: float = math.nan  # of sizes
    explained: float = 0.0  # share of the difference
    off: float = 0.0  # nats by which an engine may round differently from its form
    sharp: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64, the noise if it rounds exactly like its form
    plausible: bool = True  # the data confirm the direction of its change, not only the size

    def nothing_at(self, keep: Tensor | slice) -> Explanation:
        """The empty hypothesis at some of the positions, with the same sizes and noise."""
        return Explanation((), (), RAW, self.sizes[keep], self.scale[keep], sharp=self.sharp[keep])

    @property
    def total(self) -> float:
        """The log-likelihood of all that is left."""
        return float(self.likelihood.sum())

    @property
    def keys(self) -> frozenset[str]:
        """The causes without their parameters."""
        return frozenset(one.key for one in self.causes)

    @property
    def words(self) -> str:
        """The causes in words."""
        return " and ".join(one.sentence for one in self.causes) or "nothing"


def contains(one: Explanation, other: Explanation) -> bool:
    """Whether a hypothesis has all causes of another, and more: if the other fits, it is the simpler one."""
    return other.keys < one.keys


def slope(base: Tensor, moved: Tensor) -> float:
    """The share of a cause's effect that is in the data: 1 if all of it is."""
    there = base.isfinite() & moved.isfinite()
    size = moved[there].abs().median() * 8 + 1e-30
    x, y = moved[there].clamp(-size, size), base[there].clamp(-size, size)
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def excess(one: Explanation, known: Tensor) -> float:
    """What exceeds twice the noise, in nats, summed over known positions."""
    return float((one.sizes[known].clamp(max=CAP) - 2 * one.scale[known]).clamp(min=0).sum())


def likelihood(one: Explanation, known: Tensor) -> Tensor:
    """The log-density of the residuals at each known position, with the factor on the scale that fits them best.

    An engine's codes equal those of its form at some positions, until rounding moves one, and then others: so half of
    the density is that of the noise alone.
    """
    size = one.sizes[known] + 1e-12
    scales = [one.scale[known], one.sharp[known] if len(one.sharp) else one.scale[known]]
    best: Tensor | None = None
    for factor in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0):
        wide, sharp = (
            -(scale * factor).log() - (FREEDOM + 1) / 2 * (1 + (size / (scale * factor)).square() / FREEDOM).log()
            for scale in scales
        )
        found = torch.logaddexp(wide, sharp) - math.log(2)
        if best is None or float(found.sum()) > float(best.sum()):
            best = found
    assert best is not None
    return best


def sign_test(wins: int, trials: int) -> float:
    """The logarithm of the chance of at least this many wins, if each were a coin flip."""
    if not trials:
        return 0.0
    terms = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) - trials * math.log(2)
        for k in range(wins, trials + 1)
    ]
    most = max(terms)
    return most + math.log(math.fsum(math.exp(term - most) for term in terms))


def beats(one: Explanation, other: Explanation, count: int) -> bool:
    """Whether a hypothesis is better than another: by its likelihood, and at most of the positions that differ.

    The chance that a wrong hypothesis is 1/p times as likely as the true one is at most p (Ville 1939).
    A sign test does not rely on the distribution of rounding. `count`: hypotheses tried.
    """
    bound = math.log(max(count, 1) / ERROR_RATE)
    gain = one.likelihood - other.likelihood
    if float(gain.sum()) < bound:
        return False
    telling = gain[gain.abs() > 0.05]
    return sign_test(int((telling > 0).sum()), len(telling)) <= -bound


Config = dict[str, Any]
Change = tuple[str, str, Config]  # the key of a cause, its parameter, and fields of another config.json


def changes(config: Mapping[str, Any]) -> Iterator[Change]:
    """How an engine may have misread a config.json."""
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
        longest = max(window, 1 << 24) + 1  # longer than any text
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
    """Key and parameter of each cause, and a function that loads its model instead of a side's; it raises ModelError.

    `others`: checkpoints that may have run instead. `stack`: removes the folders of changed config files.
    """

    def load(change: Config) -> LocalSide:
        session = side.loaded_again(replace(side.session.planner.runtime, **change))
        if session.forward.vocab_size != side.vocabulary:
            session.close()
            raise ValueError
        return LocalSide(side.name, session, side.resolved, whole=True)

    def changed(field: str, source: Path, name: str, change: Config) -> LocalSide:
        """The side loaded from a folder with other values in this config file; null only replaces existing fields."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genctl-audit-")))
        for path in source.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path.resolve())
        own = json.loads((source / name).read_text(encoding="utf-8"))
        # null and a missing field differ: the latter may mean a default
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
