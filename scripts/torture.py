#!/usr/bin/env python3
"""Kill batches at random instants, break their disk, go on, and compare with what an undisturbed run writes.

    scripts/torture.py --kills 200            # SIGKILL at random moments and in the middle of writes, then --resume
    scripts/torture.py --kills 0 --faults all # ENOSPC, EIO and short writes at every write call, one per run
    scripts/torture.py --kills 0 --faults none --others 40 # other programs, second runs, signals

Prints what was lost, repeated and different; the exit status is 1 unless all three are 0. Runs are forked from one
process that has imported everything and holds the checkpoint, so that one takes a fraction of a second; one in eight
loads the checkpoint itself. `--seconds` bounds the whole: what was not done by then is said.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from genctl.io import file_lock, journal, output, resumable

FAULTS = ("ENOSPC", "EIO", "short")
SETTINGS = ("--do-sample", "--seed", "7", "-n", "12", "--batch-size", "3", "-q")


# -- what breaks -------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """Counts the write calls of a run, and does something to the one numbered `at`."""

    at: int = 0  # 0: nothing
    kind: str = ""  # ENOSPC, EIO, short, or "kill": before, in the middle of, or after the write
    share: float = 0.5  # of the data that is written before
    count: int = 0

    def write(self, raw: Any, data: memoryview) -> int:
        self.count += 1
        full = self.kind == "ENOSPC" and self.at and self.count > self.at  # a full disk stays full
        if self.count != self.at and not full:
            return int(raw.write(data))
        part = data[: max(int(len(data) * self.share), 1 if self.kind == "short" else 0)]
        done = 0 if full else int(raw.write(part)) if len(part) else 0
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "short" or (done and self.kind == "ENOSPC"):
            return done
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))

    def install(self) -> None:
        """Stand between the sinks of this process and the system."""
        disk, before = self, output.unbuffered

        class Raw:
            def __init__(self, descriptor: int) -> None:
                self.raw: Any = before(descriptor)

            def write(self, data: memoryview) -> int:
                return disk.write(self.raw, data)

            def close(self) -> None:
                self.raw.close()

        for module in (output, journal):
            module.unbuffered = Raw  # type: ignore[attr-defined]


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a run ended. `status` is negative after a signal."""

    status: int
    said: str
    seconds: float
    writes: int = 0


class Runner:
    """Forks runs of `genctl run` from this process."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model
        self.said = folder / "said"
        self.counted = folder / "writes"
        self._preload()

    def _preload(self) -> None:
        import torch

        from genctl.commands import (
            app,  # noqa: F401
            job,  # noqa: F401 (imported for the children)
        )
        from genctl.models import hub
        from genctl.params import Runtime

        torch.set_num_threads(1)
        self._load = hub.load
        self._loaded = hub.load(Runtime(model=self.model))

    def run(
        self,
        arguments: Sequence[str],
        *,
        kill_after: float | None = None,
        number: int = signal.SIGKILL,
        meanwhile: Callable[[int], bool] = lambda child: True,
        disk: Disk | None = None,
        every_s: float = 0.0,
        fresh: bool = False,
    ) -> Ended:
        """One run; killed after so many seconds, or with a disk that breaks. `every_s`: between two marks.

        `number` is the signal that kills. `meanwhile` is called with the process until it
        returns true.
        """
        self.counted.write_text("0")
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            self._child(arguments, disk or Disk(), every_s, fresh)
        killed = met = False
        while True:
            met = met or meanwhile(child)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if kill_after is not None and not killed and time.monotonic() - began >= kill_after:
                os.kill(child, number)
                killed = True
            time.sleep(0.0005 if kill_after is not None else 0.002)
        said = self.said.read_text(errors="replace")
        writes = int(self.counted.read_text())
        return Ended(os.waitstatus_to_exitcode(status), said, time.monotonic() - began, writes)

    def _child(self, arguments: Sequence[str], disk: Disk, every_s: float, fresh: bool) -> None:
        status = 70
        for number in (signal.SIGINT, signal.SIGTERM):  # as a process that begins does
            signal.signal(number, lambda number, frame: os._exit(128 + number))
        try:
            out = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            from genctl.commands import app
            from genctl.models import hub

            if not fresh:
                hub.load = self._ready
            resumable.EVERY_S = every_s
            disk.install()
            status = app.run(["run", "-m", self.model, *arguments])
            self.counted.write_text(str(disk.count))
            sys.stdout.flush()
            sys.stderr.flush()
        except SystemExit as ending:  # a signal before anything is decoded
            status = int(ending.code or 0)
        finally:
            os._exit(status)

    def _ready(self, runtime: Any, *, before_weights: Any = None, **keywords: Any) -> Any:
        if runtime.model != self.model:
            return self._load(runtime, before_weights=before_weights, **keywords)
        if before_weights is not None:
            before_weights(self._loaded.generation)
        return self._loaded


# -- what came of it ---------------------------------------------------------------------------------------------------


@dataclass
class Toll:
    """What was not as it should be, over all jobs."""

    jobs: int = 0
    runs: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0
    shuffled: int = 0  # outputs whose rows are in another order
    wrong: list[str] = field(default_factory=list)  # runs that ended as they should not

    def compare(self, made: bytes, wanted: bytes) -> None:
        """Count the rows in which an output differs from that of an undisturbed run."""
        self.jobs += 1
        if made == wanted:
            return
        mine, theirs = _by_row(made), _by_row(wanted)
        for key in mine.keys() | theirs.keys():
            here, there = mine.get(key, []), theirs.get(key, [])
            self.lost += max(len(there) - len(here), 0)
            self.repeated += max(len(here) - len(there), 0)
            self.different += sum(one != other for one, other in zip(here, there, strict=False))
        self.shuffled += int(list(mine) != list(theirs))

    def say(self) -> str:
        """The figures."""
        words = f"lost {self.lost}, repeated {self.repeated}, different {self.different}"
        return f"{words}, out of order {self.shuffled}, ended wrongly {len(self.wrong)}"

    @property
    def good(self) -> bool:
        return not (self.lost or self.repeated or self.different or self.shuffled or self.wrong)


def _by_row(data: bytes) -> dict[Any, list[bytes]]:
    rows: dict[Any, list[bytes]] = {}
    for number, line in enumerate(data.splitlines(keepends=True)):
        key: Any = ("torn", number)
        with contextlib.suppress(ValueError, KeyError):
            record = json.loads(line)
            key = record["id"], record.get("sequence")
        rows.setdefault(key, []).append(line)
    return rows


def write_prompts(path: Path, rows: int) -> None:
    """A batch with a bit of everything: own ids, several sequences, own settings, and rows that fail."""
    words = ("Once upon a time", "The little fox", "One day", "In a garden", "Mia was", "Déjà vu — naïve")
    lines = []
    for number in range(rows):
        row: dict[str, Any] = {"id": f"row {number}", "prompt": f"{words[number % len(words)]} {number}"}
        params: dict[str, Any] = {"max_new_tokens": 3 + number * 7 % 13}
        if number % 5 == 2:
            params["num_return_sequences"] = 3
        if number % 11 == 4:
            params = {"temprature": 1}
        line = json.dumps({**row, "params": params}, ensure_ascii=False)
        if number % 13 == 6:
            line = line[:-4]
        if number % 17 == 9:
            line = json.dumps({"id": "row 1", "prompt": "the same id again"})
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Torture:
    """One series: a folder, a runner, a clock."""

    def __init__(self, folder: Path, model: str, rows: int, seed: int, until: float) -> None:
        self.folder, self.until = folder, until
        self.random = random.Random(seed)
        self.runner = Runner(folder, model)
        self.prompts, self.few = folder / "prompts.jsonl", folder / "few.jsonl"
        write_prompts(self.prompts, rows)
        write_prompts(self.few, 7)

    def arguments(self, prompts: Path, out: Path, *more: str) -> list[str]:
        """A run of these prompts into this output."""
        return ["-i", str(prompts), "-o", str(out), *SETTINGS, *more]

    def reference(self, prompts: Path) -> tuple[bytes, Ended]:
        """What a run writes that nobody disturbs, and that knows nothing of journals."""
        out = self.folder / f"reference-{prompts.name}"
        out.unlink(missing_ok=True)
        ended = self.runner.run(self.arguments(prompts, out))
        if ended.status != 1:  # some rows fail on purpose
            raise SystemExit(f"the undisturbed run ended with {ended.status}: {ended.said}")
        return out.read_bytes(), ended

    # -- kills ---------------------------------------------------------------------------------------------------------

    def kill(self, kills: int, say: Callable[[str], None]) -> tuple[Toll, Counter[str]]:
        """Kill runs `kills` times; each output is gone on with until it is whole, after one to six kills."""
        toll, where = Toll(), Counter[str]()
        wanted, undisturbed = self.reference(self.prompts)
        out = self.folder / "killed.jsonl"
        whole = self.runner.run(self.arguments(self.prompts, self.folder / "counted.jsonl", "--resume"))
        while sum(where.values()) < kills and time.monotonic() < self.until:
            for path in (out, out.with_name(out.name + file_lock.JOURNAL)):
                path.unlink(missing_ok=True)
            every_s = self.random.choice([0.0, 0.05, 1.0])
            for _ in range(self.random.randint(1, 6)):
                if sum(where.values()) >= kills or not self._kill_once(out, whole, undisturbed, every_s, where, toll):
                    break
            done = self._finish(out, every_s, toll)
            toll.compare(out.read_bytes() if done and out.exists() else b"", wanted)
            say(f"{sum(where.values())} kills, {toll.jobs} jobs: {toll.say()}")
        return toll, where

    def _kill_once(
        self, out: Path, whole: Ended, undisturbed: Ended, every_s: float, where: Counter[str], toll: Toll
    ) -> bool:
        """Whether there is something left to do."""
        arguments = self.arguments(self.prompts, out, "--resume")
        fresh = self.random.random() < 0.125
        if self.random.random() < 0.5:
            share = self.random.choice([0.0, self.random.random(), 1.0])
            disk = Disk(self.random.randint(1, max(whole.writes, 1)), "kill", share)
            ended = self.runner.run(arguments, disk=disk, every_s=every_s, fresh=fresh)
            kind = "in a write"
        else:
            after = self.random.uniform(0, undisturbed.seconds * (3 if fresh else 1.1))
            ended = self.runner.run(arguments, kill_after=after, every_s=every_s, fresh=fresh)
            kind = "loading anew" if fresh else "at an instant"
        toll.runs += 1
        if ended.status == -signal.SIGKILL:
            where[kind] += 1
            return True
        if ended.status != 1:
            toll.wrong.append(f"status {ended.status}: {ended.said.strip()}")
        return False

    def _finish(self, out: Path, every_s: float, toll: Toll) -> bool:
        ended = self.runner.run(self.arguments(self.prompts, out, "--resume"), every_s=every_s)
        toll.runs += 1
        if ended.status != 1 or "Traceback" in ended.said:
            toll.wrong.append(f"status {ended.status}: {ended.said.strip()}")
            return False
        return True

    # -- faults --------------------------------------------------------------------------------------------------------

    def faults(self, kinds: Sequence[str], most: int | None, say: Callable[[str], None]) -> tuple[Toll, int, int]:
        """Break every write call of a small run, one per run: with a journal, without, and over an old file."""
        toll = Toll()
        wanted, plain = self.reference(self.few)
        whole = self.runner.run(self.arguments(self.few, self.folder / "counted-few.jsonl", "--resume"))
        cases = [
            (way, kind, at)
            for way, ended in (("resume", whole), ("plain", plain), ("force", plain))
            for kind in kinds
            for at in range(1, ended.writes + 1)
        ]
        if most is not None and len(cases) > most:
            cases = self.random.sample(cases, most)
        done = 0
        for way, kind, at in cases:
            if time.monotonic() >= self.until:
                break
            self._fault(way, Disk(at, kind, self.random.choice([0.0, 0.5])), wanted, toll)
            done += 1
            if done % 20 == 0:
                say(f"{done} of {len(cases)} faults: {toll.say()}")
        return toll, done, len(cases)

    def _fault(self, way: str, disk: Disk, wanted: bytes, toll: Toll) -> None:
        out = self.folder / "broken.jsonl"
        for path in self.folder.glob("broken.jsonl*"):
            path.unlink()
        if way == "force":
            out.write_bytes(b"old\n")
        more = {"resume": ["--resume"], "plain": [], "force": ["--force"]}[way]
        ended = self.runner.run(self.arguments(self.few, out, *more), disk=disk)
        toll.runs += 1
        what = f"{way}, {disk.kind} at write {disk.at}: status {ended.status}: {ended.said.strip()}"
        expected = 1 if disk.kind == "short" else 2
        if ended.status != expected or "Traceback" in ended.said or (expected == 2) != ("error: " in ended.said):
            toll.wrong.append(what)
        made = out.read_bytes() if out.exists() else b""
        if way == "resume":
            again = self.runner.run(self.arguments(self.few, out, *more))
            toll.runs += 1
            if again.status != 1:
                toll.wrong.append(f"{what}; then {again.status}: {again.said.strip()}")
            made = out.read_bytes() if out.exists() else b""
        elif disk.kind != "short":
            old = b"old\n" if way == "force" else b""
            if way == "force" and made != old:
                toll.wrong.append(f"{what}; the old file was harmed")
            if way == "plain" and not (wanted.startswith(made) and made.endswith(b"\n" if made else b"")):
                toll.wrong.append(f"{what}; half a record was left")
            made = wanted  # nothing more was promised
        toll.compare(made, wanted)

    # -- others --------------------------------------------------------------------------------------------------------

    def others(self, most: int, say: Callable[[str], None]) -> tuple[Toll, Counter[str]]:
        """Let other programs touch the files of a run, other runs write them, and signals come, `most` times in all."""
        toll, where = Toll(), Counter[str]()
        wanted, undisturbed = self.reference(self.prompts)
        classes = (self._tampered, self._taken_away, self._second_run, self._interrupted, self._torn_journal)
        while sum(where.values()) < most and time.monotonic() < self.until:
            for path in self.folder.glob("others.jsonl*"):
                path.unlink()
            chosen = classes[sum(where.values()) % len(classes)]
            where[chosen.__name__.strip("_").replace("_", " ")] += 1
            chosen(self.folder / "others.jsonl", wanted, undisturbed.seconds, toll)
            say(f"{sum(where.values())} of {most}: {toll.say()}")
        return toll, where

    def _expect(self, toll: Toll, what: str, ended: Ended, statuses: Sequence[int], words: str = "") -> None:
        toll.runs += 1
        if ended.status not in statuses or words not in ended.said or "Traceback" in ended.said:
            toll.wrong.append(f"{what}: status {ended.status}: {ended.said.strip()}")

    def _tampered(self, out: Path, wanted: bytes, seconds: float, toll: Toll) -> None:
        """A finished output that is changed afterwards is refused, and left."""
        arguments = self.arguments(self.prompts, out, "--resume")
        self._expect(toll, "tampered", self.runner.run(arguments), (1,))
        lines = wanted.splitlines(keepends=True)
        place = self.random.randrange(len(lines))
        half = lines[place][: len(lines[place]) // 2]
        changed = {
            "half a line": wanted + half,
            "a line twice": b"".join([*lines[:place], lines[place], *lines[place:]]),
            "a line less": b"".join([*lines[:place], *lines[place + 1 :]]),
            "a byte": wanted[: len(wanted) // 2] + b"#" + wanted[len(wanted) // 2 + 1 :],
            "nothing left": b"",
        }
        what, data = self.random.choice(list(changed.items()))
        out.write_bytes(data)
        self._expect(toll, what, self.runner.run(arguments), (2,), "was changed since")
        if out.read_bytes() != data:
            toll.wrong.append(f"{what}: the changed file was touched")

    def _taken_away(self, out: Path, wanted: bytes, seconds: float, toll: Toll) -> None:
        """A file that is replaced under a run: it says so, and leaves what is there now."""
        victim = self.random.choice([out, out.with_name(out.name + file_lock.JOURNAL)])
        theirs = b"theirs\n"

        def replace(child: int) -> bool:
            if not (out.exists() and out.stat().st_size):
                return False
            os.kill(child, signal.SIGSTOP)
            victim.unlink()
            victim.write_bytes(theirs)
            os.kill(child, signal.SIGCONT)
            return True

        ended = self.runner.run(self.arguments(self.prompts, out, "--resume"), meanwhile=replace)
        self._expect(toll, f"{victim.name} replaced", ended, (2,), "was replaced by another program")
        if victim.read_bytes() != theirs:
            toll.wrong.append(f"{victim.name}, which another program made, was touched")

    def _second_run(self, out: Path, wanted: bytes, seconds: float, toll: Toll) -> None:
        """A second run on the same path ends with an error, whatever its flags; the first is not disturbed."""
        flag = self.random.choice(["--resume", "--force"])
        second = Runner.__new__(Runner)
        vars(second).update(vars(self.runner), said=self.folder / "said 2", counted=self.folder / "writes 2")

        def start(child: int) -> bool:
            if not (out.exists() and out.stat().st_size):
                return False
            os.kill(child, signal.SIGSTOP)
            ended = second.run(self.arguments(self.prompts, out, flag))
            os.kill(child, signal.SIGCONT)
            self._expect(toll, f"a second run with {flag}", ended, (2,), "is locked by another genctl process")
            return True

        self._expect(
            toll,
            "the first run",
            self.runner.run([*self.arguments(self.prompts, out, "--resume")], meanwhile=start),
            (1,),
        )
        toll.compare(out.read_bytes(), wanted)

    def _interrupted(self, out: Path, wanted: bytes, seconds: float, toll: Toll) -> None:
        """SIGINT or SIGTERM at any moment: 130 or 143, and --resume goes on."""
        number = self.random.choice([signal.SIGINT, signal.SIGTERM])
        arguments = self.arguments(self.prompts, out, "--resume")
        ended = self.runner.run(arguments, kill_after=self.random.uniform(0.05, seconds * 1.1), number=number)
        self._expect(toll, number.name, ended, (128 + number, 1))
        done = self._finish(out, 0.0, toll)
        toll.compare(out.read_bytes() if done else b"", wanted)

    def _torn_journal(self, out: Path, wanted: bytes, seconds: float, toll: Toll) -> None:
        """A journal that was cut anywhere, in the middle of a character too: gone on with, or refused."""
        arguments = self.arguments(self.prompts, out, "--resume")
        self._expect(toll, "before the journal is torn", self.runner.run(arguments, every_s=0.0), (1,))
        path = out.with_name(out.name + file_lock.JOURNAL)
        os.truncate(path, self.random.randrange(path.stat().st_size))
        ended = self.runner.run(arguments)
        self._expect(toll, "a torn journal", ended, (1, 2))
        if ended.status == 1 or out.read_bytes() != wanted:
            toll.compare(out.read_bytes(), wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how often to kill a run (default: 200)")
    parser.add_argument("--faults", default="all", help="all, none, or how many of all write faults (default: all)")
    parser.add_argument(
        "--others", type=int, default=10, help="how often others touch the files of a run (default: 10)"
    )
    parser.add_argument("--rows", type=int, default=50, help="prompts of a killed batch (default: 50)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="bound on the whole (default: 1800)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (default: 1)")
    parser.add_argument("--model", default="builtin:stories")
    given = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    good = True
    with tempfile.TemporaryDirectory(prefix="genctl-torture-") as folder:
        torture = Torture(Path(folder), given.model, given.rows, given.seed, began + given.seconds)
        if given.kills:
            toll, where = torture.kill(given.kills, say)
            good &= toll.good and sum(where.values()) >= given.kills
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(where.items()))
            say("")
            print(f"kills {sum(where.values())} of {given.kills} ({kinds}) in {toll.jobs} jobs: {toll.say()}")
            _explain(toll)
        if given.faults != "none":
            most = None if given.faults == "all" else int(given.faults)
            toll, done, of = torture.faults(FAULTS, most, say)
            good &= toll.good and done == of
            say("")
            print(f"write faults {done} of {of} ({', '.join(FAULTS)}): {toll.say()}")
            _explain(toll)
        if given.others:
            toll, where = torture.others(given.others, say)
            good &= toll.good and sum(where.values()) >= given.others
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(where.items()))
            say("")
            print(f"others {sum(where.values())} of {given.others} ({kinds}): {toll.say()}")
            _explain(toll)
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if good else 1


def _explain(toll: Toll) -> None:
    for line in toll.wrong[:5]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
