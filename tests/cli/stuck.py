"""The program with a model that hangs: `python -m tests.cli.stuck PASS ARGUMENTS...`.

Forward pass number PASS (prefills count) prints "stuck" on standard error and takes `SECONDS`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS = 60.0


def main() -> None:
    from genctl.__main__ import main as program
    from genctl.native.runtime import NativeRuntime

    fatal = int(sys.argv.pop(1))
    before = NativeRuntime.__call__
    passes = 0

    def call(self: NativeRuntime, *arguments: Any, **keywords: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == fatal:
            print("stuck", file=sys.stderr, flush=True)
            time.sleep(SECONDS)
        return before(self, *arguments, **keywords)

    NativeRuntime.__call__ = call  # type: ignore[method-assign]
    program()


if __name__ == "__main__":
    main()
