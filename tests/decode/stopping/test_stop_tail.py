"""The end of a text from its last tokens: always what the whole would end with, and always enough of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from genctl.decode.stopping.tail import BROKEN, TailText
from tests.decode.stopping.rows import KINDS, RARE, reader, tokenizer, written

PIECES = [
    "the cat ",
    " mat",
    "don't",
    " do not",
    " . ",
    "stop",
    "\n\n",
    "日本語",
    "。",
    "🙂",
    "👩‍👩‍👧",
    "ǅ𝄞ǅ",
    "it ' s",
    "     ",
    "<pad>",
]


def shared(first: str, second: str) -> int:
    """How many characters both begin with."""
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) == 2), len(first))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 30)), min_size=3, max_size=9),
    odd=st.text(RARE + "aé .", max_size=20),
    characters=st.integers(1, 30),
)
@example(pieces=[("the cat ", 40), ("ǅ𝄞ǅ", 60)], odd="ǅ", characters=3)
@example(pieces=[(" do not", 60), (" . ", 60)], odd="a", characters=12)
def test_the_end_is_that_of_the_whole_and_long_enough(
    kind: str, pieces: list[tuple[str, int]], odd: str, characters: int
) -> None:
    encode = tokenizer(kind).backend_tokenizer.encode
    tokens = [
        token for piece, times in [*pieces, (odd, 2)] for token in encode(piece, add_special_tokens=False).ids * times
    ]
    read = reader(kind)
    tail = TailText(read, tokenizer(kind).all_special_ids)
    before = ""
    for count in range(1, len(tokens) + 1):
        text = read(tokens[:count]).rstrip(BROKEN)
        if count > 40 and BROKEN not in text and not tail.silent(tokens[count - 1]):
            changed = len(text) - shared(before, text)
            ends, whole = tail.ends(written(tokens[:count]), characters)
            if whole:
                assert ends == [text]
            enough = min(len(text), characters + changed)
            assert any(text.endswith(end) and len(end) >= enough for end in ends), (text[-60:], ends)
        before = text
