"""The interface between the decode loop and a model; `native.runtime` and `transformers.runtime` implement it.

N rows, F tokens fed to each, T columns of the cache, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from genctl.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.decode.cache.cache import Cache
    from genctl.decode.cut_windows import CutWindow
    from genctl.decode.pass_prices import PassPrice
    from genctl.decode.types import Prefix, Source, Sources


@dataclass
class Output:
    """The output of one forward pass: F tokens for each of N rows."""

    logits: Tensor  # f32 [N, F, V]
    cache: Cache | None
    hidden: Tensor | None = None  # [N, F, H]
    layers: tuple[Tensor, ...] | None = None  # per layer [N, F, H]


@dataclass
class Passed:
    """A pass through the decoder, for an observer."""

    inputs: dict[str, Any]  # the keyword arguments of the model
    cache: Cache | None  # as it is after the pass
    past: int  # columns it held before
    first: bool


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing would measure (`transformers.abilities`)
class Abilities:
    """What a loaded model can do without changing its scores. The defaults are those of a native decoder."""

    supports_cache: bool = True  # steps may continue from a cache; without one every step reads everything again
    cache_differs: bool = False  # its cache, which `generate()` uses, changes its texts
    savable: bool = True  # its cache can be saved to a file and continued by several tokens in one pass
    recurrent: bool = False  # layers keep a state instead of every token
    together: bool = True  # rows of one length may share a pass, and change places
    pads: bool = True  # rows of different lengths may share a pass, padded on the left and masked
    pads_sources: bool = True  # encoder sources of different lengths may share a pass, padded on the right
    pads_behind: bool = True  # complete texts of different lengths may share a pass, padded on the right
    reads_padded: bool = True  # padding leaves no trace in the cache of a prompt
    multi_token_exact: bool = True  # several tokens in one pass get the numbers that each gets in a pass of its own
    multi_token_exact_uncached: bool = True  # the same without a cache
    shares_prompt: bool = False  # rows that continue a prompt may share its keys and values
    shares_source: bool = False  # several rows may attend to one row of encoder states

    @property
    def reads_together(self) -> bool:
        """Whether several prompts may be read in one pass."""
        return self.reads_padded and self.pads

    def reads_several(self, cached: bool) -> bool:
        """Whether several tokens in one pass get the numbers that each gets in a pass of its own."""
        return self.multi_token_exact if cached else self.multi_token_exact_uncached


def depth_of(model: ModelRuntime) -> int:
    """The number of a decoder's layers. Raises ModelError if the config has no such number."""
    config = model.config.get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", None)
    if type(depth) is not int:
        raise ModelError(f"{model.name} has no single list of layers, whose number config.json would give")
    return depth


class ModelRuntime(Protocol):
    """A model that reads prompts and feeds steps. `forwards` counts the passes through the decoder."""

    kind: str  # "native" or "transformers"
    device: torch.device
    is_encoder_decoder: bool
    bound: float  # the length up to which texts may be cut anywhere into passes
    cut_window: CutWindow | None  # the window that sets the bound, if it is one
    findings: list[str]  # notes about the model for the user, a sentence each
    remark: str  # what everybody should know of how it was loaded, or ""
    forwards: int
    watch: Callable[[Passed], None] | None  # called after every pass
    compiled: Any  # steps through torch.compile, or None
    abilities: Abilities

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the architecture in messages."""

    @property
    def config(self) -> Any:
        """The checkpoint's configuration: its fields as attributes."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text, as the checkpoint says."""

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """[..., H] -> logits [..., V], for strategies that read earlier layers; None if there is none."""

    def first_layers(self, count: int) -> ModelRuntime:
        """The same model without the layers after `count`. It shares the weights. Raises ModelError."""

    # -- caches --------------------------------------------------------------------------------------------------------

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache with `room` for columns after the prefill; a `whole` one keeps what windows would drop."""

    def prepare(self, cache: Cache | None) -> None:
        """Convert a cache in place to the form that steps need."""

    def free(self) -> None:
        """Drop what only makes steps faster, after memory ran out."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt."""

    def prefill(
        self,
        ids: Sequence[int],
        source: Source | None,
        *,
        use_cache: bool = True,
        hidden: bool = False,
        whole: bool = False,
    ) -> Prefix:
        """Read a prompt, alone: batch 1, no padding. A `whole` cache can be resumed at any of its tokens."""

    def prefill_together(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Read prompts in one pass; each prefix holds its own row, without padding."""

    def prefill_in_pieces(self, ids: Sequence[int], size: int) -> Generator[Prefix | None, None, None]:
        """Read a prompt, so many tokens in a pass: None after each pass but the last, then the prefix."""

    def resume(
        self, saved: Prefix, ids: Sequence[int], source: Source | None, *, hidden: bool = False
    ) -> tuple[Prefix | None, int]:
        """Read a prompt that begins like `saved` (a prefix made with `whole`): only the rest is read.

        Returns the prefix and the number of reused tokens; (None, 0) if nothing can be reused.
        """

    def reread(self, tokens: Tensor, prefix: Prefix) -> Cache:
        """The cache of rows int64 [R, T] that began at `prefix`, by reading them again."""

    def __call__(
        self,
        feed: Tensor,
        cache: Cache | None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        sources: Sources | None = None,
        first: bool = False,
        keep: int = 0,
        hidden: bool = False,
        history: Tensor | None = None,
    ) -> Output:
        """One pass. feed int64 [N, F]; mask int64 [N, T+F], None without padding; positions int64 [N or 1, F].

        `keep` limits the logits to the last positions; 0 keeps all. With a cache, the fed tokens are appended
        to it. `history` int64 [N, T+F] is the full text, if `wants_history`.
        """

    def wants_history(self, before: int) -> bool:
        """Whether a pass that continues texts of `before` tokens needs `history`, the full texts."""

    @property
    def pass_price(self) -> PassPrice:
        """What its passes cost, by a table."""

    def draft_room(self, length: int) -> float:
        """How many tokens may be on trial after a text of `length` tokens without changing how it is read."""
