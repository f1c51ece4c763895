"""The processors of `json_schema`, `regex` and `grammar`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.grammar_after import after_mark
from genctl.decode.processors.grammar_rows import Grammar
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import spelling


def grammar_of(processors: Sequence[Any]) -> Any:
    """The `Grammar` or `GrammarAfter` among a lane's processors; None if there is none."""
    functions = (getattr(processor, "function", None) for processor in processors)
    return next((function for function in functions if hasattr(function, "begins_with")), None)


def json_schema(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "json_schema")


def regex(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "regex")


def lark(context: ProcessorContext, value: object) -> Processor | None:
    return constraint(context, "grammar")


def constraint(context: ProcessorContext, knob: str) -> Processor | None:
    """The processor of `json_schema`, `regex` or `grammar`; None if the knob is not set."""
    source = read(context.generation, knob)
    if source is None:
        return None
    words = spelling(context.tokenizer, context.vocab_size, knob, begun=context.begun)
    generation, start = context.generation, begins(context)
    # required words may keep a search from ending
    free = not (generation.force_words or generation.force_words_ids)
    room = context.max_length - start if free else None
    if generation.grammar_after is not None:
        return after_mark(context, source, words, start, room)
    ahead = len((generation.prefix or "").encode())
    return Grammar(source, words, start, context.eos, room, ahead, context.written)


def begins(context: ProcessorContext) -> int:
    """Where the text begins: after the prompt, unless its last tokens are of the text, and after a forced first token
    (a language, for example).
    """
    forced = context.prompt_len == 1 and context.generation.forced_bos_token_id is not None
    return context.prompt_len + forced - len(context.written)
