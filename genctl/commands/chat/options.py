"""`genctl chat`: its options, and the conflicts between its flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from genctl.commands.help import ALSO
from genctl.commands.options import FORMAT, IN_OUT, SHOWN, PresetOptions
from genctl.commands.table import Command, Conflict, OptionGroup, argument, given, needless_force, same_file
from genctl.config import presets
from genctl.config.check import shown
from genctl.config.layers import Layer, Resolved
from genctl.errors import UsageError
from genctl.terminal.standard_streams import is_terminal

CHAT = OptionGroup("The chat")

# knobs for runs of many rows or without further turns -> why a chat does not take them
NO_PLACE = {
    "num_return_sequences": "a turn has one answer; /retry gives another",
    "prompt_cache": "a chat manages the cache of its own turns",
    "token_healing": "an answer begins behind the template, not inside of a word",
}


@dataclass(frozen=True)
class ChatOptions(PresetOptions):
    """The command line of `genctl chat`."""

    arguments: tuple[str, ...] = argument("first messages, one per turn; - reads them from standard input", "TEXT")
    format: Literal["text", "jsonl"] = FORMAT
    input: str | None = IN_OUT.option("read turns from a file; - is stdin", "FILE", "--input", "-i")
    prefill: str | None = CHAT.option("begin every answer with this text", "TEXT")
    open: str | None = CHAT.option("continue a saved chat", "FILE")
    continued: bool = CHAT.switch("continue the last chat", "--continue")
    save: str | None = CHAT.option("save to a new file (default: ~/.local/state/genctl/sessions)", "FILE")
    force: bool = IN_OUT.switch("replace an existing --output file")
    scores: bool = SHOWN.switch("show token probabilities and alternatives")
    top_logprobs: int | None = SHOWN.option("number of alternatives for each token", "K", least=0)
    report: str | None = None  # of one run
    workers: str | None = None  # a chat has one row at a time
    address: str | None = None
    beneath: Sequence[Layer] = (Layer("genctl chat", {"chat": True}, declared="user"),)

    saved: Sequence[Layer] | None = None  # settings of the continued chat, above the standing ones that no chat saves

    def layers(self) -> list[Layer]:
        """The settings of the chat, lowest first, without those of the checkpoint."""
        if self.saved is None:
            return super().layers()
        return [*self.beneath, *self.saved, *presets.load(self.presets), *self.flags]

    @property
    def interactive(self) -> bool:
        """Whether a person types the turns: stdin and stdout are a terminal, and no other input or output is set."""
        return self.input is None and self.on_screen and is_terminal(sys.stdin)

    @property
    def with_tokens(self) -> bool:
        """Whether records have details of each token."""
        return self.scores or self.top_logprobs is not None


def check_settings(resolved: Resolved) -> None:
    """Raises UsageError for settings that a chat does not take."""
    wrong = []
    for knob, why in NO_PLACE.items():
        value = getattr(resolved.generation, knob, None) or getattr(resolved.runtime, knob, None)
        if value not in (None, 1) or value is True:
            wrong.append(f"{knob} = {shown(value)} ({resolved.origins.get(knob, 'default')}): {why}")
    if wrong:
        raise UsageError("\n".join(wrong))


CONFLICTS: tuple[Conflict, ...] = (
    needless_force("output"),
    same_file("save", "output"),
    same_file("open", "output"),
    same_file("save", "input"),
    (
        lambda options: options.continued and (options.open or options.save),
        "--continue continues the last chat in its own file: omit --open and --save (/save FILE continues in another)",
    ),
    (
        given("open", "save"),
        "--save {save} begins a new file, but --open {open} continues its own; /save FILE continues in another",
    ),
    (given(prefill=[""]), "--prefill is empty"),
    (
        lambda options: bool(options.scores and options.format == "text" and not options.interactive),
        "--scores shows tokens on a terminal; where answers are written, --format jsonl --scores has them",
    ),
)

CHAT_COMMAND = Command(
    "chat",
    ChatOptions,
    "genctl.commands.chat.job:chat",
    """On a terminal, type a message and press Enter; /help lists the commands. The checkpoint's chat template is used;
    a checkpoint without one continues the text. The chat is saved.

    Without a terminal, each line of standard input (or of --input) is a turn, and each answer is written as text or,
    with --format jsonl, as a record. With --input-format jsonl a line is a message such as {"role": "user", "content":
    "Hello"}, with the role system, user or assistant; user messages are answered.""",
    (
        "genctl chat -m Qwen/Qwen3-0.6B --system 'Be brief.'",
        "genctl chat --backend openai:http://localhost:8000/v1",
        "printf 'Hello\\nAnd then?\\n' | genctl chat --format jsonl",
    ),
    {
        "Model": ("model", "backend"),
        CHAT: ("system", "continued", "open", "save"),
        "How tokens are chosen": ("do_sample", "temperature", "max_new_tokens", "seed"),
        IN_OUT: ("input", "input_format", "output", "format"),
        ALSO: ("prefill", "top_p", "scores", "top_logprobs", "presets", "set", "device", "quiet", "verbose"),
    },
    CONFLICTS,
    without=frozenset({"chat", "batch_size", "num_return_sequences", "prompt_cache"}),
    input="turn",
)
