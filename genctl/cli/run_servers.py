"""`genctl run` on servers that already run: they generate, and this process reads rows and writes results."""

from __future__ import annotations

from collections.abc import Generator

from genctl import events
from genctl.cli import job
from genctl.cli.run_job import RunJob
from genctl.cli.run_options import check_backend
from genctl.config.layers import Resolved, resolve


class RunServersJob(RunJob):
    """One run whose rows are sent to servers. Records, journal, views and messages are those of `RunJob`."""

    def prepare(self) -> int | None:
        """Settings; whether a server can do what the options say."""
        check_backend(self.options, resolve(self.options.layers(), tentative=True))
        return super().prepare()

    def planned(self) -> Resolved:
        """The settings. A server keeps its own to itself."""
        return resolve(self.layers)

    def load(self) -> None:
        """Probe the servers; begin or continue the output."""
        options = self.options
        self.remote = session = self.connect(self.early.runtime, self.early.origins)
        session.live = self.shown
        self.view.load_s = self.load_s
        self.base = self.settle(session, self.layers, options.strategy)
        if options.with_tokens:
            session.needs_logprobs("--scores" if options.scores else "--top-logprobs", self.base)
        self.texts, self.encoder_decoder = session.has_texts, session.is_encoder_decoder
        self.detail(*session.notes)
        self.describe(session, self.base)
        self.width = session.width(self.base, 1 if self.live else job.WIDTH)
        self.span = 1
        self._begin()

    def decoded_together(self) -> dict[str, int]:
        """Nothing: a request does not depend on those beside it, as far as anybody knows."""
        return {}

    def fingerprints(self) -> dict[str, str]:
        """None: the journal has the address and the name of the model."""
        return self.remote.fingerprints()

    def closing_notes(self) -> None:
        """There are none: a server tells nothing of what it found."""

    def _decode(self) -> None:
        """All rows are one group, since none depends on those beside it."""
        self.listen(self._stream(self.input), self.listeners)
        if self.interrupt.status:
            return
        if self.stop_at is not None:
            self.output.stop(self.stop_at, self.stopper)
        else:
            self.output.end_of_input(self.taken)

    def _stream(self, group: job.Rows) -> Generator[events.Event, None, None]:
        return self.remote.stream(self._requests(group), self._report(), width=self.width, interrupted=self.interrupt)
