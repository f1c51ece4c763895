"""A chat with a person at a terminal: what is typed is said or done, and answers stream."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from genctl.commands.chat import saved, slash, thinking
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat, Listener, PlannedTurn
from genctl.commands.chat.line_input import SIGN, history_file, line_input
from genctl.commands.chat.options import ChatOptions
from genctl.commands.chat.slash_work import Leave, SlashWork
from genctl.commands.chat.story import edited, said
from genctl.commands.options import SHOWN_TOP
from genctl.engines.protocol import Flow, Report
from genctl.errors import Exit, GenctlError, count
from genctl.events.results import Result
from genctl.terminal import theme, widgets
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.message import print_message
from genctl.terminal.summary import lines as broken
from genctl.terminal.summary import stop_words
from genctl.tree.journal import Differs, sessions_folder

EMPTY = "the answer is empty: the model ends it at once (EOS)"

Send = Callable[[Sequence[Listener], Report, Flow], Result]


class Interactive(SlashWork):
    """The loop of prompt, command or turn, and answer. `advise` prints a hint."""

    def __init__(
        self,
        chat: Chat,
        options: ChatOptions,
        consoles: tuple[Console, Console],
        *,
        advise: Callable[[str], object],
        open_chat: Callable[[Path], Chat],
    ) -> None:
        super().__init__(chat, consoles[0], scores=options.scores, open_chat=open_chat)
        self.options, self.err, self._advise = options, consoles[1], advise
        self.top = SHOWN_TOP if options.top_logprobs is None else options.top_logprobs
        colored = self.out.is_interactive and not self.out.no_color
        self.lines = line_input(color=colored, history=history_file(sessions_folder().parent))
        self._stopped = False  # Ctrl-C was the last thing that happened
        self._draft = ""  # what the next prompt begins with
        self._full = ""  # what was chosen when the context was full: d or g

    def hold(self, first: Iterable[str]) -> int:
        """Talk until the person leaves. Returns the exit status."""
        self._welcome()
        status = int(Exit.DONE)
        try:
            for text in first:
                self.out.print(Text(f"{SIGN}{widgets.visible(text)}"))
                self._guarded(lambda text=text: self._say(text))  # type: ignore[misc]
            while True:
                self._next()
        except (EOFError, Leave):
            pass
        except KeyboardInterrupt:
            status = int(Exit.INTERRUPTED)
        self._farewell()
        return status

    # -- what is typed -------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Read a line and do it. Raises EOFError, KeyboardInterrupt or Leave to leave."""
        draft, self._draft = self._draft, ""
        try:
            line = self.lines.read(draft)
        except KeyboardInterrupt:
            if self._stopped:
                raise
            self._stopped = True
            self.note("Ctrl-C again leaves, and so does Ctrl-D")
            return
        self._stopped = False
        if line.strip():
            self._guarded(lambda: self._do(line))

    def _guarded(self, do: Callable[[], object]) -> None:
        """Do it; an error is printed."""
        try:
            do()
        except GenctlError as error:
            for part in error.message.split("\n"):
                print_message(f"error: {part}", color=self.options.color)
            self._advise(error.hint)

    def _do(self, line: str) -> None:
        typed = slash.read(line)
        if typed.command is None:
            self._say(typed.text)
        else:
            self.do(typed)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        chat = self.chat
        if self.options.prompt_template is not None:
            text = self.options.prompt_template.fill({"prompt": text})
        at = chat.story.conversation.at
        turn = self._fitting(lambda: chat.plan(text, at), at)
        if turn is not None:
            self._answer(turn, lambda *how: chat.answer(said(text), turn, *how), text)

    def _retry(self, typed: slash.Typed) -> None:
        chat = self.chat
        question = chat.story.conversation.turn(None)
        turn = self._fitting(chat.plan_again, question.parent)
        if turn is None:
            return
        before = {message.content for message in chat.story.conversation.children(question.number)}
        self._answer(turn, lambda *how: chat.answer("read", turn, *how), "")
        answer = chat.story.conversation.last_answer
        if not turn.request.resolved.generation.draws and answer is not None and answer.content in before:
            self.note("the same answer: nothing is drawn (do_sample = false); /set temperature=0.8 draws")

    def _edit(self, typed: slash.Typed) -> None:
        chat = self.chat
        first, _, text = typed.text.partition(" ")
        conversation = chat.story.conversation
        number = slash.number(slash.Typed(first, typed.command), "turn") or conversation.turns_to(conversation.at)
        question = conversation.turn(number)
        if not text.strip():
            self.note(f"change turn {number}: Enter answers it again, Ctrl-C leaves it as it is")
            try:
                text = self.lines.read(question.content)
            except (EOFError, KeyboardInterrupt):
                self.note("nothing was changed")
                return
        turn = self._fitting(lambda: chat.plan(text, question.parent), question.parent)
        if turn is not None:
            self._answer(turn, lambda *how: chat.answer(edited(number, text), turn, *how), text)

    def _fitting(self, plan: Callable[[], PlannedTurn], end: int | None) -> PlannedTurn | None:
        """The turn, once it has room in the context: what is left out for it is asked. None if it is not to be sent."""
        turn = plan()
        if not self.chat.too_long(turn):
            return turn
        place = self.chat.leave_out_for(plan, end)
        if self._full == "d" and place is not None:
            dropped = count(place - self.chat.story.left_out, "more message is", "more messages are")
            self.chat.story.do("leave-out", str(place))
            self.note(f"the context is full: {dropped} left out of the prompt")
            return plan()
        room, story = self.chat.room(turn), self.chat.story
        assert room is not None
        left = max(room[1], 0)
        words = f"the prompt has {count(room[0], 'token')} of a context of {self.chat.partner.context}: "
        words += f"{count(left, 'is', 'are')} left for the answer" if left else "nothing is left for the answer"
        if self._full == "g" and left:
            return turn
        self.note(words)
        if not left and place is None:
            self.note("the turn was not said: it does not fit alone; /set truncate=left shortens it")
            return None
        choices = [f"[d]rop the oldest {count(place - story.left_out, 'message')}"] if place is not None else []
        choices += ["[g]o on with what is left"] if left else []
        choices += ["[c]ancel"]
        self.note("leaving out, or going on, holds for the turns that follow, too")
        try:
            answer = self.lines.ask(f"{', '.join(choices)}? ").strip().lower()[:1]
        except (EOFError, KeyboardInterrupt):
            answer = "c"
        self._full = answer
        if answer == "d" and place is not None:
            story.do("leave-out", str(place))
            return plan()
        if answer == "g" and left:
            return turn
        self.note("the turn was not said")
        return None

    def _answer(self, turn: PlannedTurn, send: Send, text: str) -> None:
        """Show an answer while it comes. Ctrl-C ends it; what was said stays."""
        if turn.note:
            self.note(turn.note)
        begun = thinking.opened_by(turn.opening)
        view: Any
        if self.scores:
            from genctl.commands.run.run_view import RunView

            view = RunView(self.out, self.err, scores=True, top=self.top, quiet=True)
            hide = view.pause
        else:
            view = AnswerView(self.out, begun=begun, prefill=turn.prefill)
            hide = view.hide
        with Interrupt() as interrupt, self.lines.waiting() as restore:
            interrupt.gentle = True  # a signal ends the answer, not the process
            interrupt.hide = lambda: restore() or hide()
            interrupt.at_once = lambda: restore() or self._last_words()
            try:
                result = send(
                    [view.feed], Report(self.top if self.scores else 0, self.scores), Flow(interrupted=interrupt)
                )
            finally:
                view.close()
        if interrupt.status not in (0, 128 + signal.SIGINT):
            raise SystemExit(interrupt.status)
        self._stopped = bool(interrupt.status)
        if not result.sequences:
            self._draft = text
            self.note("nothing was answered, so the turn is not said")
            return
        self._sum_up(result)

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

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        if not self.options.quiet:
            self.note(f"{self.chat.engine.about.name}: /help lists the commands, Ctrl-D leaves")
        self._guarded(self._take_up)

    def _take_up(self) -> None:
        """Show where a saved chat is; finish what a kill has cut off."""
        chat = self.chat
        if chat.story.cut_off:
            self.note("the last answer was cut off, and continues:")
            self._finish_cut_off(chat.plan_cut_off())
        elif chat.story.unanswered:
            self.show_end()
            turn = chat.plan_again()
            self._answer(turn, lambda *how: chat.answer_last(turn, *how), "")
        elif chat.story.conversation.messages:
            self.show_end()

    def _finish_cut_off(self, turn: PlannedTurn) -> None:
        chat = self.chat
        try:
            self._answer(turn, lambda *how: chat.finish_cut_off(turn, *how), "")
        except Differs:
            self.note("the answer that was cut off comes out differently here, so it cannot be continued")
            try:
                answer = self.lines.ask("[a]nswer the turn anew, [k]eep what was written? ").strip().lower()[:1]
            except (EOFError, KeyboardInterrupt):
                answer = "k"
            if answer == "a":
                self._answer(turn, lambda *how: chat.answer("read", turn, *how), "")

    def _load(self, typed: slash.Typed) -> None:
        path, here = saved.path_of(typed.text), self.chat.story.path
        with suppress(OSError):
            if here is not None and path.samefile(here):
                self.note("this chat is open already")
                return
        self.chat = self._open_chat(path)
        self._full = ""
        self._take_up()

    def _farewell(self) -> None:
        if command := self._command():
            self.note(f"saved; {command} continues it", command)

    def _command(self) -> str:
        path = self.chat.story.path
        return "" if path is None else f"genctl chat --open {shlex.quote(str(path))}"

    def _last_words(self) -> object:
        """Say where the chat is saved, past what is buffered: the process ends now, maybe in the middle of a line."""
        command = self._command()
        words = f"\r\nsaved; {widgets.visible(command)} continues it\r\n"
        return command and os.write(sys.stdout.fileno(), words.encode())
