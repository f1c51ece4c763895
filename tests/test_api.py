"""What an interpreter prints of a model and of its results."""

from __future__ import annotations

import genctl
from genctl.events import Failed
from genctl.events.results import Result


def test_a_model_and_a_result_are_printed_in_a_line() -> None:
    model = genctl.load()
    assert repr(model) == "<genctl.Model builtin:stories, native (llama), on cpu>"
    results = model.generate(["Once upon a time " * 9], num_beams=2, num_return_sequences=2, max_new_tokens=3)
    (result,) = results
    assert repr(result).startswith("<Result 0: beam of 'Once upon a time Once upon a time Once …', <Sequence '")
    assert repr(result).endswith("3 tokens, length> and 1 more>")
    assert len(repr(results)) < 200


def test_a_failed_result_says_why() -> None:
    failed = Result("7", "x", "greedy", None, "made-up", (), error=Failed("7", "input", "the prompt is empty"))
    assert repr(failed) == "<Result 7: failed, 'the prompt is empty'>"
