"""The command: which rows, how often, and where the table goes."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from . import checkpoints, commands, host, measuring, page, rows, sides, table
from .checkpoints import Size
from .work import Setup, Side, Unavailable


@dataclass
class Stock:
    """Checkpoints that are made when they are first asked for, each in a process of its own."""

    folder: Path
    cores: tuple[int, ...]  # of every side; a thread for each
    device: str
    absent: Mapping[str, str]  # side -> why it takes no part
    say: Callable[[str], None]
    programs: Path | None = None  # the folder of llama.cpp's programs
    made: dict[tuple[str, str], Path] = field(default_factory=dict)

    def form(self, size: Size, form: str) -> Path:
        """Where a checkpoint lies in a form."""
        if (size.name, form) not in self.made:
            if form != "transformers":
                self.form(size, "transformers")
            self.say(f"making {size.name} for {form}")
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                self.made[size.name, form] = pool.submit(checkpoints.make, size, form, self.folder).result()
        return self.made[size.name, form]

    def open(self, case: rows.Case, name: str) -> Side:
        """A side in processes of its own, with the case's checkpoint. Raises Unavailable where it cannot be."""
        if name in self.absent:
            raise Unavailable(self.absent[name])
        if case.manner == "command":
            ours = case.size.name == commands.BUILTIN
            folder = None if ours else self.form(case.size, "transformers")
            return commands.Command(name, folder, self.device, beside=case.beside)
        dtype = case.dtype_of(name)
        forms = sides.forms(name, dtype)
        if name == sides.LLAMA and case.size.encoder_decoder:
            raise Unavailable("the checkpoint is not written in llama.cpp's form")
        folders = {form: self.form(case.size, form) for form in forms}
        setup = Setup(
            folders, dtype, self.device, len(self.cores), case.size.encoder_decoder, self.cores, self.programs
        )
        return sides.Fresh(name, setup) if case.manner == "fresh" else sides.Process(name, setup)


def parser() -> argparse.ArgumentParser:
    """The options."""
    keys = ", ".join(case.key for case in rows.cases(rows.Plan()))
    made = argparse.ArgumentParser(
        prog="bench.py",
        description="genctl beside generate(), CTranslate2 and llama.cpp, on random weights of real sizes.",
        epilog=f"Rows: {keys}. A row is also chosen by how its name begins. "
        "Exit status 1 if tokens differ that must not, or a side fails.",
    )
    made.add_argument("--rounds", type=_positive, default=5, help="how often each side does each row (default: 5)")
    made.add_argument("--threads", type=_positive, help="for every side, on as many cores (default: all)")
    made.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    made.add_argument("--format", choices=("md", "json"), default="md")
    made.add_argument("--only", nargs="+", default=[], metavar="ROW", help="rows to measure")
    made.add_argument("--sides", nargs="+", choices=list(sides.SIDES), metavar="SIDE", help="leave out the others")
    made.add_argument("--llama", type=Path, metavar="FOLDER", help="where llama.cpp's programs are: llama-bench is run")
    made.add_argument("--quick", action="store_true", help="short texts: to see that it works, not for figures")
    made.add_argument("--folder", type=Path, help="keep the checkpoints there, and use those that are there")
    made.add_argument("--update-docs", action="store_true", help="rewrite the table in docs/performance.md")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit status whether all was well."""
    command = parser()
    asked = command.parse_args(arguments)
    cores = host.cores()
    if asked.threads and asked.threads > len(cores):
        command.error(f"--threads {asked.threads}: there are {len(cores)} cores, and a thread has one of its own")
    cores = cores[: asked.threads or None]
    plan = rows.Plan(rows.QUICK if asked.quick else rows.Lengths())
    chosen = rows.cases(plan, asked.only)
    if not chosen:
        command.error(f"--only {' '.join(asked.only)}: there is no such row")
    if asked.update_docs and (asked.only or asked.quick or asked.sides):
        command.error("--update-docs wants the whole table: not with --only, --quick or --sides")
    os.environ.update(
        host.environment(len(cores))
    )  # inherited by every side's process; nothing is computed in this one
    absent = {name: "left out by --sides" for name in sides.SIDES if asked.sides and name not in asked.sides}
    if asked.llama is None:
        absent.setdefault(sides.LLAMA, "its programs were not named by --llama")
    for name in sides.missing():
        if absent.setdefault(name, "not installed") == "not installed":
            _say(f"{name} is not installed and left out")
    with ExitStack() as stack:
        stack.enter_context(host.pinned(cores))
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        bandwidth = host.read_bandwidth() if asked.device == "cpu" else None
        stock = Stock(folder, cores, asked.device, absent, _say, asked.llama)
        results = measuring.run(chosen, stock.open, asked.rounds, _say)
    found = host.header(cores, asked.rounds, asked.device, bandwidth, asked.llama)
    if asked.format == "json":
        records = [table.record(measured, bandwidth) for measured in results]
        whole = {**found, "rows": records}
        print(json.dumps(whole, indent=2, ensure_ascii=False))
    text = f"{host.sentence(found)}:\n\n{table.markdown(results, bandwidth)}"
    if asked.format == "md":
        print(text)
    if asked.update_docs:
        page.update(Path(__file__).resolve().parent.parent.parent / "docs" / "performance.md", text)
    return status(results)


def status(results: Sequence[measuring.Measured]) -> int:
    """1 if tokens differ that must not or a side failed, else 0; says so, and which targets were missed."""
    code = 0
    for measured in results:
        if measured.wrong:
            _say(f"{measured.case.key}: genctl's tokens are not generate()'s")
            code = 1
        for name, why in measured.failed.items():
            _say(f"{measured.case.key}: {name} {why}")
            code = 1
        for name, least in measured.missed().items():
            _say(f"{measured.case.key}: below the target of {least} × {name}")
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
