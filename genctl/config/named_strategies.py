"""`--strategy NAME`: a decoding mode by name, defined by its knobs; other settings refine it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genctl.config.layers import Layer
from genctl.errors import PresetError, UsageError, nearest

# name -> its knobs; flags and --set go above them
NAMED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "num_beams": 1},
    "sample": {"do_sample": True, "num_beams": 1},
    "beam": {"num_beams": 4, "do_sample": False},
    "beam-sample": {"num_beams": 4, "do_sample": True},
    "stochastic-beam": {"num_beams": 4, "do_sample": True, "stochastic_beams": True},
    "diverse-beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": False},
    "constrained-beam": {"num_beams": 4, "do_sample": False},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False, "num_beams": 1},
    "dola": {"dola_layers": "high"},
    "assisted": {},
    "prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "early-exit": {},
    "contrastive-decoding": {},
    "best_of": {"best_of": 4, "do_sample": True, "num_beams": 1},
    "mbr": {"mbr_samples": 8, "do_sample": True, "num_beams": 1},
}

# Knobs that a strategy needs and that have no default.
NEEDS: dict[str, tuple[str, ...]] = {
    "constrained-beam": ("force_words", "force_words_ids"),
    "assisted": ("assistant_model",),
    "early-exit": ("assistant_early_exit",),
    "contrastive-decoding": ("amateur_model",),
}


def layer(name: str, flags: Sequence[Layer]) -> Layer:
    """The layer of a strategy, at the level of flags, without the knobs that flags or `--set` set themselves.

    For an unknown name the layer is `broken`, so that all mistakes are reported together.
    """
    if name not in NAMED:
        error = PresetError(unknown(name), hint=f"there are: {', '.join(NAMED)}")
        return Layer("flag", {}, said="command", broken=(error,))
    own = {key for flag in flags for key in flag.values}
    values = {key: value for key, value in NAMED[name].items() if key not in own}
    return Layer("flag", values, {key: f"--strategy {name}" for key in values}, "command")


def unknown(name: str, place: str = "", others: Iterable[str] = ()) -> str:
    """The sentence for a name that no strategy has. `place`: where it stands; `others` may be meant, too."""
    near = nearest(name.lower().replace("_", "-"), [*NAMED, *others])
    suggestion = f"; did you mean {near}?" if near else ""
    return f"{place or f'--strategy {name}'}: there is no such strategy{suggestion}".replace("\n", "\\n")


def check(name: str, kind: str) -> None:
    """Raises UsageError if other settings select another strategy than the named one."""
    if kind == name:
        return
    needs = NEEDS.get(name)
    hint = f"it needs {' or '.join(needs)}" if needs else "see where each setting comes from with --dry"
    raise UsageError(f"--strategy {name}, but the other settings make it {kind}", hint=hint)
