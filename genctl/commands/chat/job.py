"""`genctl chat`: turns are typed, or they are the rows of an input."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from genctl.commands.chat import saved
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat, PlannedTurn
from genctl.commands.chat.line_input import SIGN
from genctl.commands.chat.log import SCHEMA, ChatHeader, ChatLog
from genctl.commands.chat.options import ChatOptions, check_backend, check_settings
from genctl.commands.chat.partner import Partner
from genctl.commands.chat.saved_settings import continued, to_save
from genctl.commands.chat.thinking import opened_by
from genctl.commands.engine_choice import SERVERS, engine_of
from genctl.commands.job import Job, Row, settings_of, start_seed, started, usable
from genctl.commands.messages import Messages
from genctl.commands.options import memory_bytes, shown_top
from genctl.config import presets
from genctl.config.layers import Layer, Resolved
from genctl.config.reader import kind_of
from genctl.engines.protocol import Flow, Report
from genctl.errors import ContractError, GenctlError, InputError, ModelError, OutputError, UsageError, printable
from genctl.io import jsonl, writers
from genctl.io.output import open_beside
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import result_record
from genctl.io.rows import BadRow, InputRow, RefusedRow
from genctl.io.sessions import new_file
from genctl.io.sink import Sink
from genctl.terminal import loading_line
from genctl.terminal.console import make_consoles
from genctl.terminal.standard_streams import is_terminal

TEE_S = 0.05  # until what reads the pipe has shown the answer, so that the sign stands below it
ROLES = ("system", "user", "assistant")


def _fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The fields of a row: a message, else what other commands take. Raises RefusedRow."""
    if "role" not in own:
        if "content" in own:
            raise RefusedRow("content: of a message without a role")
        return jsonl.ROW.fields(own, columns)
    if unknown := jsonl.unknown_keys((*own, *columns), ("id", "role", "content", "params")):
        raise RefusedRow("; ".join(unknown))
    if own["role"] not in ROLES:
        raise RefusedRow(f"role: expected one of {', '.join(ROLES)}, got {own['role']!r:.40}")
    if not isinstance(own.get("content"), str):
        raise RefusedRow(f"content: expected a string, got {kind_of(own.get('content'))}")
    if not isinstance(params := own.get("params", {}), dict):
        raise RefusedRow(f"params: expected an object, got {kind_of(params)}")
    return {"messages": ({"role": own["role"], "content": own["content"]},), "params": params}


ROW = jsonl.RowShape((*jsonl.KNOWN, "role", "content"), (*jsonl.PROMPTS, "role", "content"), _fields)


def chat(options: ChatOptions) -> int | None:
    """`genctl chat`."""
    if options.listed:
        return saved.write_list(options)
    if options.continued:
        options = replace(options, open=str(saved.last_chat()))
    elif options.open is not None:
        options = replace(options, open=str(Path(options.open).expanduser()))
    if options.open is not None:
        options = _with_saved(options, Path(options.open))
    choice = engine_of(options)
    choice = replace(choice, check=check_backend) if choice is SERVERS else choice
    with started(options, choice, row="turn") as job:
        interrupt, messages = job.interrupt, job.messages
        _ = options.prompt_template  # a mistake in it is reported at once
        for line in options.remarks:
            messages.remark(line)
        layers, early = job.early_settings()
        check_settings(early)
        memory = None if options.memory is None else memory_bytes(options.memory)
        interactive = options.interactive
        # a person types the turns, though the answers go elsewhere, as to `tee`
        typed = job.waits and is_terminal(sys.stdin) and is_terminal(sys.stderr)
        if typed and not interactive:
            job.options = options = replace(options, input="-")
        rows = iter(()) if interactive and not options.arguments else job.read(shape=ROW)
        if rows is None:
            return None

        with job.outputs() as stack:
            out, err = make_consoles(options.color)
            begin_file: Callable[[str], Sink] | None = None
            if options.save is not None:
                file = open_beside(Path(options.save), force=options.force)
                stack.callback(file.abandon, keep=False)
                begin_file = lambda words: file  # noqa: E731
            elif interactive:
                begin_file = lambda words: open_beside(new_file("chat", words))  # noqa: E731
            tally = RowTally()
            job.live = interactive or options.on_screen
            if not job.live:
                sink = writers.open_output(options.output, sys.stdout, force=options.force)
                writer = writers.open_writer(options.format, sink, on_error=messages.failure)
                output = job.output = RecordOutput(writer, sink, tally)
                stack.push(
                    lambda kind, *_: output.abandon() if kind else output.close(cut_short=bool(interrupt.status))
                )

            # a server streams where its text is saved, so that an answer that a signal ends has what came
            streams = early.runtime.backend is not None and (options.open is not None or begin_file is not None)
            engine = job.load_engine(early, layers, need_tokenizer=True, live=job.live or streams, waits=True)
            partner = Partner(engine, memory, options.prefill or "")
            partner.check_system(early.runtime.system, early.origins.get("system", "--system"))
            if options.open is not None:
                log = _reopened(Path(options.open), partner, early, messages)
            else:
                settings = to_save(layers)
                header = ChatHeader(SCHEMA, engine.about.name, partner.fingerprint(), start_seed(early), settings)
                log = ChatLog(header, begin_file)

            def remark(line: str) -> None:
                if messages.is_new(line):
                    messages.remark(line)

            chat = Chat(partner, layers, log, options.prefill or "", remark)
            stack.push(lambda kind, *_: chat.log.close() if kind is None else chat.log.leave())
            if options.with_tokens:
                chat.base_plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
            engine.use_threads(chat.base_plan.rows)
            messages.detail(*engine.notes())
            job.describe(chat.base, chat.base_plan)
            messages.note(*filter(None, [partner.note]))

            loading_line.end()
            if interactive:
                from genctl.commands.chat.commands import run
                from genctl.commands.chat.screen import ChatScreen

                def load(path: Path) -> None:
                    found = _reopened(path, partner, early, messages)
                    chat.switch(found, continued(layers, found.header.settings, messages.remark))

                ended = run(ChatScreen(chat, options, (out, err), messages.advise, load), _initial_turns(rows))
            else:
                if chat.log.unanswered:
                    messages.remark("the last turn has no answer yet; it is answered first")
                    chat.answer(chat.plan_again(), [], Report(), Flow(interrupted=interrupt))
                with interrupt.rescued_by(lambda: job.rescue(stack)):
                    _answer_rows(job, options, chat, _typed_rows(rows, messages) if typed else rows, out, tally)
        return interrupt.status or (ended if interactive else job.status())


def _reopened(path: Path, partner: Partner, early: Resolved, messages: Messages) -> ChatLog:
    """The chat in a file. Raises as `ChatLog.open` does.

    Raises InputError for a chat of another checkpoint, unless -m names this one and its tokens are the same.
    """
    log, name = ChatLog.open(path), partner.name
    begun, named = log.header.model, early.settings.get("model")
    if log.header.checkpoint == partner.fingerprint():
        pass
    elif partner.session is None or not all(map(partner.writes, log.messages.values())):
        log.leave()
        raise InputError(
            f"{path} was begun with {begun}, whose tokens are not those of {name}",
            hint=f"-m {begun}, if its files are still there",
        )
    elif named is None or named.kind != "command":
        log.leave()
        raise InputError(
            f"-m {name} continues {path} with this checkpoint: the chat was begun with {begun}, in another "
            "state or by an older genctl, so that earlier answers may not be what it would write now"
        )
    else:
        messages.note(f"{path} was begun with {begun}; {name} continues it, as -m says")
    if log.torn:
        messages.remark(f"{printable(str(path))} ends in half a line, which is dropped: a write was cut off")
    return log


# -- turns -------------------------------------------------------------------------------------------------------------


def _initial_turns(rows: Iterable[Row]) -> Iterator[str]:
    """The turns of the command line."""
    for row in rows:
        if isinstance(row, InputRow) and row.prompt:
            yield row.prompt
        elif isinstance(row, BadRow):
            raise InputError(row.message)


def _typed_rows(rows: Iterator[Row], messages: Messages) -> Iterator[Row]:
    """The turns that a person types, each after a sign on standard error."""
    messages.note("type a turn and press Enter; Ctrl-D ends")
    while True:
        time.sleep(TEE_S)
        sys.stderr.write(SIGN)
        sys.stderr.flush()
        row = next(rows, None)
        if row is None:
            sys.stderr.write("\n")
            return
        yield row


def _answer_rows(
    job: Job, options: ChatOptions, chat: Chat, rows: Iterable[Row], out: Console, tally: RowTally
) -> None:
    """Answer each row, and write its record."""
    top, answered = shown_top(options), 0
    for each in rows:
        numbered = replace(each, index=answered + job.failed)  # rows that are not answered have no record
        for row, resolved in usable([numbered], lambda row: settings_of(row, chat.base), job.fail):
            try:
                check_settings(resolved)
                if (turn := _turn(chat, row, resolved)) is None:
                    continue
                job.messages.note_once(turn.note)
                view = AnswerView(out, begun=opened_by(turn.opening), prefill=chat.prefill) if job.live else None
                try:
                    report = Report(top, options.scores or top > 0)
                    flow = Flow(interrupted=job.interrupt)
                    result = chat.answer(turn, [] if view is None else [view.feed], report, flow)
                finally:
                    if view is not None:
                        view.close()
            except (ContractError, OutputError):  # what is wrong for one turn is wrong for all, as a full disk is
                raise
            except GenctlError as error:
                job.fail(row, error.code, error.message, hint=error.hint)
                continue
            tally.look(row.index, job.row_label(row), result, (), texts=True)
            if job.output is not None and result.sequences:
                reused = None if result.backend else result.reused
                record = result_record(row, result, 0, tokens=options.with_tokens, extra={}, reused_tokens=reused)
                job.output.put(row.index, [record])
            answered += 1
        if job.interrupt.status:
            return


def _turn(chat: Chat, row: InputRow, base: Resolved) -> PlannedTurn | None:
    """The turn of a row that is to be answered. Messages before it are appended; None where nothing else is there."""
    if row.prompt_ids is not None:
        raise InputError("a chat is made of texts: prompt_ids has no place in it")
    *context, last = row.messages or ({"role": "user", "content": row.prompt or ""},)
    for message in (*context, *([last] if last["role"] != "user" else [])):
        chat.log.add_message(message["role"], message["content"], chat.log.end)
    if last["role"] != "user":
        return None
    own_id = row.id if row.own_id else ""
    return chat.plan(last["content"], chat.log.end, lane=row.id, own_id=own_id, base=base)


# -- the settings of a saved chat --------------------------------------------------------------------------------------


def _with_saved(options: ChatOptions, path: Path) -> ChatOptions:
    """The options with the settings of a saved chat. Raises GenctlError for a file that cannot be continued with them.

    The file of somebody else names a checkpoint: it is not downloaded for that, and no code of it runs.
    """
    from genctl.models.resolve import needs_download

    header = ChatLog.look(path).header
    now = [*presets.load(options.presets), *options.flags]
    named = {key for layer in now for key in layer.values}
    remarks: list[str] = []
    layers = continued(options.standing_layers(), header.settings, remarks.append, named)
    layers.append(Layer("the chat", {"model": header.model}, declared="user"))
    served = any(layer.values.get("backend") for layer in [*layers, *now])
    if not header.checkpoint and not served:
        raise UsageError(
            f"{path} is a chat with a server, and a checkpoint here cannot continue it",
            hint="--backend URL names the server",
        )
    if "model" in named or served:
        return replace(options, saved=layers, remarks=remarks)
    for flag, given in options.trust.items():
        if given:
            raise UsageError(
                f"--{flag.replace('_', '-')} would run code of {header.model!r:.60}, which only {path} names",
                hint=f"-m {header.model} names it, too",
            )
    if needs_download(header.model, None):
        raise ModelError(
            f"{path}: model = {header.model!r:.60} is not on this machine, and is not downloaded because of a file",
            hint=f"--model {header.model} downloads it",
        )
    return replace(options, saved=layers, remarks=remarks)
