"""`/why`: the last answer of a chat on the screen of `genctl explore`, in a copy of its tree."""

from __future__ import annotations

import signal
from pathlib import Path

from genctl.commands.chat.turns import Message
from genctl.engines.local.session import Session
from genctl.terminal.interrupt import Interrupt


def look_into(session: Session, copy: Path, answer: Message, *, memory: int | None, coloured: bool) -> bool:
    """Show the tree in `copy`, with the cursor before the first token of `answer`, until the person leaves.

    `memory` are bytes for its caches. Returns whether the person changed the tree; a copy without a change is removed.
    Raises GenctlError, with the terminal restored; SystemExit after a signal.
    """
    from genctl.commands.explore.screen import run_screen
    from genctl.commands.explore.screen_source import TreeSource
    from genctl.tree.explorer import Explorer
    from genctl.tree.language import MEMORY

    explorer = Explorer.reopen(session, copy, memory=memory or MEMORY)
    changed = False
    try:
        tree = explorer.tree
        last = tree.nodes[answer.node]
        start = last.start if last.by == "generate" else answer.node  # an answer may have no tokens
        explorer.space.settle(cursor=start, tip=answer.node, settings=last.settings)
        begun = len(tree), list(tree.steps)
        with Interrupt() as interrupt:
            interrupt.gentle = True  # a signal ends the screen, not the process
            explorer.interrupted = interrupt
            run_screen(TreeSource(explorer), coloured=coloured, signalled=lambda: interrupt.status)
        changed = begun != (len(tree), tree.steps)
    finally:
        explorer.close()
        if not changed:
            copy.unlink(missing_ok=True)
    if interrupt.status not in (0, 128 + signal.SIGINT):
        raise SystemExit(interrupt.status)
    return changed
