"""`genctl parity` at work: sides are loaded, compared pair by pair, shown and written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeGuard

from rich.text import Text as Line

from genctl.commands.engine_choice import LOCAL, EngineChoice
from genctl.commands.job import request_of
from genctl.commands.old_job import OldJob as Job
from genctl.commands.parity import by_text, golden_file, view
from genctl.commands.parity.findings import FindingsWriter
from genctl.commands.parity.loading import WIDTH, GivenTexts, LoadedSides, check_models, check_same
from genctl.commands.parity.options import LIMITS, ParityCommandOptions, sides_of
from genctl.commands.parity.output import COLUMNS, failed_checks, flat, records
from genctl.commands.parity.report import Tops, add_pair, recorded_tops, tops_of, worst_tops
from genctl.commands.parity.sides import own_length, refused_settings, unused
from genctl.commands.parity.view import LivePairs, Naming
from genctl.config.layers import Resolved
from genctl.config.sides import Side
from genctl.engines.protocol import Engine, Request, TextToScore
from genctl.errors import CheckError, GenctlError, InputError, ModelError, count
from genctl.io import readers, scored, writers
from genctl.io.records import finding
from genctl.io.rows import BadRow, InputRow
from genctl.models.text import detokenizer
from genctl.parity import golden as against_golden
from genctl.parity.measure import ParityOptions, measure
from genctl.parity.reading import ReadOnce
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, Parity, Text
from genctl.terminal.interrupt import Interrupt

NOTHING = "there is nothing to compare the sides on"


class ParityJob(Job[ParityCommandOptions]):
    """One comparison: the reference, and one after another the sides that are compared with it."""

    def __init__(self, options: ParityCommandOptions, interrupt: Interrupt, choice: EngineChoice = LOCAL) -> None:
        super().__init__(options, interrupt, choice)
        self.golden: Golden | None = None  # the reference of --expect
        self.saved_to: writers.Sink | None = None  # the golden file that is written
        self.naming = Naming()
        self.compared: list[Parity] = []
        self.by_text: list[by_text.TextParity] = []  # of --by-text
        self.checks: list[str] = []  # sentences of checks that failed
        self.lengths: dict[str, int | None] = {}  # most new tokens of a row, where it says so, by id

    def prepare(self) -> int | None:
        """The sides, without the settings of their checkpoints."""
        options = self.options
        self.sides = sides_of(options)
        for side in self.sides:
            self.check_early(side.early)
        if options.expect is not None:
            self.golden = golden_file.read(options.expect)
        return None

    def read_input(self, stack: ExitStack) -> bool:
        """Read all prompts, or texts."""
        options = self.options
        if self.golden is not None:
            self.rows = [
                InputRow(
                    text.id,
                    number,
                    text.prompt or None,
                    None if text.prompt else text.prompt_ids,
                    where=f"text {text.name} of the golden file",
                    own_id=text.id != str(number),
                )
                for number, text in enumerate(self.golden.texts)
            ]
            return True
        if options.texts is not None:
            rows = readers.open_prompts(
                (), options.texts, None, stdin_is_terminal=True, format=options.input_format, shape=scored.ROW
            )
            assert rows is not None
            self.input = iter(stack.enter_context(rows))
        elif not super().read_input(stack):
            return False
        self.rows = [row for row in readers.all_rows(self.input) if self._is_usable(row)]
        if not self.rows:
            raise InputError(NOTHING)
        return True

    def _is_usable(self, row: InputRow | BadRow) -> TypeGuard[InputRow]:
        """Whether a row can be compared; says why it cannot."""
        if isinstance(row, BadRow):
            self.fail(row, row.code, row.message)
            return False
        try:
            if message := refused_settings(row):
                raise InputError(message)
            self.lengths[row.id] = own_length(row, self.sides[0].early)
        except GenctlError as error:
            self.fail(row, error.code, error.message)
            return False
        return True

    def open(self, stack: ExitStack) -> None:
        """Open the outputs and the view."""
        options = self.options
        self.open_consoles()
        sink = self.report_sink(stack)
        if (path := options.save or (options.expect if options.update else None)) is not None:
            self.saved_to = writers.open_output(path, None, force=options.force or options.update, at_once=True)
            stack.callback(self.saved_to.abandon)
        self.results = FindingsWriter(options.format, self.out, sink, COLUMNS, flat, self._lines)
        self.view = LivePairs(self.err, time.monotonic, quiet=options.quiet)
        self.listeners_of_pair: dict[str, Any] = {
            "on_position": self.view.position, "on_stage": self.view.stage, "interrupted": self.interrupt,
        }  # fmt: skip
        stack.callback(self.view.hide)

    def deliver(self, stack: ExitStack) -> None:
        """Compare each side with the reference; write what is found, also where a later side fails."""

        def give_up() -> None:
            stack.__exit__(SystemExit, SystemExit(self.interrupt.status), None)

        try:
            with self.interrupt.rescued_by(give_up):
                check_models(self.sides)
                needed = self.options.are_texts or self.options.texts is not None
                loaded = LoadedSides(partial(self.setup, need_tokenizer=needed))
                stack.callback(loaded.close)
                if self.options.by_text:
                    self._compare_texts(loaded)
                elif self.golden is not None:
                    self._compare_golden(loaded, self.golden)
                else:
                    self._compare_tokens(loaded, stack)
        except GenctlError:
            self.hide()
            self.results.finish()
            raise
        self.hide()
        self.results.finish()

    def _compare_tokens(self, loaded: LoadedSides, stack: ExitStack) -> None:
        prompts = [(row.name, row.prompt) for row in self.rows if row.prompt]
        again = len(self.sides) > 2 or self.page is not None or self.saved_to is not None
        reference = stack.enter_context(ReadOnce(self._load(loaded, self.sides[0]), keep=again))
        self._name(reference)
        requests, texts = self._work(reference)
        for side in self.sides[1:]:
            loaded.keep(self.sides[0], side)
            other = self._load(loaded, side)
            check_same(reference.session.loaded, other.session.loaded, prompts)
            self.view.begin(other.name)
            how = ParityOptions(layers=self.options.show_layers)
            one = measure(reference, other, requests, texts, how, **self.listeners_of_pair)
            self._end_if_interrupted()
            self._take(one, tops_of(reference, self.interrupt), tops_of(other, self.interrupt))
        if self.saved_to is not None:
            self._save(reference, requests, texts)

    def _compare_golden(self, loaded: LoadedSides, golden: Golden) -> None:
        side = self._load(loaded, self.sides[0])
        self._name(side)
        golden_file.check_same(golden, side)
        self.view.begin(side.name)
        one = against_golden.compare(golden, side, **self.listeners_of_pair)
        self._end_if_interrupted()
        self._take(one, recorded_tops(golden), tops_of(side, self.interrupt))
        if self.options.update:
            if why := golden_file.not_tied(one):
                self.checks.append(f"--update leaves {self.options.expect} as it is: {why}")
            else:
                self._save(side, *golden_file.again(golden, side))

    def _load(self, loaded: LoadedSides, side: Side) -> LocalSide:
        found = loaded.load(side, [row.id for row in self.rows])
        self._describe(side, found.session, found.resolved)
        return found

    def _name(self, side: LocalSide) -> None:
        """Take what tokens and rows are called, and what is known of the reference."""
        golden = "" if self.golden is None else self.options.expect or ""
        piece = detokenizer(side.session.loaded.tokenizer).piece
        self.naming = Naming(piece, {row.id: row.name for row in self.rows}, golden)
        if self.page is not None:
            session = side.session
            self.page.facts = [("digest", session.loaded.fingerprint()), *session.about.facts]

    def _save(self, side: LocalSide, requests: Sequence[Request], texts: Sequence[Text]) -> None:
        """Write the golden file, all of it or nothing."""
        assert self.saved_to is not None
        self.view.begin(side.name)
        self.view.stage("recording")
        prompts = {row.id: row.prompt or "" for row in self.rows}
        golden, failed = golden_file.recorded(side, requests, texts, prompts, self.interrupt)
        self._end_if_interrupted()
        for id, message in failed.items():
            row = next(row for row in self.rows if row.id == id)
            self.fail(row, "model", message)
        if not golden.known:
            raise InputError("there is no position to save")
        content = golden_file.content(golden, self.naming.text_of)
        self.saved_to.write(content)
        self.saved_to.close()
        what = f"{count(len(golden.texts), 'text')}, {count(len(golden.known), 'position')}"
        self.messages.note(f"{self.options.save or self.options.expect}: {what}, {len(content):,} bytes")

    def _compare_texts(self, loaded: LoadedSides) -> None:
        """With --by-text: every side scores the given texts, or those that the reference writes."""
        texts: list[tuple[str, TextToScore]] = []
        outcomes: list[by_text.Outcomes] = []
        answers = False
        for side in self.sides:
            loaded.keep(side)
            engine, resolved = loaded.engine(side)
            self._describe(side, engine, resolved)
            self.view.begin(side.name)
            width = engine.width(resolved, WIDTH)
            if outcomes and engine.about.is_encoder_decoder is not answers:
                kinds = ["a causal model", "an encoder-decoder"]
                raise ModelError(
                    f"{self.sides[0].name} is {kinds[answers]}, and {side.name} is {kinds[not answers]}: "
                    "one continues texts, the other answers them"
                )
            if not outcomes:
                answers = engine.about.is_encoder_decoder
                self.view.stage("writing")
                texts = self._texts_by(engine, resolved, width)
            self.view.stage("scoring")
            outcomes.append(by_text.score(engine, texts, width, self.interrupt))
            self._end_if_interrupted()
            for id, error in outcomes[-1].items():
                if isinstance(error, GenctlError):
                    self._fail_text(side, id, error)
            if outcomes[1:]:
                names = self.sides[0].name, side.name
                self.by_text.append(by_text.compared(names, outcomes[0], outcomes[-1]))
                self.results.records([finding("texts", asdict(self.by_text[-1]))])

    def _texts_by(self, engine: Engine, resolved: Resolved, width: int) -> list[tuple[str, TextToScore]]:
        if self.options.texts is not None:
            return [
                (row.id, TextToScore(row.prompt or "", row.extra.get("context"), row.extra.get("target")))
                for row in self.rows
            ]
        requests = [self._request(row, resolved, 0) for row in self.rows]
        texts = []
        for id, text in by_text.written(engine, requests, width, self.interrupt):
            if isinstance(text, GenctlError):
                self._fail_text(self.sides[0], id, text)
            else:
                texts.append((id, text))
        self._end_if_interrupted()
        order = {row.id: place for place, row in enumerate(self.rows)}
        return sorted(texts, key=lambda text: order[text[0]])

    def _fail_text(self, side: Side, id: str, error: GenctlError) -> None:
        row = next(row for row in self.rows if row.id == id)
        self.fail(row, error.code, f"{side.place}: {error.message}")

    def _end_if_interrupted(self) -> None:
        """What is found so far is not all: nothing is written."""
        if self.interrupt.status:
            raise SystemExit(self.interrupt.status)

    def _describe(self, side: Side, engine: Engine, resolved: Resolved) -> None:
        """Notes on a side, and on settings that a comparison does not use."""
        self.hide()
        self.messages.detail(*(f"{side.place}: {line}" for line in engine.notes()))
        lines = [f"its checkpoint is {engine.about.name}"] if side.kind == "preset" else []
        lines += [*unused(engine.resolve(side.layers)), *engine.plan(resolved).remarks]
        self.messages.note(*(f"{side.place}: {line}" for line in lines))

    def _work(self, reference: LocalSide) -> tuple[list[Request], list[Text]]:
        """What the sides read: prompts, which the reference continues, or texts."""
        if self.options.texts is None:
            seed = reference.resolved.runtime.seed or 0
            return [self._request(row, reference.resolved, seed) for row in self.rows], []
        texts = [text for _, text in self.usable(iter(self.rows), GivenTexts(reference).encode)]
        if not texts:
            raise InputError(NOTHING)
        return [], texts

    def _request(self, row: InputRow, resolved: Resolved, seed: int) -> Request:
        """The request of a row, with the length that it sets."""
        request, own = request_of(row, resolved, seed), self.lengths[row.id]
        if own is None:
            return request
        return replace(request, resolved=replace(resolved, generation=replace(resolved.generation, max_new_tokens=own)))

    def _take(self, one: Parity, *tops: Tops) -> None:
        """A pair is compared: check and write it. `tops` give the best tokens of both sides."""
        if self.page is not None:
            worst = worst_tops(one, *tops)
            self._end_if_interrupted()
            add_pair(self.page, one, self.naming, len(self.compared) + 1, worst)
        self.view.end(one)
        if one.verdict == "drift" and all(getattr(self.options, name) is None for name in LIMITS):
            self.hide()
            self.messages.note(f"{one.other}: no limit was given for this drift; --max-kl X sets one")
        failed = failed_checks(self.options, one)
        self.checks += failed
        self.failed += len(one.failed)
        self.compared.append(one)
        self.results.records(records(one, self.naming, positions=self.options.positions, failed=failed))

    def _lines(self, width: int | None) -> Sequence[Line]:
        """All pairs, in lines of at most `width` cells."""
        if self.by_text:
            return by_text.lines(self.by_text, width)
        return view.lines(self.compared, self.naming, width)

    def status(self) -> int:
        """The exit status. Raises CheckError for checks that failed."""
        if self.checks and not self.interrupt.status:
            words = {": defect: ": "--allow-defect", ": other weights: ": "--allow-other-weights"}
            flags = [flag for word, flag in words.items() if any(word in line for line in self.checks)]
            hint = f"{' '.join(flags)} passes it" if flags else ""
            raise CheckError("; ".join(self.checks), hint=hint)
        return super().status()
