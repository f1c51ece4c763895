"""Texts that repeat themselves as real ones do, to measure drafts.

Random weights write circles, where every draft of prompt lookup is right. A checkpoint with `by_heart`
(`checkpoints.Size`) writes one of these texts instead, so drafts are right where the text repeats itself.
"""

from __future__ import annotations

import json
import re
import sysconfig
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY = 8_000  # of the tokens in which texts are cut
# as tokenizers of today cut a text before they pair bytes
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def code() -> str:
    """Python: a module of genctl."""
    return (ROOT / "genctl" / "events" / "results.py").read_text(encoding="utf-8")


def _settings() -> dict[str, dict[str, Any]]:
    """What is known of each setting."""
    from genctl.config.check import default, describe, known
    from genctl.params import knobs

    return {
        name: {"description": knobs(kind)[name].metadata["about"], "type": describe(hint), "default": default(name)}
        for name, (kind, hint) in known().items()
    }


def structured() -> str:
    """JSON: all settings."""
    return json.dumps(_settings(), indent=1)


def summary() -> str:
    """A text, and what begins each of its paragraphs."""
    source = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    points = [" ".join(point.split()) for point in re.findall(r"^- (.*?)(?=\n- |\n\n)", source, re.M | re.S)][:4]
    return "\n\n".join([*points, "In short:", *(re.split(r"(?<=[.:]) ", point)[0] for point in points)])


# key -> the text in words, how it is made, and whether its last tokens are taken
TEXTS = {
    "code": ("code", code, False),
    "json": ("JSON", structured, False),
    "summary": ("a summary of its source", summary, True),
}


def rows() -> list[tuple[str, str]]:
    """Rows of one file, question and answer: what is said of a setting, and that as JSON."""
    found = []
    for name, setting in _settings().items():
        help_text, kind = setting["description"], setting["type"]
        if 20 < len(help_text) < 160:
            answer = json.dumps({"setting": name, "type": kind, "help": help_text, "source": "presets"})
            found.append((f"As JSON: {name} ({kind}): {help_text}\n", answer + "\n\n"))
    return found


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """Pairs of bytes, trained on a third of Python's standard library: code and English."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORD), "isolated")
    pairs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pairs])
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::3]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((file.read_text("utf-8", "replace") for file in files), trainer)
    return made


def excerpt(key: str, length: int, vocabulary: int, special: int) -> tuple[int, ...]:
    """`length` tokens of a text, numbered as they come first, after `special` ids."""
    _, make, last = TEXTS[key]
    tokens = _tokenizer().encode(make()).ids
    return _numbered(tokens[-length:] if last else tokens[:length], vocabulary, special)


def file_of_rows(length: int, vocabulary: int, special: int) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """As many rows as fit into `length` tokens, one after another, and where each row, its answer and its end are."""
    parts = [[_tokenizer().encode(part).ids for part in row] for row in rows()]
    ends = [*accumulate(sum(map(len, row)) for row in parts)]
    fit = [row for row, end in zip(parts, ends, strict=True) if end <= length]
    text = _numbered([token for row in fit for part in row for token in part], vocabulary, special)
    begins = [0, *ends]
    return text, [(begin, begin + len(ask), end) for (ask, _), begin, end in zip(fit, begins, ends, strict=False)]


def _numbered(tokens: list[int], vocabulary: int, special: int) -> tuple[int, ...]:
    known = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    return tuple(special + known[token] % (vocabulary - special) for token in tokens)
