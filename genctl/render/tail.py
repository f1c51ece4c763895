"""The part of the screen that still changes: the newest lines of every text that is being written.

Rich's Live would hide the newest lines of a picture taller than the terminal; here the oldest go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from genctl.render import parts, theme
from genctl.render.explain import explain_heading, explain_lines
from genctl.render.story import LaneStory, Path, StoryRow
from genctl.render.summary import stop_words

_BLOCK = 500  # characters; the beginning that is left out moves only in steps of this or more, so that lines wrap alike


@dataclass(frozen=True)
class Look:
    """What the view was asked to show."""

    echo: bool = False
    scores: bool = False
    explain: bool = False
    top: int = 0
    labels: bool = False

    @property
    def steps(self) -> bool:
        """Whether there are lines for each step."""
        return self.scores or self.explain


@dataclass(frozen=True)
class Section:
    """A text on its way, and what to write above it."""

    lane: LaneStory
    path: Path
    heading: tuple[str, ...]


def tail(lanes: Sequence[LaneStory], look: Look, console: Console) -> list[Text]:
    """The newest lines of all texts of these lanes, in order, never more than fit the console."""
    sections = [section for lane in lanes for section in sections_of(lane, look)]
    height, width = max(console.height - 1, 1), console.width
    if not sections:
        return []
    least = 1 + (len(sections) > 1)  # a heading and one line of text
    shown = sections[: max((height - 1) // least if len(sections) * least > height else len(sections), 1)]
    hidden = len(sections) - len(shown)
    room = height - (hidden > 0)
    drawn: list[list[Text]] = []
    for place, section in enumerate(shown):
        share = max(room // (len(shown) - place), 1)
        lines = section_lines(section, look, console, share, width, headed=len(sections) > 1 or look.labels)
        drawn.append(lines)
        room -= len(lines)
    lines = [line for part in drawn for line in part]
    if hidden:
        lines.append(Text(f"… and {hidden} more", style=theme.DIM, no_wrap=True))
    return lines[:height]


def sections_of(lane: LaneStory, look: Look) -> list[Section]:
    """The texts of a lane as they stand: one per returned sequence where those are independent, else the best."""
    if lane.finished:
        hypotheses = lane.finished.hypotheses
        return [
            Section(
                lane,
                lane.path_of(hypothesis) or Path(),
                (*names(lane), place_words(place, len(hypotheses)), stop_words(hypothesis.reason, hypothesis.cause)),
            )
            for place, hypothesis in enumerate(hypotheses)
        ]
    if lane.failed:
        return [Section(lane, Path(), (*names(lane), "failed"))]
    independent = slots(lane)
    if independent:
        return [
            Section(lane, path, (*names(lane), place_words(slot, max(independent) + 1), state))
            for slot, (path, state) in sorted(independent.items())
        ]
    best = best_path(lane)
    among = f"best of {len(lane.rows)} so far" if len(lane.rows) > 1 else ""
    return [Section(lane, best, (*names(lane), among))]


def slots(lane: LaneStory) -> dict[int, tuple[Path, str]]:
    """The text and state of each returned sequence, where rows are independent; empty where they compete."""
    rows: list[StoryRow] = [row for row in lane.rows if row.slot is not None]
    found = {row.slot: (row.path, "") for row in rows if row.slot is not None}
    for leaf in lane.endings or ():
        if leaf.hypothesis.slot is not None:
            words = stop_words(leaf.hypothesis.reason, leaf.hypothesis.cause)
            found.setdefault(leaf.hypothesis.slot, (leaf.path, words))
    return found


def best_path(lane: LaneStory) -> Path:
    """The best row that lives, or the best that ended where none does."""
    if lane.rows:
        return lane.rows[0].path
    leaves = lane.ended
    return max(leaves, key=lambda leaf: leaf.hypothesis.score).path if leaves else Path()


def names(lane: LaneStory) -> tuple[str, str]:
    """What a lane is called on screen: its id and the first words of its prompt."""
    return lane.lane, parts.first_words(lane.prompt, 44)


def place_words(place: int, of: int) -> str:
    """Which of several sequences this is; nothing where there is one."""
    return f"{place + 1} of {of}" if of > 1 else ""


def section_lines(
    section: Section, look: Look, console: Console, height: int, width: int, *, headed: bool
) -> list[Text]:
    """A section in at most `height` lines: heading, the end of its text, the newest of its steps."""
    lines = [parts.header(width, *section.heading)] if headed and height > 1 else []
    room = height - len(lines)
    wanted = min(max(room // 3, 1), room) if look.steps else room
    text = text_lines(section, look, console, wanted, width)
    steps: list[Text] = []
    if look.steps and room > len(text):
        steps = step_lines(section.path, look, width, last=room - len(text))[-(room - len(text)) :]
    return lines + text + steps


def text_lines(section: Section, look: Look, console: Console, height: int, width: int) -> list[Text]:
    """The last `height` lines of a section's text, wrapped to the width; `⋮` stands where lines are left out."""
    block = max(_BLOCK, 2 * height * width)
    start = max(section.path.chars // block - 1, 0) * block
    text = Text()
    if start == 0 and look.echo:
        text.append(parts.visible(section.lane.prompt[-block:]), style=theme.PROMPT)
    text.append(parts.visible(section.path.text(start)))
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
    lines = [parts.score_heading()]
    if look.explain:
        lines.append(explain_heading(width))
    for step, token in enumerate(tokens, start=path.length - len(tokens) + 1):
        lines.append(parts.score_line(step, token))
        if look.scores and look.top:
            lines += parts.alternative_lines(token, width, look.top)
        if look.explain:
            lines += explain_lines(token, width)
    return lines
