"""The program with another time limit for a rank that does not answer: `… SECONDS ARGUMENTS...`."""

from __future__ import annotations

import sys


def main() -> None:
    from genctl.__main__ import main as program
    from genctl.engines import shared as group

    group.TIMEOUT_S = int(sys.argv.pop(1))
    program()


if __name__ == "__main__":
    main()
