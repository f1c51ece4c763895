"""What is not simply equal: refused with a sentence, or not right yet."""

from __future__ import annotations

# name -> a pattern that the sentence matches
REFUSED: dict[str, str] = {}

# name -> why genctl writes something else, or ends in an error that is none of ours. To be emptied.
KNOWN_DIFFERENT: dict[str, str] = {}
