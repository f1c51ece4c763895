"""`genctl inspect-cache` at work: a checkpoint decodes its prompts in one batch, and a report is written."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from genctl.commands.inspect import plan
from genctl.commands.inspect import report as reports
from genctl.commands.inspect.inputs import input_lines
from genctl.commands.inspect.measurement import Measurement
from genctl.commands.inspect.options import STEPS, InspectOptions, check_length
from genctl.commands.job import Job, Listener, request_of, seed_of, start_seed
from genctl.config.dry import to_toml
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines.protocol import Flow, Request
from genctl.errors import GenctlError, InputError, UsageError, count
from genctl.io import writers
from genctl.io.rows import InputRow
from genctl.terminal import loading_line
from genctl.terminal.progress_bars import LoadingBar

COLUMNS = ("step", "rows", "layer", "kind", "shape", "dtype", "device", "bytes", "new")  # of --format tsv


class InspectJob(Job[InspectOptions]):
    """One measurement: a checkpoint, its prompts in one batch, and the report."""

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint; with --plan, print the plan."""
        super().prepare()
        if self.options.plan:
            return plan.perform(self.options, self.early)
        self.steps = STEPS if self.options.steps is None else self.options.steps
        check_length(self.early, self.options.steps, self.steps)
        place = f"--steps {self.steps}"
        self.layers.append(Layer("flag", {"max_new_tokens": self.steps + 1}, {"max_new_tokens": place}, "command"))
        self.early = resolve(self.layers, tentative=True)
        self.messages.held = []  # notes are printed below what is measured
        return None

    def read(self, stack: ExitStack) -> bool:
        """Read the prompts."""
        if not super().read(stack):
            return False
        self.rows = list(self.input)
        if self.options.save_cache is not None and len(self.rows) != 1:
            raise UsageError(f"--save-cache takes exactly one prompt; there are {len(self.rows)}")
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output and the saved prompt cache."""
        options = self.options
        self.live = options.on_screen
        self.open_consoles()
        self.saved = None if options.save_cache is None else self.sink(stack, options.save_cache, at_once=True)
        self.results = None if self.live else self.sink(stack, options.output)

    def deliver(self, stack: ExitStack) -> None:
        """Load the checkpoint, decode with and without a cache, and write the prompt cache and the report."""
        from genctl.engines.session import Session

        options, interrupt = self.options, self.interrupt
        with closing(LoadingBar(self.err, time.monotonic)) as bar:
            on_event = None if options.quiet else bar.show
            session = self.load_engine(self.early, self.layers, on_event=on_event, live=self.live)
        assert isinstance(session, Session)  # measurements look into the model
        session.planner.drafts = False  # each step is looked at
        self.base, how = self.settle(session, self.layers, options.strategy)
        self.describe(self.base, how)
        session.use_threads(how.rows)
        self.messages.detail(*session.notes())
        requests = self._requests()
        interrupt.gentle = True

        def decode(requests: list[Request], listeners: list[Listener]) -> None:
            flow = Flow(max(len(requests), 1), watch=True, interrupted=interrupt)
            self.listen(session.stream(requests, None, flow), listeners)

        measured, uncached = Measurement(self.steps), None
        decode(requests, [*self.listeners, measured.feed, self.note_prompt, *self.reuse.listeners])
        self.messages.note(*self.reuse.notes(session, verbose=options.verbose))
        for failed in measured.failures:
            self.fail(self.source_of(failed.lane)[0], failed.code, failed.message, hint=failed.hint)
        done = bool(measured.passes) and len(measured.failures) < len(measured.prompts)
        generation = self.base.generation
        form = generation.cache_implementation if generation.use_cache else "off"
        cached = form != "off" and session.forward.abilities.supports_cache
        if done and cached and (options.inputs or options.format == "json") and not interrupt.status:
            uncached = Measurement(self.steps)
            decode([_uncached(request) for request in requests], [uncached.feed])
            if measured.written() != uncached.written():
                self.messages.note("without a cache other tokens were written")
        loading_line.end()
        self.messages.release()

        if self.saved is not None and not (self.failed or interrupt.status):
            content, tokens = session.saved_prompt(requests[0])
            self.saved.write(content)
            self.saved.close()
            if not options.quiet:
                self.messages.print(f"saved {count(tokens, 'token')}, {len(content):,} bytes, to {options.save_cache}")
        if done:
            found = measured.report(weights_bytes(session.loaded.model), form, beside=uncached)
            self._write(found)
            if self.page is not None:
                self.page.settled(
                    to_toml(self.base, defaults=False), cache=reports.cache_part(found, self._planned(found))
                )

    def _requests(self) -> list[Request]:
        """The request of each prompt. Those whose row is bad, or says how many tokens are written, fail."""

        def settings(row: InputRow) -> Resolved:
            for name in ("max_new_tokens", "max_length"):
                if name in row.params:
                    raise InputError(f"{row.where}: {name} contradicts --steps {self.steps}")
            return self.settings_of(row, self.base)

        start = start_seed(self.base)
        rows = self.usable(iter(self.rows), settings)
        return [request_of(row, resolved, seed_of(row, resolved, start)) for row, resolved in rows]

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        return next(row for row in self.rows if row.id == lane and isinstance(row, InputRow)), self.base

    def _write(self, report: dict[str, Any]) -> None:
        """Write the report in its --format."""
        options, on_terminal = self.options, self.out.is_terminal and self.options.output is None
        if options.format == "text":
            width = self.out.width if on_terminal else None
            lines = [*reports.report_lines(report, width), *(input_lines(report, width) if options.inputs else ())]
            if self.results is None or on_terminal:
                for line in lines:
                    self.out.print(line)
                return
            content = "".join(f"{line.plain.rstrip()}\n" for line in lines)
        else:
            layers = ((step, layer) for step in report["steps"] for layer in step["layers"])
            rows = [[step["step"], step["rows"], *(layer[name] for name in COLUMNS[2:])] for step, layer in layers]
            content = writers.report_text(report, options.format, COLUMNS, rows)
        assert self.results is not None
        self.results.write(content.encode("utf-8", "backslashreplace"))
        self.results.close()

    def _planned(self, report: dict[str, Any]) -> dict[str, Any] | None:
        """What a plan of the same size says, for the page of --report."""
        try:
            return plan.planned_like(self.base.runtime, self.base.generation, report, **self.options.trust)
        except GenctlError as error:
            self.messages.detail(f"the page has no plan beside the measurement: {error.message}")
            return None


def weights_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once."""
    from genctl.native.runtime import NativeModel

    if isinstance(model, NativeModel):
        return model.bytes()
    from genctl.models import packed_layers

    return packed_layers.weights_bytes(model)


def _uncached(request: Request) -> Request:
    generation = replace(request.resolved.generation, use_cache=False, cache_implementation="off")
    return replace(request, resolved=replace(request.resolved, generation=generation))
