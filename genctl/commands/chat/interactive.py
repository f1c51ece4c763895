"""A chat with a person at a terminal: what is typed is said or done, and answers stream."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from genctl.commands.chat import saved, slash, thinking
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat, PlannedTurn
from genctl.commands.chat.commands import DO, ChatScreen, Leave
from genctl.commands.chat.line_input import SIGN, history_file, line_input
from genctl.commands.chat.options import ChatOptions
from genctl.commands.options import SHOWN_TOP
from genctl.engines.protocol import Flow, Report
from genctl.errors import Exit, GenctlError, UsageError, count
from genctl.events.results import Result
from genctl.io.sessions import sessions_folder
from genctl.terminal import theme, widgets
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.message import print_message
from genctl.terminal.summary import lines as broken
from genctl.terminal.summary import stop_words

EMPTY = "the answer is empty: the model ends it at once (EOS)"


class Interactive:
    """The loop of prompt, command or turn, and answer. `advise` prints a hint; `open_chat` gives the chat in a file."""

    def __init__(
        self,
        chat: Chat,
        options: ChatOptions,
        consoles: tuple[Console, Console],
        *,
        advise: Callable[[str], object],
        open_chat: Callable[[Path], Chat],
    ) -> None:
        self.screen = ChatScreen(chat, consoles[0], options.scores)
        self.out, self.err, self.note = *consoles, self.screen.note
        self.options, self._advise, self._open_chat = options, advise, open_chat
        self._own = {"retry": self._retry, "edit": self._edit, "load": self._load}
        self.top = SHOWN_TOP if options.top_logprobs is None else options.top_logprobs
        colored = self.out.is_interactive and not self.out.no_color
        self.lines = line_input(color=colored, history=history_file(sessions_folder().parent))
        self._stopped = False  # Ctrl-C was the last thing that happened
        self._draft = ""  # what the next prompt begins with
        self._full = ""  # what was chosen when the context was full: d or g

    @property
    def chat(self) -> Chat:
        """The chat that is open."""
        return self.screen.chat

    def run(self, initial_turns: Iterable[str]) -> int:
        """Talk until the person leaves. Returns the exit status."""
        status = int(Exit.DONE)
        if not self.options.quiet:
            self.note(f"{self.chat.partner.name}: /help lists the commands, Ctrl-D leaves")
        try:
            self._guarded(self._resume)
            for text in initial_turns:
                self.out.print(Text(f"{SIGN}{widgets.visible(text)}"))
                self._guarded(self._send, text)
            while True:
                draft, self._draft = self._draft, ""
                try:
                    line = self.lines.read(draft)
                except KeyboardInterrupt:
                    if self._stopped:
                        raise
                    self._stopped = True
                    self.note("Ctrl-C again leaves, and so does Ctrl-D")
                    continue
                self._stopped = False
                if line.strip():
                    self._guarded(self._take, line)
        except (EOFError, Leave):
            pass
        except KeyboardInterrupt:
            status = int(Exit.INTERRUPTED)
        if command := self._command():
            self.note(f"saved; {command} continues it", command)
        return status

    def _take(self, line: str) -> None:
        """Do the command of a line, or say its text."""
        typed = slash.read(line)
        if typed.command is None:
            self._send(typed.text)
            return
        name = typed.command.name
        if typed.command.local and self.chat.partner.session is None:
            raise UsageError(f"/{name} needs the token ids of a checkpoint, which servers do not report")
        if name in self._own:
            self._own[name](typed)
        else:
            DO[name](self.screen, typed)

    def _guarded(self, do: Callable[..., object], *arguments: Any) -> None:
        """Do it; an error is printed."""
        try:
            do(*arguments)
        except GenctlError as error:
            for part in error.message.split("\n"):
                print_message(f"error: {part}", color=self.options.color)
            self._advise(error.hint)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        if self.options.prompt_template is not None:
            text = self.options.prompt_template.fill({"prompt": text})
        end = self.chat.log.end
        self._answer(self._fitting(lambda: self.chat.plan(text, end), end))

    def _retry(self, typed: slash.Typed) -> None:
        log = self.chat.log
        question = log.turn()
        before = {message.content for message in log.answers(question.id)}
        turn = self._fitting(self.chat.plan_again, question.parent)
        self._answer(turn)
        answer = log.last_answer
        if turn and not turn.request.resolved.generation.draws and answer is not None and answer.content in before:
            self.note("the same answer: nothing is drawn (do_sample = false); /set temperature=0.8 draws")

    def _edit(self, typed: slash.Typed) -> None:
        log = self.chat.log
        first, _, text = typed.text.partition(" ")
        number = slash.number(slash.Typed(first, typed.command), "turn") or log.turns_to(log.end)
        question = log.turn(number)
        if not text.strip():
            self.note(f"change turn {number}: Enter answers it again, Ctrl-C leaves it as it is")
            try:
                text = self.lines.read(question.content)
            except (EOFError, KeyboardInterrupt):
                self.note("nothing was changed")
                return
        self._answer(self._fitting(lambda: self.chat.plan(text, question.parent), question.parent))

    def _fitting(self, plan: Callable[[], PlannedTurn], end: int | None) -> PlannedTurn | None:
        """The turn, once it has room in the context: what is left out for it is asked. None if it is not to be sent."""
        turn, log = plan(), self.chat.log
        if not self.chat.too_long(turn):
            return turn
        place = self.chat.leave_out_for(plan, end)
        if self._full == "d" and place is not None:
            dropped = count(place - log.left_out, "more message is", "more messages are")
            log.change("leave_out", place)
            self.note(f"the context is full: {dropped} left out of the prompt")
            return plan()
        context = self.chat.partner.context
        left = max((context or 0) - len(turn.ids), 0)
        if self._full == "g" and left:
            return turn
        words = f"the prompt has {count(len(turn.ids), 'token')} of a context of {context}: "
        self.note(
            words + (f"{count(left, 'is', 'are')} left for the answer" if left else "nothing is left for the answer")
        )
        if not left and place is None:
            self.note("not sent: this message alone exceeds the context; /set truncate=left shortens it")
            return None
        choices = [f"[d]rop the oldest {count(place - log.left_out, 'message')}"] if place is not None else []
        choices += ["[g]o on with what is left"] if left else []
        choices += ["[c]ancel"]
        self.note("the choice applies to later turns, too")
        try:
            answer = self.lines.ask(f"{', '.join(choices)}? ").strip().lower()[:1]
        except (EOFError, KeyboardInterrupt):
            answer = "c"
        self._full = answer
        if answer == "d" and place is not None:
            log.change("leave_out", place)
            return plan()
        if answer == "g" and left:
            return turn
        self.note("the turn was not sent")
        return None

    def _answer(self, turn: PlannedTurn | None) -> None:
        """Show an answer while it comes. Ctrl-C ends it; what it has so far stays."""
        if turn is None:
            return
        if turn.note:
            self.note(turn.note)
        view: Any
        if self.screen.scores:
            from genctl.commands.run.run_view import RunView

            view = RunView(self.out, self.err, scores=True, top=self.top, quiet=True)
            hide = view.pause
        else:
            view = AnswerView(self.out, begun=thinking.opened_by(turn.opening), prefill=self.chat.prefill)
            hide = view.hide
        with Interrupt() as interrupt, self.lines.waiting() as restore:
            interrupt.gentle = True  # a signal ends the answer, not the process
            interrupt.hide = lambda: restore() or hide()
            interrupt.at_once = lambda: restore() or self._report_saved()
            report = Report(self.top if self.screen.scores else 0, self.screen.scores)
            try:
                result = self.chat.answer(turn, [view.feed], report, Flow(interrupted=interrupt))
            finally:
                view.close()
        if interrupt.status not in (0, 128 + signal.SIGINT):
            raise SystemExit(interrupt.status)
        self._stopped = bool(interrupt.status)
        if result.sequences:
            self._sum_up(result)
        else:
            self._draft = turn.text
            self.note("no answer came, so the turn is not added")

    def _sum_up(self, result: Result) -> None:
        """The answer in a line: its tokens, what was read for it, and why it ended."""
        sequence = result.sequences[0]
        ended = stop_words(sequence.finish_reason, sequence.hypothesis.cause)
        words = [count(sequence.hypothesis.length, "token")]
        if result.decode_s > 0 and sequence.hypothesis.length > 1:
            words.append(f"{(sequence.hypothesis.length - 1) / result.decode_s:,.0f} tok/s")
        if not result.backend and result.prompt_tokens:
            words.append(f"read {result.prompt_tokens - result.reused} of {count(result.prompt_tokens, 'token')}")
        words += [f"seed {result.seed}"] if result.seed is not None else []
        words += [ended] if sequence.finish_reason != "eos" else []
        if self.options.quiet:
            words = words[-1:] if sequence.finish_reason not in ("eos", "stop") else []
        if not sequence.text.strip():
            words.insert(0, EMPTY if sequence.finish_reason == "eos" else "the answer is empty")
        for line in broken(Text(" · ".join(words), style=theme.DIM), self.out.width) if words else []:
            self.out.print(line)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Show where a saved chat is; answer its last turn, if a kill has left it without an answer."""
        if self.chat.log.end is not None:
            self.screen.show_end()
        if self.chat.log.unanswered:
            self._answer(self.chat.plan_again())

    def _load(self, typed: slash.Typed) -> None:
        path, here = saved.path_of(typed.text), self.chat.log.path
        with suppress(OSError):
            if here is not None and path.samefile(here):
                self.note("this chat is open already")
                return
        self.screen.chat = self._open_chat(path)
        self._full = ""
        self._resume()

    def _command(self) -> str:
        path = self.chat.log.path
        return "" if path is None else f"genctl chat --open {shlex.quote(str(path))}"

    def _report_saved(self) -> object:
        """Say where the chat is saved, past what is buffered: the process ends now, maybe in the middle of a line."""
        command = self._command()
        words = f"\r\nsaved; {widgets.visible(command)} continues it\r\n"
        return command and os.write(sys.stdout.fileno(), words.encode())
