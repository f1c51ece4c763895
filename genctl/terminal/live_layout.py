"""The layout of the live region: the newest lines of every unfinished text.

Rich's Live hides the newest lines of what is taller than the terminal; this hides the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from genctl.events.history import LaneHistory, Path
from genctl.terminal import theme, widgets
from genctl.terminal.explain import explain_heading, explain_lines
from genctl.terminal.run_history import stop_words

_BLOCK = 500  # characters; the omitted beginning grows in steps of at least this, so that lines wrap the same way


@dataclass(frozen=True)
class Look:
    """The options of a view."""

    echo: bool = False
    messages: bool = False  # with `echo`, conversations as well
    scores: bool = False
    explain: bool = False
    top: int = 0
    labels: bool = False
    numbered: bool = True  # there may be several prompts, so labels say which

    @property
    def steps(self) -> bool:
        """Whether there are lines for each step."""
        return self.scores or self.explain

    def echoes(self, lane: LaneHistory) -> bool:
        """Whether the prompt of a lane is shown before its text."""
        return self.echo and bool(lane.prompt) and (self.messages or not lane.is_chat)


@dataclass(frozen=True)
class Section:
    """An unfinished text and the words of its heading."""

    lane: LaneHistory
    path: Path
    heading: tuple[str, ...]


def tail(lanes: Sequence[LaneHistory], look: Look, console: Console) -> list[Text]:
    """The newest lines of all texts of these lanes, in order, at most as many as fit the console."""
    sections = [section for lane in lanes for section in sections_of(lane, look)]
    height, width = max(console.height - 1, 1), console.width
    if not sections:
        return []
    least = 1 + (len(sections) > 1)  # a heading and one line of text
    shown = sections[: max((height - 1) // least if len(sections) * least > height else len(sections), 1)]
    hidden = len(sections) - len(shown)
    room = height - (hidden > 0)
    lines: list[Text] = []
    for place, section in enumerate(shown):
        share = max(room // (len(shown) - place), 1)  # its heading, the end of its text, its newest steps
        part = [widgets.header(width, *section.heading)] if share > 1 and (len(sections) > 1 or look.labels) else []
        left = share - len(part)
        part += text_lines(section, look, console, min(max(left // 3, 1), left) if look.steps else left, width)
        left = share - len(part)
        part += step_lines(section.path, look, width, last=left)[-left:] if look.steps and left else []
        lines += part
        room -= len(part)
    if hidden:
        lines.append(Text(f"… and {hidden} more", style=theme.DIM, no_wrap=True))
    return lines[:height]


def sections_of(lane: LaneHistory, look: Look) -> list[Section]:
    """The current texts of a lane: one per returned sequence if rows are independent, else the best."""
    named = names(lane, look)
    if lane.finished:
        hypotheses = lane.finished.hypotheses
        return [
            Section(
                lane,
                path or Path(),
                (*named, place_words(place, len(hypotheses)), stop_words(hypothesis.reason, hypothesis.cause)),
            )
            for place, (hypothesis, path) in enumerate(zip(hypotheses, lane.paths_of(hypotheses), strict=True))
        ]
    if lane.failed:
        return [Section(lane, Path(), (*named, "failed"))]
    independent = slots(lane)
    if independent:
        return [
            Section(lane, path, (*named, place_words(slot, max(independent) + 1), state))
            for slot, (path, state) in sorted(independent.items())
        ]
    best = best_path(lane)
    among = f"best of {len(lane.rows)} so far" if len(lane.rows) > 1 else ""
    return [Section(lane, best, (*named, among))]


def slots(lane: LaneHistory) -> dict[int, tuple[Path, str]]:
    """The text and state of each returned sequence, where rows are independent; empty where they compete."""
    texts = {row.slot: (row, "") for row in lane.rows if row.slot is not None}
    for path in lane.endings or ():
        if path.slot is not None:
            words = stop_words(path.hypothesis.reason, path.hypothesis.cause)
            texts.setdefault(path.slot, (path, words))
    return texts


def best_path(lane: LaneHistory) -> Path:
    """The best live row, or the best finished one if none is live."""
    if lane.rows:
        return lane.rows[0]
    return max(lane.ended, key=lambda path: path.hypothesis.score, default=Path())


def names(lane: LaneHistory, look: Look, *, settled: bool = False) -> tuple[str, str]:
    """The name of a lane on screen: its place or id, where there are several, and the first words of its prompt.

    A `settled` text has its full prompt above it, so the heading leaves the prompt out.
    """
    name = lane.name if lane.began and lane.began.place else lane.lane
    words = "" if settled and look.numbered and look.echoes(lane) else widgets.first_words(lane.prompt, 44)
    return name if look.numbered else "", words


def place_words(place: int, of: int) -> str:
    """`2 of 5`, or "" if there is only one sequence."""
    return f"{place + 1} of {of}" if of > 1 else ""


def returned(lane: LaneHistory) -> int:
    """The number of sequences that a lane returns: `num_return_sequences` if recorded, at least those that it has."""
    wanted = lane.began.settings.get("num_return_sequences") if lane.began else None
    count = len(lane.finished.hypotheses) if lane.finished else 1
    return max(wanted, count) if isinstance(wanted, int) else count


def text_lines(section: Section, look: Look, console: Console, height: int, width: int) -> list[Text]:
    """The last `height` lines of a section's text, wrapped to the width; `⋮` replaces omitted lines."""
    block = max(_BLOCK, 2 * height * width)
    start = max(section.path.chars // block - 1, 0) * block
    text = Text()
    if start == 0 and look.echoes(section.lane):
        text.append(widgets.visible(section.lane.prompt[-block:] + section.lane.between), style=theme.PROMPT)
    text.append(widgets.visible(section.path.text(start)))
    text.expand_tabs(8)
    lines = list(text.wrap(console, width, tab_size=8))
    if len(lines) > height or start:
        lines = lines[-height:]
        lines[0] = Text("⋮", style=theme.DIM) if height > 1 else lines[0]
    for line in lines:
        line.no_wrap = True
    return lines


def step_lines(path: Path, look: Look, width: int, *, last: int | None = None) -> list[Text]:
    """The lines of each step of a path, or of the `last` steps."""
    tokens = path.tokens(last)
    lines = [widgets.score_heading(width)]
    if look.explain:
        lines.append(explain_heading(width))
    for step, token in enumerate(tokens, start=path.length - len(tokens) + 1):
        lines.append(widgets.score_line(step, token, width))
        if look.scores and look.top:
            lines += widgets.alternative_lines(token, width, look.top)
        if look.scores:
            lines += widgets.watched_lines(token, width)
        if look.explain:
            lines += explain_lines(token, width)
    return lines
