"""The job as the journal of its output keeps it, for --resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genctl.commands.run.options import RunOptions
from genctl.commands.run.row_source import Grouping
from genctl.config.dry import settings_of
from genctl.config.layers import Resolved
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.identity import versions
from genctl.io.records import SCHEMA

APART = ("seed", "offline", "threads", "draft", "draft_corpus")  # settings that are kept elsewhere, or change no result
IN_FILES = ("json_schema", "grammar", "prompt_cache")  # settings that may name a file


def identity(
    options: RunOptions,
    resolved: Resolved,
    *,
    seed: int,
    checkpoints: Mapping[str, str],
    grouping: Grouping,
    input: Mapping[str, Any] | None,
    top: int,
    watch: Sequence[int] = (),
) -> dict[str, Any]:
    """Everything that decides the bytes of an output, as plain JSON, for its journal.

    `checkpoints`: fingerprints by name. `input`: what the input file holds.
    """
    ignored = (*APART, "batch_size") if grouping.invariant_by else APART  # a row has its bytes in any batch
    settings = {key: value for key, value in settings_of(resolved).items() if key not in ignored}
    for key in ("processors", "stopping"):
        if (listed := getattr(resolved, key)) is not None:
            settings[key] = listed
    records = {
        "echo": bool(options.echo),
        "template": None if options.prompt_template is None else options.prompt_template.text,
        "tokens": options.with_tokens,
        "top": top,
        "explain": options.explain,
        "fail_on": sorted(options.fail_on),
        **({"watch": list(watch)} if watch else {}),
    }
    header = {
        "seed": seed,
        "settings": settings,
        "files": {key: digest for key in IN_FILES if (digest := _digest(settings.get(key)))},
        "checkpoints": checkpoints,
        "format": options.format,
        "records": records,
        "batch": grouping.numbers,
        "input": input,
        # the next run computes with as many, unless it is given a number
        "threads": None if grouping.invariant_by else grouping.threads,
        "versions": {**versions("torch", "transformers", "tokenizers"), "schema": SCHEMA},
    }
    plain: dict[str, Any] = json.loads(json.dumps(header))
    return plain


def _digest(value: Any) -> str:
    """The digest of the file that a setting names, or an empty string."""
    if not isinstance(value, str):
        return ""
    try:
        with reader.opened(Path(value).expanduser(), regular=True) as file:
            digest = hashlib.blake2b(digest_size=16)
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest()
    except (Unreadable, RuntimeError):  # RuntimeError: ~ of a user who is not there
        return ""
