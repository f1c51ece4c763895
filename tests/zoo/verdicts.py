"""What is not simply equal: refused with a sentence, or not right yet."""

from __future__ import annotations

# name -> a pattern that the sentence matches
REFUSED: dict[str, str] = {
    "causal/emu3": r"^Emu3ForConditionalGeneration reads pictures, and transformers does not find its text model",
}

# name -> why what it draws cannot be compared
NOT_DRAWN: dict[str, str] = {"causal/reformer": "its forward seeds the generator that generate() draws from"}

# name -> why genctl writes something else, or ends in an error that is none of ours
KNOWN_DIFFERENT: dict[str, str] = {}
