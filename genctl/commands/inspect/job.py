"""`genctl inspect-cache` at work: a checkpoint decodes its prompts in one batch, and a report is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.inspect import plan as cache_plan
from genctl.commands.inspect.cache_inputs import given_lines
from genctl.commands.inspect.cache_report import cache_part, report_lines
from genctl.commands.inspect.cache_view import CacheView
from genctl.commands.inspect.measurement import Measurement
from genctl.commands.inspect.options import STEPS, InspectOptions, check_length, check_rows
from genctl.commands.job import Job, Listener, request_of, seed_of, start_seed
from genctl.config.dry import to_toml
from genctl.config.layers import Layer, Resolved, resolve
from genctl.engines.protocol import Flow, Request
from genctl.errors import GenctlError, InputError, UsageError, count
from genctl.io import writers
from genctl.io.rows import InputRow
from genctl.terminal.interrupt import Interrupt

if TYPE_CHECKING:
    pass


# -- the size of a model in memory -------------------------------------------------------------------------------------


def weights_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once."""
    from genctl.native.runtime import NativeModel

    if isinstance(model, NativeModel):
        return model.bytes()
    from genctl.models import packed_layers

    return packed_layers.weights_bytes(model)


COLUMNS = ("step", "rows", "layer", "kind", "shape", "dtype", "device", "bytes", "new")


class InspectJob(Job[InspectOptions]):
    """One measurement: a checkpoint, its prompts in one batch, and the report."""

    def __init__(self, options: InspectOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.steps = STEPS if options.steps is None else options.steps
        self.heat: tuple[int, list[dict[str, Any]], list[dict[str, Any]]] | None = None
        self.messages.held = []  # notes for the end

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint; with --plan, print the plan."""
        super().prepare()
        if self.options.plan:
            return cache_plan.perform(self.options, self.early)
        check_length(self.early, self.options.steps, self.steps)
        place = f"--steps {self.steps}"
        self.layers.append(Layer("flag", {"max_new_tokens": self.steps + 1}, {"max_new_tokens": place}, "command"))
        self.early = resolve(self.layers, tentative=True)
        return None

    def read(self, stack: ExitStack) -> bool:
        """Read the prompts."""
        if not super().read(stack):
            return False
        self.rows = list(self.input)
        check_rows(self.options, len(self.rows))
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output, the saved prompt cache and the view."""
        options, live = self.options, self.options.on_screen
        self.live = live
        self.open_consoles()
        self.saved: writers.Sink | None = None
        self.results: writers.Sink | None = None
        if options.save_cache is not None:
            self.saved = self.sink(stack, options.save_cache, at_once=True)
        if not live:
            self.results = self.sink(stack, options.output)
        self.view = CacheView(self.out, self.err, live=live, steps=self.steps, quiet=options.quiet)
        stack.enter_context(self.view)

    def load(self) -> None:
        """Load the checkpoint and check the settings on it."""
        from genctl.engines.session import Session

        session = self.load_engine(self.early, self.layers, on_event=self.view.feed, live=self.live)
        assert isinstance(session, Session)  # measurements look into the model
        session.planner.drafts = False  # each step is looked at
        self.session = session
        self.base, plan = self.settle(session, self.layers, self.options.strategy)
        self._check_cache()
        self.describe(self.base, plan)
        session.use_threads(plan.rows)
        self.messages.detail(*session.notes())
        self.weights = self.view.weights = weights_bytes(session.loaded.model)

    def deliver(self, stack: ExitStack) -> None:
        """Measure, and write the report and the prompt cache."""
        requests = self._requests()
        self.interrupt.gentle = True
        report = self._measure(requests)
        self.hide()
        self.messages.release()
        if self.saved is not None and not (self.failed or self.interrupt.status):
            content, tokens = self.session.saved_prompt(requests[0])
            self.saved.write(content)
            self.saved.close()
            if not self.options.quiet:
                self.messages.say(
                    f"saved {count(tokens, 'token')}, {len(content):,} bytes, to {self.options.save_cache}"
                )
        if report is not None:
            self._write(report)
            self._show(report)

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _check_cache(self) -> None:
        """Raises UsageError or ModelError where --heatmap or --diff has no cache to look into."""
        options = self.options
        wanted = [
            flag for flag, given in (("--heatmap", options.heatmap), ("--diff", options.diff is not None)) if given
        ]
        if not wanted:
            return
        if not self._cached:
            name = "cache_implementation" if self.base.generation.use_cache else "use_cache"
            raise UsageError(f"{wanted[0]} looks into the cache, and there is none ({self.base.origins[name]})")
        if options.heatmap:
            from genctl.commands.inspect.cache_norms import check

            check(self.session)

    @property
    def _cached(self) -> bool:
        return self.base.generation.use_cache and self.base.generation.cache_implementation != "off"

    def _requests(self) -> list[Request]:
        def settings(row: InputRow) -> Resolved:
            for name in ("max_new_tokens", "max_length"):
                if name in row.params:
                    raise InputError(f"{row.where}: {name} contradicts --steps {self.steps}")
            return self.settings_of(row, self.base)

        start = start_seed(self.base)
        rows = self.usable(iter(self.rows), settings)
        return [request_of(row, resolved, seed_of(row, resolved, start)) for row, resolved in rows]

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _measure(self, requests: Sequence[Request]) -> dict[str, Any] | None:
        """The report on the prompts; None if none could be decoded."""
        options, session = self.options, self.session
        measured = Measurement(self.steps)

        def look(event: events.Event) -> None:
            finished = measured.feed(event)
            if options.heatmap and finished is not None and isinstance(event, events.CacheRead):
                from genctl.commands.inspect.cache_norms import current_norms

                self.heat = current_norms(session)

        self._decode(requests, [*self.listeners, look, self.note_prompt, *self.reuse.listeners, self.view.feed])
        self.messages.note(*self.reuse.notes(session, verbose=options.verbose))
        for prompt in measured.failures:
            if prompt.failed is not None:
                self.fail(self._row(prompt.lane), prompt.failed.code, prompt.failed.message, hint=prompt.failed.hint)
        if not measured.passes or len(measured.failures) == len(measured.prompts):
            return None
        uncached: Measurement | None = None
        cached = self._cached and session.forward.abilities.supports_cache
        if (options.inputs or options.format == "json") and cached and not self.interrupt.status:
            uncached = Measurement(self.steps)
            self._decode([_uncached(request) for request in requests], [uncached.feed])
            if measured.written() != uncached.written():
                self.messages.note("without a cache other tokens were written")
        form = self.base.generation.cache_implementation if self._cached else "off"
        report = measured.report(self.weights, form, beside=uncached)
        if self.heat is not None:
            from genctl.commands.inspect.cache_norms import heatmap

            report["heatmap"] = heatmap(session, requests[0], self.heat, measured.tokens[0])
        if options.diff is not None and not self.interrupt.status:
            from genctl.commands.inspect.prompt_diff import difference

            other = replace(requests[0], id="other", prompt=options.diff, prompt_ids=None, messages=None)
            report["diff"] = difference(session, requests[0], other, interrupted=self.interrupt)
        return report

    def _decode(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> None:
        flow = Flow(max(len(requests), 1), watch=True, interrupted=self.interrupt)
        self.listen(self.session.stream(requests, None, flow), listeners)

    def source_of(self, lane: str) -> tuple[InputRow, Resolved]:
        """The row of a lane that begins, and the settings of its run."""
        return self._row(lane), self.base

    def _row(self, id: str) -> InputRow:
        return next(row for row in self.rows if row.id == id and isinstance(row, InputRow))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _write(self, report: dict[str, Any]) -> None:
        """Write the report in its --format."""
        if self.options.format != "text":
            content = writers.report_text(report, self.options.format, COLUMNS, tsv_rows(report))
        else:
            on_terminal = self.out.is_terminal and self.options.output is None
            lines = self._lines(report, self.out.width if on_terminal else None)
            if self.results is None or (self.options.output is None and self.out.is_terminal):
                for line in lines:
                    self.out.print(line)
                return
            content = "".join(f"{line.plain.rstrip()}\n" for line in lines)
        assert self.results is not None
        self.results.write(content.encode("utf-8", "backslashreplace"))
        self.results.close()

    def _show(self, report: dict[str, Any]) -> None:
        """Give the page of --report the report, and with it what a plan of the same size says."""
        if self.page is not None:
            self.page.settled(to_toml(self.base, defaults=False), cache=self._page_part(report))

    def _page_part(self, report: dict[str, Any]) -> dict[str, Any]:
        from genctl.commands.inspect.cache_estimate import planned_like

        try:
            planned = planned_like(self.base.runtime, self.base.generation, report, **self.options.trust)
        except GenctlError as error:
            planned = None
            self.messages.detail(f"the page has no plan beside the measurement: {error.message}")
        return cache_part(report, planned)

    def _lines(self, report: dict[str, Any], width: int | None) -> list[Any]:
        from genctl.commands.inspect.cache_norms import heatmap_lines
        from genctl.commands.inspect.prompt_diff import diff_lines

        lines = report_lines(report, width)
        if self.options.inputs:
            lines += given_lines(report, width)
        if "heatmap" in report:
            lines += heatmap_lines(report["heatmap"], width)
        if "diff" in report:
            lines += diff_lines(report["diff"], width)
        return lines


def tsv_rows(report: dict[str, Any]) -> list[list[Any]]:
    """A line for each layer of each pass; `rows` and `shape` as JSON lists."""
    return [
        [one["step"], one["rows"], *(layer[name] for name in COLUMNS[2:])]
        for one in report["steps"]
        for layer in one["layers"]
    ]


def _uncached(request: Request) -> Request:
    generation = replace(request.resolved.generation, use_cache=False, cache_implementation="off")
    return replace(request, resolved=replace(request.resolved, generation=generation))
