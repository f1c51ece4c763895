"""From knobs to processors, in the order of `listed_knobs.PROCESSORS`; only the files that they need are imported."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from genctl.config.listed_knobs import PROCESSORS, ProcessorRow, check_finite, is_set, processors_of
from genctl.decode.processors import Processor
from genctl.decode.processors.context import NamedProcessor, ProcessorContext
from genctl.errors import GenctlError, UsageError, one_line
from genctl.params import Generation

__all__ = ["NAMES", "ORDER", "NamedProcessor", "ProcessorContext", "build", "unlisted"]


ORDER = tuple(PROCESSORS.values())
NAMES = PROCESSORS


def build(context: ProcessorContext) -> tuple[NamedProcessor, ...]:
    """The processors of the knobs, in the order of `ORDER`; those for sampling only when sampling.

    With `context.explicit`, the processors of the list in its order and no others: each entry is
    `{"use": NAME, KNOB: VALUE, …}` with knobs of that processor (others keep the value of `context.generation`), or
    a user's own. `config` has checked names, keys and values. A listed processor acts in every mode. Processors whose
    settings have no effect are left out.

    Raises UsageError if a processor cannot be built.
    """
    check_finite(context.generation)
    if context.explicit is not None:
        return tuple(processor for processor in _explicit(context.explicit, context) if processor is not None)
    made = (_make(row, context) for row in processors_of(context.generation, healed=bool(context.healed)))
    return tuple(processor for processor in made if processor is not None)


def unlisted(context: ProcessorContext) -> tuple[str, ...]:
    """Processors that the knobs enable but an explicit list does not name.

    A knob at its default (transformers' top_k = 50) does not count.
    """
    if context.explicit is None:
        return ()
    listed = {entry.get("use") for entry in context.explicit}
    default = Generation()
    return tuple(
        made.name
        for made in build(dataclasses.replace(context, explicit=None))
        if made.name not in listed and any(value != getattr(default, knob) for knob, value in made.settings.items())
    )


def maker_of(row: ProcessorRow) -> Any:
    """The function that makes a processor from a `ProcessorContext` and the value of its first knob; it may return
    None: the setting has no effect.
    """
    file, _, function = row.maker.partition(".")
    return getattr(import_module(f"genctl.decode.processors.{file}"), function)


def _make(row: ProcessorRow, context: ProcessorContext) -> NamedProcessor | None:
    value = getattr(context.generation, row.knobs[0])
    if not is_set(row, context.generation, healed=bool(context.healed)):
        return None
    try:
        function = maker_of(row)(context, value)
    except GenctlError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:  # raised by transformers' constructors
        raise UsageError(f"{row.name}: {one_line(error)}") from error
    if function is None:
        return None
    settings = {name: getattr(context.generation, name) for name in row.knobs}
    key = (row.name, repr(settings)) if row.of_scores else None
    return NamedProcessor(row.name, function, settings, key=key)


def _explicit(items: tuple[dict[str, Any], ...], context: ProcessorContext) -> Iterator[NamedProcessor | None]:
    for number, item in enumerate(items, 1):
        try:
            yield _listed(item, context)
        except UsageError as error:
            raise UsageError(f"processors, item {number}: {error.message}", hint=error.hint) from error


def _listed(item: dict[str, Any], context: ProcessorContext) -> NamedProcessor | None:
    use, values = item["use"], {key: value for key, value in item.items() if key != "use"}
    if use not in NAMES:
        return NamedProcessor(use, _foreign(use, values, allowed=context.allow_plugins), values, foreign=True)
    changed = _changed(context, **values)
    check_finite(changed.generation)
    if use == "temperature" and "temperature" in values:
        if values["temperature"] == 0.0:
            raise UsageError("temperature: must be above 0 in a list; do_sample = false takes the best token")
        changed = _changed(changed, dynatemp_range=0.0)  # both may be listed, each with its own value
    return _make(NAMES[use], changed)


def _foreign(use: str, values: dict[str, Any], *, allowed: bool) -> Processor:
    """A user's own: a class that is constructed with the values (a transformers LogitsProcessor, or anything whose
    instances take history and scores), or a function that receives them after history and scores.
    """
    from genctl.config.plugins import make

    processor = make("processor", use, values, allowed=allowed)
    fixed = isinstance(processor, partial)
    try:
        inspect.signature(processor.func if fixed else processor).bind(None, None, **(values if fixed else {}))
    except TypeError as error:
        raise UsageError(f"processor {use} does not take history and scores: {one_line(error)}") from error
    except ValueError:  # C code without a signature: a wrong call fails later
        pass
    function: Processor = processor
    return function


def _changed(context: ProcessorContext, **values: Any) -> ProcessorContext:
    """The same context with other knobs."""
    return dataclasses.replace(context, generation=dataclasses.replace(context.generation, **values))
