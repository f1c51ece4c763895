"""`genctl chat`: turns are typed on a terminal, or read from the rows of an input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from genctl.commands.chat.chat import Chat, PlannedTurn, continued, fingerprint_of, to_save
from genctl.commands.chat.log import SCHEMA, ChatHeader, ChatLog, NotAChat, Role, unsent
from genctl.commands.chat.options import ChatOptions, check_settings
from genctl.commands.engine_choice import engine_of
from genctl.commands.job import Job, Row, settings_of, start_seed, started, usable
from genctl.commands.messages import Messages
from genctl.commands.options import shown_top
from genctl.config import presets
from genctl.config.layers import Layer, Resolved
from genctl.config.shapes import value_of
from genctl.engines.protocol import Engine, Flow, Report
from genctl.errors import (
    ContractError,
    GenctlError,
    InputError,
    ModelError,
    OutputError,
    UsageError,
    printable,
)  # fmt: skip
from genctl.io import jsonl, writers
from genctl.io.output import open_beside
from genctl.io.record_output import RecordOutput
from genctl.io.records import result_record
from genctl.io.rows import InputRow, RefusedRow
from genctl.io.sessions import new_file, sessions_folder
from genctl.io.sink import Sink
from genctl.terminal import loading_line, widgets

OF_FILE = "the chat"  # origin of the model that the chat's file names


@dataclass(frozen=True)
class RowMessage:
    """A row that is a message."""

    role: Role
    content: str
    id: Any = None
    params: dict[str, Any] = field(default_factory=dict)


def _fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The fields of a row: a message, or else those of other commands. Raises RefusedRow."""
    if "role" not in own and "content" not in own:
        return jsonl.ROW.fields(own, columns)
    try:
        row: RowMessage = value_of(RowMessage, {**own, **dict.fromkeys(columns)})
    except ValueError as error:
        raise RefusedRow(str(error)) from None
    return {"messages": ({"role": row.role, "content": row.content},), "params": row.params}


ROW = jsonl.RowShape((*jsonl.KNOWN, "role", "content"), (*jsonl.PROMPTS, "role", "content"), _fields)


def chat(options: ChatOptions) -> int | None:
    """`genctl chat`."""
    with started(options, engine_of(options), row="turn") as job:
        interrupt, messages = job.interrupt, job.messages
        _ = options.prompt_template  # a mistake in it is reported at once
        path = _last_chat() if options.continued else options.open and Path(options.open).expanduser()
        if path:
            header = ChatLog.look(path).header
            given = {key for layer in (*presets.load(options.presets), *options.flags) for key in layer.values}
            saved = continued(options.standing_layers(), header.settings, messages.remark, given)
            saved.append(Layer(OF_FILE, {"model": header.model}, declared="user"))
            job.options = options = replace(options, saved=saved)
        layers, early = job.early_settings()
        check_settings(early)
        if options.prefill is not None and early.runtime.backend is not None:
            server = f"(backend, {early.origins['backend']})"
            raise UsageError(f"--prefill begins the answer in the prompt, which a server makes itself {server}")
        if path and early.runtime.backend is None:
            _check_checkpoint(options, path, header, early)
        interactive = options.interactive
        rows = iter(()) if interactive else job.read(shape=ROW)
        if rows is None:
            return None

        with job.outputs() as stack:
            begin_file: Callable[[str], Sink] | None = None
            if options.save is not None:
                file = open_beside(Path(options.save))
                stack.callback(file.abandon, keep=False)
                begin_file = lambda words: file  # noqa: E731
            elif interactive:
                begin_file = lambda words: open_beside(new_file("chat", words))  # noqa: E731
            job.live = interactive
            if not interactive:
                sink = writers.open_output(options.output, sys.stdout, force=options.force)
                safe = widgets.visible if sink.is_terminal else str
                writer = writers.open_writer(options.format, sink, on_error=messages.failure, shown=safe)
                output = job.output = RecordOutput(writer, sink)
                stack.push(
                    lambda kind, *_: output.abandon() if kind else output.close(cut_short=bool(interrupt.status))
                )

            # a server streams if the chat is saved, so that an interrupted answer keeps the text received so far
            streams = early.runtime.backend is not None and bool(path or begin_file)
            engine = job.load_engine(early, layers, need_tokenizer=True, live=interactive or streams, waits=True)
            if path:
                log = _reopened(path, engine, early, messages)
            else:
                settings = to_save(layers)
                begun = ChatHeader(SCHEMA, engine.about.name, fingerprint_of(engine), start_seed(early), settings)
                log = ChatLog(begun, begin_file)

            chat = Chat(engine, layers, log, options.prefill or "", messages.remark_once)
            stack.push(lambda kind, *_: chat.log.close(sync=kind is None))
            if options.with_tokens:
                chat.base_plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
            engine.use_threads(chat.base_plan.rows)
            messages.detail(*engine.notes())
            job.describe(chat.base, chat.base_plan)
            messages.note(*filter(None, [chat.remark]))

            loading_line.end()
            if interactive:
                from genctl.commands.chat.screen import ChatScreen

                ended = ChatScreen(chat, options).run(options.arguments)
            else:
                if chat.log.unanswered:
                    messages.remark("the last turn has no answer yet; it is answered first")
                    chat.answer(chat.plan(chat.log.turn()), lambda event: None, Report(), Flow(interrupted=interrupt))
                with interrupt.rescued_by(lambda: job.rescue(stack)):
                    _answer_rows(job, options, chat, rows)
        return interrupt.status or (ended if interactive else job.status())


# -- turns -------------------------------------------------------------------------------------------------------------


def _answer_rows(job: Job, options: ChatOptions, chat: Chat, rows: Iterable[Row]) -> None:
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
                report = Report(top, options.scores or top > 0)
                result = chat.answer(turn, lambda event: None, report, Flow(interrupted=job.interrupt))
            except (ContractError, OutputError):  # errors of every turn, such as a full disk
                raise
            except GenctlError as error:
                job.fail(row, error.code, error.message, hint=error.hint)
                continue
            if job.output is not None and result is not None:
                reused = None if result.backend else result.reused
                record = result_record(row, result, 0, tokens=options.with_tokens, extra={}, reused_tokens=reused)
                job.output.put(row.index, [record])
            answered += 1
        if job.interrupt.status:
            return


def _turn(chat: Chat, row: InputRow, base: Resolved) -> PlannedTurn | None:
    """The turn that answers a row's last message; None if that is not the user's. The other messages are appended."""
    if row.prompt_ids is not None:
        raise InputError("a chat is made of texts: prompt_ids has no place in it")
    messages = row.messages or ({"role": "user", "content": row.prompt or ""},)
    if any(message["role"] not in get_args(Role) or "tool_calls" in message for message in messages):
        raise InputError("a chat has texts of system, user and assistant, and no calls of tools")
    *context, last = messages
    for message in (*context, *([last] if last["role"] != "user" else [])):
        chat.log.add_message(message["role"], message["content"], chat.log.end)
    if last["role"] != "user":
        return None
    question = unsent(last["content"], chat.log.end)
    return chat.plan(question, base, lane=row.id, own_id=row.id if row.own_id else "")


# -- saved chats -------------------------------------------------------------------------------------------------------


def _check_checkpoint(options: ChatOptions, path: Path, header: ChatHeader, early: Resolved) -> None:
    """Raises UsageError for a chat with a server, which no checkpoint here can continue, and GenctlError if only the
    chat's file names the checkpoint, and it needs a download or may run code: anyone may have written the file.
    """
    from genctl.models.resolve import needs_download

    if not header.checkpoint:
        raise UsageError(
            f"{path} is a chat with a server, and a checkpoint here cannot continue it",
            hint="--backend URL names the server",
        )
    if early.origins["model"] != OF_FILE:
        return
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


def _reopened(path: Path, engine: Engine, early: Resolved, messages: Messages) -> ChatLog:
    """The chat in a file. Raises as `ChatLog.open` does; InputError for another checkpoint, unless -m names it."""
    log, name, named = ChatLog.open(path), engine.about.name, early.settings.get("model")
    begun = log.header.model
    if log.header.checkpoint != fingerprint_of(engine):
        if named is None or named.kind != "command":
            log.close(sync=False)
            raise InputError(
                f"-m {name} continues {path} with this checkpoint: the chat was begun with {begun}, in another "
                "state or by an older genctl, so that earlier answers may not be what it would write now"
            )
        messages.note(f"{path} was begun with {begun}; {name} continues it, as -m says")
    if log.torn:
        messages.remark(f"{printable(str(path))} ends in half a line, which is dropped: a write was cut off")
    return log


def _last_chat() -> Path:
    """The most recently changed chat in the sessions folder. Raises InputError if there is none."""
    found = [path for path in sessions_folder().glob("*.jsonl") if path.is_file()]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime, path), reverse=True):
        with suppress(NotAChat):  # such as a tree
            ChatLog.look(path)
            return path
    raise InputError(f"there is no chat to continue in {printable(str(sessions_folder()))}")
