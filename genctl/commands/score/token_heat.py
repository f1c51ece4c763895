"""A text coloured by its tokens' probabilities, with a digit under each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from genctl.engines.protocol import Scored
from genctl.errors import count
from genctl.events import Token
from genctl.terminal import divergences, theme, widgets
from genctl.terminal.marked_text import MarkedPiece, marked
from genctl.terminal.text_width import first_cells, hanging, one_line

CONTEXT = 3  # lines of context shown before the text
TEXT = 20  # cells that a candidate has at least, where less important columns can make room
LEAST_FIRST = ("bits/byte", "perplexity", "total")


def heat(context: str, lead: str, tokens: Sequence[Token], width: int) -> list[Text]:
    """The text in lines of at most `width` cells, under each a line of digits: the tenths of each token's probability.

    A digit stands under the first letter of its token. Tokens that share a character count as one, with the product of
    their probabilities. `context` and `lead` have no score; they come first, dimmed and without digits.
    """
    return marked(width, context + lead, _groups(tokens), lines=CONTEXT)


def legend() -> Text:
    """What the digits and colours mean: one line of 70 cells."""
    line = Text(no_wrap=True).append("digits: tenths of each token's probability, ", style=theme.DIM)
    for digit in range(10):
        line.append(str(digit), style=theme.colour(digit / 10 + 0.05))
    line.append(" (9: 90% and up)", style=theme.DIM)
    return line


def figures(sums: Scored) -> str:
    """A text's sums in words."""
    words = [
        f"perplexity {widgets.perplexity(sums.ppl)}",
        f"{widgets.rounded(sums.nll)} nats",
        f"{widgets.rounded(sums.bits)} bits",
    ]
    if not math.isnan(sums.bpb):
        words.append(f"{sums.bpb:.3f} bits/byte")
    words.append(count(sums.count, "token"))
    return " · ".join(words)


def token_table(tokens: Sequence[Token], width: int, top: int) -> list[Text]:
    """Each scored token with its probability, log-probability, rank and entropy, and `top` alternatives."""
    lines = [widgets.score_heading(width)]
    for step, token in enumerate(tokens, 1):
        lines.append(widgets.score_line(step, token, width))
        lines += widgets.alternative_lines(token, width, top)
    return lines


def ranking(entries: Sequence[Scored], by: str, width: int) -> list[Text]:
    """Candidates, best first, in lines of at most `width` cells. `by` names the sort key in words."""
    columns = {"mean": 9, "total": 10, "perplexity": 10, "bits/byte": 9, "tokens": 6}
    left_out: list[str] = []
    while (room := width - sum(1 + cells for cells in columns.values()) - 6) < TEXT and len(left_out) < len(
        LEAST_FIRST
    ):
        left_out.append(LEAST_FIRST[len(left_out)])
        del columns[left_out[-1]]
    lines = [Text(f"{'rank':>4}" + "".join(f" {name:>{cells}}" for name, cells in columns.items()) + "  text")]
    lines[0].stylize(theme.DIM)
    room = max(room, 8)
    texts = [entry.text for entry in entries]
    shown, shared = [Text(first_cells(text, room)) for text in texts], [""] * len(texts)
    cut = any(cell_len(one_line(text)) > room for text in texts)
    if cut and (common := divergences.column(found := divergences.divergences(texts, [()] * len(texts)))):
        shared, shown = common, divergences.parts(texts, found, max(room - len(common[0]), 8))
    for rank, sums in enumerate(entries, 1):
        cells = {
            "mean": widgets.rounded(sums.mean),
            "total": widgets.rounded(-sums.nll),
            "perplexity": widgets.perplexity(sums.ppl),
            "bits/byte": "–" if math.isnan(sums.bpb) else f"{sums.bpb:.3f}",
            "tokens": f"{sums.count:,}",
        }
        line = Text(f"{rank:>4}", style=theme.CHOSEN if rank == 1 else theme.PLAIN)
        for name, size in columns.items():
            style = theme.colour(math.exp(min(sums.mean, 0.0))) if name == "mean" else ""
            line.append(" ").append(f"{cells[name]:>{size}}", style=style)
        line.append(f"  {shared[rank - 1]}").append_text(shown[rank - 1])
        lines.append(line)
    lines = [widgets.fit(line, width) for line in lines]
    words = f"sorted by {by}; log-probabilities in nats"
    words += f"; {divergences.legend([()])}" if any(shared) else ""
    return lines + hanging("", words + (f"; no room for {', '.join(left_out)}" if left_out else ""), width, theme.DIM)


def _groups(tokens: Iterable[Token]) -> Iterable[MarkedPiece]:
    """The pieces of a text; tokens that share a character are one."""

    def piece(text: str, logprob: float) -> MarkedPiece:
        probability = math.exp(min(logprob, 0.0))
        return MarkedPiece(text, theme.colour(probability), str(min(int(probability * 10), 9)))

    logprob, ids = 0.0, list[int]()  # of the tokens whose character is not whole yet
    for token in tokens:
        logprob += token.logprob
        ids.append(token.id)
        if token.text:
            yield piece(token.text, logprob)
            logprob, ids = 0.0, []
    if ids:
        yield piece("".join(widgets.token_text(id, "") for id in ids), logprob)
