"""What a comparison looks like on a terminal: a line while it runs, a table of all pairs, then each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from genctl import errors
from genctl.commands.parity.findings import verdict_lines
from genctl.errors import count, printable
from genctl.events import shared_length
from genctl.parity.values import (
    ENCODER,
    SEVERITY,
    Estimate,
    Fault,
    LayerDifference,
    Parity,
    Position,
    TextParting,
    Verdict,
)
from genctl.parity.values import Text as TextRead
from genctl.terminal import theme, widgets
from genctl.terminal.console import takes_lines
from genctl.terminal.live_region import LiveRegion, RareLines
from genctl.terminal.marked_text import Levels, marked
from genctl.terminal.text_width import hanging, labelled
from genctl.terminal.widgets import first_column, table_lines, token_text

HEADS = ("side", "verdict", "mean KL", "max KL", "agree", "max regret", "perplexity", "difference")
CURVE_HEADS = ("part of the model", "difference", "explained", "position")
PARTINGS = 5  # shown of each pair
CURVE = 40  # parts of the model shown one by one on a terminal
AROUND = 5  # parts before and after the one at fault, whose layers are shown whole
LEVELS = Levels(tuple(10 ** (power / 2) for power in range(-8, 1)))  # of KL in nats: 1e-4, 3e-4, …, 1
_VERDICTS: dict[Verdict, Style] = {
    "tie": theme.colour(1.0),
    "drift": theme.colour(0.5),
    "other weights": theme.ERROR,
    "defect": theme.ERROR,
}


@dataclass(frozen=True)
class Naming:
    """What tokens, rows and the reference are called.

    `text_of` gives the text of a token; `rows` the name of a row: its own id, else its place in the input.
    """

    text_of: Callable[[int], str] = lambda token: ""
    rows: Mapping[str, str] = field(default_factory=dict)
    golden: str = ""  # the file that has the reference

    def token(self, token: int | None) -> str:
        """A token in quotes; None is the end of a text."""
        return "the end" if token is None else f"“{token_text(token, self.text_of(token))}”"

    def reference(self, name: str) -> str:
        """The reference, which may have the name of the side that is compared with it."""
        return f"{printable(self.golden)} ({name})" if self.golden else name

    def row(self, id: str) -> str:
        """A row."""
        return printable(self.rows.get(id, id))


# -- numbers -----------------------------------------------------------------------------------------------------------


def nats(value: float) -> str:
    """A size that may be of any power of ten, in a few characters."""
    if math.isnan(value) or math.isinf(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    return f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.1e}"


def plain(value: float) -> str:
    """A perplexity."""
    return widgets.perplexity(value) if math.isfinite(value) else nats(value)


def signed(value: float) -> str:
    """A difference of perplexities, or of bits."""
    if not math.isfinite(value):
        return nats(value)
    text = f"{value:+.4f}"
    return "0" if not text.strip("+-0.") else text


def percent(value: float) -> str:
    """A share."""
    return errors.percent(value, 2)


def chance(logprob: float) -> str:
    """The probability of a token, – where it is not known."""
    return widgets.percent(math.nan if math.isnan(logprob) else math.exp(min(logprob, 0.0))).strip()


# -- all pairs ---------------------------------------------------------------------------------------------------------


def lines(comparisons: Sequence[Parity], naming: Naming, width: int | None) -> list[Text]:
    """All pairs of sides. Without a `width`, lines are not broken."""
    found: list[Text] = []
    if len(comparisons) > 1:
        names = short_names([one.other for one in comparisons], width)
        rows = [[name, *row_of(one)[1:]] for name, one in zip(names, comparisons, strict=True)]
        found = table_lines(HEADS, rows, width)
    for one in comparisons:
        found += [Text("")] if found else []
        found += pair_lines(one, naming, width)
    return found


def short_names(names: Sequence[str], width: int | None) -> list[str]:
    """Names of sides for the first column of a table: where one is too long for it, without what all begin with."""
    shown = [widgets.visible(name) for name in names]
    if width is None or max(map(cell_len, shown)) <= first_column(width):
        return shown
    shared = shown[0][: min(shared_length(shown[0], name) for name in shown)]
    begin = max(shared.rfind(mark) for mark in "@,/")
    return [f"…{name[begin:]}" for name in shown] if begin > 0 else shown


def row_of(one: Parity) -> list[str]:
    """A pair in the columns of HEADS."""
    figures = one.summary
    least = "" if figures.kl_high is None else "≥ "
    return [
        one.other,
        one.word,
        least + nats(figures.kl.mean),
        least + nats(figures.kl.max),
        percent(figures.agreement.value),
        nats(figures.regret.max),
        plain(figures.perplexity_other.value),
        signed(figures.perplexity_difference.value),
    ]


# -- one pair ----------------------------------------------------------------------------------------------------------


def verdict_style(verdict: Verdict | None) -> Style:
    """The colour of a verdict, or of none, which is no success."""
    return theme.ERROR if verdict is None else _VERDICTS[verdict]


def pair_lines(one: Parity, naming: Naming, width: int | None) -> list[Text]:
    """One pair: the verdict with its reason, figures, where texts part, layers, and the text that differs most."""
    details = [] if one.fault is None else [("fault  ", one.fault.reason)]
    details += [("note: ", note) for note in one.notes]
    details += [("failed ", f"text {naming.row(text)}: {reason}") for text, reason in one.failed.items()]
    names = one.other, naming.reference(one.reference)
    found = verdict_lines(names, one.word, verdict_style(one.verdict), sized(one), details, width)
    if one.summary.positions:
        heads, rows = figure_rows(one)
        found += table_lines(("nats", *heads[1:]), rows, width)
        for label, words in sentences(one):
            found += hanging(f"{label:<12}", widgets.visible(words), width)
    if one.partings:
        found += _partings(one, naming, width)
    if one.curve:
        shown = [*one.curve] if width is None else _shortened(one)
        found += table_lines(CURVE_HEADS, [curve_row(point) for point in shown], width)
        if left := len(one.curve) - len(shown):
            words = f"{left} parts within layers are not shown; --format jsonl has all {len(one.curve)}"
            found += hanging("  ", words, width, theme.DIM)
    return found + worst_text(one, naming, width)


def sized(one: Parity) -> str:
    """The reason of a verdict, after the size of the difference where there is one."""
    figures = one.summary
    if not figures.positions or not figures.kl.max > 0:
        return one.reason
    least = "at least " if figures.kl_high is not None else ""
    return f"KL {least}{nats(figures.kl.mean)}, regret up to {nats(figures.regret.max)}: {one.reason}"


def figure_rows(one: Parity) -> tuple[tuple[str, ...], list[list[str]]]:
    """The heads and the rows of the table of figures."""
    figures = one.summary
    kl = {"KL": figures.kl}
    if figures.kl_high is not None:
        kl = {"KL, at least": figures.kl, "KL, at most": figures.kl_high}
    named = {**kl, "regret": figures.regret, "|Δ logprob|": figures.difference}
    rows = [
        [name, *map(nats, (values.mean, values.median, values.q90, values.q99, values.max))]
        for name, values in named.items()
    ]
    return ("figure", "mean", "median", "90%", "99%", "max"), rows


def sentences(one: Parity) -> list[tuple[str, str]]:
    """What is found in words, each with its label: first choices, perplexities, the noise."""

    def error(value: Estimate, shown: Callable[[float], str]) -> str:
        return "" if math.isnan(value.uncertainty) else f" ± {shown(2 * value.uncertainty)}"

    figures = one.summary
    agreed = f"{percent(figures.agreement.value)}{error(figures.agreement, percent)}"
    change = f"{signed(figures.perplexity_difference.value)}{error(figures.perplexity_difference, plain)}"
    over = figures.perplexity_positions
    both = f"{plain(figures.perplexity_reference.value)} → {plain(figures.perplexity_other.value)}"
    found = [
        ("agreement", f"{agreed} of {count(figures.positions, 'first choice')} agree"),
        ("perplexity", f"{both}, difference {change}" + ("" if over is None else f" (over {count(over, 'position')})")),
    ]
    if one.noise.positions:
        found.append(("noise", f"{one.noise.how}. Margins under {nats(one.noise.margin)} nats count as ties"))
    return found


def _partings(one: Parity, naming: Naming, width: int | None) -> list[Text]:
    """How many texts part and how, and the worst of them: both tokens with their probabilities, and the verdict."""
    verdicts = [parting.verdict for parting in one.partings]
    tally = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in _VERDICTS if kind in verdicts)
    diverge = "diverges" if len(one.partings) == 1 else "diverge"
    words = f"generating independently, {len(one.partings)} of {count(len(one.texts), 'text')} {diverge} ({tally})"
    found = hanging("", words, width)
    for parting in worst_first(one.partings)[:PARTINGS]:
        sentence = f"text {naming.row(parting.text)}, token {parting.index + 1}: {' or '.join(ways(parting, naming))}"
        sentence = widgets.visible(f"{sentence}, margin {nats(parting.margin)} nats")
        found += labelled(f"  {parting.verdict:<6} ", verdict_style(parting.verdict), sentence, width)
    left = len(one.partings) - PARTINGS
    return found + ([Text(f"  {left} more: --format jsonl has them", style=theme.DIM)] if left > 0 else [])


def worst_first(partings: Sequence[TextParting]) -> list[TextParting]:
    """The most severe first, then the largest margin."""
    return sorted(partings, key=lambda each: (SEVERITY[each.verdict], each.margin), reverse=True)


def ways(parting: TextParting, naming: Naming) -> list[str]:
    """How the reference continues, and how the other: each token with its probabilities on both sides."""
    tokens = (parting.token_reference, parting.token_other)
    chances = zip(parting.logprobs_reference, parting.logprobs_other, strict=True)
    return [
        f"{naming.token(token)} {' → '.join(map(chance, both))}" for token, both in zip(tokens, chances, strict=True)
    ]


def curve_row(point: LayerDifference) -> list[str]:
    """A part in the columns of CURVE_HEADS."""
    return [point.name or point.sublayer, nats(point.size), nats(point.noise), str(point.position)]


def _shortened(one: Parity) -> list[LayerDifference]:
    """The curve; of a long one what each layer ends with, and all parts of the layers around the fault.

    Where there is no fault, they are around the part that is furthest from what is explained.
    """

    def layer(point: LayerDifference) -> tuple[bool, int | None]:  # an encoder's have the numbers of its decoder's
        return point.sublayer.startswith(ENCODER), point.layer

    if len(one.curve) <= CURVE:
        return [*one.curve]
    middle = max(one.curve, key=lambda point: point.size / point.noise if point.noise else 0.0)
    if one.fault is not None:
        middle = next((point for point in one.curve if is_fault(point, one.fault)), middle)
    place = one.curve.index(middle)
    near = {layer(point) for point in one.curve[max(place - AROUND, 0) : place + AROUND + 1]}
    return [
        point for point in one.curve if point.layer is None or point.sublayer.endswith("layer") or layer(point) in near
    ]


def is_fault(point: LayerDifference, fault: Fault | None) -> bool:
    """Whether it is the part that is at fault."""
    return fault is not None and (point.layer, point.name) == (fault.layer, fault.name)


# -- the text that differs most ----------------------------------------------------------------------------------------


def worst_text(one: Parity, naming: Naming, width: int | None) -> list[Text]:
    """The text with the largest KL: each token with its KL as a digit beneath, in half powers of ten."""
    text = worst_of(one)
    if text is None or width is None:
        return []
    pieces = []
    for each in one.positions:
        if each.text == text.id:
            piece = LEVELS.piece(each.token, naming.text_of(each.token), each.kl)
            pieces.append(replace(piece, style=piece.style + Style(underline=not each.same)))
    line = Text("digits: KL, ", style=theme.DIM, no_wrap=True)
    for level in range(10):
        line.append(str(level), style=LEVELS.colour(LEVELS.steps[level - 1] if level else 0.0))
    line.append(" from 1e-4 to 1 nat", style=theme.DIM)
    rest = Text("underlined: another first choice", style=theme.DIM, no_wrap=True)
    fits = line.cell_len + rest.cell_len + 2 <= width
    legend = [line.append("; ").append_text(rest)] if fits else [line, rest]
    heading = Text(f"text {naming.row(text.id)} differs most", style=theme.DIM)
    return [heading, *marked(width, text.prompt, pieces), *legend]


def worst_of(one: Parity) -> TextRead | None:
    """The text with the largest KL; None if no KL is large enough for a digit."""
    worst = max(one.positions, key=lambda each: each.kl, default=None)
    if worst is None or LEVELS.digit(worst.kl) == "0":
        return None
    return next(each for each in one.texts if each.id == worst.text)


# -- while sides are compared ------------------------------------------------------------------------------------------

STAGES = {
    "writing": "texts are written",
    "reading": "both sides read",
    "noise": "measuring noise",
    "recording": "recording the reference",
    "scoring": "texts are scored",
    "layers": "looking for the layer",
}


class LivePairs:
    """Draws the pairs: finished ones with their verdict, the current one with its progress. `clock` gives seconds.

    `stages` has the words for the stages that `measure` or an audit reports.
    """

    def __init__(
        self, console: Console, clock: Callable[[], float], *, quiet: bool, stages: Mapping[str, str] = STAGES
    ) -> None:
        self._console, self._clock, self._stages = console, clock, stages
        self._draws = console.is_interactive and not quiet
        self._rare = RareLines(clock) if takes_lines(console) and not quiet else None
        self._region = LiveRegion(console, clock)
        self._finished: list[Text] = []
        self._name = self._stage = ""
        self._positions, self._kl = 0, 0.0

    def begin(self, name: str) -> None:
        """A pair follows."""
        self._name, self._stage, self._positions, self._kl = name, "", 0, 0.0
        self._show(at_once=True)

    def stage(self, stage: str) -> None:
        """The next stage begins."""
        self._stage = self._stages.get(stage, stage)
        self._show(at_once=True)

    def position(self, position: Position) -> None:
        """One more position is compared."""
        self._positions += 1
        self._kl += position.kl
        self._show()

    def end(self, one: Parity) -> None:
        """The pair is compared."""
        line = Text(f"{widgets.visible(one.other)}: ").append(one.word, style=verdict_style(one.verdict))
        self._finished.append(line.append(f" · KL {nats(one.summary.kl.mean)} nats", style=theme.DIM))

    def hide(self) -> None:
        """Erase what is drawn."""
        self._region.hide()

    def _line(self) -> Text:
        words = [f"{widgets.visible(self._name)}: {self._stage}".rstrip(": ")]
        if self._positions:
            words.append(count(self._positions, "position"))
            words.append(f"KL {nats(self._kl / self._positions)} nats")
        return Text(" · ".join(words), style=theme.DIM)

    def _show(self, *, at_once: bool = False) -> None:
        if self._rare is not None and self._rare.is_due():
            self._console.print(self._line())
        if self._draws and (at_once or self._region.is_due(self._clock())):
            room = max(self._console.height - 2, 1)
            lines = [*self._finished, self._line()][-room:]
            self._region.draw([widgets.fit(line.copy(), self._console.width) for line in lines])
