"""genctl as a side: a session, driven as the command line drives it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import gguf_files
from .work import Ran, Setup, Unavailable, Work, checked


class Genctl:
    """`Session.stream` with a collector, the settings of each prompt resolved within the clock."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from genctl.config.layers import Layer, resolve
        from genctl.engines.session import Session

        torch.set_num_threads(setup.threads)
        # random weights write circles, in which every draft is right: drafts are measured where they are asked for
        settings: dict[str, Any] = {"device": setup.device, "draft": False}
        if setup.dtype in gguf_files.TYPES:  # it runs as it lies
            settings["model"] = str(setup.folder(gguf_files.form(setup.dtype)) / "model.gguf")
        else:
            settings["model"] = str(setup.folder("transformers"))
            settings["dtype"] = "bfloat16" if setup.dtype == "bfloat16" else "float32"
        if setup.dtype in ("int8", "int4"):
            settings["quantize"] = setup.dtype
        self.layer = Layer("load", settings, {}, "user")
        self.session = Session.load(resolve([self.layer], tentative=True).runtime)
        self.cuda = setup.device.startswith("cuda")

    def run(self, work: Work) -> Ran:
        """Do the work and time it. Raises Unavailable for unknown settings, ValueError if a prompt fails."""
        import torch

        from genctl import events
        from genctl.engines.protocol import Flow, Report
        from genctl.engines.strategy_choice import StrategyChoice
        from genctl.errors import PresetError
        from genctl.events.results import Collector

        if self.cuda:
            torch.cuda.synchronize()
        waiting = {str(place) for place in range(len(work.asks))}
        planner = self.session.planner  # each run is one of its own: nothing is drafted from the texts before it
        planner.strategies = StrategyChoice(planner.loaded, planner.forward, planner.runtime, planner.flags)
        firsts: list[float] = []  # until every prompt had its first token; of each prompt, if they come one by one
        found: dict[str, tuple[int, ...]] = {}
        collector = Collector()
        began = turn = time.perf_counter()
        try:
            requests = list(self._requests(work))
        except PresetError as error:
            raise Unavailable(error.message) from error
        report, ahead = Report(scores=work.scores), 2 * work.width if work.width > 1 else 0  # as in Python
        for event in self.session.stream(requests, report, Flow(work.width, ahead=ahead)):
            if event.lane in waiting and isinstance(event, events.Stepped):
                waiting.remove(event.lane)
                if work.width == 1 or not waiting:
                    firsts.append(time.perf_counter() - turn)
            result = collector.feed(event)
            if result is not None:
                turn = time.perf_counter() if work.width == 1 else turn
                if result.error is not None:
                    raise ValueError(result.error.message)
                found[result.lane] = result.sequences[0].token_ids
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return checked(
            work,
            Ran(tuple(found[str(place)] for place in range(len(work.asks))), seconds, sum(firsts) if firsts else None),
        )

    def _requests(self, work: Work) -> Iterator[Any]:
        from genctl.config.layers import Layer
        from genctl.engines.protocol import Request

        known: dict[str, Any] = {}  # settings that many prompts share are resolved once, as the command line does
        for place, ask in enumerate(work.asks):
            settings = {key: value for key, value in ask.knobs.items() if key != "seed"}
            settings["max_new_tokens"] = ask.new
            key = repr(sorted(settings.items()))
            if key not in known:
                known[key] = self.session.resolve([self.layer, Layer("argument", settings, {}, "command")])
            yield Request(str(place), known[key], ask.knobs.get("seed", 0), prompt_ids=ask.prompt)


class Undrafted(Genctl):
    """The same without the settings that draft tokens: greedy search."""

    def run(self, work: Work) -> Ran:
        """Do the work one token at a time."""
        from genctl.params import DRAFTING

        def plain(knobs: Mapping[str, Any]) -> Mapping[str, Any]:
            return {key: value for key, value in knobs.items() if key not in (*DRAFTING, "draft")}

        return super().run(replace(work, asks=tuple(replace(ask, knobs=plain(ask.knobs)) for ask in work.asks)))
