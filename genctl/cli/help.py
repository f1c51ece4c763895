"""Help that is quick and fits 80 columns: options under the headings of their groups, in two plain columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

GENERAL = "Options"


class GroupedCommand(TyperCommand):
    """A command whose help lists its options group by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the general options, then those of each group in the order of their declaration."""
        arguments, groups = [], {GENERAL: []}  # type: ignore[var-annotated]
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or GENERAL, []).append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)
