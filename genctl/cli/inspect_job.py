"""A cache measured: a checkpoint is loaded, its prompts are decoded in one batch, and a report is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from genctl import events as told
from genctl.batch import writers
from genctl.batch.rows import BadRow, InputRow
from genctl.batch.seeds import random_seed, row_seed
from genctl.cli import notes, strategy
from genctl.cli.inputs import are_texts, is_terminal, prompts_of
from genctl.cli.inspect_options import STEPS, InspectOptions, check_length, check_rows
from genctl.cli.interrupt import Interrupt
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, overlay, resolve, row_layer
from genctl.errors import Exit, GenctlError, InputError, UsageError

if TYPE_CHECKING:
    from genctl.inspecting.measured import Measurement
    from genctl.render.cache_live import CacheView
    from genctl.requests import Request
    from genctl.session import Session

COLUMNS = ("step", "rows", "layer", "kind", "shape", "dtype", "device", "bytes", "new")


def perform(asked: InspectOptions) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt to be had."""
    layers = [*settings.standing_layers(asked.presets), *asked.flags]
    early = resolve(layers, tentative=True)
    if asked.plan:
        return _plan(asked, early)
    steps = STEPS if asked.steps is None else asked.steps
    check_length(early, asked.steps, steps)
    place = f"--steps {steps}"
    layers.append(Layer("flag", {"max_new_tokens": steps + 1}, {"max_new_tokens": place}, "command"))
    early = resolve(layers, tentative=True)
    prompts = prompts_of(asked)
    if prompts is None:
        return None
    with Interrupt() as interrupt:
        with prompts:
            rows = list(prompts)
        check_rows(asked, rows)
        return InspectJob(asked, layers, early, steps, rows, interrupt).run()


def _plan(asked: InspectOptions, early: Resolved) -> int:
    from genctl.cli import cache_plan

    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    return cache_plan.perform(
        early.runtime,
        early.generation,
        batch=asked.batch or 1,
        length=asked.length,
        source_length=asked.source_length,
        memory=asked.memory,
        format=asked.format,
        color=asked.color,
        allow_pickle=asked.allow_pickle,
        trust_remote_code=asked.trust_remote_code,
    )


@dataclass
class InspectJob:
    """One measurement: a checkpoint, its prompts in one batch, and what is written of it."""

    asked: InspectOptions
    layers: Sequence[Layer]
    early: Resolved
    steps: int
    rows: Sequence[InputRow | BadRow]
    interrupt: Interrupt
    failed: int = 0
    heat: tuple[int, list[dict[str, Any]], list[dict[str, Any]]] | None = None
    asides: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Load, decode, write. Returns the exit status."""
        from genctl.render.cache_live import CacheView
        from genctl.render.console import make_consoles

        asked = self.asked
        self.out, self.err = make_consoles(asked.color)  # type: ignore[arg-type]
        live = asked.output is None and asked.format == "text" and is_terminal(sys.stdout)
        with ExitStack() as stack:
            saved = None
            if asked.save_cache is not None:
                saved = writers.open_output(asked.save_cache, None, force=asked.force)
                stack.callback(saved.abandon)
            sink = None
            if not live:
                sink = writers.open_output(asked.output, sys.stdout, force=asked.force)
                stack.callback(sink.abandon)
            with CacheView(self.out, self.err, live=live, steps=self.steps, quiet=asked.quiet) as view:
                session, requests = self._load(view)
                self.interrupt.gentle = True
                report = self._measure(session, requests, view)
            for note in self.asides:
                self.say(f"note: {note}")
            if saved is not None and not (self.failed or self.interrupt.status):
                content, tokens = session.saved_prompt(requests[0])
                saved.write(content)
                saved.close()
                if not asked.quiet:
                    self.say(f"saved {tokens} tokens, {len(content):,} bytes, to {asked.save_cache}")
            if report is not None:
                self._write(report, sink)
        return self.interrupt.status or int(Exit.ROWS_FAILED if self.failed else Exit.DONE)

    # -- before decoding -----------------------------------------------------------------------------------------------

    def _load(self, view: CacheView) -> tuple[Session, list[Request]]:
        from genctl.inspecting.weights import weights_bytes
        from genctl.session import Session

        asked = self.asked
        session = Session.load(
            self.early.runtime,
            allow_pickle=asked.allow_pickle,
            trust_remote_code=asked.trust_remote_code,
            allow_plugins=asked.allow_plugins,
            on_event=view.feed,
            layers=self.layers,
            need_tokenizer=are_texts(asked),
        )
        view.hide()
        notes.announce_compiling(session, self.say, quiet=asked.quiet, before=view.hide)
        self.base = session.resolve(self.layers)
        kind = session.check(self.base)
        if asked.strategy:
            strategy.check(asked.strategy, kind)
        self._check_cache(session)
        if not asked.quiet:
            self.asides += notes.cache_notes(session, self.base)
        if asked.verbose:
            self.asides += [*self.base.notes, *session.loaded.told]
        self.weights = view.weights = weights_bytes(session.loaded.model)
        return session, self._requests()

    def _check_cache(self, session: Session) -> None:
        """Raises UsageError or ModelError where there is no cache for what looks into one."""
        asked = self.asked
        wanted = [flag for flag, given in (("--heatmap", asked.heatmap), ("--diff", asked.diff is not None)) if given]
        if not wanted:
            return
        if not self._cached:
            name = "cache_implementation" if self.base.generation.use_cache else "use_cache"
            raise UsageError(f"{wanted[0]} looks into the cache, and there is none ({self.base.origins[name]})")
        if asked.heatmap:
            from genctl.inspecting.heat import check

            check(session)

    @property
    def _cached(self) -> bool:
        return self.base.generation.use_cache and self.base.generation.cache_implementation != "off"

    def _requests(self) -> list[Request]:
        from genctl.requests import Request

        found = []
        base = self.base
        start = base.runtime.seed if base.runtime.seed is not None else random_seed()
        for row in self.rows:
            try:
                if isinstance(row, BadRow):
                    raise InputError(row.message)
                for name in ("max_new_tokens", "max_length"):
                    if name in row.params:
                        raise InputError(f"{row.where}: {name} contradicts --steps {self.steps}")
                wanted = {**row.params, **{key: value for key, value in row.extra.items() if key != "reference"}}
                resolved = overlay(base, row_layer(wanted, row.where)) if wanted else base
            except GenctlError as error:
                self._failure(row.id, error.message)
                continue
            own = resolved.runtime.seed if "seed" in row.params else None
            seed = row_seed(start, row.id, row.index) if own is None else own
            found.append(Request(row.id, resolved, seed, row.prompt, row.prompt_ids, row.messages))
        return found

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _measure(self, session: Session, requests: Sequence[Request], view: CacheView) -> dict[str, Any] | None:
        """What the prompts come to; None if none could be decoded."""
        from genctl.inspecting.measured import Measurement

        asked = self.asked
        reuse = notes.Reuse(self.base.runtime.prompt_cache)
        measured = Measurement(self.steps)
        self._decode(session, requests, measured, view, reuse)
        if not asked.quiet:
            self.asides += reuse.notes(session, verbose=asked.verbose)
        for prompt in measured.failures:
            if prompt.failed is not None:
                self._failure(prompt.id, prompt.failed.message)
        if not measured.passes or len(measured.failures) == len(measured.prompts):
            return None
        beside = None
        wanted = asked.inputs or asked.format == "json"
        cached = self._cached and session.forward.supports_cache
        if wanted and cached and not self.interrupt.status:
            beside = Measurement(self.steps)
            self._decode(session, [_uncached(request) for request in requests], beside, view, None)
            if not asked.quiet and measured.written() != beside.written():
                self.asides.append("without a cache other tokens were written")
        form = self.base.generation.cache_implementation if self._cached else "off"
        report = measured.report(self.weights, form, beside=beside)
        if self.heat is not None:
            from genctl.inspecting.heat import heatmap

            report["heatmap"] = heatmap(session, requests[0], self.heat, measured.tokens[0])
        if asked.diff is not None and not self.interrupt.status:
            from genctl.inspecting.difference import difference

            other = replace(requests[0], id="other", prompt=asked.diff, prompt_ids=None, messages=None)
            report["diff"] = difference(session, requests[0], other, interrupted=self.interrupt)
        view.hide()
        return report

    def _decode(
        self,
        session: Session,
        requests: Sequence[Request],
        measured: Measurement,
        view: CacheView,
        reuse: notes.Reuse | None,
    ) -> None:
        main = reuse is not None
        stream = session.stream(requests, width=max(len(requests), 1), interrupted=self.interrupt, watch=True)
        with closing(stream):
            for event in stream:
                found = measured.feed(event)
                if reuse is not None:
                    if isinstance(event, told.Began) and (note := self._cut(event)):
                        self.asides.append(note)
                    reuse.feed(event)
                    view.feed(event)
                if main and self.asked.heatmap and found is not None and isinstance(event, told.CacheRead):
                    from genctl.inspecting.heat import look

                    self.heat = look(session)

    def _cut(self, event: told.Began) -> str:
        row = next((row for row in self.rows if row.id == event.lane and isinstance(row, InputRow)), None)
        return notes.cut_note(event, event.lane, row, self.base.runtime)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _write(self, report: dict[str, Any], sink: writers.Sink | None) -> None:
        """The report in the format that was asked for."""
        if self.asked.format == "json":
            content = f"{writers.to_json(report)}\n"
        elif self.asked.format == "tsv":
            content = "".join("\t".join(map(str, line)) + "\n" for line in [COLUMNS, *tsv_lines(report)])
        else:
            lines = self._lines(report)
            if sink is None or (self.asked.output is None and self.out.is_terminal):
                for line in lines:
                    self.out.print(line)
                return
            content = "".join(f"{line.plain.rstrip()}\n" for line in lines)
        assert sink is not None
        sink.write(content.encode("utf-8", "backslashreplace"))
        sink.close()

    def _lines(self, report: dict[str, Any]) -> list[Any]:
        from genctl.render.cache import report_lines
        from genctl.render.cache_diff import diff_lines
        from genctl.render.cache_given import given_lines
        from genctl.render.cache_norms import heatmap_lines

        width = self.out.width if self.out.is_terminal and self.asked.output is None else None
        lines = report_lines(report, width)
        if self.asked.inputs:
            lines += given_lines(report, width)
        if "heatmap" in report:
            lines += heatmap_lines(report["heatmap"], width)
        if "diff" in report:
            lines += diff_lines(report["diff"], width)
        return lines

    def _failure(self, id: str, message: str) -> None:
        self.failed += 1
        self.say(f"error: prompt {id}: {message}")

    def say(self, line: str) -> None:
        """One line on standard error."""
        from genctl.render.parts import visible

        print(visible(line), file=sys.stderr, flush=True)


def tsv_lines(report: dict[str, Any]) -> list[list[Any]]:
    """A line for each layer of each pass; `rows` and `shape` as JSON lists."""
    return [
        [one["step"], one["rows"], *(layer[name] for name in COLUMNS[2:])]
        for one in report["steps"]
        for layer in one["layers"]
    ]


def _uncached(request: Request) -> Request:
    generation = replace(request.resolved.generation, use_cache=False, cache_implementation="off")
    return replace(request, resolved=replace(request.resolved, generation=generation))
