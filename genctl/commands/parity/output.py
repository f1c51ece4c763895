"""The records of a comparison, and the checks that it fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from genctl.commands.parity import view
from genctl.commands.parity.options import LIMITS, ParityCommandOptions
from genctl.commands.parity.view import Naming
from genctl.commands.table import flag_of
from genctl.io import writers
from genctl.io.records import finding
from genctl.parity.values import Parity

COLUMNS = (
    "kind", "reference", "other", "verdict", "positions", "kl_mean", "kl_median", "kl_q99", "kl_max", "regret_mean",
    "regret_max", "agreement", "perplexity_reference", "perplexity_other", "ratio", "id", "index", "token_reference",
    "token_other", "margin", "bpb_reference", "bpb_other",
    "bpb_difference", "bpb_low", "bpb_high", "reason", "kl_bounded",
)  # fmt: skip


def records(one: Parity, naming: Naming, *, positions: bool, failed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The pair with all figures, then a record for each parting, and each position if `positions`.

    `failed` are the sentences of the checks that failed.
    """
    names = {"reference": one.reference, "other": one.other}
    fault = None if one.fault is None else asdict(one.fault)
    if fault is not None:
        del fault["curve"]  # has records of its own
    yield finding("pair", {
        **names,
        "verdict": one.verdict,
        "reason": one.reason,
        "texts": len(one.texts),
        "parted": len(one.partings),
        **asdict(one.summary),
        "noise": asdict(one.noise),
        "fault": fault,
        "failed_checks": list(failed),
        "failed_texts": dict(one.failed),
        "notes": list(one.notes),
    })  # fmt: skip
    for parting in one.partings:
        fields = asdict(parting)
        fields["id"] = fields.pop("text")
        for name in names:
            token = fields[f"token_{name}"]
            fields[f"text_{name}"] = None if token is None else naming.text_of(token)
        yield finding("parting", names | fields)
    for position in one.positions if positions else ():
        fields = asdict(position)
        yield finding("position", names | {"id": fields.pop("text"), **fields})
    for layer in one.curve:
        yield finding("layer", names | asdict(layer))


def flat(record: writers.Record) -> writers.Record | None:
    """The columns of --format tsv, without nested figures; None for records that it leaves out."""
    if record["kind"] not in ("pair", "parting", "texts"):
        return None
    columns = dict(record)
    if record["kind"] == "pair":
        columns["kl_bounded"] = str(record["kl_high"] is not None).lower()  # then the figures of KL are lower bounds
    for name in ("kl", "regret"):
        if isinstance(values := record.get(name), Mapping):
            columns |= {f"{name}_{key}": value for key, value in values.items()}
    for name in ("agreement", "perplexity_reference", "perplexity_other", "ratio"):
        if isinstance(value := record.get(name), Mapping):
            columns[name] = value["value"]
    if record["kind"] == "texts":
        change = record["difference"]
        columns |= {"bpb_difference": change["mean"], "bpb_low": change["low"], "bpb_high": change["high"]}
    return columns


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
    if one.verdict == "other weights" and not options.allow_other_weights:
        failed.append(f"{one.other}: other weights: {view.sized(one)}")
    if one.verdict == "defect" and not options.allow_defect:
        failed.append(f"{one.other}: defect: {view.sized(one)}")
    return failed
