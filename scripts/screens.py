"""Draw the pictures of the docs: real commands in a terminal of 100 columns, as SVG, and a report in a browser, as PNG.

    python scripts/screens.py [--folder docs/images] [--only NAME ...]

`pyte` emulates the terminal. The picture of a beam search is a frame in the middle of the run. The report needs
Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 100, 40
RECORDING, TREE = "{folder}/run.jsonl", "{folder}/tree.jsonl"  # in commands: a folder for this run of the script
# name -> title, command, and a text: of the frames with this text, the middle one is drawn; with "", the last frame
SCREENS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "run": ("genctl run, half-way", ("run", "One day", "--seed", "1"), "One day"),
    "beam": (
        "genctl beam, in the middle of a run",
        ("beam", "One day", "--num-beams", "5", "-n", "60", "--events", RECORDING),
        "what all share",
    ),
    "table": ("genctl beam, when it is done", ("beam", "One day", "--num-beams", "3", "-n", "12"), ""),
    "scores": ("genctl run --scores", ("run", "One day", "--scores", "-n", "8"), ""),
    "explain": (
        "genctl run --explain",
        (
            "run",
            "One day",
            "--explain",
            "--do-sample",
            "--temperature",
            "0.7",
            "--top-k",
            "20",
            "--seed",
            "3",
            "-n",
            "5",
        ),
        "",
    ),
    "compare": (
        "genctl compare",
        ("compare", "One day", "-p", "greedy", "-p", "contrastive", "-p", "beam5", "-n", "16"),
        "",
    ),
    "score": ("genctl score", ("score", "One day, a curious girl named Poppy bought a submarine."), ""),
    "cache": ("genctl inspect-cache", ("inspect-cache", "One day", "--steps", "4"), ""),
    "explore": (
        "genctl explore, at an uncertain token",
        ("explore", "One day", "-n", "24", "--do-sample", "--top-p", "0.9", "--seed", "4", "--save", TREE),
        "next token",
    ),
}


# name -> keys, each with the text that the screen must show before it is pressed; the frame before the last is drawn
KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "explore": (("no tokens yet", "3"), ("sample: done", "\x1b[C"), ("entropy 2.06", "q")),
}
_QUERIES = re.compile(rb"\x1b\[[<>=?][0-9;]*[mu]")  # pyte mistakes the end of such a sequence for a style


class Screen(pyte.Screen):
    """A screen that stores dim text, which pyte does not support, as italics, which genctl does not use."""

    def select_graphic_rendition(self, *attributes: int, **private: bool) -> None:
        super().select_graphic_rendition(*attributes, **private)
        if 2 in attributes[:1]:  # later numbers may belong to a colour
            self.cursor.attrs = self.cursor.attrs._replace(italics=True)


def frames(command: tuple[str, ...]) -> list[list[Text]]:
    """The lines of the terminal after each burst of output."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    child = pexpect.spawn(
        sys.executable,
        ["-m", "genctl", *command],
        dimensions=(ROWS, COLUMNS),
        env=environment,
        timeout=120,
        echo=False,
    )
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    shown: list[list[Text]] = []
    keys = list(KEYS.get(command[0], ()))
    while True:
        if "--step" in command:
            child.send(" ")
        try:
            stream.feed(_QUERIES.sub(b"", child.read_nonblocking(1 << 14, timeout=120)))
        except pexpect.EOF:
            return shown
        lines = [_line(screen, number) for number in range(ROWS)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        shown.append(lines)
        if keys and any(keys[0][0] in line.plain for line in lines):
            child.send(keys.pop(0)[1])
            if command[0] in KEYS and not keys:
                child.expect(pexpect.EOF)
                return shown[-1:]


def _line(screen: pyte.Screen, number: int) -> Text:
    line, row = Text(), screen.buffer[number]
    for column in range(COLUMNS):
        cell = row[column]
        colour = "" if cell.fg == "default" else _colour(cell.fg)
        marks = [name for name in ("bold", "italics", "underscore", "reverse") if getattr(cell, name)]
        names = {"italics": "dim", "underscore": "underline"}
        line.append(cell.data, style=" ".join([*(names.get(mark, mark) for mark in marks), colour]).strip())
    line.rstrip()
    return line


def _colour(name: str) -> str:
    if len(name) == 6 and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    bright = name.startswith("bright")
    plain = name.removeprefix("bright").replace("brown", "yellow")
    return f"bright_{plain}" if bright else plain


def draw_report(folder: Path, work: str) -> None:
    """Draw the report of a beam search in a browser, with dead branches shown and the least certain token opened."""
    from playwright.sync_api import sync_playwright

    page = Path(work) / "report.html"
    words = [sys.executable, "-m", "genctl", "beam", "One day", "-n", "24", "--num-beams", "4", "--report", page.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, cwd=work, env=environment, check=True, capture_output=True)
    with sync_playwright() as started:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1100, "height": 900})
        shown.goto(page.as_uri())
        shown.locator("#search").get_by_role("checkbox", name="dead branches").check()
        shown.locator("#tokens .least button").first.click()
        shown.evaluate("scrollTo(0, 0)")  # the sticky header would hide the text below it
        shown.screenshot(path=folder / "report.png", full_page=True)
    print(f"{folder / 'report'}.png")


def main() -> None:
    """Draw all pictures, or those of --only."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", nargs="+", choices=[*SCREENS, "report"], default=[*SCREENS, "report"])
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    work = tempfile.mkdtemp()
    if "report" in given.only:
        draw_report(folder, work)
    for name, (title, command, part) in SCREENS.items():
        if name not in given.only:
            continue
        shown = frames(tuple(word.format(folder=work) for word in command))
        having = [lines for lines in shown if part and any(part in line.plain for line in lines)]
        lines = having[len(having) // 2] if part else shown[-1]
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        shown_command = " ".join(f'"{word}"' if " " in word else word for word in command)
        console.print(Text(f"$ genctl {shown_command.format(folder='.')}\n", style="dim"), no_wrap=True)
        for line in lines:
            console.print(line, no_wrap=True, crop=True)
        console.save_svg(str(folder / f"{name}.svg"), title=title)
        print(f"{folder / name}.svg: {len(lines)} lines")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
