"""Checks of a pair of sides: limits of the command line, and defects."""

from __future__ import annotations

from genctl.cli.table import flag_of
from genctl.commands.parity.options import LIMITS, ParityCommandOptions
from genctl.parity.values import Parity


def failed_checks(options: ParityCommandOptions, one: Parity) -> list[str]:
    """A sentence for each check that a pair fails. Where KL is only bounded, its lower bound counts.

    Without a position, no check passes. A pair whose texts have failed fails them beside that.
    """
    figures, failed = one.summary, []
    if not figures.positions:
        limits = [flag_of(name) for name in LIMITS if getattr(options, name) is not None]
        if limits or not one.failed:
            failed.append(f"{', '.join([*limits, one.other])}: {one.reason}")
        return failed
    limit = options.max_kl
    if limit is not None and not figures.kl.mean <= limit:
        least = "at least " if figures.kl_high is not None else ""
        failed.append(f"--max-kl {limit:g}: the mean KL of {one.other} is {least}{figures.kl.mean:.3g} nats")
    limit = options.max_regret
    if limit is not None and not figures.regret.max <= limit:
        failed.append(f"--max-regret {limit:g}: the largest regret of {one.other} is {figures.regret.max:.3g} nats")
    limit, share = options.min_agreement, figures.agreement.value
    if limit is not None and not share >= limit:
        failed.append(f"--min-agreement {limit:g}: {share:.4g} of the first choices of {one.other} agree")
    if one.verdict == "defect" and not options.allow_defect:
        failed.append(f"{one.other}: defect: {one.reason}")
    return failed
