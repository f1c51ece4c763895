#!/usr/bin/env python
"""Let hostile input loose on what reads it: presets, JSONL rows, --set, the environment, grammars, answers of servers.

    python scripts/fuzz.py --generate 10000 --seed 1          so many hostile presets and as many JSONL lines
    python scripts/fuzz.py --answers 1000 --seed 1            so many answers of hostile servers
    python scripts/fuzz.py --files 300 --seed 1               so many spoilt checkpoints, GGUF files, adapters, prompts
    python scripts/fuzz.py preset                             coverage-guided, until stopped or something breaks
    python scripts/fuzz.py jsonl corpus/ -max_total_time=600  with a folder of inputs and options of libFuzzer

All hold what is read to the contract of tests/hostile/targets.py: it is refused with exit status 2 and a sentence
that says where, or accepted with every key known; never another exception, never longer than --seconds. An answer of a
server (tests/hostile/servers.py) costs at most its own row. With a spoilt file (tests/hostile/files.py) the program
generates or ends with one clear line, within bounds of memory and time. Coverage guidance needs atheris (`pip install
atheris`); the others need nothing. Exit status 1 if the contract was broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NAMES = ("preset", "jsonl", "set", "environment", "regex", "json-schema", "grammar", "stop-regex")
Kind: TypeAlias = tuple[str, Callable[[Random], bytes], Callable[[bytes], str]]  # name, what makes one, what takes it
SECONDS = 10.0  # for one input; the slowest sound one takes a tenth of that on a busy machine
HANGS = 60.0  # after so many seconds in one input the stack is shown and the process ends


def main() -> int:
    """Run what was asked. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=NAMES, help="what the coverage-guided fuzzer is let loose on")
    parser.add_argument("--generate", type=int, metavar="N", help="make N hostile presets and N hostile JSONL lines")
    parser.add_argument("--answers", type=int, metavar="N", help="let a hostile server give N answers")
    parser.add_argument("--files", type=int, metavar="N", help="spoil N files of checkpoints, adapters, saved prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is made at random (default: 0)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"most for one input (default: {SECONDS:g})")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where inputs that break the contract are kept")
    asked, rest = parser.parse_known_args()
    wanted = [name for name in ("generate", "answers", "files") if getattr(asked, name) is not None]
    if len(wanted) + (asked.target is not None) != 1 or (wanted and rest):
        parser.error("give a target, --generate N, --answers N or --files N")
    if asked.answers is not None:
        return answers(asked.answers, asked.seed, asked.seconds, asked.save)
    if asked.files is not None:
        return files(asked.files, asked.seed, asked.save)
    if asked.generate is not None:
        return generate(asked.generate, asked.seed, asked.seconds, asked.save)
    return guided(asked.target, rest)


def generate(count: int, seed: int, seconds: float, save: Path | None) -> int:
    """Make and try `count` inputs of either kind, and say what became of them."""
    from tests.hostile import corpus, targets

    kinds: tuple[Kind, ...] = (
        ("presets", corpus.preset, targets.preset),
        ("JSONL lines", corpus.line, targets.jsonl),
    )
    return tried(kinds, count, seed, seconds, save)


def answers(count: int, seed: int, seconds: float, save: Path | None) -> int:
    """Let a hostile server give `count` answers, and say what became of them."""
    from tests.hostile import servers

    with servers.hostile() as target:
        return tried((("answers", servers.answer, target),), count, seed, seconds, save)


def tried(kinds: Sequence[Kind], count: int, seed: int, seconds: float, save: Path | None) -> int:
    """Make and try `count` inputs of each kind. Returns the exit status."""
    from tests.hostile import targets

    broken = 0
    for name, make, target in kinds:
        became: Counter[str] = Counter()
        slowest, began = 0.0, time.perf_counter()
        for number in range(count):
            data = make(Random(f"{name} {seed} {number}"))
            faulthandler.dump_traceback_later(HANGS, exit=True)
            start = time.perf_counter()
            try:
                became[targets.checked(target, data)] += 1
                took = time.perf_counter() - start
                fault = f"took {took:.1f} s" if took > seconds else ""
            except targets.Breach as breach:
                took, fault = time.perf_counter() - start, str(breach)
            slowest = max(slowest, took)
            if fault:
                became["broken"] += 1
                print(f"{name} {seed} {number}: {fault}\n    {data[:200]!r}", flush=True)
                if save is not None:
                    save.mkdir(parents=True, exist_ok=True)
                    (save / f"{name.split()[0]}-{seed}-{number}").write_bytes(data)
        broken += became["broken"]
        faulthandler.cancel_dump_traceback_later()
        print(
            f"{count:,} hostile {name}: {became[targets.REFUSED]:,} refused with a sentence and its place, "
            f"{became[targets.ACCEPTED]:,} accepted with every key known, {became['broken']:,} broke the contract; "
            f"the slowest took {slowest:.2f} s, all of them {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return int(broken > 0)


def files(count: int, seed: int, save: Path | None) -> int:
    """Spoil `count` files and run the program on each, and say what became of them."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    from tests.hostile import files as hostile
    from tests.hostile.sound import folders

    became: Counter[str] = Counter()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="genctl-fuzz-") as scratch:
        sound = folders(Path(scratch) / "sound")
        for number in range(count):
            random = Random(f"files {seed} {number}")
            name = random.choice(sorted(sound))
            spoilt = Path(scratch) / name
            shutil.copytree(sound[name].folder, spoilt)
            what = sound[name].spoil(spoilt, random)
            found = hostile.outcome(sound[name].arguments(spoilt))
            if found in (hostile.REFUSED, hostile.RAN):
                became[found] += 1
            else:
                became["broken"] += 1
                print(f"files {seed} {number}: {name}, {what}\n    {found}", flush=True)
                if save is not None:
                    shutil.copytree(spoilt, save / f"{name}-{seed}-{number}", dirs_exist_ok=True)
            shutil.rmtree(spoilt)
    print(
        f"{count:,} spoilt files: {became[hostile.REFUSED]:,} refused with one line, {became[hostile.RAN]:,} harmless, "
        f"{became['broken']:,} broke the contract; {time.perf_counter() - began:.0f} s"
    )
    return int(became["broken"] > 0)


def guided(name: str, arguments: list[str]) -> int:
    """Hand a target over to atheris, which never returns unless told how much to do."""
    try:
        import atheris  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("error: coverage guidance needs atheris: pip install atheris (Linux, macOS)", file=sys.stderr)
        print("hint: --generate N needs nothing", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["genctl", "tomli"]):
        from tests.hostile import targets

    target = targets.TARGETS[name]
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if not folders:
        folder = Path(tempfile.mkdtemp(prefix=f"genctl-fuzz-{name}-"))
        print(f"inputs that reach something new are kept in {folder}", file=sys.stderr)
        arguments = [str(folder), *arguments]
        folders = [str(folder)]
    if not any(argument.startswith("-artifact_prefix=") for argument in arguments):
        arguments = [*arguments, f"-artifact_prefix={folders[0]}/"]
    for number, seed in enumerate(targets.seeds(name)):
        path = Path(folders[0]) / f"seed-{number}"
        if not path.exists():
            path.write_bytes(seed)

    def one_input(data: bytes) -> None:
        targets.checked(target, data)

    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
