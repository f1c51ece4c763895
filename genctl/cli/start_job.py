"""What was asked of a generating command, checked before anything is loaded, and then done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from genctl.cli import beam_output
from genctl.cli.inputs import prompts_of
from genctl.cli.interrupt import Interrupt
from genctl.cli.job import Job
from genctl.cli.run_options import RunOptions, check
from genctl.config import settings
from genctl.config.layers import Layer, Resolved, resolve
from genctl.errors import Exit


def perform(asked: RunOptions) -> int | None:
    """Do what was asked. Returns the exit status, or None if there is no prompt to be had."""
    with Interrupt() as interrupt, ExitStack() as stack:
        check(asked)
        layers = [*asked.beneath, *settings.standing_layers(asked.presets), *asked.flags]
        early = resolve(layers, tentative=True)
        if asked.view == "beam":
            beam_output.check_search(early)
        if asked.dry:
            return _dry(asked, early, layers)
        rows = prompts_of(asked)
        if rows is None:
            return None
        stack.enter_context(rows)
        return Job(asked, layers, early, interrupt).run(iter(rows))


def _dry(asked: RunOptions, early: Resolved, layers: Sequence[Layer]) -> int:
    """The resolved job as TOML; only the checkpoint's settings are read, not its weights."""
    from genctl.config.dry import to_toml
    from genctl.session import planned

    flags = {"allow_pickle": asked.allow_pickle, "trust_remote_code": asked.trust_remote_code}
    sys.stdout.write(to_toml(planned(early.runtime, layers, **flags)))
    return int(Exit.DONE)
