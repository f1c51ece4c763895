"""A chat on a terminal: what a person types becomes turns, answers stream, and notes of the program stand between."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from genctl.commands.chat import thinking
from genctl.commands.chat.answer_view import AnswerView
from genctl.commands.chat.chat import Chat, PlannedTurn
from genctl.commands.chat.line_input import SIGN, PlainLines
from genctl.commands.chat.options import ChatOptions
from genctl.commands.options import SHOWN_TOP
from genctl.engines.protocol import Flow, Report
from genctl.errors import UsageError, count
from genctl.events.results import Result
from genctl.terminal import theme, widgets
from genctl.terminal.interrupt import Interrupt
from genctl.terminal.summary import stop_words
from genctl.terminal.text_width import unbroken

if TYPE_CHECKING:
    from genctl.commands.chat.line_editor import LineEditor

EMPTY = "the answer is empty: the model ends it at once (EOS)"


class ChatScreen:
    """A chat and the terminal on which it is shown. `advise` prints a hint; `load` continues the chat in a file."""

    def __init__(
        self,
        chat: Chat,
        options: ChatOptions,
        consoles: tuple[Console, Console],
        advise: Callable[[str], object],
        load: Callable[[Path], object],
    ) -> None:
        self.chat, self.options, self.advise, self.load = chat, options, advise, load
        self.out, self.err = consoles
        self.scores = options.scores  # whether token probabilities are shown under each answer
        self.top = SHOWN_TOP if options.top_logprobs is None else options.top_logprobs
        self.lines: PlainLines | LineEditor
        if os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown"):
            self.lines = PlainLines()  # this terminal cannot redraw
        else:
            from genctl.commands.chat.line_editor import LineEditor

            self.lines = LineEditor(color=self.out.is_interactive and not self.out.no_color)

    def note(self, words: str, whole: str = "") -> None:
        """Print a remark of the program, dimmed. It is broken between words, but not within the text `whole`."""
        for line in unbroken(
            widgets.visible(words), max(self.out.width, 20), [widgets.visible(whole)] if whole else []
        ):
            self.out.print(Text(line, style=theme.DIM), soft_wrap=True)

    def show_end(self) -> None:
        """The last turn of the branch and its answer, as they were printed."""
        log = self.chat.log
        if (turns := log.turns_to(log.end)) > 1:
            self.note(f"({count(turns - 1, 'turn')} before)")
        for message in log.here[-2:]:
            text = thinking.split(message.content)[1] if message.role == "assistant" else message.content
            sign = SIGN if message.role == "user" else ""
            self.out.print(Text(f"{sign}{widgets.visible(text)}"), soft_wrap=False)

    def resume(self) -> None:
        """Show where a saved chat is; answer its last turn, if a kill has left it without an answer."""
        if self.chat.log.end is not None:
            self.show_end()
        if self.chat.log.unanswered:
            self.answer(self.chat.plan_again())

    @property
    def reopening(self) -> str:
        """The command that continues the chat; "" while it is not saved."""
        path = self.chat.log.path
        return "" if path is None else f"genctl chat --open {shlex.quote(str(path))}"

    # -- turns ---------------------------------------------------------------------------------------------------------

    def answer(self, turn: PlannedTurn) -> None:
        """Show an answer while it comes. Ctrl-C ends it; what it has so far stays.

        Raises UsageError for a prompt that does not fit the context.
        """
        context = self.chat.partner.context
        if context is not None and len(turn.ids) > context and turn.request.resolved.runtime.truncate is None:
            raise UsageError(
                f"not sent: the prompt has {count(len(turn.ids), 'token')}, but the model's context is {context}",
                hint="/undo and /edit shorten the chat, /new begins another; /set truncate=left drops its beginning",
            )
        if turn.note:
            self.note(turn.note)
        view: AnswerView | RunView
        if self.scores:
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
            report = Report(self.top if self.scores else 0, self.scores)
            try:
                result = self.chat.answer(turn, [view.feed], report, Flow(interrupted=interrupt))
            finally:
                view.close()
        if interrupt.status not in (0, 128 + signal.SIGINT):
            raise SystemExit(interrupt.status)
        if result.sequences:
            self._sum_up(result)
        else:
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
        if words:
            self.note(" · ".join(words))

    def _report_saved(self) -> object:
        """Say where the chat is saved, past what is buffered: the process ends now, maybe in the middle of a line."""
        words = f"\r\nsaved; {widgets.visible(self.reopening)} continues it\r\n"
        return self.reopening and os.write(sys.stdout.fileno(), words.encode())
