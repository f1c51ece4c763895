"""`genctl inspect-cache`: decode all prompts in one batch, and write a report on the cache."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console

from genctl.commands.inspect import report as reports
from genctl.commands.inspect.measurement import Measurement
from genctl.commands.inspect.options import InspectOptions, steps_of
from genctl.commands.inspect.plan import plan
from genctl.commands.job import Listener, request_of, seed_of, settings_of, settle, start_seed, started, usable
from genctl.commands.options import memory_bytes
from genctl.config.layers import Layer, Resolved, resolve
from genctl.config.settings import to_toml
from genctl.engines.protocol import Flow, Request
from genctl.errors import Exit, UsageError, count
from genctl.io import writers
from genctl.terminal import loading_line
from genctl.terminal.console import make_consoles
from genctl.terminal.live_region import LoadingBar
from genctl.terminal.widgets import visible

COLUMNS = ("step", "rows", "layer", "kind", "shape", "dtype", "device", "bytes", "new")  # of --format tsv


def inspect_cache(options: InspectOptions) -> int | None:
    """`genctl inspect-cache`."""
    with started(options) as job:
        interrupt, messages = job.interrupt, job.messages
        layers, early = job.early_settings()
        if options.plan:
            return show_plan(options, early)
        steps = steps_of(options, early)
        layers.append(Layer("flag", {"max_new_tokens": steps + 1}, {"max_new_tokens": f"--steps {steps}"}, "command"))
        early = resolve(layers, tentative=True)
        messages.held = []  # hold notes back until the measurement is done
        input = job.read()
        if input is None:
            return None
        rows = list(input)
        if options.save_cache is not None and len(rows) != 1:
            raise UsageError(f"--save-cache takes exactly one prompt; there are {len(rows)}")

        with job.outputs() as stack:
            job.live = options.on_screen
            out, err = make_consoles(options.color)
            saved = None if options.save_cache is None else job.sink(stack, options.save_cache, at_once=True)
            results = job.report_sink(stack)

            with closing(LoadingBar(err, time.monotonic)) as bar:
                on_event = None if options.quiet else bar.show
                session = job.load_engine(early, layers, on_event=on_event, live=job.live)
            from genctl.engines.session import Session

            assert isinstance(session, Session)  # measurements need the model in this process
            session.planner.drafts = False  # each step is measured
            base, how = settle(session, layers, options.strategy)
            job.describe(base, how)
            session.use_threads(how.rows)
            messages.detail(*session.notes())
            start = start_seed(base)
            measurable = usable(rows, lambda row: settings_of(row, base), job.fail)
            sources = {row.id: (row, resolved) for row, resolved in measurable}
            requests = [request_of(row, one, seed_of(row, one, start)) for row, one in sources.values()]
            interrupt.gentle = True

            def decode(requests: list[Request], *listeners: Listener) -> None:
                flow = Flow(max(len(requests), 1), watch=True, interrupted=interrupt)
                job.listen(session.stream(requests, None, flow), listeners, sources.__getitem__)

            measured, uncached = Measurement(steps), None
            notes = job.prompt_notes(sources.__getitem__)
            decode(requests, *job.listeners, measured.feed, notes, *job.reuse.listeners)
            messages.note(*job.reuse.notes(session, verbose=options.verbose))
            for failed in measured.failures:
                job.fail(sources[failed.lane][0], failed.code, failed.message, hint=failed.hint)
            done = bool(measured.passes) and len(measured.failures) < len(measured.prompts)
            form = base.generation.cache_implementation if base.generation.use_cache else "off"
            cached = form != "off" and session.forward.abilities.supports_cache
            if done and cached and (options.inputs or options.format == "json") and not interrupt.status:
                uncached = Measurement(steps)
                decode(list(map(_uncached, requests)), uncached.feed)
            loading_line.end()
            messages.release()

            if saved is not None and not (job.failed or interrupt.status):
                content, tokens = session.saved_prompt(requests[0])
                saved.write(content)
                saved.close()
                if not options.quiet:
                    size = f"{count(tokens, 'token')}, {len(content):,} bytes"
                    messages.print(f"saved {size}, to {options.save_cache}")
            if done:
                report = measured.report(weights_bytes(session.loaded.model), form, beside=uncached)
                _write(report, options, out, results)
                if job.page is not None:
                    job.page.settled(to_toml(base, defaults=False), cache=reports.cache_part(report))
        return job.status()


def show_plan(options: InspectOptions, early: Resolved) -> int:
    """Print the plan. Returns the exit status: 4 if --memory is too small for it, else 0."""
    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    report = plan(
        early.runtime,
        early.generation,
        batch=options.batch or 1,
        length=options.length,
        source_length=options.source_length,
        memory=None if options.memory is None else memory_bytes(options.memory),
        **options.trust,
    )
    out, err = make_consoles(options.color)
    _write(report, options, out, None)
    for note in report["plan"]["notes"]:
        err.print(visible(f"note: {note}"), style="dim")
    return int(Exit.CHECK if report["plan"]["fits"] is False else Exit.DONE)


def _uncached(request: Request) -> Request:
    generation = replace(request.resolved.generation, use_cache=False, cache_implementation="off")
    return replace(request, resolved=replace(request.resolved, generation=generation))


def _write(report: dict[str, Any], options: InspectOptions, out: Console, results: writers.Sink | None) -> None:
    """Write the report in its --format."""
    if options.format == "text":
        width = out.width if out.is_terminal and results is None else None
        lines = reports.plan_lines(report, width) if options.plan else reports.report_lines(report, width)
        lines += reports.input_lines(report, width) if options.inputs else []
        if results is None:
            for line in lines:
                out.print(line)
            return
        content = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    else:
        columns = COLUMNS[2:-1] if options.plan else COLUMNS
        layers = [{**step, **layer} for step in report["steps"] or [report] for layer in step["layers"]]
        rows = [[layer[name] for name in columns] for layer in layers]
        content = writers.report_text(report, options.format, columns, rows)
    if results is None:
        sys.stdout.write(content)
    else:
        results.write(content.encode("utf-8", "backslashreplace"))
        results.close()


def weights_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once."""
    from genctl.models import packed_layers
    from genctl.native.runtime import NativeModel

    return model.bytes() if isinstance(model, NativeModel) else packed_layers.weights_bytes(model)
