"""Whole commands on a terminal of 60, 80 and 140 columns, and frames of live views, on the built-in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from genctl.api import Model, load
from genctl.commands.run.run_view import RunView
from genctl.events import Stepped
from tests.cli.tool import genctl
from tests.screens import check_screen
from tests.terminal.streams import Clock, Terminal, console

SCREENS = Path(__file__).parent / "screens" / "commands"
WIDTHS = [60, 80, 140]
SAMPLED = ("--do-sample", "--temperature", "0.7", "--top-k", "20", "--repetition-penalty", "1.2", "--seed", "3")
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "One day", "-n", "60"),
    "run_several": ("run", "One day", "Once upon a time", "-n", "20"),
    "run_scores": ("run", "One day", "--scores", "-n", "4", "--watch", " a"),
    "run_explain": ("run", "One day", "--explain", *SAMPLED, "-n", "3"),
    "run_answer": ("run", "-m", "builtin:numbers", "42"),
    "beam": ("beam", "One day", "--num-beams", "3", "--num-return-sequences", "2", "-n", "20"),
    "compare": ("compare", "One day", "-p", "greedy", "-p", "beam5", "--baseline", "greedy", "-n", "12"),
    "compare_several": (
        "compare",
        "One day",
        "The sea",
        "-p",
        "greedy",
        "--strategy",
        "b:length_penalty=2.0",
        "-n",
        "4",
    ),
    "score": ("score", "One day, a curious girl named Poppy bought a submarine.", "The sea", "--scores"),
    "score_rank": ("score", "--rank", "--context", "One day", ", a boy", ", a submarine"),
    "tokens": ("tokens", "A naïve 日本語 🦊\n", "<bos>One day "),
    "tokens_beside": ("tokens", "-m", "builtin:stories", "-m", "builtin:numbers", "A naïve 日本語 fox"),
    "inspect": ("inspect-cache", "One day", "--steps", "3", "--inputs"),
    "inspect_several": ("inspect-cache", "One day", "The sea", "--steps", "2", "--num-beams", "2"),
    "inspect_plan": ("inspect-cache", "--plan", "--batch", "3", "--memory", "1GiB"),
}


def shown(raw: bytes, width: int) -> str:
    """What a terminal shows of bytes, without what differs from run to run: the speeds of a comparison."""
    screen = pyte.Screen(width, 400)
    pyte.ByteStream(screen).feed(raw.replace(b"\n", b"\r\n"))
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    for place, line in enumerate(lines):
        at = line.find("tok/s") if line.startswith("run ") else -1
        for below in range(place + 1, len(lines) if at >= 0 else 0):
            if not lines[below]:
                break
            lines[below] = lines[below][:at] + "    ?" + lines[below][at + 5 :]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "60")
    done = genctl(*COMMANDS[name], terminal=True, color="never")
    assert done.status == 0, done.err
    text = shown(done.raw, width)
    assert not re.search(r"-0\.0+\b|\de\+\d|\b1 (tokens|prompts|rows|steps|runs)\b|\d\.\d+ bytes\b", text)
    check_screen(SCREENS / f"{name}_{width}.txt", text)


@pytest.fixture(scope="module")
def stories() -> Model:
    return load()


def beams(terminal: Terminal, clock: Clock) -> RunView:
    return RunView(terminal.console, console(80), echo=True, numbered=False, clock=clock, beams=True)


def texts(terminal: Terminal, clock: Clock) -> RunView:
    return RunView(terminal.console, console(80), echo=True, labels=True, clock=clock)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "view", "step"), [("beam", beams, 28), ("run", texts, 40)])
def test_a_frame_of_a_live_view(
    name: str, view: Callable[[Terminal, Clock], RunView], step: int, width: int, stories: Model
) -> None:
    terminal, clock = Terminal(width, 16), Clock()
    search = {"num_beams": 4} if name == "beam" else {"batch_size": 3, "draft": False}
    prompts = "One day" if name == "beam" else ["Once upon a time", "One day", "The sea"]
    with view(terminal, clock) as drawn:
        for event in stories.stream(prompts, max_new_tokens=step + 2, **search):
            clock.now += 0.1
            drawn.feed(event)
            if isinstance(event, Stepped) and event.step == step:
                frame = terminal.visible()
    check_screen(SCREENS / f"live_{name}_{width}.txt", "\n".join(frame) + "\n")
