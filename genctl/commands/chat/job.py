"""`genctl chat` at work: turns are typed, or they are the rows of an input."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from genctl.commands import job
from genctl.commands.chat import saved
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat
from genctl.commands.chat.line_input import SIGN
from genctl.commands.chat.log import SCHEMA, ChatHeader, ChatLog
from genctl.commands.chat.options import ChatOptions, check_backend, check_settings
from genctl.commands.chat.partner import Partner
from genctl.commands.chat.saved_settings import continued, to_save
from genctl.commands.chat.thinking import opened_by
from genctl.commands.engine_choice import SERVERS, engine_of
from genctl.commands.options import memory_bytes, shown_top
from genctl.config import presets
from genctl.config.layers import Layer, Resolved
from genctl.documents.reader import kind_of
from genctl.engines.protocol import Flow, Report
from genctl.errors import ContractError, Exit, GenctlError, InputError, ModelError, OutputError, UsageError, printable
from genctl.io import jsonl, writers
from genctl.io.output import open_beside
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import result_record
from genctl.io.rows import BadRow, InputRow, RefusedRow
from genctl.io.sessions import new_file
from genctl.io.sink import Sink
from genctl.terminal import loading_line
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


class ChatJob(job.Job[ChatOptions]):
    """One chat."""

    what = "turn"
    reading: ClassVar[Mapping[str, Any]] = {"shape": ROW}
    chat: Chat | None = None
    ended = int(Exit.DONE)  # how a person left
    answered = 0  # rows, and those that failed

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint."""
        _ = self.options.prompt_template  # a mistake in it is reported at once
        self.interactive = self.options.interactive
        for line in self.options.remarks:
            self.messages.remark(line)
        status = super().prepare()
        check_settings(self.early)
        self.memory = None if self.options.memory is None else memory_bytes(self.options.memory)
        return status

    def read(self, stack: ExitStack) -> bool:
        """Open the input; a person at a terminal needs none."""
        if not self.interactive and self._is_typed:
            self.options = replace(self.options, input="-")
        if not self.interactive or self.options.arguments:
            return super().read(stack)
        self.input = iter(())
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the output, the terminal and the file of a new chat."""
        self.open_consoles()
        self.new_file = None
        if self.options.save is not None:
            path = Path(self.options.save)
            file = open_beside(path, force=self.options.force)
            stack.callback(file.abandon, keep=False)

            def begin(words: str) -> Sink:
                saved.remember(path)
                return file

            self.new_file = begin
        elif self.interactive:
            self.new_file = lambda words: open_beside(new_file("chat", words))
        self.tally = RowTally()
        self.live = self.interactive or self.options.on_screen
        if not self.live:
            sink = writers.open_output(self.options.output, sys.stdout, force=self.options.force)
            writer = writers.open_writer(self.options.format, sink, on_error=self.print_failure)
            output = self.output = RecordOutput(writer, sink, self.tally)
            stack.push(
                lambda kind, *_: output.abandon() if kind else output.close(cut_short=bool(self.interrupt.status))
            )

        def close(kind: object, *_: object) -> None:
            if self.chat is not None:
                self.chat.log.close() if kind is None else self.chat.log.leave()

        stack.push(close)

    def load(self) -> None:
        """Load the checkpoint; begin or continue the chat."""
        early, options = self.early, self.options
        # a server streams where its text is saved, so that an answer that a signal ends has what came
        streams = early.runtime.backend is not None and (options.open is not None or self.new_file is not None)
        engine = self.load_engine(early, self.layers, need_tokenizer=True, live=self.live or streams, waits=True)
        self.partner = Partner(engine, self.memory)
        self.partner.check_system(early.runtime.system, early.origins.get("system", "--system"))
        if options.open is not None:
            log = self._reopened(Path(options.open))
        else:
            layers = to_save(layer for layer in self.layers if layer.origin != "genctl chat")
            seed = job.start_seed(early)
            header = ChatHeader(SCHEMA, engine.about.name, self.partner.fingerprint(), seed, layers)
            log = ChatLog(header, self.new_file)
        chat = self._use(log, self.layers, options.prefill or "")
        if options.with_tokens:
            chat.base_plan.require_logprobs("--scores" if options.scores else "--top-logprobs")
        engine.use_threads(chat.base_plan.rows)
        self.messages.detail(*engine.notes())
        self.describe(chat.base, chat.base_plan)
        self.messages.note(*filter(None, [self.partner.note]))

    def deliver(self, stack: ExitStack) -> None:
        """Hold the conversation."""
        loading_line.end()
        assert self.chat is not None
        if self.interactive:
            from genctl.commands.chat.commands import run
            from genctl.commands.chat.screen import ChatScreen

            screen = ChatScreen(
                self.chat, self.options, (self.out, self.err), advise=self.messages.advise, open_chat=self.change_chat
            )
            self.ended = run(screen, self._initial_turns())
            return
        if self.chat.log.unanswered:
            self.messages.remark("the last turn has no answer yet; it is answered first")
            self.chat.answer(self.chat.plan_again(), [], Report(), Flow(interrupted=self.interrupt))
        with self.interrupt.rescued_by(lambda: self._rescue(stack)):
            for row in self._typed_rows() if self._is_typed else self.input:
                self._take(row, self.chat)
                if self.interrupt.status:
                    break

    @property
    def _is_typed(self) -> bool:
        """Whether a person types the turns, though the answers go elsewhere, as to `tee`."""
        read = self.options.input in (None, "-") and not self.options.arguments
        return read and is_terminal(sys.stdin) and is_terminal(sys.stderr)

    def _typed_rows(self) -> Iterator[InputRow | BadRow]:
        """The turns that a person types, each after a sign on standard error."""
        self.messages.note("type a turn and press Enter; Ctrl-D ends")
        rows = iter(self.input)
        while True:
            time.sleep(TEE_S)
            sys.stderr.write(SIGN)
            sys.stderr.flush()
            row = next(rows, None)
            if row is None:
                sys.stderr.write("\n")
                return
            yield row

    def status(self) -> int:
        """The exit status."""
        return self.interrupt.status or (self.ended if self.interactive else super().status())

    # -- the file ------------------------------------------------------------------------------------------------------

    def _reopened(self, path: Path) -> ChatLog:
        """The chat in a file. Raises InputError if it is another checkpoint's, and as `ChatLog.open` does."""
        log = ChatLog.open(path)
        try:
            self._check_checkpoint(path, log)
        except InputError:
            log.leave()
            raise
        if log.torn:
            self.messages.remark(f"{printable(str(path))} ends in half a line, which is dropped: a write was cut off")
        return log

    def _check_checkpoint(self, path: Path, log: ChatLog) -> None:
        """Raises InputError for a chat of another checkpoint, unless -m names this one and its tokens are the same."""
        header, name = log.header, self.partner.name
        if header.checkpoint == self.partner.fingerprint():
            return
        answers = [message for message in log.messages.values() if message.token_ids]
        if self.partner.session is None or not all(
            self.partner.writes(answer.token_ids, answer.content.removeprefix(answer.prefill)) for answer in answers
        ):
            raise InputError(
                f"{path} was begun with {header.model}, whose tokens are not those of {name}",
                hint=f"-m {header.model}, if its files are still there",
            )
        named = self.early.settings.get("model")
        if named is None or named.kind != "command":
            raise InputError(
                f"-m {name} continues {path} with this checkpoint: the chat was begun with {header.model}, in another "
                "state or by an older genctl, so that earlier answers may not be what it would write now"
            )
        self.messages.note(f"{path} was begun with {header.model}; {name} continues it, as -m says")

    def _use(self, log: ChatLog, layers: list[Layer], prefill: str) -> Chat:
        """Go on with a log. Raises what settings raise; then the log is closed."""

        def note(line: str) -> None:
            if self.messages.is_new(line):
                self.messages.remark(line)

        try:
            chat = Chat(self.partner, layers, log, prefill=prefill, note=note)
        except BaseException:
            log.leave()
            raise
        self.chat = chat
        return chat

    def change_chat(self, path: Path) -> Chat:
        """Go on with the chat in another file, and with its settings."""
        log, before = self._reopened(path), self.chat
        assert before is not None
        layers = continued(self.layers, log.header.settings, self.messages.remark)
        chat = self._use(log, layers, before.prefill)
        try:
            before.log.close()
        except OutputError as error:
            self.messages.print(f"error: {error.message}")
        return chat

    # -- turns of an input ---------------------------------------------------------------------------------------------

    def _initial_turns(self) -> Iterator[str]:
        """The turns of the command line."""
        for row in self.input:
            if isinstance(row, InputRow) and row.prompt:
                yield row.prompt
            elif isinstance(row, BadRow):
                raise InputError(row.message)

    def _take(self, row: InputRow | BadRow, chat: Chat) -> None:
        """Say one row, and write the answer."""
        row = replace(row, index=self.answered)  # rows that are not answered have no record
        for usable_row, resolved in self.usable(iter([row]), lambda row: self.settings_of(row, chat.base)):
            try:
                check_settings(resolved)
                self._answer(usable_row, resolved, chat)
            except (ContractError, OutputError):  # what is wrong for one turn is wrong for all, as a full disk is
                raise
            except GenctlError as error:
                self.fail(usable_row, error.code, error.message, hint=error.hint)

    def fail(
        self, row: InputRow | BadRow, code: str, message: str, *, already_shown: bool = False, hint: str = ""
    ) -> None:
        """Write the record of a row that failed; nothing was said."""
        super().fail(row, code, message, already_shown=already_shown, hint=hint)
        self.answered += 1

    def _answer(self, row: InputRow, base: Resolved, chat: Chat) -> None:
        if row.prompt_ids is not None:
            raise InputError("a chat is made of texts: prompt_ids has no place in it")
        *context, last = row.messages or ({"role": "user", "content": row.prompt or ""},)
        for message in (*context, *([last] if last["role"] != "user" else [])):
            chat.append_message(message["role"], message["content"])
        if last["role"] != "user":
            return
        own_id = row.id if row.own_id else ""
        turn = chat.plan(last["content"], chat.log.end, lane=row.id, own_id=own_id, base=base)
        self.messages.note_once(turn.note)
        view = AnswerView(self.out, begun=opened_by(turn.opening), prefill=chat.prefill) if self.live else None
        try:
            top = shown_top(self.options)
            report = Report(top, self.options.scores or top > 0)
            result = chat.answer(turn, [] if view is None else [view.feed], report, Flow(interrupted=self.interrupt))
        finally:
            if view is not None:
                view.close()
        self.tally.look(row.index, self.of(row), result, (), texts=True)
        if self.output is not None and result.sequences:
            reused = None if result.backend else result.reused
            tokens = self.options.with_tokens
            self.output.put(row.index, [result_record(row, result, 0, tokens=tokens, extra={}, reused_tokens=reused)])
        self.answered += 1


def chat(options: ChatOptions) -> int | None:
    """`genctl chat`."""
    if options.listed:
        return saved.write_list(options)
    if options.continued:
        options = replace(options, open=str(saved.last_chat()))
    elif options.open is not None:
        options = replace(options, open=str(saved.path_of(options.open)))
    if options.open is not None:
        options = _with_saved(options, Path(options.open))
    choice = engine_of(options)
    return ChatJob.perform(options, replace(choice, check=check_backend) if choice is SERVERS else choice)


def _with_saved(options: ChatOptions, path: Path) -> ChatOptions:
    """The options with the settings of a saved chat. Raises GenctlError for a file that cannot be continued with them.

    The file of somebody else names a checkpoint: it is not downloaded for that, and no code of it runs.
    """
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
    if "model" not in named and not served:
        _check_named(options, header.model, path)
    return replace(options, saved=layers, remarks=remarks)


def _check_named(options: ChatOptions, model: str, path: Path) -> None:
    """Raises GenctlError where only the file names the checkpoint, and it would be downloaded or its code run."""
    from genctl.models.resolve import needs_download

    for flag, given in options.trust.items():
        if given:
            raise UsageError(
                f"--{flag.replace('_', '-')} would run code of {model!r:.60}, which only {path} names",
                hint=f"-m {model} names it, too",
            )
    if needs_download(model, None):
        raise ModelError(
            f"{path}: model = {model!r:.60} is not on this machine, and is not downloaded because of a file",
            hint=f"--model {model} downloads it",
        )
