"""Texts against references, and samples against each other: exact match, BLEU, chrF, TER (sacrebleu, an extra).

BLEU (Papineni et al. 2002), chrF (Popović 2015) and TER (Snover et al. 2006) are on sacrebleu's scale of 0 to 100 with
its default settings; BLEU of a single sentence leaves out the orders for which it is too short (`effective_order`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

from genctl.comparing.metrics import Values
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import InputError, UsageError, count, extra


def is_installed() -> bool:
    """Whether there is sacrebleu."""
    return importlib.util.find_spec("sacrebleu") is not None


def check_installed(what: str) -> None:
    """Raises UsageError where `what` needs sacrebleu and there is none."""
    if not is_installed():
        raise UsageError(
            f"{what}: scores against references need sacrebleu, which is not installed", hint=extra("metrics")
        )


@cache
def _bleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=True, force=True)


@cache
def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


@cache
def _ter() -> Any:
    from sacrebleu.metrics.ter import TER

    return TER()


def against(text: str, references: Sequence[str]) -> Values:
    """One text against its references; exact match ignores white space at the ends."""
    expected = list(references)
    return {
        "exact_match": float(text.strip() in {reference.strip() for reference in expected}),
        "chrf": _bounded(_chrf().sentence_score(text, expected).score),
        "bleu": _bounded(_bleu().sentence_score(text, expected).score),
        "ter": float(_ter().sentence_score(text, expected).score),
    }


def corpus(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """The scores of all texts of a run as one corpus, which differ from the mean over its texts; `references[i]` belong
    to `texts[i]`.
    """
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    streams: Any = [[texts[place] if place < len(texts) else None for texts in references] for place in range(most)]
    return {
        "chrf": _bounded(_chrf().corpus_score(list(texts), streams).score),
        "bleu": _bounded(BLEU(force=True).corpus_score(list(texts), streams).score),
        "ter": float(_ter().corpus_score(list(texts), streams).score),
    }


def self_bleu(texts: Sequence[str]) -> list[float | None]:
    """For each text its BLEU with all others as references (Zhu et al. 2018, arXiv:1802.01886): 100 for equal texts.

    None for a single text, and without sacrebleu.
    """
    if len(texts) < 2 or not is_installed():
        return [None] * len(texts)
    return [
        _bounded(_bleu().sentence_score(text, [*texts[:place], *texts[place + 1 :]]).score)
        for place, text in enumerate(texts)
    ]


def _bounded(score: float) -> float:
    return min(float(score), 100.0)  # sacrebleu may return 100.00000000000004


def read(path: str, prompts: int) -> list[str]:
    """One reference per line, as many as there are prompts. Raises InputError."""
    try:
        text = reader.text(path)
    except Unreadable as error:
        raise InputError(f"the references could not be read: {error}: {path}") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    if len(lines) != prompts:
        raise InputError(f"{path} has {count(len(lines), 'reference')}, one per line, for {count(prompts, 'prompt')}")
    return lines
