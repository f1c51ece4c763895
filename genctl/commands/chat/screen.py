"""A chat on a terminal: lines become turns or commands, and answers stream. `ChatScreen.run` is the loop."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genctl.commands.chat import slash, thinking
from genctl.commands.chat.chat import Chat, PlannedTurn, setting
from genctl.commands.chat.log import unsent
from genctl.commands.chat.options import ChatOptions
from genctl.commands.chat.thinking import ThinkSplitter
from genctl.commands.options import SHOWN_TOP
from genctl.commands.run.run_view import RunView
from genctl.commands.run.text_stream import TextStream, console_writer
from genctl.config import presets
from genctl.config.check import known, shown
from genctl.config.conflicts import sampling_notice
from genctl.engines.protocol import Flow, Report
from genctl.errors import Exit, GenctlError, UsageError, count
from genctl.events import Event, Finished, Stepped
from genctl.events.history import LaneHistory, StablePrefix
from genctl.events.results import Result
from genctl.io.sessions import sessions_folder
from genctl.terminal import theme, widgets
from genctl.terminal.console import make_consoles
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.run_history import stop_words
from genctl.terminal.standard_streams import print_message

SIGN, MORE = "> ", ". "
KEYS = (
    "Enter sends a line, Alt-Enter begins a new one; Tab completes; Up and Ctrl-R find earlier lines, from all chats; "
    "Ctrl-C stops an answer or clears the line"
)
BINDINGS = KeyBindings()


# -- lines -------------------------------------------------------------------------------------------------------------


@BINDINGS.add("enter")
@BINDINGS.add("c-j")
def _enter(event: KeyPressEvent) -> None:
    event.current_buffer.validate_and_handle()


@BINDINGS.add("escape", "enter")
def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


@BINDINGS.add("c-c")
def _clear(event: KeyPressEvent) -> None:
    """Clear the line; raise KeyboardInterrupt if it is empty."""
    if event.current_buffer.text:
        event.app.exit(result="")
    else:
        event.app.exit(exception=KeyboardInterrupt())


class Commands(Completer):
    """The names of commands, and of settings and presets."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Completions of the line."""
        named = (preset.name for preset in presets.available())
        for word, length in slash.completions(document.text_before_cursor, known(), named):
            yield Completion(word, -length)


class SafeHistory(FileHistory):
    """A history that ignores write errors, such as a full disk or a missing folder."""

    def store_string(self, string: str) -> None:
        """Append a text."""
        with suppress(OSError):
            super().store_string(string)


def line_editor(*, color: bool) -> PromptSession[str]:
    """The line editor. Its history has the lines of all chats, in a file that only its owner can read."""
    history: History = InMemoryHistory()
    path = sessions_folder().parent / "chat_history"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        history = SafeHistory(str(path))
    return PromptSession(
        SIGN, multiline=True, prompt_continuation=MORE, history=history, key_bindings=BINDINGS, enable_suspend=True,
        completer=Commands(), complete_while_typing=False, complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0, color_depth=None if color else ColorDepth.DEPTH_1_BIT,
    )  # fmt: skip


# -- answers -----------------------------------------------------------------------------------------------------------


class AnswerView:
    """Writes one answer to a terminal, with its thought dimmed. Feed it the answer's events, then `close` it.

    `begun` is the think tag that ends the prompt, `prefill` the beginning of the answer.
    """

    def __init__(self, out: Console, *, begun: str = "", prefill: str = "") -> None:
        self._stream, self._splitter = TextStream(console_writer(out)), ThinkSplitter(begun)
        self._whole = TextStream(lambda text, dim: self._show(self._splitter.feed(text)))  # with think tags
        self._lane, self._stable = LaneHistory(""), StablePrefix()
        self._in_thought = False
        self._server_thought = ""  # if the server reports it apart from the text
        self._whole.write(prefill)

    def feed(self, event: Event) -> None:
        """Show the text that is stable after an event."""
        self._lane = self._lane.after(event)
        if isinstance(event, Finished) and event.hypotheses:
            best = event.hypotheses[0]
            self._think(best.thought_text[len(self._server_thought) :])
            self._whole.complete(best.text)
        elif isinstance(event, Stepped):
            self._think("".join(row.thought for row in event.rows[:1]))
            self._whole.write(self._whole.take(self._stable(self._lane)))

    def close(self) -> None:
        """End the answer: show the text held back, and end the line."""
        self._show(self._splitter.finish())
        self._stream.end_line()

    def _think(self, thought: str) -> None:
        """Show a piece of the thought that a server reports apart from the text."""
        if thought:
            self._server_thought += thought
            self._splitter.had_thought = True
            self._show([("thought", thought)])

    def _show(self, parts: Iterable[thinking.Part]) -> None:
        for kind, text in parts:
            if kind == "answer" and self._in_thought:
                self._stream.end_line()
            self._in_thought = kind == "thought"
            self._stream.write(text, dim=kind == "thought")


# -- the chat ----------------------------------------------------------------------------------------------------------


class ChatScreen:
    """A chat and the terminal on which it is shown."""

    def __init__(self, chat: Chat, options: ChatOptions) -> None:
        self.chat, self.options = chat, options
        self.out, self.err = make_consoles(options.color)
        self.scores = options.scores  # whether token probabilities are shown under each answer
        self.top = SHOWN_TOP if options.top_logprobs is None else options.top_logprobs
        dumb = os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown")  # it cannot redraw
        self.editor = None if dumb else line_editor(color=self.out.is_interactive and not self.out.no_color)

    def run(self, initial_turns: Iterable[str]) -> int:
        """Read and answer lines until the user leaves. Returns the exit status."""
        status, leaves = int(Exit.DONE), False  # leaves: whether the next Ctrl-C on an empty line ends the chat
        if not self.options.quiet:
            self.note(f"{self.chat.name}: /help lists the commands, Ctrl-D leaves")
        try:
            self._show_end()
            if self.chat.log.unanswered:  # the process was killed before the last answer
                self._guarded(lambda: self._answer(self.chat.plan(self.chat.log.turn())))
            for text in initial_turns:
                self.out.print(Text(f"{SIGN}{widgets.visible(text)}"))
                self._guarded(self._send, text)
            while True:
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    if leaves:
                        raise
                    leaves = True
                    self.note("Ctrl-C again leaves, and so does Ctrl-D")
                    continue
                leaves = False
                if line.strip():
                    self._guarded(self._do, line)
        except EOFError:
            pass
        except KeyboardInterrupt:
            status = int(Exit.INTERRUPTED)
        if reopening := self._reopening():
            self.note(f"saved; {reopening} continues it")
        return status

    def note(self, words: str) -> None:
        """Print a remark of the program, dimmed."""
        self.out.print(Text(widgets.visible(words), style=theme.DIM), soft_wrap=True)

    def _read(self, text: str = "") -> str:
        """Read a turn or a command, with `text` to edit. Returns "" if Ctrl-C clears the line."""
        if self.editor is None:
            return input(SIGN)
        return self.editor.prompt(default=text, handle_sigint=False).rstrip("\n")

    def _guarded(self, do: Callable[..., object], *arguments: Any) -> None:
        """Call `do`, and print its error if it fails."""
        try:
            do(*arguments)
        except GenctlError as error:
            hints = [f"hint: {error.hint}"] if error.hint else []
            for line in (*(f"error: {part}" for part in error.message.split("\n")), *hints):
                print_message(line, color=self.options.color)

    def _reopening(self) -> str:
        """The command that continues the chat; "" while it is not saved."""
        path = self.chat.log.path
        return "" if path is None else f"genctl chat --open {shlex.quote(str(path))}"

    def _show_end(self) -> None:
        """Print the last turn of the branch and its answer, without the thought."""
        log = self.chat.log
        if (turns := log.turns_to(log.end)) > 1:
            self.note(f"({count(turns - 1, 'turn')} before)")
        for message in log.here[-2:]:
            text = thinking.split(message.content)[1] if message.role == "assistant" else message.content
            self.out.print(Text(f"{SIGN if message.role == 'user' else ''}{widgets.visible(text)}"), soft_wrap=False)

    def _answer(self, turn: PlannedTurn) -> None:
        """Show an answer as it streams. Ctrl-C ends it; the text so far is kept.

        Raises UsageError for a prompt that does not fit the context.
        """
        context = None if self.chat.session is None else self.chat.session.planner.context
        if context is not None and len(turn.ids) > context and turn.request.resolved.runtime.truncate is None:
            raise UsageError(
                f"not sent: the prompt has {count(len(turn.ids), 'token')}, but the model's context is {context}",
                hint="/undo and /edit shorten the chat, /new begins another; /set truncate=left drops its beginning",
            )
        if turn.note:
            self.note(turn.note)
        table = RunView(self.out, self.err, scores=True, top=self.top, quiet=True) if self.scores else None
        view = table or AnswerView(self.out, begun=thinking.opened_by(turn.opening), prefill=self.chat.prefill)
        with Interrupt() as interrupt:
            interrupt.gentle = True  # a signal ends the answer, not the process
            interrupt.hide = table.pause if table else interrupt.hide
            report = Report(self.top if self.scores else 0, self.scores)
            try:
                result = self.chat.answer(turn, view.feed, report, Flow(interrupted=interrupt))
            finally:
                view.close()
        if interrupt.status not in (0, 128 + signal.SIGINT):
            raise SystemExit(interrupt.status)
        if result is not None:
            self._sum_up(result)
        else:
            self.note("no answer came, so the turn is not added")

    def _sum_up(self, result: Result) -> None:
        """Print a line about the answer: its tokens, speed, prompt tokens and seed, and why it ended."""
        sequence, length = result.sequences[0], result.sequences[0].hypothesis.length
        reason, words = sequence.finish_reason, ["" if sequence.text.strip() else "the answer is empty"]
        if not self.options.quiet:
            words.append(count(length, "token"))
            if result.decode_s > 0 and length > 1:
                words.append(f"{(length - 1) / result.decode_s:,.0f} tok/s")
            if not result.backend and result.prompt_tokens:
                words.append(f"read {result.prompt_tokens - result.reused} of {count(result.prompt_tokens, 'token')}")
            words.append("" if result.seed is None else f"seed {result.seed}")
        if reason != "eos" and not (self.options.quiet and reason == "stop"):
            words.append(stop_words(reason, sequence.hypothesis.cause))
        if any(words):
            self.note(" · ".join(filter(None, words)))

    # -- commands ------------------------------------------------------------------------------------------------------

    def _do(self, line: str) -> None:
        """Run the command of a line, or send its text."""
        typed, chat, log, out = slash.read(line), self.chat, self.chat.log, self.out
        if typed.command is None:
            self._send(typed.text)
            return
        match typed.command.name:
            case "retry":
                self._answer(chat.plan(log.turn()))
            case "edit":
                self._edit(typed)
            case "undo":
                log.undo()
                self.note(f"undone: the chat has {count(log.turns_to(log.end), 'turn')}")
            case "branch":
                self._branch(slash.number(typed, "branch"))
            case "prompt":
                if chat.session is None:
                    raise UsageError("/prompt needs the token ids of a checkpoint, which servers do not report")
                turn = chat.plan(log.turn())
                self.note(f"{count(len(turn.ids), 'token')}:")
                out.print(Text(" ".join(map(str, turn.ids))), soft_wrap=False)
                out.print(Text(widgets.visible(turn.opening), style=theme.DIM), soft_wrap=False)
            case "set" | "unset" | "preset" | "system" as name:
                self._change(name, typed.text)
            case "scores":
                if not self.scores:
                    chat.base_plan.require_logprobs("/scores")
                self.scores = not self.scores
                self.note(f"token probabilities are {'shown under each answer' if self.scores else 'no longer shown'}")
            case "save":
                if typed.text:
                    log.save(Path(typed.text).expanduser())
                path = "" if log.path is None else shlex.quote(str(log.path))
                self.note(f"saved in {path}" if path else "the chat is empty, so nothing is saved")
            case "new":
                if not log.messages:
                    raise UsageError("the chat is empty")
                reopening = self._reopening()
                chat.begin_anew()
                self.note("a new conversation" + (f"; {reopening} continues the one before" if reopening else ""))
            case "help":
                table = Table.grid(padding=(0, 2))
                table.add_column(no_wrap=True)
                for command in slash.COMMANDS:
                    table.add_row(Text(f"  {command.usage}"), Text(command.about))
                out.print(table)
                self.note(KEYS)
            case "quit":
                raise EOFError  # as Ctrl-D does

    def _send(self, text: str) -> None:
        if self.options.prompt_template is not None:
            text = self.options.prompt_template.fill({"prompt": text})
        self._answer(self.chat.plan(unsent(text, self.chat.log.end)))

    def _edit(self, typed: slash.Typed) -> None:
        log = self.chat.log
        first, _, text = typed.text.partition(" ")
        number = slash.number(slash.Typed(first, typed.command), "turn") or log.turns_to(log.end)
        question = log.turn(number)
        if not text.strip():
            self.note(f"change turn {number}: Enter answers it again, Ctrl-C leaves it as it is")
            with suppress(EOFError, KeyboardInterrupt):
                text = self._read(question.content)
        if not text.strip():
            self.note("nothing was changed")
            return
        self._answer(self.chat.plan(unsent(text, question.parent)))

    def _branch(self, number: int | None) -> None:
        """Go to branch `number`, or list the branches."""
        log = self.chat.log
        if number is not None:
            log.change("go", log.branch(number).id)
            self._show_end()
            return
        if not log.branches:
            self.note("the chat is empty")
        here = {message.id for message in log.here}
        for place, leaf in enumerate(log.branches, 1):
            sign, turns = "*" if leaf.id in here else " ", count(log.turns_to(leaf.id), "turn")
            words = widgets.first_words(leaf.content, max(self.out.width - 16, 8))
            self.out.print(Text(f"{sign} {place}  {turns:<9} {words}"))

    def _change(self, name: str, argument: str) -> None:
        """Run /set, /unset, /preset or /system."""
        chat, key, before = self.chat, argument.replace("-", "_"), self.chat.base
        if name == "set" and not argument:
            values = "; ".join(f"{key} = {shown(value)}" for key, value in chat.own_values.items())
            self.note(values or "nothing is set here")
            return
        if name == "set" and key in before.origins:
            value = {**vars(before.generation), **vars(before.runtime)}.get(key)
            held = "is not set" if value is None else f"= {shown(value)}"
            self.note(f"{key} {held} ({before.origins[key]}); /set {key}=VALUE sets it")
            return
        chat.change(name, argument)
        # once sampling is on, it is not reported again
        repeated = [sampling_notice(chat.base.settings)] if before.generation.do_sample else []
        for line in chat.base.notices:
            if line not in (*before.notices, *repeated):
                self.note(line)
        self.note(f"set {setting(argument)}" if name == "set" else f"{name} {argument}")
