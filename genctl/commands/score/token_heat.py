"""A text coloured by its tokens' probabilities, with a digit under each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from genctl.engines.protocol import Scored
from genctl.errors import count
from genctl.events import Token, shared_length
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import MarkedPiece, hanging, marked, one_line

CONTEXT = 3  # lines of context shown before the text
NARROW = 70  # cells; a narrower table has fewer columns
COLUMNS = {"rank": 4, "mean": 9, "total": 10, "perplexity": 10, "bits/byte": 9, "tokens": 6}  # their cells


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
    """Candidates, best first, in lines of at most `width` cells. `by` names the sort key in words.

    Of candidates that do not fit, what all begin with is left out.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=theme.DIM, expand=True)
    left_out = () if width >= NARROW else ("perplexity", "bits/byte")
    columns = {name: size for name, size in COLUMNS.items() if name not in left_out}
    for name, size in columns.items():
        table.add_column(name, justify="right", width=size, no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    texts = [entry.text for entry in entries]
    room = width - sum(columns.values()) - len(columns)
    shared = min(shared_length(texts[0], text) for text in texts)
    if shared and len(texts) > 1 and max(map(cell_len, texts)) > room:
        texts = [f"…{text[shared:]}" for text in texts]
    for rank, (sums, text) in enumerate(zip(entries, texts, strict=True), 1):
        table.add_row(
            f"{rank}",
            Text(widgets.rounded(sums.mean), style=theme.colour(math.exp(min(sums.mean, 0.0)))),
            widgets.rounded(-sums.nll),
            *(() if left_out else (widgets.perplexity(sums.ppl), "–" if math.isnan(sums.bpb) else f"{sums.bpb:.3f}")),
            f"{sums.count:,}",
            Text(one_line(text)),
            style=theme.CHOSEN if rank == 1 else theme.PLAIN,
        )
    words = f"sorted by {by}; log-probabilities in nats" + (f"; no room for {', '.join(left_out)}" if left_out else "")
    return widgets.lines_of(table, width) + hanging("", words, width, theme.DIM)


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
