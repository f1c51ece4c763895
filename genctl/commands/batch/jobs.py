"""`genctl batch export` and `genctl batch import` at work."""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from typing import Any, get_args

from genctl.commands.batch.options import ExportOptions, ImportOptions
from genctl.commands.job import Job, seed_of, start_seed
from genctl.commands.messages import Messages
from genctl.config.layers import resolve
from genctl.engines.server import batch_files
from genctl.errors import Exit, UsageError, count, quote
from genctl.io import readers, writers
from genctl.io.rows import InputRow


class ExportJob(Job[ExportOptions]):
    """Rows to requests. A row that cannot be one is said, and left out."""

    def prepare(self) -> int | None:
        """The settings, which hold for every row that does not have its own."""
        super().prepare()
        self.base = resolve(self.layers)
        if not self.base.names_model:
            raise UsageError("a request names its model: give it with --model")
        problems, note = batch_files.checked(self.base, self.options.kind)
        if problems:
            raise UsageError("\n".join(problems))
        self.messages.note(*([note] if note else []))
        self.seed = start_seed(self.base)
        return None

    def open(self, stack: ExitStack) -> None:
        """Open the output."""
        self.requests = self.sink(stack, self.options.output)
        self.columns: dict[str, None] = {}  # of the rows, beside what is sent

    def deliver(self, stack: ExitStack) -> None:
        """Write a line for each row."""
        options, written = self.options, 0
        for _, line in self.usable(self.input, self._line):
            self.requests.write(line.encode())
            written += 1
        self.requests.close()
        if self.columns:
            names = ", ".join(map(quote, itertools.islice(self.columns, 4))) + (", …" if len(self.columns) > 4 else "")
            self.messages.remark(f"a request has no place for columns ({names}): import --rows brings them back")
        if options.kind == "openai" and written > batch_files.MOST:
            self.messages.remark(f"{count(written, 'request')}: OpenAI takes at most {batch_files.MOST:,} in one file")

    def _line(self, row: InputRow) -> str:
        self.columns |= dict.fromkeys(row.columns)
        resolved, options = self.settings_of(row, self.base), self.options
        seed = seed_of(row, resolved, self.seed)
        request = batch_files.request_line(row, resolved, seed, options.kind, options.top_logprobs)
        return f"{writers.to_json(request)}\n"


def import_results(options: ImportOptions) -> int:
    """Write the records of a batch. Returns the exit status."""
    form: Any = options.format or writers.format_of(options.output, get_args(writers.Format), "jsonl")
    messages = Messages()
    records = list(batch_files.imported(options.input, options.requests, messages.remark))
    if options.rows is not None:
        prompts = readers.open_prompts((), options.rows, sys.stdin, stdin_is_terminal=False) or ()
        batch_files.add_columns(records, {row.id: row.columns for row in prompts}, options.rows)
    sink = writers.open_output(options.output, sys.stdout, force=options.force)
    failed = 0
    with ExitStack() as stack:
        stack.callback(sink.abandon)
        writer = writers.open_writer(
            form, sink, on_error=lambda record: messages.error(record["error"]["message"], f"{record['id']}: ")
        )
        for rows in records:
            failed += any("error" in one for one in rows)
            for one in rows:
                writer.write(one)
        writer.close()
        messages.close()
    return int(Exit.ROWS_FAILED if failed else Exit.DONE)
