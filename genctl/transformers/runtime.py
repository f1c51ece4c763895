"""`ModelRuntime` for transformers' models: batched passes, with the inputs that each architecture requires.

transformers' own `prepare_inputs_for_generation` is called where an architecture overrides it; otherwise the
few inputs that every model shares are passed directly, which is cheaper.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from genctl import compat
from genctl.decode import transfer
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.foreign import ModuleStates, ReturnedStatesCache, new_cache
from genctl.decode.runtime import Abilities, ModelRuntime, Output, Pass, Passed, cut_bound
from genctl.decode.types import Source, Sources
from genctl.errors import GenctlError, ModelError, is_shortage
from genctl.models.architectures import facts_of
from genctl.transformers import contract
from genctl.transformers.abilities import MeasuredAbilities

if TYPE_CHECKING:
    from genctl.transformers.compiled import Compiled


@dataclass
class EncoderOutput(BaseModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """An encoder's output, with fields that some decoders access but do not use."""

    router_logits: tuple[Tensor, ...] | None = None
    router_probs: tuple[Tensor, ...] | None = None


# -- rotary positions whose frequencies depend on the length of a text -------------------------------------------------
# "dynamic" (NTK-aware scaling) widens the wavelengths with every token beyond the trained context; "longrope" (Ding et
# al. 2024, arXiv:2402.13753) switches to a second set of them there. transformers takes the length of the longest row
# of a pass, and stores the last result in a module, so texts of different lengths affect each other.


class LengthRope:
    """How a model's frequencies depend on the length of a text. Up to `bound` tokens they are the same for every text.

    With `reads_again` the full text is recomputed when it exceeds longrope's bound.
    """

    def __init__(self, modules: Iterable[Any] = (), *, reads_again: bool = False) -> None:
        rotary = [module for module in modules if hasattr(module, "original_max_seq_len")]
        self.dynamic = [module for module in rotary if any("dynamic" in kind for kind in _kinds(module).values())]
        long = [bound for module in rotary for bound in _long_bounds(module)]
        self.bound: float = min([*(module.original_max_seq_len for module in self.dynamic), *long], default=math.inf)
        self.reads_again = bool(long) and reads_again

    def reset(self) -> None:
        """Reset frequencies that depend on the length of the last pass."""
        for module in self.dynamic:
            for prefix in (prefix for prefix, kind in _kinds(module).items() if "dynamic" in kind):
                module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _kinds(module: Any) -> dict[str, str]:
    """Prefix of the module's buffers -> kind of RoPE: one entry, or one for each layer type if there are several."""
    kinds = module.rope_type
    return {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}


def _long_bounds(module: Any) -> Iterator[int]:
    parameters = module.config.rope_parameters
    for prefix, kind in _kinds(module).items():
        if kind == "longrope":
            yield int((parameters[prefix[:-1]] if prefix else parameters)["original_max_position_embeddings"])


# -- the runtime ------------------------------------------------------------------------------------------------------


class TransformersRuntime(ModelRuntime):
    """A transformers model for the loop. `forwards` counts the decoder's passes; `findings` lists missing abilities.

    With `compile` its steps go through torch.compile (see `compiled`). Without `trust` the abilities of listed
    architectures are measured, too. `abilities` is only passed to a runtime that measures them: it never separates
    rows, and does not wrap errors of the model's code. Raises ModelError if the steps cannot be compiled.
    """

    kind = "transformers"
    reads_history = False  # whether its input preparation reads the full text
    rope = LengthRope()

    def __init__(
        self, model: Any, *, compile: bool = False, trust: bool = True, abilities: Abilities | None = None
    ) -> None:
        self.model = model
        self.config, self.dtype, self.name = model.config, model.dtype, type(model).__name__
        self.facts = facts_of(model.config.model_type)
        self.device = model.device if model.device.type != "meta" else torch.device("cpu")
        self.is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        accepted = inspect.signature(model.forward).parameters
        prepare, inherited = type(model).prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation
        self.cache_name = compat.cache_argument(model.forward, inherited)
        self.takes_positions = "position_ids" in accepted
        self.takes_mask = "attention_mask" in accepted
        self.takes_keep = "logits_to_keep" in accepted
        wild = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        takes_cache = compat.takes_dynamic_cache(model) and (self.cache_name in accepted or wild)
        self.prepares = prepare is not inherited and not self.facts.reads_again
        self.prepared_name = compat.cache_argument(prepare, inherited)
        if self.facts.returns:
            self.prepared_name = compat.states_argument(prepare, self.facts.returns)
        kind = "encoder-decoder" if self.is_encoder_decoder else "decoder"
        self.trusted = trust and (self.facts.compared == kind or model.device.type == "meta")
        self.returns, self.reads_history = self.facts.returns, self.facts.reads_history
        self.rope = LengthRope(model.modules(), reads_again=self.facts.reads_again)
        self.bound, self.dynamic, self.reads_again = self.rope.bound, bool(self.rope.dynamic), self.rope.reads_again
        self.limit_cuts(cut_bound(model))
        self.module_states = ModuleStates(model) if self.facts.states_in_modules else None
        self.findings: list[str] = []
        self.forwards = 0
        self._probing = abilities is not None
        self._hooks = compat.forward_hooks(model)
        # whether `contract.check_scores` is done or not needed
        self._compared = self._probing or not self.trusted or self.facts.cache_differs or bool(self.facts.returns)
        self.abilities: Abilities = abilities or MeasuredAbilities(
            model,
            takes_cache=takes_cache,
            takes_mask=self.takes_mask,
            findings=self.findings,
            runtime=None if self.trusted else lambda abilities: TransformersRuntime(model, abilities=abilities),
        )
        self.watch: Callable[[Passed], None] | None = None
        self.compiled: Compiled | None = None
        if compile:
            from genctl.transformers.compiled import Compiled

            self.compiled = Compiled(model, frozenset(accepted), self.cache_name, self.device)

    @property
    def vocab_size(self) -> int:
        """Size of the output distribution."""
        head = self.model.get_output_embeddings()
        if isinstance(outputs := getattr(head, "out_features", None), int):
            return outputs
        weight = getattr(head, "weight", None)
        if weight is not None and weight.numel():
            return int(weight.shape[0])
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def head(self) -> Callable[[Tensor], Tensor] | None:
        """[..., H] -> logits [..., V]; None if there is none."""
        head: Callable[[Tensor], Tensor] | None = self.model.get_output_embeddings()
        return head

    def first_layers(self, count: int) -> TransformersRuntime:
        """The same model cut to its first `count` layers, sharing the weights. Raises ModelError."""
        return TransformersRuntime(_first_layers(self.model, count))

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """An empty cache for this model (see `foreign.new_cache`)."""
        if self.returns:
            return ReturnedStatesCache()
        return new_cache(self.config, encoder_decoder=self.is_encoder_decoder, room=room, whole=whole)

    def encode(self, ids: Sequence[int]) -> Source:
        """Run the encoder over one prompt. Shapes: ids [S] -> states [1, S, H]."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        encoder = self.model.get_encoder()
        with torch.no_grad():
            output = self._run(encoder, input_ids=tokens, attention_mask=torch.ones_like(tokens))
        return Source(tokens, output.last_hidden_state)

    def __call__(self, given: Pass) -> Output:
        """One pass (see `decode.runtime.ModelRuntime`).

        Raises ModelError if the model's own code fails, and ContractError if it does not use the cache correctly (see
        `contract`).
        """
        feed, cache, mask, positions, sources = given.feed, given.cache, given.mask, given.positions, given.sources
        first, keep, hidden, history = given.first, given.keep, given.hidden, given.history
        if feed.shape[0] > 1 and not self._probing and not self.abilities.together:
            return self._apart(given)
        if cache is not None and not first and not self._compared and compat.forward_hooks(self.model) == self._hooks:
            # not with new forward hooks on the model: they would see these passes
            contract.check_scores(TransformersRuntime(self.model, abilities=self.abilities))
            self._compared = True
        self.rope.reset()
        past = 0 if cache is None else cache.length
        if self.reads_again and (grown := self._grown(given, past)) is not None:
            return grown
        inputs: dict[str, Any] = {}
        if self.is_encoder_decoder:
            assert sources is not None
            if cache is not None and sources.cross is not None:
                cache = cache.with_cross(sources.cross)
            inputs["encoder_outputs"] = EncoderOutput(last_hidden_state=sources.states)
            if sources.mask is not None:
                inputs["attention_mask"] = self._mask(sources.mask, feed, cache)
            if mask is not None:
                inputs["decoder_attention_mask"] = self._mask(mask, feed, cache)
            inputs["decoder_input_ids"] = feed
        else:
            inputs["input_ids"] = feed
            if self.takes_mask:
                inputs["attention_mask"] = None if mask is None else self._mask(mask, feed, cache)
            if self.takes_positions:
                if positions is None:
                    positions = torch.arange(past, past + feed.shape[1], device=feed.device)[None]
                inputs["position_ids"] = positions
        inputs["use_cache"] = cache is not None
        model_cache = None if cache is None else cache.for_model
        if cache is not None:
            inputs[self.cache_name] = model_cache
        if self.prepares:
            inputs = self._prepare(feed if history is None or not self.reads_history else history, inputs, first)
            inputs.pop("logits_to_keep", None)  # Bamba and its variants set it to 1
        if keep and self.takes_keep:
            inputs["logits_to_keep"] = keep
        if hidden:
            inputs["output_hidden_states"] = True
        output: Any = None
        logits: Tensor
        with torch.no_grad():
            compiled = None if first else self.compiled
            if compiled is not None and cache is not None and cache.is_slotted and feed.shape[1] == 1 and not hidden:
                logits = compiled.step(feed, cache, mask, positions, partial(self._eager, inputs))
            else:
                if self.module_states is not None:
                    self.module_states.put(None if first else cache)
                before = None if cache is None or self._probing else contract.columns(cache)
                output = self._run(self.model, **inputs)
                logits = output.logits
                if self.module_states is not None:
                    self.module_states.take(cache)
                if isinstance(cache, ReturnedStatesCache):
                    cache.store(getattr(output, self.returns))
                if cache is not None and before is not None:
                    contract.check_pass(self.model, cache, model_cache, output, before, feed.shape[1])
        self.forwards += 1
        if self.watch is not None:
            self.watch(Passed(inputs, cache, past, first))
        if keep and logits.shape[1] > keep:
            logits = logits[:, -keep:]
        if not hidden:
            return Output(logits.float(), cache)
        states = output.decoder_hidden_states if self.is_encoder_decoder else output.hidden_states
        if states is None:
            raise ModelError(f"{self.name} does not report hidden states, which this strategy needs")
        if states[-1].dim() != 3:
            raise ModelError(f"{self.name} keeps several hidden states of a token, and this strategy compares one")
        return Output(logits.float(), cache, states[-1], tuple(states))

    def wants_history(self, before: int) -> bool:
        """Whether a pass that continues texts of `before` tokens needs `history`, the full texts."""
        return self.reads_history or super().wants_history(before)

    def _run(self, module: Any, **inputs: Any) -> Any:
        """Call the model's code. Raises ModelError, with a message of one line, if it fails."""
        try:
            return module(**inputs, return_dict=True)
        except Exception as error:
            if self._probing or isinstance(error, GenctlError) or is_shortage(error):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(f"{type(self.model).__name__} failed in its own code: {why}") from error

    def _apart(self, given: Pass) -> Output:
        """Read each row in its own pass, without its left padding, because rows would affect each other."""
        mask, sources = given.mask, given.sources
        outputs = []
        for row in range(len(given.feed)):
            tokens = given.feed[row : row + 1]
            if mask is not None:
                tokens = tokens[:, mask.shape[1] - int(mask[row].sum()) :]
            own = sources
            if sources is not None:
                length = sources.states.shape[1] if sources.mask is None else int(sources.mask[row].sum())
                own = Sources(sources.states[row : row + 1, :length], None, None)
            outputs.append(self(Pass(tokens, sources=own, first=True, keep=given.keep, hidden=given.hidden)))
        logits = torch.cat([output.logits for output in outputs])
        layers = tuple(torch.cat(parts) for parts in zip(*(output.layers or () for output in outputs), strict=True))
        return Output(logits, None, layers[-1], layers) if given.hidden else Output(logits, None)

    def _mask(self, mask: Tensor, feed: Tensor, cache: Cache | None) -> Tensor:
        """The mask int64 [N, T] of a step; on a GPU, if possible, as bool [N, 1, 1, T], the form that attention uses.

        Else transformers checks whether anything is masked, which synchronises host and GPU in every step.
        """
        usual = compat.attention_of(self.config.get_text_config(decoder=True)) == "sdpa" and self.facts.dense
        if feed.shape[1] > 1 or transfer.on_host(mask) or not usual or cache is None:
            return mask
        return mask[:, None, None].bool() if cache.is_plain else mask

    def _eager(self, inputs: dict[str, Any], cache: Cache) -> Tensor:
        """An uncompiled step, on another cache: logits [N, 1, V]."""
        logits: Tensor = self.model(**{**inputs, self.cache_name: cache.for_model}, return_dict=True).logits
        return logits

    def prepare(self, cache: Cache | None) -> None:
        """Convert a cache in place to the form that steps need."""
        if self.compiled is not None and cache is not None:
            cache.use_slots()

    def _prepare(self, feed: Tensor, inputs: dict[str, Any], first: bool) -> dict[str, Any]:
        """The inputs as the architecture's own `prepare_inputs_for_generation` returns them."""
        arguments = dict(inputs)
        arguments.pop("decoder_input_ids" if self.is_encoder_decoder else "input_ids")
        if self.cache_name in arguments:
            arguments[self.prepared_name] = arguments.pop(self.cache_name)
        if self.returns:  # Reformer prints unknown arguments
            arguments = {name: arguments[name] for name in (self.prepared_name, "use_cache") if name in arguments}
        prepared = self.model.prepare_inputs_for_generation(feed, is_first_iteration=first, **arguments)
        return {key: value for key, value in prepared.items() if key != "is_first_iteration"}


# -- a model with its first layers only, sharing all weights (see `drafters.early_exit`) -------------------------------


def _first_layers(model: Any, count: int) -> Any:
    """The model with `count` layers. The original is unchanged. Raises ModelError if its layers are not a list."""
    name, depth = type(model).__name__, int(model.config.get_text_config(decoder=True).num_hidden_layers)
    lists = [path for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == depth]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise ModelError(f"assistant_early_exit: {name} has no single list of layers that could be left early")
    steps = outer[0].split(".")
    *holders, layers = [model.get_submodule(".".join(steps[:end])) for end in range(len(steps) + 1)]
    if any("forward" in vars(holder) for holder in holders):  # a patched forward would use the original layers
        raise ModelError(f"assistant_early_exit: the layers of {name} are spread over devices and cannot be left early")
    shared = [part for holder in holders for part in holder.children() if part not in [*holders, layers]]
    tensors = [part for holder in holders for part in (*holder.parameters(False), *holder.buffers(False))]
    # modules around the layers are copied, with one shared config; their other children and tensors are not
    twin = copy.deepcopy(model, {id(part): part for part in [*shared, *layers, *tensors]})
    del twin.get_submodule(outer[0])[count:]
    text = twin.config.get_text_config(decoder=True)
    try:
        text.num_hidden_layers = count
    except NotImplementedError:
        raise ModelError(f"assistant_early_exit: {name} has no single number of layers that could be smaller") from None
    if isinstance(vars(text).get("layer_types"), list):
        text.layer_types = text.layer_types[:count]
    return twin
