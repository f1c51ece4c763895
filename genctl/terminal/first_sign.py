"""The older name of `loading_line`."""

from genctl.terminal.loading_line import clear, end, exists, show_prompt, status

__all__ = ["clear", "end", "exists", "show_prompt", "status"]
