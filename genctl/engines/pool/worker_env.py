"""What Ray starts workers with: they import what is installed, and nothing from the driver's working directory.

Ray puts the folder of the driver's script and its working directory on the path of every worker, before that of Python,
unless the job names a working directory of its own. So it names an empty one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import genctl
from genctl import children
from genctl.kernels.variant import VARIABLE

TEMPORARY = "RAY_TMPDIR"
LONGEST = 24  # characters of a folder for temporary files: the names of Ray's sockets in it have 107 at most


@contextmanager
def worker_env(folder: str = "", *, here: bool) -> Iterator[dict[str, Any]]:
    """`runtime_env` of `ray.init`, which is called inside. `here`: the workers are on this machine.

    A Ray that starts puts its sockets, logs and copies into `folder`, where RAY_TMPDIR names no other.
    """
    variables = {children.SAFE: "1"}
    if os.environ.get(VARIABLE):
        variables[VARIABLE] = os.environ[VARIABLE]
    if here and (path := _python_path()):
        variables["PYTHONPATH"] = path
    made: dict[str, Any] = {"env_vars": variables}
    before = os.environ.get(TEMPORARY)
    with tempfile.TemporaryDirectory(prefix="genctl-") as empty:
        if not _job_names_one():
            made["working_dir"] = empty
        if folder and not before:
            os.environ[TEMPORARY] = folder
        try:
            yield made
        finally:
            if folder and not before:
                os.environ.pop(TEMPORARY, None)


def new_folder() -> str:
    """A folder for a Ray that starts: Ray's usual one is everybody's, and everybody may replace files in it."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) <= LONGEST else "/tmp")


def _python_path() -> str:
    """PYTHONPATH with whole paths, since workers start elsewhere. It leads to genctl where nothing else does."""
    entries = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    home = str(Path(genctl.__file__).absolute().parents[1])
    if home not in (*entries, *sys.path[1:]):  # a checkout, found because it is the working folder
        entries.append(home)
    return os.pathsep.join(entries)


def _job_names_one() -> bool:
    """Whether this process is a job of `ray job submit --working-dir`, which names the working directory of workers."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
        return bool(job["runtime_env"]["working_dir"])
    except (ValueError, KeyError, TypeError):
        return False
