"""`genctl parity`: load sides, compare them pair by pair, show and write the findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from rich.text import Text as Line

from genctl.commands.job import Job, Row, check_early, request_of, started, usable
from genctl.commands.parity import golden_file, view
from genctl.commands.parity.findings import FindingsWriter, StageLine
from genctl.commands.parity.loading import LoadedSides, check_models, check_same, given_text
from genctl.commands.parity.options import ParityCommandOptions, own_length, refused_settings, sides_of
from genctl.commands.parity.view import COLUMNS, Naming, failed_checks, flat, records
from genctl.config.layers import Resolved
from genctl.config.sides import Side
from genctl.engines.protocol import Request
from genctl.engines.scorer import TextReader
from genctl.errors import CheckError, GenctlError, InputError, count
from genctl.io import jsonl, readers, writers
from genctl.io.rows import InputRow
from genctl.models.text import detokenizer
from genctl.parity import golden as against_golden
from genctl.parity.measure import ReadOnce, measure
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, Parity, Text
from genctl.terminal.console import make_consoles

NOTHING = "there is nothing to compare the sides on"


def parity(options: ParityCommandOptions) -> int | None:
    """Run `genctl parity`."""
    with started(options) as job:
        sides = sides_of(options)
        for side in sides:
            check_early(side.early)
        golden = None if options.expect is None else golden_file.read(options.expect)
        rows = _golden_rows(golden) if golden is not None else _rows(job, options, sides[0])
        if rows is None:
            return None

        with job.outputs() as stack:
            out, err = make_consoles(options.color)
            sink = job.report_sink(stack)
            saved_to: writers.Sink | None = None  # the golden file to write
            if options.save is not None:
                saved_to = writers.open_output(options.save, None, force=options.force, at_once=True)
                stack.callback(saved_to.abandon)
            job.view = StageLine(err, quiet=options.quiet)
            stack.callback(job.view.hide)
            comparison = Comparison(job, options, sides, rows, saved_to)
            results = comparison.results = FindingsWriter(options.format, out, sink, COLUMNS, flat, comparison.lines)

            def give_up() -> None:
                """End with the signal's status if the model does not return: the findings so far are incomplete."""
                stack.__exit__(SystemExit, SystemExit(job.interrupt.status), None)

            try:
                with job.interrupt.rescued_by(give_up):
                    check_models(sides)
                    needed = options.are_texts or options.texts is not None
                    loaded = LoadedSides(partial(job.setup, need_tokenizer=needed))
                    stack.callback(loaded.close)
                    if golden is not None:
                        comparison.compare_golden(loaded, golden)
                    else:
                        comparison.compare_tokens(loaded, stack)
            except GenctlError:  # of a later side: write the findings so far
                job.hide()
                results.finish()
                raise
            job.hide()
            results.finish()

        if comparison.checks and not job.interrupt.status:
            words = {": defect: ": "--allow-defect", ": other weights: ": "--allow-other-weights"}
            flags = [flag for word, flag in words.items() if any(word in line for line in comparison.checks)]
            hint = f"{' '.join(flags)} passes it" if flags else ""
            raise CheckError("; ".join(comparison.checks), hint=hint)
        return job.status()


def _golden_rows(golden: Golden) -> list[InputRow]:
    """The prompts of a golden file."""
    return [
        InputRow(text.id, number, text.prompt or None, where=text.name, own_id=text.id != str(number))
        for number, text in enumerate(golden.texts)
    ]


def _rows(job: Job, options: ParityCommandOptions, reference: Side) -> list[InputRow] | None:
    """The prompts or the texts; None without input. Raises InputError if none can be compared."""
    input: Iterator[Row] | None
    if options.texts is not None:
        opened = readers.open_prompts(
            (), options.texts, None, stdin_is_terminal=True, format=options.input_format, shape=jsonl.SCORED_ROW
        )
        assert opened is not None
        input = iter(job.stack.enter_context(opened))
    else:
        input = job.read()
    if input is None:
        return None

    def check(row: InputRow) -> None:
        if message := refused_settings(row):
            raise InputError(message)
        own_length(row, reference.early)

    rows = [row for row, _ in usable(readers.all_rows(input), check, job.fail)]
    if not rows:
        raise InputError(NOTHING)
    return rows


class Comparison:
    """The reference, and the sides that are compared with it, one after another."""

    results: FindingsWriter  # calls `lines`, so it is set later

    def __init__(
        self,
        job: Job,
        options: ParityCommandOptions,
        sides: Sequence[Side],
        rows: Sequence[InputRow],
        saved_to: writers.Sink | None,
    ) -> None:
        self.job, self.options, self.sides, self.saved_to = job, options, sides, saved_to
        self.interrupt, self.view = job.interrupt, job.view
        self.rows = {row.id: row for row in rows}
        self.naming = Naming()
        self.compared: list[Parity] = []
        self.checks: list[str] = []  # sentences of checks that failed
        self.listeners: dict[str, Any] = {
            "on_position": self.view.position, "on_stage": self.view.stage, "interrupted": self.interrupt,
        }  # fmt: skip

    def lines(self, width: int | None) -> Sequence[Line]:
        """All pairs, in lines of at most `width` cells (None: unbroken)."""
        return view.lines(self.compared, self.naming, width)

    def compare_tokens(self, loaded: LoadedSides, stack: ExitStack) -> None:
        """Compare each side with the reference, on the reference's own texts or on those of --texts."""
        reference = stack.enter_context(ReadOnce(self._load(loaded, self.sides[0])))
        self._name(reference)
        requests, texts = list[Request](), list[Text]()
        if self.options.texts is None:
            seed = reference.resolved.runtime.seed or 0
            requests = [self._request(row, reference.resolved, seed) for row in self.rows.values()]
        else:
            planner = reference.session.planner
            start = planner.decoder_start if planner.decoder_start is not None else planner.bos
            reader = TextReader(planner.loaded, eos=None, start=start, add_eos=False)
            given = usable(self.rows.values(), partial(given_text, reader, planner.context), self.job.fail)
            texts = [text for _, text in given]
            if not texts:
                raise InputError(NOTHING)
        prompts = [(row.name, row.prompt) for row in self.rows.values() if row.prompt]
        for side in self.sides[1:]:
            loaded.retain(self.sides[0], side)
            other = self._load(loaded, side)
            check_same(reference.session.loaded, other.session.loaded, prompts)
            self.view.begin(other.name)
            one = measure(reference, other, requests, texts, layers=self.options.show_layers, **self.listeners)
            self._end_if_interrupted()
            self._take(one)
        if self.saved_to is not None:
            self._save(reference, requests, texts)

    def compare_golden(self, loaded: LoadedSides, golden: Golden) -> None:
        """Compare the side with the golden file."""
        side = self._load(loaded, self.sides[0])
        self._name(side)
        golden_file.check_tokens(golden, side)
        self.view.begin(side.name)
        one = against_golden.compare(golden, side, **self.listeners)
        self._end_if_interrupted()
        self._take(one)

    def _load(self, loaded: LoadedSides, side: Side) -> LocalSide:
        """Load a side, and print its notes."""
        found = loaded.load(side)
        engine = found.session
        self.view.hide()
        self.job.messages.detail(*(f"{side.place}: {line}" for line in engine.notes()))
        lines = [f"its checkpoint is {engine.about.name}"] if side.kind == "preset" else []
        lines += engine.plan(found.resolved).remarks
        self.job.messages.note(*(f"{side.place}: {line}" for line in lines))
        return found

    def _name(self, side: LocalSide) -> None:
        """Set the names of tokens and rows, and the facts about the reference."""
        piece = detokenizer(side.session.loaded.tokenizer).piece
        self.naming = Naming(piece, {id: row.name for id, row in self.rows.items()}, self.options.expect or "")
        if self.job.page is not None:
            session = side.session
            self.job.page.facts = [("digest", session.loaded.fingerprint()), *session.about.facts]

    def _take(self, one: Parity) -> None:
        """Check a pair, and write its records."""
        if self.job.page is not None:
            view.add_to_page(self.job.page, one, self.naming, len(self.compared) + 1)
        failed = failed_checks(self.options, one)
        self.checks += failed
        self.job.failed += len(one.failed)
        self.compared.append(one)
        self.results.records(records(one, self.naming, positions=self.options.positions, failed=failed))

    def _save(self, side: LocalSide, requests: Sequence[Request], texts: Sequence[Text]) -> None:
        """Write the golden file, completely or not at all."""
        assert self.saved_to is not None
        self.view.begin(side.name)
        self.view.stage("recording")
        prompts = {id: row.prompt or "" for id, row in self.rows.items()}
        golden, failed = against_golden.record(side, requests, texts, prompts, self.interrupt)
        self._end_if_interrupted()
        for id, message in failed.items():
            self.job.fail(self.rows[id], "model", message)
        if not golden.known:
            raise InputError("there is no position to save")
        content = golden_file.content(golden, self.naming.text_of)
        self.saved_to.write(content)
        self.saved_to.close()
        what = f"{count(len(golden.texts), 'text')}, {count(len(golden.known), 'position')}"
        self.job.messages.note(f"{self.options.save}: {what}, {len(content):,} bytes")

    def _end_if_interrupted(self) -> None:
        """Exit if interrupted: the findings are incomplete, so none are written."""
        if self.interrupt.status:
            raise SystemExit(self.interrupt.status)

    def _request(self, row: InputRow, resolved: Resolved, seed: int) -> Request:
        """The request of a row, with the length that it sets."""
        if (own := own_length(row, self.sides[0].early)) is not None:
            resolved = replace(resolved, generation=replace(resolved.generation, max_new_tokens=own))
        return request_of(row, resolved, seed)
