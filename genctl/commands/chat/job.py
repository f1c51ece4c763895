"""`genctl chat` at work: turns are typed, or they are the rows of an input."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from genctl.commands import job
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat, Listener
from genctl.commands.chat.line_input import SIGN
from genctl.commands.chat.options import ChatOptions, check_backend, check_settings
from genctl.commands.chat.partner import Partner, local_session
from genctl.commands.chat.story import Story, said
from genctl.commands.chat.thinking import opened_by
from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice, engine_of
from genctl.commands.options import memory_bytes, shown_top
from genctl.config import presets
from genctl.config.layers import Layer, Resolved, values_of
from genctl.documents.reader import kind_of
from genctl.engines.protocol import Flow, Report
from genctl.errors import ContractError, Exit, GenctlError, InputError, OutputError, UsageError
from genctl.events.results import Result
from genctl.io import jsonl, writers
from genctl.io.output import open_beside
from genctl.io.record_output import RecordOutput, RowTally
from genctl.io.records import result_record
from genctl.io.rows import BadRow, InputRow, RefusedRow
from genctl.io.sink import Sink
from genctl.models.text import detokenizer
from genctl.terminal import first_sign
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.standard_streams import is_terminal
from genctl.tree.changes import SCHEMA, Opened
from genctl.tree.file_settings import FileSettings, found_of, saved_layers, to_save
from genctl.tree.journal import Differs, new_file, read_tree, remember
from genctl.tree.nodes import Tree

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

    def __init__(self, options: ChatOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.story: Story | None = None
        self.answered = 0  # rows, and those that failed
        self.ended = int(Exit.DONE)  # how a person left
        self.interactive = options.interactive

    def prepare(self) -> int | None:
        """Settings without those of the checkpoint."""
        _ = self.options.prompt_template  # a mistake in it is reported at once
        self._tell(self.options.file)
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
        self.new_file: Callable[[str], Sink] | None = None
        if self.options.save is not None:
            saved = open_beside(Path(self.options.save), force=self.options.force)
            stack.callback(saved.abandon, keep=False)

            def new_file_of(words: str) -> Sink:
                remember(Path(self.options.save or ""))
                return saved

            self.new_file = new_file_of
        elif self.interactive:
            self.new_file = lambda words: open_beside(new_file("chat", words))
        self.tally = RowTally()
        self.live = self.interactive or self.options.on_screen
        if not self.live:
            sink = writers.open_output(self.options.output, sys.stdout, force=self.options.force)
            writer = writers.open_writer(self.options.format, sink, on_error=self.say_failed)
            self.output: RecordOutput | None = RecordOutput(writer, sink, self.tally)
            output = self.output
            stack.push(
                lambda kind, *_: output.abandon() if kind else output.close(cut_short=bool(self.interrupt.status))
            )
        stack.push(lambda kind, *_: self._close_story(failed=kind is not None))

    def load(self) -> None:
        """Load the checkpoint; begin or continue the chat."""
        early = self.early
        self.engine = engine = self.load_engine(
            early,
            self.layers,
            need_tokenizer=True,
            # what a server streams is written as it comes, too
            live=self.live or (early.runtime.backend is not None and self.is_saved),
            waits=True,
        )
        self.partner = Partner(engine, local_session(engine), self.memory)
        self.partner.check_system(early.runtime.system, early.origins.get("system", "--system"))
        self.story = self._story()
        seed = self.story.tree.opened.seed
        self.chat = Chat(engine, self.partner, self.layers, self.story, seed=seed, prefill=self.options.prefill or "")
        self._tell(self.story.file)
        if self.options.with_tokens:
            self.chat.base_plan.require_logprobs("--scores" if self.options.scores else "--top-logprobs")
        engine.use_threads(self.chat.base_plan.rows)
        self.messages.detail(*engine.notes())
        self.describe(self.chat.base, self.chat.base_plan)
        self.messages.note(*filter(None, [self.partner.note]))

    def deliver(self, stack: ExitStack) -> None:
        """Hold the conversation."""
        first_sign.end()
        if self.interactive:
            from genctl.commands.chat.interactive import Interactive

            screen = Interactive(
                self.chat, self.options, (self.out, self.err), advise=self.messages.advise, open_chat=self.change_story
            )
            self.ended = screen.hold(self._first_turns())
            return
        self._take_up()
        with self.interrupt.rescued_by(lambda: self._rescue(stack)):
            for row in self._typed_rows() if self._is_typed else self.input:
                self._take(row)
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

    def _story(self) -> Story:
        """The chat of --open, or a new one."""
        if self.options.open is not None:
            return self._reopened(Path(self.options.open), self.options.file)
        root = self.partner.first_token(self.engine.resolve(self.layers))
        seed = job.start_seed(self.early)
        layers = to_save(layer for layer in self.layers if layer.origin != "genctl chat")
        opened = Opened(SCHEMA, self.engine.about.name, self._checkpoint(), "", root, seed, layers)
        return Story(Tree(opened), new_file=self.new_file)

    def _reopened(self, path: Path, file: FileSettings) -> Story:
        """The chat in a file. Raises InputError if it is another checkpoint's, and as `Story.open` does."""
        story = Story.open(path, file)
        try:
            self._check_checkpoint(path, story.tree)
        except InputError:
            story.leave()
            raise
        return story

    def _check_checkpoint(self, path: Path, tree: Tree) -> None:
        """Raises InputError for a chat of another checkpoint, unless -m names this one and its tokens are the same."""
        from genctl.tree.workspace import check_ids, has_texts

        session, opened, name = self.partner.session, tree.opened, self.partner.name
        if opened.checkpoint == self._checkpoint():
            if session is not None:
                check_ids(tree, session.forward.vocab_size, str(path))
            return
        if session is None or not has_texts(
            tree, session.forward.vocab_size, detokenizer(session.loaded.tokenizer).piece
        ):
            raise InputError(
                f"{path} was begun with {opened.model}, whose tokens are not those of {name}",
                hint=f"-m {opened.model}, if its files are still there",
            )
        named = self.early.settings.get("model")
        if named is None or named.kind != "command":
            raise InputError(
                f"-m {name} continues {path} with this checkpoint: the chat was begun with {opened.model}, in another "
                "state or by an older genctl, so that earlier answers may not be what it would write now"
            )
        self.messages.note(f"{path} was begun with {opened.model}; {name} continues it, as -m says")

    def change_story(self, path: Path) -> Chat:
        """Go on with the chat in another file."""
        file = replace(_file_settings(self.options, path), overriding=frozenset())  # its settings lie above the flags
        story = self._reopened(path, file)
        try:
            layers = [*self.options.beneath, *_saved_layers(story.tree.opened, file)]
            chat = Chat(
                self.engine, self.partner, layers, story, seed=story.tree.opened.seed, prefill=self.chat.prefill
            )
        except BaseException:
            story.leave()
            raise
        try:
            self._close_story()
        except OutputError as error:
            self.messages.say(f"error: {error.message}")
        self.story, self.chat = story, chat
        self._tell(file)
        return chat

    def _tell(self, file: FileSettings | None) -> None:
        """Say which settings of a file do not hold, once."""
        for line in () if file is None else file.news():
            self.messages.remark(line)

    @property
    def is_saved(self) -> bool:
        """Whether the chat has a file, or gets one with its first turn."""
        return self.options.open is not None or self.new_file is not None

    def _checkpoint(self) -> str:
        session = self.partner.session
        return "" if session is None else session.loaded.fingerprint()

    def _close_story(self, *, failed: bool = False) -> None:
        if self.story is not None:
            self.story.leave() if failed else self.story.close()

    def _take_up(self) -> None:
        """Finish what a kill has cut off. Raises what an answer that fails raises."""
        chat = self.chat
        how: tuple[list[Listener], Report, Flow] = [], self.report, self.flow
        if chat.story.cut_off:
            self.messages.remark("the last answer was cut off; it is finished first")
            turn = chat.plan_cut_off()
            try:
                chat.finish_cut_off(turn, *how)
            except Differs:
                self.messages.remark(
                    "the answer that was cut off comes out differently here, so its turn is answered anew"
                )
                chat.answer("read", turn, *how)
        elif chat.story.unanswered:
            self.messages.remark("the last turn has no answer yet; it is answered first")
            chat.answer_last(chat.plan_again(), *how)

    # -- turns of an input ---------------------------------------------------------------------------------------------

    @property
    def flow(self) -> Flow:
        """How an answer is decoded."""
        return Flow(interrupted=self.interrupt)

    @property
    def report(self) -> Report:
        """What events report of each token."""
        top = shown_top(self.options)
        return Report(top, self.options.scores or top > 0)

    def _first_turns(self) -> Iterator[str]:
        """The turns of the command line."""
        for row in self.input:
            if isinstance(row, InputRow) and row.prompt:
                yield row.prompt
            elif isinstance(row, BadRow):
                raise InputError(row.message)

    def _take(self, row: InputRow | BadRow) -> None:
        """Say one row, and write the answer."""
        row = replace(row, index=self.answered)  # rows that are not answered have no record
        for usable, resolved in self.usable(iter([row]), lambda row: self.settings_of(row, self.chat.base)):
            try:
                check_settings(resolved)
                self._answer(usable, resolved)
            except (ContractError, OutputError):  # what is wrong for one turn is wrong for all, as a full disk is
                raise
            except GenctlError as error:
                self.fail(usable, error.code, error.message, hint=error.hint)

    def fail(self, row: InputRow | BadRow, code: str, message: str, *, said: bool = False, hint: str = "") -> None:
        """Write the record of a row that failed; nothing was said."""
        super().fail(row, code, message, said=said, hint=hint)
        self.answered += 1

    def _answer(self, row: InputRow, base: Resolved) -> None:
        chat = self.chat
        if row.prompt_ids is not None:
            raise InputError("a chat is made of texts: prompt_ids has no place in it")
        *context, last = row.messages or ({"role": "user", "content": row.prompt or ""},)
        for message in (*context, *([last] if last["role"] != "user" else [])):
            chat.hear(message["role"], message["content"])
        if last["role"] != "user":
            return
        conversation = chat.story.conversation
        turn = chat.plan(last["content"], conversation.at, lane=row.id, own_id=row.id if row.own_id else "", base=base)
        self.messages.note_once(turn.note)
        view = None
        if self.live:
            view = AnswerView(self.out, begun=opened_by(turn.opening), prefill=turn.prefill)
        try:
            result = chat.answer(
                said(last["content"]), turn, [] if view is None else [view.feed], self.report, self.flow
            )
        finally:
            if view is not None:
                view.close()
        self.tally.look(row.index, self.of(row), result, (), texts=True)
        if self.output is not None and result.sequences:
            self.output.put(row.index, [self._record(row, result)])
        self.answered += 1

    def _record(self, row: InputRow, result: Result) -> dict[str, Any]:
        server = bool(result.backend)
        return result_record(
            row,
            result,
            0,
            tokens=self.options.with_tokens,
            extra={},
            reused_tokens=None if server else result.reused,
        )

    def keep_partial(self) -> None:
        """What was said is in the file already."""


def _saved_layers(opened: Opened, file: FileSettings) -> list[Layer]:
    """The settings that a chat began with, of those that hold. Raises InputError."""
    layers = [Layer("the chat", {"model": opened.model}, said="user")]
    for each in saved_layers(opened.layers, "chat"):
        # flags of that time are below those of now
        flag = each.kind == "command"
        layers.append(
            replace(
                each,
                origin=f"{each.origin}, when the chat began",
                said="user" if flag else each.kind,
                typed=each.typed or flag,
            )
        )
    return [part for layer in layers for part in file.layers(layer)]


def _file_settings(options: ChatOptions, path: Path) -> FileSettings:
    """Which settings of the chat in a file hold, beside those of the command line."""
    now = [*presets.load(options.presets), *options.flags]
    yours = values_of([*options.standing_layers(), *now])
    return FileSettings("chat", found_of(path), yours, frozenset(key for layer in now for key in layer.values))


def _check_served(path: Path, opened: Opened, file: FileSettings) -> None:
    """Raises UsageError for a chat with a server where no server is named: no checkpoint here has its answers."""
    if opened.checkpoint:
        return
    why = file.left_out.get("backend", "its server is not known")
    raise UsageError(f"{path} is a chat with a server, and a checkpoint here cannot continue it: {why}")


def chat(options: ChatOptions) -> int | None:
    """`genctl chat`."""
    from genctl.commands.chat import saved

    if options.listed:
        return saved.write_list(options)
    if options.continued:
        options = replace(options, open=str(saved.last_chat()))
    elif options.open is not None:
        options = replace(options, open=str(saved.path_of(options.open)))
    if options.open is not None:
        path = Path(options.open)
        opened, file = read_tree(path).opened, _file_settings(options, path)
        options = replace(options, saved=_saved_layers(opened, file), file=file)
    choice = engine_of(options)
    if options.open is not None and choice is not SERVERS:
        _check_served(path, opened, file)
    if choice is SERVERS:
        choice = replace(SERVERS, check=check_backend)
    return ChatJob.perform(options, choice)
