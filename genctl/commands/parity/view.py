"""How a comparison is shown: a table of all pairs, then each pair, for a terminal, a file and a page.

Also the records of a comparison, and the checks that it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from rich.style import Style
from rich.text import Text

from genctl.commands.parity.findings import Finding
from genctl.commands.parity.options import LIMITS, ParityCommandOptions
from genctl.commands.recording import PageFile
from genctl.commands.table import flag_of
from genctl.errors import count, percent, printable
from genctl.events import Token
from genctl.io import writers
from genctl.io.records import finding
from genctl.parity.values import SEVERITY, Estimate, Parity, Position, TextParting, Verdict
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import hanging, labelled, last_cells
from genctl.terminal.widgets import first_column, table_lines, token_text

HEADS = ("side", "verdict", "mean KL", "max KL", "agree", "max regret", "perplexity", "difference")
CURVE_HEADS = ("part of the model", "difference", "explained", "position")
PARTINGS = 5  # shown for each pair
STYLES: dict[Verdict | None, Style] = {
    "tie": theme.colour(1.0),
    "drift": theme.colour(0.5),
    "other weights": theme.ERROR,
    "defect": theme.ERROR,
    None: theme.ERROR,  # counts as a failure
}


@dataclass(frozen=True)
class Naming:
    """Names of tokens, rows and the reference.

    `text_of` gives the text of a token; `rows` the name of a row: its own id, else its place in the input.
    """

    text_of: Callable[[int], str] = lambda token: ""
    rows: Mapping[str, str] = field(default_factory=dict)
    golden: str = ""  # the file with the reference

    def reference(self, name: str) -> str:
        """The name of the reference, which may equal that of the side compared with it."""
        return f"{printable(self.golden)} ({name})" if self.golden else name

    def row(self, id: str) -> str:
        """The name of a row."""
        return printable(self.rows.get(id, id))


# -- numbers -----------------------------------------------------------------------------------------------------------


def nats(value: float) -> str:
    """A value of any magnitude, in a few characters."""
    if math.isnan(value) or math.isinf(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    return f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.1e}"


def signed(value: float) -> str:
    """A difference of perplexities."""
    text = f"{value:+.4f}"
    return nats(value) if not math.isfinite(value) else text if text.strip("+-0.") else "0"


def _perplexity(value: float) -> str:
    return widgets.perplexity(value) if math.isfinite(value) else nats(value)


def _share(value: float) -> str:
    return percent(value, 2)


def _with_error(value: Estimate, shown: Callable[[float], str], error: Callable[[float], str]) -> str:
    return shown(value.value) + ("" if math.isnan(value.uncertainty) else f" ± {error(2 * value.uncertainty)}")


def sized(one: Parity) -> str:
    """The reason of a verdict, after the size of the difference if there is one."""
    figures = one.summary
    if not figures.positions or not figures.kl.max > 0:
        return one.reason
    least = "at least " if figures.kl_high is not None else ""
    return f"KL {least}{nats(figures.kl.mean)}, regret up to {nats(figures.regret.max)}: {one.reason}"


# -- text --------------------------------------------------------------------------------------------------------------


def lines(comparisons: Sequence[Parity], naming: Naming, width: int | None) -> list[Text]:
    """All pairs. Without a `width`, lines are not broken."""
    found: list[Text] = []
    if len(comparisons) > 1:
        rows = []
        for one in comparisons:
            figures, least = one.summary, "" if one.summary.kl_high is None else "≥ "
            name = one.other if width is None else last_cells(one.other, first_column(width))
            rows.append([
                name, one.word, least + nats(figures.kl.mean), least + nats(figures.kl.max),
                _share(figures.agreement.value), nats(figures.regret.max), _perplexity(figures.perplexity_other.value),
                signed(figures.perplexity_difference.value),
            ])  # fmt: skip
        found = table_lines(HEADS, rows, width)
    for one in comparisons:
        found += [Text("")] if found else []
        found += pair_lines(one, naming, width)
    return found


def pair_finding(one: Parity, naming: Naming) -> Finding:
    """The verdict on a pair, with its fault, notes and failed texts."""
    details = [] if one.fault is None else [("fault  ", one.fault.reason)]
    details += [("note: ", note) for note in one.notes]
    details += [("failed ", f"text {naming.row(text)}: {reason}") for text, reason in one.failed.items()]
    return Finding(one.other, naming.reference(one.reference), one.word, STYLES[one.verdict], sized(one), details)


def pair_lines(one: Parity, naming: Naming, width: int | None) -> list[Text]:
    """One pair: the verdict with its reason, figures, where the texts diverge, and layers."""
    found, figures = pair_finding(one, naming).lines(width), one.summary
    if figures.positions:
        kl = {"KL": figures.kl}
        if figures.kl_high is not None:
            kl = {"KL, at least": figures.kl, "KL, at most": figures.kl_high}
        named = {**kl, "regret": figures.regret, "|Δ logprob|": figures.difference}
        rows = [
            [name, *map(nats, (each.mean, each.median, each.q90, each.q99, each.max))] for name, each in named.items()
        ]
        found += table_lines(("nats", "mean", "median", "90%", "99%", "max"), rows, width)
        for label, words in sentences(one):
            found += hanging(f"{label:<12}", widgets.visible(words), width)
    if one.partings:
        found += _partings(one, naming, width)
    if one.curve:
        rows = [
            [each.name or each.sublayer, *map(nats, (each.size, each.noise)), str(each.position)] for each in one.curve
        ]
        found += table_lines(CURVE_HEADS, rows, width)
    return found


def sentences(one: Parity) -> list[tuple[str, str]]:
    """The findings in words, each with a label: first choices, perplexities, the noise."""
    figures, over = one.summary, one.summary.perplexity_positions
    agreed = _with_error(figures.agreement, _share, _share)
    change = _with_error(figures.perplexity_difference, signed, _perplexity)
    both = f"{_perplexity(figures.perplexity_reference.value)} → {_perplexity(figures.perplexity_other.value)}"
    found = [
        ("agreement", f"{agreed} of {count(figures.positions, 'first choice')} agree"),
        ("perplexity", f"{both}, difference {change}" + ("" if over is None else f" (over {count(over, 'position')})")),
    ]
    if one.noise.positions:
        found.append(("noise", f"{one.noise.how}. Margins under {nats(one.noise.margin)} nats count as ties"))
    return found


def _partings(one: Parity, naming: Naming, width: int | None) -> list[Text]:
    """How many texts diverge and how, and the worst of them: both tokens with their probabilities, and the verdict."""
    verdicts = [parting.verdict for parting in one.partings]
    tally = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in SEVERITY if kind in verdicts)
    diverge = "diverges" if len(one.partings) == 1 else "diverge"
    words = f"generating independently, {len(one.partings)} of {count(len(one.texts), 'text')} {diverge} ({tally})"
    found = hanging("", words, width)
    for parting in worst_first(one.partings)[:PARTINGS]:
        both, tokens = [], (parting.token_reference, parting.token_other)
        for token, *logprobs in zip(tokens, parting.logprobs_reference, parting.logprobs_other, strict=True):
            name = "the end" if token is None else f"“{token_text(token, naming.text_of(token))}”"
            chances = (math.nan if math.isnan(value) else math.exp(min(value, 0.0)) for value in logprobs)
            both.append(f"{name} {' → '.join(widgets.percent(chance).strip() for chance in chances)}")
        where = f"text {naming.row(parting.text)}, token {parting.index + 1}"
        sentence = widgets.visible(f"{where}: {' or '.join(both)}, margin {nats(parting.margin)} nats")
        found += labelled(f"  {parting.verdict:<6} ", STYLES[parting.verdict], sentence, width)
    left = len(one.partings) - PARTINGS
    return found + ([Text(f"  {left} more: --format jsonl has them", style=theme.DIM)] if left > 0 else [])


def worst_first(partings: Sequence[TextParting]) -> list[TextParting]:
    """The most severe first, then the largest margin."""
    return sorted(partings, key=lambda each: (SEVERITY[each.verdict], each.margin), reverse=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def add_to_page(page: PageFile, one: Parity, naming: Naming, number: int) -> None:
    """Add a pair: its findings, and the texts of both sides as runs of a comparison.

    `number` counts pairs from 1; the texts of the reference are added with the first.
    """
    found = pair_finding(one, naming)
    page.facts.append(found._replace(details=[*found.details, *sentences(one)]).fact())
    by_text: dict[str, list[Position]] = {text.id: [] for text in one.texts}
    for position in one.positions:
        by_text[position.text].append(position)
    for run, name in [(0, found.reference)] * (number == 1) + [(number, one.other)]:
        for text in one.texts:
            own, figures = by_text[text.id], ""
            if run and own:
                kl = [each.kl for each in own]
                figures = f"KL {nats(math.fsum(kl) / len(kl))} nats on average, {nats(max(kl))} at most"
            logprobs = [each.logprob_other if run else each.logprob_reference for each in own]
            tokens = [
                Token(each.token, logprob, naming.text_of(each.token))
                for each, logprob in zip(own, logprobs, strict=True)
            ]
            lane = f"{name}/{quote(text.id, safe='')}/0"
            page.scored(lane, text.prompt, tokens, model=name, figures=figures, run=run + 1)


COLUMNS = (
    "kind", "reference", "other", "verdict", "positions", "kl_mean", "kl_median", "kl_q99", "kl_max", "regret_mean",
    "regret_max", "agreement", "perplexity_reference", "perplexity_other", "ratio", "id", "index", "token_reference",
    "token_other", "margin", "reason", "kl_bounded",
)  # fmt: skip


def records(one: Parity, naming: Naming, *, positions: bool, failed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The pair with all figures, then a record for each parting, and with `positions` one for each position.

    `failed` are the sentences of the checks that failed.
    """
    names = {"reference": one.reference, "other": one.other}
    yield finding("pair", {
        **names,
        "verdict": one.verdict,
        "reason": one.reason,
        "texts": len(one.texts),
        "parted": len(one.partings),
        **asdict(one.summary),
        "noise": asdict(one.noise),
        "fault": None if one.fault is None else asdict(one.fault),
        "failed_checks": list(failed),
        "failed_texts": dict(one.failed),
        "notes": list(one.notes),
    })  # fmt: skip
    for parting in one.partings:
        fields = asdict(parting)
        fields["id"] = fields.pop("text")
        for name in names:
            token = fields[f"token_{name}"]
            fields[f"text_{name}"] = None if token is None else naming.text_of(token)
        yield finding("parting", names | fields)
    for position in one.positions if positions else ():
        fields = asdict(position)
        yield finding("position", names | {"id": fields.pop("text"), **fields})
    for layer in one.curve:
        yield finding("layer", names | asdict(layer))


def flat(record: writers.Record) -> writers.Record | None:
    """The columns of --format tsv, without nested figures; None if a record is left out."""
    if record["kind"] not in ("pair", "parting"):
        return None
    columns = dict(record)
    if record["kind"] == "pair":
        columns["kl_bounded"] = str(record["kl_high"] is not None).lower()  # if so, the figures of KL are lower bounds
    for name in ("kl", "regret"):
        if isinstance(values := record.get(name), Mapping):
            columns |= {f"{name}_{key}": value for key, value in values.items()}
    for name in ("agreement", "perplexity_reference", "perplexity_other", "ratio"):
        if isinstance(value := record.get(name), Mapping):
            columns[name] = value["value"]
    return columns


def failed_checks(options: ParityCommandOptions, one: Parity) -> list[str]:
    """A sentence for each check that a pair fails. If KL is only bounded, its lower bound counts.

    Without a position, no check passes. Texts of a pair that could not be read do not count here, but fail the command.
    """
    figures, failed = one.summary, []
    if not figures.positions:
        limits = [flag_of(name) for name in LIMITS if getattr(options, name) is not None]
        if limits or not one.failed:
            failed.append(f"{', '.join([*limits, one.other])}: {one.reason}")
        return failed
    least = "at least " if figures.kl_high is not None else ""
    kl, regret, share = figures.kl.mean, figures.regret.max, figures.agreement.value
    if (limit := options.max_kl) is not None and not kl <= limit:
        failed.append(f"--max-kl {limit:g}: the mean KL of {one.other} is {least}{kl:.3g} nats")
    if (limit := options.max_regret) is not None and not regret <= limit:
        failed.append(f"--max-regret {limit:g}: the largest regret of {one.other} is {regret:.3g} nats")
    if (limit := options.min_agreement) is not None and not share >= limit:
        failed.append(f"--min-agreement {limit:g}: {share:.4g} of the first choices of {one.other} agree")
    if (one.verdict, False) in (("other weights", options.allow_other_weights), ("defect", options.allow_defect)):
        failed.append(f"{one.other}: {one.verdict}: {sized(one)}")
    return failed
