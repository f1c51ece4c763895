"""The tokenizer of a checkpoint on this machine, without its model: it imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any

from genctl.errors import InputError, ModelError
from genctl.models import check, text, tokenizer
from genctl.models.library_errors import guarded, without_panic_reports
from genctl.models.resolve import resolve
from genctl.models.tokenizer_files import UnsupportedTokenizer


class LoneTokenizer:
    """Texts to ids, as for a prompt of the checkpoint, and back. Raises ModelError if it cannot be loaded."""

    def __init__(self, name: str) -> None:
        folder = resolve(name, offline=True).folder
        check.check_files(folder)
        config = check.read_config(folder)

        def plain() -> Any:
            try:
                return tokenizer.plain(folder, config)
            except UnsupportedTokenizer as error:
                raise ModelError(f"the tokenizer of {name} cannot be loaded without its model: {error}") from None

        with without_panic_reports():
            self._tokenizer: Any = guarded(plain, f"the tokenizer in {folder} cannot be loaded")

    def ids(self, prompt: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds. Raises InputError."""
        return text.encode(self._tokenizer, prompt, add_special_tokens=True)

    def text(self, ids: tuple[int, ...]) -> str:
        """The text that has these ids. Raises InputError if there is none."""
        words = text.decode(self._tokenizer, ids)
        if not words or self.ids(words) != list(ids):
            raise InputError("the token ids are not those of any text, and the server takes no ids")
        return words
