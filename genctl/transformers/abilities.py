"""The abilities of a transformers model: known for the architectures that were compared, measured for all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from genctl import compat
from genctl.decode.cache.foreign import new_cache
from genctl.decode.runtime import Abilities, ModelRuntime
from genctl.models.architectures import facts_of
from genctl.transformers.probe import FAILURES, Probe

FINDINGS = {
    "cache": "{} says something else with a cache than without: it runs without one and reads all at every step",
    "rows": "rows of {} affect each other: each runs alone and without a cache",
    "padding": "padding changes the output of {}: prompts of different lengths are not batched",
    "sources": "padding changes the output of {}: sources of different lengths are not batched",
    "trailing": "padding changes the output of {}: texts of different lengths are not scored together",
}


class MeasuredAbilities(Abilities):
    """Each ability is found when it is first read; one that is missing adds a sentence to `findings`.

    `runtime` makes a runtime of its own for the short passes that measure it (see `Probe`): a run's counters and the
    states between its passes stay as they are. None: every ability counts as there.
    """

    def __init__(
        self,
        model: Any,
        *,
        takes_cache: bool,
        takes_mask: bool,
        findings: list[str],
        runtime: Callable[[Abilities], ModelRuntime] | None,
    ) -> None:
        self._config, self._model_class = model.config, type(model).__name__
        self._facts = facts_of(model.config.model_type)
        self._is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._stateful = compat.is_stateful(model)
        self._takes_cache, self._takes_mask = takes_cache, takes_mask
        self._findings, self._runtime = findings, runtime

    def _has(self, ability: str) -> bool:
        if self._runtime is None:
            return True
        probe = Probe(self._runtime(self))
        try:
            has = bool(getattr(probe, ability)())
        except FAILURES:
            has = False
        if not has and ability in FINDINGS:
            self._findings.append(FINDINGS[ability].format(self._model_class))
        return has

    @property
    def savable(self) -> bool:
        """Whether its cache is a cache of layers, not a state that the model returns."""
        return not self._facts.returns

    @property
    def recurrent(self) -> bool:
        """Whether its class is marked as one with states."""
        return self._stateful

    @property
    def _always_cached(self) -> bool:
        """Whether the cache is used even if it changes the texts, as in `generate()`."""
        return bool(self._facts.returns or self._facts.cache_differs)

    @cached_property
    def supports_cache(self) -> bool:
        """Whether the model takes a cache: one that changes no text, or that is used in any case."""
        return bool(self._facts.returns or self._takes_cache) and (self._always_cached or self._has("cache"))

    @cached_property
    def cache_differs(self) -> bool:
        """Whether a cache that is used in any case was found to change the texts."""
        return self._always_cached and self.supports_cache and not self._has("cache")

    @cached_property
    def multi_token_exact(self) -> bool:
        """Measured, also after a rejected draft."""
        return self._has("several")

    @cached_property
    def multi_token_exact_uncached(self) -> bool:
        """Measured."""
        return self._has("whole")

    @cached_property
    def together(self) -> bool:
        """Measured. If False, each row is read alone."""
        return self._has("rows")

    @cached_property
    def pads(self) -> bool:
        """Whether rows may share a pass, and padding leaves their scores as they are."""
        if self._is_encoder_decoder:  # positions of most decoders are columns of the cache, which cannot be shifted
            return self._facts.relative and self.together
        return self._takes_mask and self.together and not self._facts.returns and self._has("padding")

    @cached_property
    def pads_sources(self) -> bool:
        """The same for sources."""
        return self.together and self._has("sources")

    @cached_property
    def pads_behind(self) -> bool:
        """The same for complete texts."""
        return self.together and self._has("trailing")

    @cached_property
    def reads_padded(self) -> bool:
        """Whether the cache has only columns, which can be dropped, and no states."""
        if not self._takes_mask or not self.supports_cache or self._is_encoder_decoder or self._facts.returns:
            return False
        return new_cache(self._config).only_columns
