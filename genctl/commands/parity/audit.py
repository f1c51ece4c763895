"""`genctl audit`: read a trace, or request one from a server, and find out what its engine computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from genctl.commands.engine_choice import SERVERS
from genctl.commands.job import Job, settings_of, started
from genctl.commands.parity import audit_view
from genctl.commands.parity.audit_options import UNEXPLAINED, AuditOptions, check_words
from genctl.commands.parity.findings import FindingsWriter, StageLine
from genctl.config.conflicts import variables_of
from genctl.config.layers import Layer, Resolved, resolve
from genctl.errors import BackendError, CheckError, GenctlError, InputError, ModelError, UsageError, printable
from genctl.io import readers
from genctl.io.rows import BadRow, InputRow
from genctl.models.resolve import needs_download
from genctl.models.runtime_choice import stored_dtype
from genctl.models.text import detokenizer
from genctl.params import Runtime
from genctl.parity import traces
from genctl.parity.audit import Auditor
from genctl.parity.causes import Audit
from genctl.parity.prompts import AuditPrompts, AuditRow
from genctl.parity.sides import LocalSide, greedy
from genctl.parity.trace_rows import TemplateSettings
from genctl.parity.traces import TraceFile, rows_of
from genctl.parity.ways import DTYPES
from genctl.terminal.console import make_consoles

DRAWN_TOO = 1.0  # a server is queried greedily, and at this temperature
TOKENS = 64  # length of an answer without another limit


def audit(options: AuditOptions) -> int | None:
    """Run `genctl audit`."""
    with started(options) as job:
        check_words(options)
        layers, early = job.early_settings()
        trace = TraceFile()
        if not options.is_server:
            trace = traces.read(options.trace, options.rows, traces.field_paths(options.field))
            if options.prompts_file is not None:
                given = [*prompts_of(options.prompts_file, job.messages.note)]
                traces.with_prompts(trace, f"--prompts {printable(options.prompts_file)}", given)
        if (name := _named_by(trace, options, early)) is not None:
            layers.append(Layer(f"the records of {options.trace}", {"model": name}, declared="user"))
            early = resolve(layers, tentative=True)
            job.messages.note(f"the reference is {name}, which the records name; -m names another one")
        prompts = _prompts(job, options, trace) if options.is_server else []

        with job.outputs() as stack:
            out, err = make_consoles(options.color)
            sink = job.report_sink(stack)
            progress = job.view = StageLine(err, quiet=options.quiet)
            stack.callback(progress.hide)
            if options.is_server:
                _query_server(job, stack, options.trace, early, prompts, trace)
            is_gguf = early.runtime.model.endswith(".gguf")
            plain = replace(early.runtime, quantize=None, dtype="float32", dequantize=is_gguf)
            session: Any = job.load_engine(replace(early, runtime=plain), need_tokenizer=False)
            if session.about.is_encoder_decoder:
                raise ModelError(f"{session.about.name} is an encoder-decoder: only causal models can be audited")
            side = LocalSide(session.about.name, session, greedy(session.resolve(layers), ("max_length",)), whole=True)
            audited = AuditPrompts(session.loaded, side.resolved, bos=session.planner.bos)
            rows = [*_rows(job, trace, audited, session.planner.context)]
            checkpoint = session.loaded.checkpoint
            own = (checkpoint and stored_dtype(checkpoint)) or "float32"
            dtype, form = _declared({"dtype": early.runtime.dtype, "quantize": early.runtime.quantize,
                                     **options.declared}, own)  # fmt: skip
            found = Audit(options.trace, side.name, "unexplained", "")
            if rows:
                progress.begin("audit")
                found = Auditor(
                    side, rows, audited, dtype=DTYPES[dtype], form=form, others=options.also,
                    interrupted=job.interrupt, on_stage=progress.stage,
                ).run(options.trace)  # fmt: skip
            found = replace(audited.impossible.judge(found), failed=trace.bad)
            if not found.reason:
                raise InputError(f"{options.trace}: no row can be audited")
            notes = {
                f"{trace.failed:,} rows cannot be audited; the first {len(trace.bad)} are listed":
                    trace.failed > len(trace.bad),
                f"{len(trace.rows)} of {trace.total:,} rows are audited; --rows N changes that":
                    trace.total > len(trace.rows),
                f"the engine is declared to compute in {form or dtype}": dtype != own or form,
            }  # fmt: skip
            found = replace(found, notes=(*found.notes, *(note for note, holds in notes.items() if holds)))
            job.failed = trace.failed

            job.hide()
            keys = dict.fromkeys(one.key for one in found.causes) or {UNEXPLAINED: None}
            passed = found.verdict == "same" or all(key in options.allow for key in keys)
            failed_check = "" if passed else f"{found.trace}: {found.verdict}: {found.reason}"
            lines = partial(audit_view.lines, found)
            results = FindingsWriter(options.format, out, sink, audit_view.COLUMNS, audit_view.flat, lines)
            results.records(audit_view.records(found, positions=options.positions, failed_check=failed_check))
            if job.page is not None:
                audit_view.add_to_page(job.page, found, detokenizer(session.loaded.tokenizer).piece)
            results.finish()
        if failed_check and not job.interrupt.status:
            raise CheckError(failed_check, hint=f"{' '.join(f'--allow {key}' for key in keys)} passes it")
        return job.status()


def prompts_of(path: str, note: Callable[[str], object]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The prompts of a file, read like `--input`, with their ids. Raises InputError."""
    format: readers.Format | None = "jsonl" if path.endswith(".json") else None
    rows = readers.open_prompts((), path, None, stdin_is_terminal=True, format=format, report=note)
    assert rows is not None
    with rows:
        for row in rows:
            if isinstance(row, BadRow):
                raise InputError(f"--prompts {printable(path)}: {row.message}")
            yield row.id if row.own_id else None, _prompt_fields(row)


def _prompt_fields(row: InputRow) -> dict[str, Any]:
    """The prompt of a row, as fields of a `TraceRow`."""
    known = TemplateSettings.__annotations__
    settings = {key: value for key, value in {**row.params, **row.extra}.items() if key in known}
    return {"prompt": row.prompt, "prompt_ids": row.prompt_ids, "messages": row.messages, "settings": settings}


def _prompts(job: Job, options: AuditOptions, trace: TraceFile) -> list[InputRow]:
    """The prompts that a server continues. Raises InputError if there is none."""
    rows = replace(options, arguments=()).prompts(job.messages.print)
    if rows is None:
        raise InputError("a server needs prompts: --input FILE")
    prompts = []
    for row in islice(job.stack.enter_context(rows), options.rows):
        if isinstance(row, BadRow):
            trace.fail(row.id, row.message)
            job.messages.error(row.message)
        else:
            prompts.append(row)
    if not prompts:
        raise InputError(next(iter(trace.bad.values()), "there is no prompt"))
    return prompts


def _named_by(trace: TraceFile, options: AuditOptions, early: Resolved) -> str | None:
    """The checkpoint that the records name, unless the command line names one. Raises UsageError if neither does."""
    known, names = early.settings.get("model"), {row.model for row in trace.rows} - {""}
    if (known is not None and known.kind == "command") or (early.names_model and len(names) != 1):
        return None
    words = "genctl audit needs the checkpoint that the engine should have run: -m ./model"
    if len(names) != 1:
        raise UsageError(words, hint=f"the records name {' and '.join(sorted(names))}" if names else "")
    if needs_download(name := names.pop(), None):  # a trace causes no download
        raise UsageError(words, hint=f"the records name {name}, which is not on this machine")
    return name


def _rows(job: Job, trace: TraceFile, prompts: AuditPrompts, context: int | None) -> Iterator[AuditRow]:
    """The rows of the trace that can be audited."""
    for row in trace.rows:
        try:
            if (one := prompts.row(row)) is None:
                continue
            length = len(one.text.prompt_ids) + len(one.text.token_ids)
            if context is not None and length > context:
                raise InputError(f"{length} tokens, and the model reads {context}")
            yield one
        except GenctlError as error:
            trace.fail(row.name, f"row {row.name}: {error.message}")
            job.hide()
            job.messages.error(error.message, f"row {row.name}: ", error.hint)


def _query_server(
    job: Job, stack: ExitStack, address: str, early: Resolved, prompts: list[InputRow], trace: TraceFile
) -> None:
    """Add a server's answers to the trace: to every prompt greedily, then sampled."""
    from genctl.engines.server.server import answers
    from genctl.engines.server.session import RemoteSession

    layer = Layer("the trace", {"backend": address}, declared="user", typed=True)
    engine: Any = SERVERS.load(job.setup(resolve([layer], tentative=True), ()))
    stack.callback(engine.close)
    assert isinstance(engine, RemoteSession)
    job.view.begin("audit")
    job.view.stage("querying the server")
    most = early.generation.max_new_tokens or TOKENS
    requests = [(row, drawn) for drawn in (0.0, DRAWN_TOO) for row in prompts]
    bodies = [_body(row, settings_of(row, early).runtime, drawn, most) for row, drawn in requests]
    for (row, drawn), (id, answer) in zip(requests, answers(engine.servers, bodies, job.interrupt), strict=False):
        name = f"{row.id} drawn" if drawn else row.id
        try:
            if isinstance(answer, GenctlError):
                raise answer
            texts: Any = answer.get("choices") if isinstance(answer, dict) else None
            if not isinstance(texts, list) or len(texts) == 1:  # of thousands of choices none is parsed
                texts = rows_of(answer, f"the answer to prompt {row.name}", id)
            if len(texts) != 1:
                raise InputError(f"prompt {row.name}: one text was requested, and the server gives {len(texts):,}")
        except GenctlError as error:
            trace.fail(name, error.message)
            continue
        trace.rows.append(replace(texts[0], id=name, own_id=True, **_prompt_fields(row)))
    if job.interrupt.status:
        raise SystemExit(job.interrupt.status)
    trace.total = len(trace.rows)
    if not trace.rows:
        raise BackendError(f"{address}: {next(iter(trace.bad.values()), 'no answer')}")


def _body(row: InputRow, runtime: Runtime, temperature: float, most: int) -> tuple[str, str, dict[str, Any]]:
    """The id, the path and the fields of a request."""
    from genctl.engines.server.body import COMPLETIONS, EXPLICIT, messages_of

    body: dict[str, Any] = {"max_tokens": most, "temperature": temperature}
    if temperature:
        body |= {name: plain for name, plain in EXPLICIT.items() if name in COMPLETIONS} | {"seed": row.index}
    if row.messages is None and not runtime.is_chat:
        prompt: Any = row.prompt if row.prompt is not None else list(row.prompt_ids or ())
        return row.id, "/completions", {**body, "prompt": prompt, "logprobs": 20}
    body |= {"messages": messages_of(row.prompt, row.messages, runtime.system), "logprobs": True, "top_logprobs": 20}
    variables = variables_of(runtime)
    if "tools" in variables:
        body["tools"] = variables.pop("tools")
    return row.id, "/chat/completions", {**body, **({"chat_template_kwargs": variables} if variables else {})}


def _declared(declared: dict[str, Any], own: str) -> tuple[str, str | None]:
    """The dtype and the form in which an engine is declared to compute. Raises UsageError."""
    dtype = own if declared["dtype"] == "auto" else str(declared["dtype"])
    if dtype not in DTYPES:
        raise UsageError(f"dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    return dtype, None if declared["quantize"] == "gguf" else declared["quantize"]  # the GGUF file is --model itself
