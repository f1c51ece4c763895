"""An answer that was cut off comes again: its tokens are compared with those that the file has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genctl.errors import InputError
from genctl.events import UNKNOWN_ID, Token
from genctl.tree.nodes import Tree


class OtherTokens(InputError):
    """Other tokens come than those that were written: other settings, another machine, or a server that draws."""

    def __init__(self) -> None:
        super().__init__("the answer that was cut off comes out differently here, so it cannot be continued")


class WrittenAnswer:
    """The nodes of an answer that was cut off, from `start` on, while its tokens come again.

    A server that tells no ids may cut the same text into other pieces: there the texts are compared.
    """

    def __init__(self, tree: Tree, start: int, nodes: Sequence[int]) -> None:
        self.at = start  # the last node that came again
        self.end = nodes[-1] if nodes else start
        self._tree = tree
        self._left = list(reversed(nodes))
        self._text = ""  # came again, but ends within a piece

    @property
    def is_over(self) -> bool:
        """Whether everything came again."""
        return not self._left

    def take(self, token: Token) -> Token | None:
        """Compare the next token. Returns what is new of it. Raises OtherTokens."""
        if not self._left:
            return token
        expected = self._tree.nodes[self._left[-1]]
        if token.id > UNKNOWN_ID and expected.id > UNKNOWN_ID:
            if token.id != expected.id:
                raise OtherTokens
            self.at = self._left.pop()
            return None
        self._text += token.text
        while self._left and self._text.startswith(piece := self._tree.nodes[self._left[-1]].text):
            self._text = self._text[len(piece) :]
            self.at = self._left.pop()
        if self._left and not self._tree.nodes[self._left[-1]].text.startswith(self._text):
            raise OtherTokens
        return replace(token, id=UNKNOWN_ID, text=self._text) if self._text and not self._left else None
