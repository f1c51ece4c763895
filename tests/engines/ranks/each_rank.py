"""One rank of a shared run that writes the tokens it chose, which genctl's own ranks above 0 keep to themselves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from genctl.config.layers import Layer
from genctl.engines.protocol import Flow, Request
from genctl.engines.session import Session
from genctl.events import Finished
from genctl.params import Runtime

PROMPTS = [(5, 60, 250, 7), (9, 8), (11, 48, 205, 93, 160)]


def tokens_of(session: Session, ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[list[int]]]]:
    """The tokens of every prompt in several ways, decoded together: way -> prompt -> sequences."""
    found: dict[str, dict[str, list[list[int]]]] = {way: {} for way in ways}
    for way, settings in ways.items():
        resolved = session.resolve([Layer("test", {**settings, "max_new_tokens": 10})])
        requests = [Request(str(number), resolved, number, prompt_ids=ids) for number, ids in enumerate(PROMPTS)]
        for event in session.stream(requests, None, Flow(3)):
            if isinstance(event, Finished):
                found[way][event.lane] = [list(one.tokens) for one in event.hypotheses]
    return found


def main(model: str, folder: str, ways: str) -> None:
    """Write `FOLDER/RANK.json`."""
    from genctl.engines import shared as group

    group.start()
    session = group.SharedSession.load(Runtime(model=model, tensor_parallel=True))
    found = tokens_of(session, json.loads(ways))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    group.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
