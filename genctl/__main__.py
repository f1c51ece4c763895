"""`python -m genctl` and the `genctl` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    if sys.argv[1:] in (["--version"], ["-V"]):  # answered before anything is imported
        from genctl import __version__

        print(f"genctl {__version__}")
        return
    from genctl.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
