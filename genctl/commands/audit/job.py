"""`genctl audit` at work: a trace is read or asked for, and what its engine computed is looked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

from rich.text import Text

from genctl.commands.audit import view
from genctl.commands.audit.options import UNEXPLAINED, AuditOptions, check_words
from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice
from genctl.commands.job import Job
from genctl.commands.parity.findings import FindingsWriter
from genctl.commands.parity.view import LivePairs
from genctl.config.chat_settings import variables_of
from genctl.config.layers import Layer, resolve
from genctl.errors import BackendError, CheckError, GenctlError, InputError, ModelError, UsageError
from genctl.io.rows import BadRow, InputRow
from genctl.models.resolve import needs_download
from genctl.models.runtime_choice import stored_dtype
from genctl.models.text import detokenizer
from genctl.params import Runtime
from genctl.parity import traces
from genctl.parity.audit import Auditor
from genctl.parity.audit_values import Audit
from genctl.parity.prompts import AuditPrompts, AuditRow
from genctl.parity.shapes import rows_of
from genctl.parity.sides import LocalSide, greedy
from genctl.parity.trace_rows import TemplateSettings
from genctl.parity.traces import TraceFile
from genctl.parity.ways import DTYPES
from genctl.terminal.interrupt import Interrupt

DRAWN_TOO = 1.0  # a server is asked greedily, and at this temperature
TOKENS = 64  # of an answer, where nothing says it


class AuditJob(Job[AuditOptions]):
    """One audit."""

    def __init__(self, options: AuditOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.trace = TraceFile()
        self.prompts: list[InputRow] = []

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint."""
        check_words(self.options)
        status = super().prepare()
        if self.options.is_server:
            self._name_model()
        return status

    def _name_model(self) -> None:
        """Make the checkpoint that genctl's records name the reference, unless a flag does. Raises UsageError."""
        known, names = self.early.settings.get("model"), {row.model for row in self.trace.rows} - {""}
        if (known is not None and known.kind == "command") or (self.early.names_model and len(names) != 1):
            return
        words = "genctl audit needs the checkpoint that the engine should have run: -m ./model"
        if len(names) != 1:
            raise UsageError(words, hint=f"the records name {' and '.join(sorted(names))}" if names else "")
        if needs_download(name := names.pop(), None):  # nothing is downloaded because of a trace
            raise UsageError(words, hint=f"the records name {name}, which is not on this machine")
        self.layers.append(Layer(f"the records of {self.options.trace}", {"model": name}, declared="user"))
        self.early = resolve(self.layers, tentative=True)
        self.messages.note(f"the reference is {name}, which the records name; -m names another one")

    def read(self, stack: ExitStack) -> bool:
        """Read the trace; a server is asked later, once its prompts are there."""
        options = self.options
        if not options.is_server:
            self.trace = traces.read(options.trace, options.rows, traces.field_paths(options.field))
            if options.prompts_file is not None:
                traces.with_prompts(self.trace, options.prompts_file)
            self._name_model()
            return True
        prompts = replace(options, arguments=()).prompts(self.messages.print)
        if prompts is None:
            raise InputError("a server needs prompts: --input FILE")
        for row in islice(stack.enter_context(prompts), options.rows):
            if isinstance(row, BadRow):
                self.trace.fail(row.id, row.message)
                self.messages.error(row.message, "", "")
            else:
                self.prompts.append(row)
        if not self.prompts:
            raise InputError(next(iter(self.trace.bad.values()), "there is no prompt"))
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the outputs and the view."""
        options = self.options
        self.open_consoles()
        sink = self.report_sink(stack)
        self.results = FindingsWriter(options.format, self.out, sink, view.COLUMNS, view.flat, self._lines)
        self.view = LivePairs(self.err, time.monotonic, quiet=options.quiet, stages=view.STAGES)
        stack.callback(self.view.hide)

    def deliver(self, stack: ExitStack) -> None:
        """Read, explain, write."""
        declared = {"dtype": self.early.runtime.dtype, "quantize": self.early.runtime.quantize, **self.options.declared}
        if self.options.is_server:
            self._ask(stack)
        is_gguf = self.early.runtime.model.endswith(".gguf")
        plain = replace(self.early.runtime, quantize=None, dtype="float32", dequantize=is_gguf)
        early = replace(self.early, runtime=plain)
        session: Any = self.load_engine(early, need_tokenizer=False)
        if session.about.is_encoder_decoder:
            raise ModelError(f"{session.about.name} is an encoder-decoder: only causal models can be audited")
        resolved = greedy(session.resolve(self.layers), ("max_length",))
        side = LocalSide(session.about.name, session, resolved, whole=True)
        prompts = AuditPrompts(session.loaded, resolved, bos=session.planner.bos)
        rows = [*self._rows(prompts, session.planner.context)]
        checkpoint = session.loaded.checkpoint
        own = (checkpoint and stored_dtype(checkpoint)) or "float32"
        dtype, form = _declared(declared, own)
        found = Audit(self.options.trace, side.name, "unexplained", "")
        if rows:
            self.view.begin("audit")
            auditor = Auditor(
                side, rows, prompts, dtype=DTYPES[dtype], form=form, others=self.options.also,
                interrupted=self.interrupt, on_stage=self.view.stage,
            )  # fmt: skip
            found = auditor.run(self.options.trace)
        found = replace(prompts.impossible.judge(found), failed=self.trace.bad)
        if not found.reason:
            raise InputError(f"{self.options.trace}: no row can be audited")
        notes = [*found.notes]
        if self.trace.failed > len(self.trace.bad):
            notes.append(f"{self.trace.failed:,} rows cannot be audited; the first {len(self.trace.bad)} are listed")
        if self.trace.total > len(self.trace.rows):
            notes.append(f"{len(self.trace.rows)} of {self.trace.total:,} rows are audited; --rows N changes that")
        if dtype != own or form:
            notes.append(f"the engine is declared to compute in {form or dtype}")
        self.found = replace(found, notes=tuple(notes))
        self.failed = self.trace.failed
        self.hide()
        self.piece = detokenizer(session.loaded.tokenizer).piece
        failed_check = self._failed_check()
        self.results.records(view.records(self.found, positions=self.options.positions, failed_check=failed_check))
        if self.page is not None:
            view.add_to_page(self.page, self.found, self.piece)
        self.results.finish()

    def _lines(self, width: int | None) -> list[Text]:
        return view.lines(self.found, self.piece, width)

    def _rows(self, prompts: AuditPrompts, context: int | None) -> Iterator[AuditRow]:
        for row in self.trace.rows:
            try:
                if (one := prompts.row(row)) is None:
                    continue
                length = len(one.text.prompt_ids) + len(one.text.token_ids)
                if context is not None and length > context:
                    raise InputError(f"{length} tokens, and the model reads {context}")
                yield one
            except GenctlError as error:
                self.trace.fail(row.name, f"row {row.name}: {error.message}")
                self.hide()
                self.messages.error(error.message, f"row {row.name}: ", error.hint)

    def _ask(self, stack: ExitStack) -> None:
        """Ask the server: every prompt greedily, then drawn."""
        from genctl.engines.server.logprobs import answers
        from genctl.engines.server.session import RemoteSession

        layer = Layer("the trace", {"backend": self.options.trace}, declared="user", typed=True)
        engine: Any = SERVERS.load(self.setup(resolve([layer], tentative=True), ()))
        stack.callback(engine.close)
        assert isinstance(engine, RemoteSession)
        self.view.begin("audit")
        self.view.stage("asking")
        most = self.early.generation.max_new_tokens or TOKENS
        requests = [(row, drawn) for drawn in (0.0, DRAWN_TOO) for row in self.prompts]
        bodies = [_body(row, self.settings_of(row, self.early).runtime, drawn, most) for row, drawn in requests]
        for (row, drawn), (id, answer) in zip(requests, answers(engine.servers, bodies, self.interrupt), strict=False):
            name = f"{row.id} drawn" if drawn else row.id
            try:
                if isinstance(answer, GenctlError):
                    raise answer
                texts: Any = answer.get("choices") if isinstance(answer, dict) else None
                if not isinstance(texts, list) or len(texts) == 1:  # of thousands none is read
                    texts = rows_of(answer, f"the answer to prompt {row.name}", id)
                if len(texts) != 1:
                    raise InputError(f"prompt {row.name}: one text was requested, and the server gives {len(texts):,}")
            except GenctlError as error:
                self.trace.fail(name, error.message)
                continue
            own = {"prompt": row.prompt, "prompt_ids": row.prompt_ids, "messages": row.messages}
            known = TemplateSettings.__annotations__
            settings = {key: value for key, value in {**row.params, **row.extra}.items() if key in known}
            self.trace.rows.append(replace(texts[0], id=name, own_id=True, settings=settings, **own))
        if self.interrupt.status:
            raise SystemExit(self.interrupt.status)
        self.trace.total = len(self.trace.rows)
        if not self.trace.rows:
            raise BackendError(f"{self.options.trace}: {next(iter(self.trace.bad.values()), 'no answer')}")

    def _failed_check(self) -> str:
        one = self.found
        names = [each.key for each in one.causes] or [UNEXPLAINED]
        return "" if one.verdict == "same" or all(name in self.options.allow for name in names) else (
            f"{one.trace}: {one.verdict}: {one.reason}"
        )  # fmt: skip

    def status(self) -> int:
        """The exit status. Raises CheckError where the engine did not compute what it should."""
        if (check := self._failed_check()) and not self.interrupt.status:
            keys = " ".join(f"--allow {key}" for key in dict.fromkeys(one.key for one in self.found.causes))
            raise CheckError(check, hint=f"{keys or f'--allow {UNEXPLAINED}'} passes it")
        return super().status()


def _body(row: InputRow, runtime: Runtime, temperature: float, most: int) -> tuple[str, str, dict[str, Any]]:
    """The id, the path and the fields of a request."""
    from genctl.engines.server.body import COMPLETIONS, EXPLICIT, messages_of

    body: dict[str, Any] = {"max_tokens": most, "temperature": temperature}
    if temperature:
        body |= {name: plain for name, plain in EXPLICIT.items() if name in COMPLETIONS}
        body["seed"] = row.index
    if row.messages is not None or runtime.is_chat:
        body |= {
            "messages": messages_of(row.prompt, row.messages, runtime.system),
            "logprobs": True,
            "top_logprobs": 20,
        }
        variables = variables_of(runtime)
        tools = {"tools": variables.pop("tools")} if "tools" in variables else {}
        return (
            row.id,
            "/chat/completions",
            {**body, **tools, **({"chat_template_kwargs": variables} if variables else {})},
        )
    prompt: Any = row.prompt if row.prompt is not None else list(row.prompt_ids or ())
    return row.id, "/completions", {**body, "prompt": prompt, "logprobs": 20}


def _declared(declared: dict[str, Any], own: str) -> tuple[str, str | None]:
    """The dtype and the form that an engine is said to compute in. Raises UsageError."""
    dtype = str(declared["dtype"])
    dtype = own if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype = {dtype}: must be one of {', '.join(DTYPES)}")
    return dtype, None if declared["quantize"] == "gguf" else declared["quantize"]  # of a GGUF file that is --model
