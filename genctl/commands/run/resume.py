"""How the rows of a run are grouped into passes, and the description of the job in the journal, for --resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.commands import job
from genctl.commands.run.options import RunOptions
from genctl.config import reader
from genctl.config.layers import Resolved
from genctl.config.reader import Unreadable
from genctl.engines.protocol import Engine, JobPlan
from genctl.errors import count
from genctl.io.record_output import RecordOutput
from genctl.io.records import SCHEMA
from genctl.process import versions

APART = ("seed", "offline", "threads", "draft", "draft_corpus")  # stored elsewhere, or without effect on results
IN_FILES = ("json_schema", "grammar", "prompt_cache")  # settings that may name a file
AHEAD = 2  # rows to read ahead if they are available, as a multiple of the width, so that the longest begins first


@dataclass(frozen=True)
class Grouping:
    """How rows share passes. If a row's numbers depend on the rows in its batch, the groups are always the same."""

    width: int  # rows decoded at once
    span: int  # rows per group; a group is decoded to its end before the next begins
    threads: int | None  # threads that compute a step
    begun_with: int | None  # threads of the run that began the output
    invariant_by: str  # how a row gets the same numbers in any batch; "" if it does not
    shared: bool  # whether this process decides which rows are decoded together

    @classmethod
    def of(
        cls, engine: Engine, plan: JobPlan, output: RecordOutput, *, width: int, single_prompt: bool, shared: bool
    ) -> Grouping:
        """The grouping of a run with `width` rows at once; the engine chooses its number of threads."""
        invariant_by = plan.batch_invariant_by if shared and not output.in_groups else ""
        recorded = None if invariant_by else output.threads
        threads = engine.use_threads(plan.rows * (1 if single_prompt else width), recorded)
        span = job.SPAN * width if width > 1 and shared else 1
        return cls(width, span, threads, output.threads, invariant_by, shared)

    @property
    def numbers(self) -> dict[str, int | str]:
        """What a row's numbers depend on besides the row: how they are computed, or the width of its batch."""
        if self.invariant_by:
            return {"numbers": self.invariant_by}
        return {"width": self.width} if self.shared else {}

    @property
    def again(self) -> int:
        """How many rows are decoded again together with a missing row: its group, or 1 if rows are batch-invariant."""
        return 1 if self.invariant_by else self.span

    def ahead(self, *, at_hand: bool) -> int:
        """How many rows are read ahead. `at_hand` requires --unordered (else an interrupt must leave the beginning of
        the input done) and no pipe or keyboard (which would keep other rows waiting).
        """
        return AHEAD * self.width if at_hand and self.width > 1 else 0

    def changed(self, output: str | None) -> str:
        """A note if this run uses another number of threads than the run that began the output, else ""."""
        if self.invariant_by or None in (self.threads, self.begun_with) or self.threads == self.begun_with:
            return ""
        begun = count(self.begun_with or 0, "thread")
        return (
            f"{output} was begun with {begun}, and continues with {self.threads}: the last digits of log-probabilities "
            "may differ from those of an uninterrupted run"
        )


def identity(
    options: RunOptions,
    resolved: Resolved,
    *,
    seed: int,
    checkpoints: Mapping[str, str],
    grouping: Grouping,
    top: int,
    watch: Sequence[int] = (),
) -> dict[str, Any]:
    """Everything that determines the bytes of an output, as plain JSON, for its journal.

    `checkpoints`: fingerprints by name.
    """
    from genctl.config.settings import settings_of

    ignored = (*APART, "batch_size") if grouping.invariant_by else APART  # a row has the same bytes in any batch
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
        # the next run uses the same number, unless one is set
        "threads": None if grouping.invariant_by else grouping.threads,
        "versions": {**versions("torch", "transformers", "tokenizers"), "schema": SCHEMA},
    }
    plain: dict[str, Any] = json.loads(json.dumps(header))
    return plain


def _digest(value: Any) -> str:
    """The digest of the file that a setting names; "" if it names none."""
    if not isinstance(value, str):
        return ""
    try:
        with reader.opened(Path(value).expanduser(), regular=True) as file:
            digest = hashlib.blake2b(digest_size=16)
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest()
    except (Unreadable, RuntimeError):  # RuntimeError: ~NAME of an unknown user
        return ""
