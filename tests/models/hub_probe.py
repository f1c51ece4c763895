"""Run in a process of its own (the Hub's client reads HF_* when imported): load models, print what happened as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from genctl.errors import GenctlError
from genctl.events import Loading
from genctl.models.hub import load
from genctl.models.resolve import resolve
from genctl.params import Runtime


def probe(options: dict[str, Any]) -> dict[str, Any]:
    """`options` are those of `resolve`; with "load" the model is loaded as well."""
    heard: list[Loading] = []
    try:
        if options.pop("load", False):
            loaded = load(Runtime(**options), on_event=heard.append)
            done = {"folder": str(loaded.path), "notes": loaded.notes, "name": loaded.name, "tokens": loaded.vocab_size}
        else:
            place = resolve(**options, on_event=heard.append)
            done = {"folder": str(place.folder), "notes": place.notes}
    except GenctlError as error:
        return {"error": f"{type(error).__name__}: {error.message}", "hint": error.hint}
    return {**done, "heard": [(one.what, one.done, one.total, one.unit) for one in heard]}


if __name__ == "__main__":
    print(json.dumps([probe(options) for options in json.loads(sys.argv[1])]))
