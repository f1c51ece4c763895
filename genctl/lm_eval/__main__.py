"""`genctl-lm-eval`: the command line of lm_eval with genctl as a --model."""

from __future__ import annotations

import sys

from genctl import process

if __name__ == "__main__":
    process.forget_working_directory()  # before anything is imported that a file there could replace

from genctl.errors import Exit, GenctlError, extra
from genctl.lm_eval import register
from genctl.terminal.standard_streams import print_message


def main() -> int:
    """Run lm_eval. Returns the exit status of a genctl error; otherwise lm_eval determines it."""
    process.protect_children()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print_message(f"error: lm_eval cannot be imported: {error}")
        print_message(f"hint: {extra('lm-eval')}")
        return Exit.USAGE
    register()
    try:
        cli_evaluate()
    except GenctlError as error:
        print_message(f"error: {error.message}")
        if error.hint:
            print_message(f"hint: {error.hint}")
        return error.exit
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
