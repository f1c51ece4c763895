"""Values from documents: convert a JSON value to a dataclass of its shape, or raise an error with the place.

The type hints of a dataclass are its shape. Types are strict: a number in quotes is not a number, and `true` is not 1.
Besides the usual hints there are those of `annotated_types` (`Ge`, `Le`, `MinLen`), and:

- a tuple is a list in JSON;
- a float may be null, and is then NaN, because genctl writes an unknown number as null. Use `Known` for a number that
  must not be null, and `Written` for a number from another program, which may be NaN or infinite, but not null;
- a TypedDict stays a dict, and its other keys are left as they are. As a mark (`Annotated[dict[str, Any], SomeDict]`)
  it is the shape of a dict that the program reads without knowing its keys.

Unknown fields of a dataclass are refused.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, Le

from genctl.config.reader import kind_of
from genctl.errors import nearest, printable, quote

if TYPE_CHECKING:
    from pydantic_core import CoreSchema, ErrorDetails, SchemaValidator


Known: TypeAlias = Annotated[float, "not null"]
Written: TypeAlias = Annotated[float, "not null, but any number"]
Natural: TypeAlias = Annotated[int, Ge(0), Le(2**63 - 1)]  # 0, 1, 2, …


class BadShape(ValueError):
    """A value without the expected shape: the path of the first wrong field, and what was expected there."""


def value_of(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type `hint`. Raises BadShape."""
    validator, known = _validator(hint)
    from pydantic_core import ValidationError

    try:
        return validator.validate_python(value)
    except ValidationError as error:
        raise BadShape(_sentence(error.errors(include_url=False, include_context=True), known)) from None


@cache
def _validator(hint: Any) -> tuple[SchemaValidator, tuple[str, ...]]:
    """The validator of a hint, and the names of its fields."""
    from pydantic_core import SchemaValidator

    names = tuple(item.name for item in dataclasses.fields(hint)) if dataclasses.is_dataclass(hint) else ()
    return SchemaValidator(_schema(hint)), names


def _schema(hint: Any, marks: tuple[Any, ...] = ()) -> CoreSchema:
    """The schema of a hint; `marks` are those of `Annotated`."""
    from pydantic_core import core_schema as make

    if like := next((each for each in (hint, *marks) if is_typeddict(each)), None):
        fields = {
            name: make.typed_dict_field(_schema(each), required=name in like.__required_keys__)
            for name, each in get_type_hints(like, include_extras=True).items()
        }
        return make.typed_dict_schema(fields, strict=True, extra_behavior="allow")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    bounds: dict[str, Any] = {
        name: getattr(mark, name) for mark in marks for name in ("ge", "le", "min_length") if hasattr(mark, name)
    }
    if origin is Annotated:
        return _schema(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        inner = [_schema(each) for each in arguments if each is not types.NoneType]
        one = inner[0] if len(inner) == 1 else make.union_schema(list(inner))
        return make.nullable_schema(one) if len(inner) < len(arguments) else one
    if origin is tuple and arguments[-1] is Ellipsis:
        return make.tuple_variable_schema(_schema(arguments[0]), strict=False, **bounds)
    if origin is tuple:
        return make.tuple_positional_schema([_schema(each) for each in arguments], strict=False)
    if origin is list:
        return make.list_schema(_schema(arguments[0]), strict=True, **bounds)
    if origin in (dict, Mapping):
        return make.dict_schema(_schema(str), _schema(arguments[1]), strict=True, **bounds)
    if origin is Literal:
        return make.literal_schema(list(arguments))
    if hint is str:  # not `str_schema`: names of files may hold halves of surrogate pairs
        return make.is_instance_schema(str, cls_repr="str")
    if hint is int:
        return make.int_schema(strict=True, **bounds)
    if hint is not float:
        return {bool: make.bool_schema(strict=True), Any: make.any_schema()}[hint]
    if "not null, but any number" in marks:
        return make.float_schema(strict=True)
    number = make.float_schema(strict=True, allow_inf_nan=False, **bounds)
    if "not null" in marks:
        return number
    unknown = make.no_info_after_validator_function(lambda none: math.nan, make.none_schema())
    return make.union_schema([(number, _EITHER), (unknown, _EITHER)], mode="left_to_right")


def _dataclass(kind: type) -> CoreSchema:
    from pydantic_core import core_schema as make

    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for item in dataclasses.fields(kind):
        schema = _schema(hints[item.name])
        if item.default is not dataclasses.MISSING:
            schema = make.with_default_schema(schema, default=item.default)
        elif item.default_factory is not dataclasses.MISSING:
            schema = make.with_default_schema(schema, default_factory=item.default_factory)
        fields.append(make.dataclass_field(item.name, schema))
    return make.dataclass_schema(
        kind,
        make.dataclass_args_schema(kind.__name__, fields, extra_behavior="forbid"),
        [field["name"] for field in fields],
        strict=False,
        slots=hasattr(kind, "__slots__"),
        frozen=True,
    )


# -- errors ------------------------------------------------------------------------------------------------------------

_EITHER = "number or null"  # stands for the branch in the path of an error
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "is_instance_of": "a string",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
}


def _sentence(errors: list[ErrorDetails], known: tuple[str, ...]) -> str:
    """The first error, with its path; missing fields of one object are reported together."""
    first = errors[0]
    place, kind, found = first["loc"], first["type"], first["input"]
    context: Mapping[str, Any] = first.get("ctx", {})
    if kind == "missing" and isinstance(place[-1], int):
        return _at(place[:-1], f"expected more items, got {len(found)}")
    if kind == "missing":
        missing = [str(each["loc"][-1]) for each in errors if (each["loc"][:-1], each["type"]) == (place[:-1], kind)]
        return _at(place[:-1], f"{' and '.join(missing)}: expected here, but missing")
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        near = nearest(str(place[-1]), known) if len(place) == 1 else ""
        return _at(place[:-1], f"unknown field {quote(str(place[-1]))}" + (f"; did you mean {near}?" if near else ""))
    for name, words in (("min_length", "at least"), ("max_length", "at most")):
        if name in context:
            return _at(place, f"expected {words} {context[name]} items, got {len(found)}")
    if kind in _TYPES:
        return _at(place, f"expected {_TYPES[kind]}, got {kind_of(found)}")
    return _at(place, f"expected {_BOUNDS.get(kind, 'another value').format_map(context)}, got {_short(found)}")


def _at(place: tuple[int | str, ...], words: str) -> str:
    path = ".".join(printable(str(part)[:60]) for part in place if part != _EITHER)
    return f"{path}: {words}" if path else words


def _short(value: Any) -> str:
    """A wrong value: itself if it is a string or a number, else its kind."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return kind_of(value)
    return quote(value, 40) if isinstance(value, str) else f"{value!r:.40}"
