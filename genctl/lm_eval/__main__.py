"""`genctl-lm-eval`: the command line of lm_eval, whose --model may be genctl."""

from __future__ import annotations

import sys

from genctl import children

if __name__ == "__main__":
    children.forget_working_directory()  # before anything is imported that a file there could replace

from genctl.errors import Exit, GenctlError
from genctl.lm_eval import register


def main() -> int:
    """Run lm_eval. Returns the exit status of an error of genctl; other ends are those of lm_eval."""
    children.protect()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"error: lm_eval cannot be imported: {error}", file=sys.stderr)
        print('hint: pip install "genctl[lm-eval]"', file=sys.stderr)
        return Exit.USAGE
    register()
    try:
        cli_evaluate()
    except GenctlError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
