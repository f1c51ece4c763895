"""Compare two sides: both read the reference's texts, both write their own, and the noise between them is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from genctl.engines.protocol import never
from genctl.engines.requests import Request
from genctl.errors import ModelError
from genctl.parity.figures import Pairs
from genctl.parity.sides import LocalSide
from genctl.parity.spool import Spool
from genctl.parity.statistics import quantiles, summary
from genctl.parity.values import Noise, Parity, Position, Text

SPOOLED = 2**31  # bytes of logits in the temporary file, unless a block of texts has more


@dataclass(frozen=True)
class ParityOptions:
    """What is compared."""

    free: bool = True  # both sides also write their own texts, unless texts are given
    layers: bool = False  # the curve by layer is wanted whatever the verdict is
    checked: int = 128  # positions on which noise is measured at most


def read_both(
    reference: LocalSide,
    other: LocalSide,
    texts: Sequence[Text],
    receive: Callable[[Position], object],
    *,
    interrupted: Callable[[], str] = never,
) -> dict[str, str]:
    """Let both sides read texts, a block at a time, and hand out the figures of each position, text by text.

    The reference's logits of a block wait in a temporary file, so that memory holds a few rows of each side. Returns
    why texts could not be read, by id. Raises ModelError for sides whose distributions have different sizes.
    """
    vocabulary = reference.vocabulary
    if other.vocabulary != vocabulary:
        raise ModelError(
            f"{reference.name} has {vocabulary} entries in a distribution, {other.name} has {other.vocabulary}"
        )
    failed: dict[str, str] = {}
    with Spool() as spool:
        for block in blocks(texts, max(reference.width, other.width), vocabulary):
            if interrupted():
                break
            spool.clear()
            failed |= reference.read(
                block, lambda place, index, logits: spool.write((place, index), logits), interrupted=interrupted
            )
            found: list[Position] = []
            pairs = Pairs(found.append)

            def pair(
                place: int, index: int, logits: Tensor, block: Sequence[Text] = block, pairs: Pairs = pairs
            ) -> None:
                if (place, index) in spool:
                    text = block[place]
                    mine = spool.read((place, index), vocabulary)
                    pairs.add((text.id, index, text.token_ids[index]), mine, logits.detach().float().cpu())

            failed |= other.read(block, pair, interrupted=interrupted)
            pairs.flush()
            order = {text.id: number for number, text in enumerate(block)}
            for position in sorted(found, key=lambda each: (order[each.text], each.index)):
                if position.text not in failed:
                    receive(position)
    return failed


def blocks(texts: Sequence[Text], width: int, vocabulary: int) -> list[list[Text]]:
    """Texts to be spooled together: at least `width`, and not more than `SPOOLED` bytes beyond that."""
    made: list[list[Text]] = []
    size = 0
    for text in texts:
        own = 4 * vocabulary * len(text.token_ids)
        if not made or (len(made[-1]) >= width and size + own > SPOOLED):
            made.append([])
            size = 0
        made[-1].append(text)
        size += own
    return made


def measure(
    reference: LocalSide,
    other: LocalSide,
    requests: Sequence[Request] = (),
    texts: Sequence[Text] = (),
    options: ParityOptions | None = None,
    *,
    on_position: Callable[[Position], object] = lambda position: None,
    on_stage: Callable[[str], object] = lambda stage: None,
    interrupted: Callable[[], str] = never,
) -> Parity:
    """Compare a side with the reference on given `texts`, or on those that the reference writes for `requests`.

    `on_position` receives each position as it is compared, `on_stage` a few words on what begins: "writing", "reading",
    "noise", "layers". Raises ModelError, UsageError and InputError.
    """
    options = options or ParityOptions()
    failed: dict[str, str] = {}
    if requests:
        on_stage("writing")
        written, failed = reference.write(requests, interrupted=interrupted)
        texts = [*texts, *written]
    on_stage("reading")
    positions: list[Position] = []

    def receive(position: Position) -> None:
        positions.append(position)
        on_position(position)

    failed |= read_both(reference, other, texts, receive, interrupted=interrupted)
    figures = summary(positions)
    nothing = quantiles([])
    noise = Noise(0, (), 0.0, 0.0, 0.0, nothing.median, 0.0, 0.0, 0.0, "not measured")
    return Parity(
        reference.name,
        other.name,
        tuple(texts),
        tuple(positions),
        (),
        figures,
        noise,
        "tie" if figures.kl.max == 0 else "drift",
        "the distributions are equal" if figures.kl.max == 0 else "the distributions differ",
        failed=failed,
    )
