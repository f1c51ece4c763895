"""The settings in the file of a chat: those of generation and of the prompt, nothing else.

Anybody may have written the file, so it does not choose files, further checkpoints or code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from genctl.config.check import shown
from genctl.config.conflicts import CHAT_KNOBS
from genctl.config.layers import Layer
from genctl.config.listed_knobs import LISTS
from genctl.config.settings import SavedLayer, objections, saved_layers
from genctl.params import Generation, knobs, spelled

OF_PROMPTS = {"system", "seed", "truncate", "row_timeout", "src_lang", "tgt_lang", *CHAT_KNOBS}
SAVED = frozenset({*knobs(Generation), *LISTS, *OF_PROMPTS})


def to_save(layers: Iterable[Layer]) -> tuple[SavedLayer, ...]:
    """Layers as the header has them."""
    return saved_layers((layer for layer in layers if layer.origin != "genctl chat"), SAVED)


def continued(
    layers: Iterable[Layer], saved: Iterable[SavedLayer], note: Callable[[str], object], overriding: Iterable[str] = ()
) -> list[Layer]:
    """The settings of a saved chat above those of `layers` that no chat saves: the device, the cache, the server.

    `note` gets a sentence for each setting that is not used, unless it is one of `overriding`.
    """
    found = [
        replace(layer, values={key: value for key, value in layer.values.items() if key not in SAVED})
        for layer in layers
    ]
    for each in saved:
        flag = each["kind"] == "command"  # of that time, so below the flags of now
        origin, kind = f"{each['origin']}, when the chat began", "user" if flag else each["kind"]
        layer = Layer(origin, each["values"], declared=kind, typed=each["typed"] or flag)
        found.append(usable(layer, note, overriding))
    return found


def usable(layer: Layer, note: Callable[[str], object], overriding: Iterable[str] = ()) -> Layer:
    """A layer of a file without what a file may not choose."""
    refused = objections(layer.values, SAVED)
    for key in refused.keys() - set(overriding):
        value = shown(layer.values[key])
        note(f"the chat's {key} = {value} is not used: it {refused[key]}; --{spelled(key)} sets it")
    return replace(layer, values={key: value for key, value in layer.values.items() if key not in refused})
