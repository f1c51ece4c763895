"""The format of an output by its name, where --format does not say it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from genctl.errors import UsageError
from genctl.io.writers import FORMATS

BY_SUFFIX = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes} | {".md": "md"}
# Formats that no command writes: plain text under such a name would mislead the program that opens it.
FOREIGN = (
    ".csv", ".gz", ".htm", ".html", ".npy", ".npz", ".ods", ".parquet", ".pdf", ".pickle", ".pkl", ".pt",
    ".sqlite", ".svg", ".toml", ".xls", ".xlsx", ".xml", ".yaml", ".yml", ".zip",
)  # fmt: skip
TEXT = frozenset({"md"})  # plain text under this name is in order


def format_of(output: str | None, formats: Sequence[str], default: str = "text") -> str:
    """The format that the suffix of `output` names, else `default`. `formats` are those of the command.

    Raises UsageError if the suffix names a format that the command does not write.
    """
    suffix = "" if output is None else PurePath(output).suffix.lower()
    format = BY_SUFFIX.get(suffix)
    if format in formats:
        return str(format)
    if suffix in FOREIGN or (format is not None and format not in TEXT):
        records = " or ".join(f"--format {name}" for name in formats if name != "text")
        raise UsageError(
            f"--output {output}: {suffix[1:]} is not a format of this command", hint=f"{records}; --format text anyway"
        )
    return default
