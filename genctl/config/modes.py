"""Decoding modes: conflicts between the knobs of one, after all settings are resolved, and the modes by name. No torch.

`config.conflicts` checks the settings of several layers; here the layers are merged, and values have no origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from genctl.config.layers import Layer
from genctl.errors import PresetError, UsageError, nearest, quote
from genctl.params import DRAFTING, GRAMMARS, Generation

MODES = (*DRAFTING, "dola_layers", "amateur_model")  # knobs that select a strategy of their own


def check_search(generation: Generation) -> None:
    """Check the knobs of beam searches, contrastive search and sampling. Raises UsageError with the first conflict."""
    if conflict := next(_search_conflicts(generation), ""):
        raise UsageError(conflict)


def _search_conflicts(g: Generation) -> Iterator[str]:
    beams, groups, returned, penalty = g.num_beams, g.num_beam_groups, g.num_return_sequences, g.diversity_penalty
    alpha = g.penalty_alpha or 0.0
    if beams > 1 and returned > beams:
        yield f"num_return_sequences = {returned} cannot exceed num_beams = {beams}"
    if groups > beams:
        yield f"num_beam_groups = {groups} cannot exceed num_beams = {beams}"
    if beams % groups:
        yield f"num_beams = {beams} cannot be divided into num_beam_groups = {groups} equal groups"
    if groups > 1 and g.do_sample:
        why = "diverse beam search does not sample"
        yield f"num_beam_groups = {groups} cannot be combined with do_sample = true: {why}"
    if groups > 1 and not penalty:
        yield f"num_beam_groups = {groups} needs diversity_penalty above 0, or all groups are identical"
    if penalty and groups == 1:
        yield f"diversity_penalty = {penalty:g} has no effect with num_beam_groups = 1"
    if g.sampler != "multinomial" and beams > 1 and g.do_sample:
        yield f'sampler = "{g.sampler}" draws one token for each row, but num_beams = {beams} needs several'
    if alpha and beams > 1:
        yield f"penalty_alpha = {alpha:g} is contrastive search, but num_beams = {beams}"
    if g.force_words_ids or g.force_words:
        name = "force_words_ids" if g.force_words_ids else "force_words"
        if beams == 1:
            yield f"{name} needs num_beams above 1, but num_beams = 1"
        if g.do_sample:
            yield f"{name} cannot be combined with do_sample = true: constrained beam search does not sample"
        if groups > 1:
            yield f"{name} cannot be combined with num_beam_groups = {groups}"
    if alpha and g.do_sample:
        yield f"penalty_alpha = {alpha:g} cannot be combined with do_sample = true: contrastive search does not sample"
    if alpha and g.top_k < 2:
        yield f"penalty_alpha = {alpha:g} compares candidates, but top_k = {g.top_k}"
    if alpha and returned > 1:
        yield f"penalty_alpha = {alpha:g} finds one sequence, but num_return_sequences = {returned}"
    if returned > 1 and beams == 1 and not g.do_sample:
        yield (
            f"num_return_sequences = {returned} would return identical sequences: do_sample is false and num_beams = 1"
        )


def mode_of(generation: Generation) -> str | None:
    """The knob in `MODES` that is set. Raises UsageError, in one sentence, for a knob that conflicts with it."""
    modes = [name for name in MODES if getattr(generation, name) is not None]
    if modes and (conflict := next(_mode_conflicts(generation, *modes), "")):
        raise UsageError(conflict)
    return modes[0] if modes else None


def _mode_conflicts(g: Generation, mode: str, *others: str) -> Iterator[str]:
    returned = g.num_return_sequences
    searches = {
        **dict.fromkeys(others, True),
        f"num_beams = {g.num_beams}": g.num_beams > 1,
        "penalty_alpha": bool(g.penalty_alpha),
        "force_words": bool(g.force_words or g.force_words_ids),
    }
    for other, is_set in searches.items():
        if is_set:
            yield f"{mode} and {other} are two ways to search, and a text is found in one"
    if returned > 1 and mode in DRAFTING:
        yield f"{mode} writes one sequence at a time, but num_return_sequences = {returned}"
    if returned > 1 and not g.do_sample:
        yield f"num_return_sequences = {returned} would return identical sequences: do_sample is false"
    if g.do_sample and g.sampler != "multinomial" and mode not in DRAFTING:
        yield f'sampler = "{g.sampler}" is for plain sampling, and {mode} draws in its own way'


def conflicts(generation: Generation) -> list[str]:
    """The conflicts of bans, reranking, grammars, and samplers that steer by the text, one sentence each."""
    g = generation
    messages = [*_ban_conflicts(g), *_rerank_conflicts(g), *_structure_conflicts(g)]
    if g.mirostat_tau is not None and g.adaptive_target is not None:
        messages.append(
            f"mirostat_tau = {g.mirostat_tau:g} and adaptive_target = {g.adaptive_target:g} both steer by what is "
            "written; leave out one of them"
        )
    return messages


def _ban_conflicts(g: Generation) -> Iterator[str]:
    if not g.ban:
        return
    others = {
        f"num_beams = {g.num_beams}": g.num_beams > 1,
        "penalty_alpha": g.penalty_alpha,
        f"num_return_sequences = {g.num_return_sequences}": g.num_return_sequences > 1,
        **{name: getattr(g, name) is not None for name in ("best_of", "mbr_samples", *MODES)},
    }
    phrases = ", ".join(map(quote, g.ban[:5])) + (", …" if len(g.ban) > 5 else "")
    for name, is_set in others.items():
        if is_set:
            yield f"ban = {phrases} cannot be combined with {name}: it takes back the text of a single row"
    if "" in g.ban:
        yield "ban: an empty text is in every text"
    if broken := next((text for text in g.ban if "\N{REPLACEMENT CHARACTER}" in text), ""):
        yield f"ban: {quote(broken)} has U+FFFD, the sign for an incomplete character"


def _rerank_conflicts(g: Generation) -> Iterator[str]:
    for name, count in (("best_of", g.best_of), ("mbr_samples", g.mbr_samples)):
        if count is None:
            continue
        if not g.do_sample or g.temperature == 0.0:
            why = "do_sample is false" if not g.do_sample else "temperature is 0"
            yield f"{name} = {count} chooses among samples, but {why}"
        if g.num_beams > 1:
            yield f"{name} = {count} chooses among independent samples, but num_beams = {g.num_beams}"
        if g.num_return_sequences > count:
            yield f"num_return_sequences = {g.num_return_sequences} cannot exceed {name} = {count}"
    if g.best_of is not None and g.mbr_samples is not None:
        yield "best_of and mbr_samples both say which samples are returned; leave out one of them"


def _structure_conflicts(g: Generation) -> Iterator[str]:
    """Grammars, prefixes, token healing and thinking budgets."""
    knobs = [knob for knob in GRAMMARS if getattr(g, knob) is not None]
    for other in knobs[1:]:
        yield f"{knobs[0]} and {other} both say what the text must be; leave out one of them"
    if g.grammar_after == "":
        yield "grammar_after is empty: the grammar begins at once"
    if g.token_healing:
        for knob in knobs:
            yield f"token_healing cannot be combined with {knob}: its text would begin in the prompt"
        if g.stop_regex is not None:
            yield "token_healing cannot be combined with stop_regex: it could match in the part taken back"
    if g.thinking_budget is not None:
        both = f"thinking_budget = {g.thinking_budget} cannot be combined with {{}}: both say how the text begins"
        for knob in () if g.grammar_after else knobs:
            yield f"{both.format(knob)}; grammar_after lets the grammar begin after the thought"
        for name in ("prefix", "token_healing"):
            if getattr(g, name):
                yield both.format(name)
    tags = g.thinking_tags
    if tags is not None and (not all(tags) or tags[0] == tags[1]):
        yield f"thinking_tags = {list(tags)}: two different texts are needed, neither of them empty"


# -- `--strategy NAME`: a decoding mode by name, defined by its knobs; other settings refine it ------------------------


# name -> its knobs; flags and --set go above them
NAMED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "num_beams": 1},
    "sample": {"do_sample": True, "num_beams": 1},
    "beam": {"num_beams": 4, "do_sample": False},
    "beam-sample": {"num_beams": 4, "do_sample": True},
    "diverse-beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": False},
    "constrained-beam": {"num_beams": 4, "do_sample": False},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False, "num_beams": 1},
    "dola": {"dola_layers": "high"},
    "assisted": {},
    "prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "early-exit": {},
    "contrastive-decoding": {},
    "best_of": {"best_of": 4, "do_sample": True, "num_beams": 1},
    "mbr": {"mbr_samples": 8, "do_sample": True, "num_beams": 1},
}

# Knobs that a strategy needs and that have no default.
NEEDS: dict[str, tuple[str, ...]] = {
    "constrained-beam": ("force_words", "force_words_ids"),
    "assisted": ("assistant_model",),
    "early-exit": ("assistant_early_exit",),
    "contrastive-decoding": ("amateur_model",),
}


def layer(name: str, flags: Sequence[Layer]) -> Layer:
    """The layer of a strategy, at the level of flags, without the knobs that flags or `--set` set.

    For an unknown name the layer is `broken`, so that all mistakes are reported together.
    """
    if name not in NAMED:
        error = PresetError(unknown(name), hint=f"there are: {', '.join(NAMED)}")
        return Layer("flag", {}, declared="command", broken=(error,))
    own = {key for flag in flags for key in flag.values}
    values = {key: value for key, value in NAMED[name].items() if key not in own}
    return Layer("flag", values, {key: f"--strategy {name}" for key in values}, "command")


def unknown(name: str, place: str = "", others: Iterable[str] = ()) -> str:
    """The error for an unknown strategy name. `place`: where it is used; `others`: further names to suggest."""
    near = nearest(name.lower().replace("_", "-"), [*NAMED, *others])
    suggestion = f"; did you mean {near}?" if near else ""
    return f"{place or f'--strategy {name}'}: there is no such strategy{suggestion}".replace("\n", "\\n")


def check(name: str, kind: str) -> None:
    """Raises UsageError if other settings select another strategy than the named one."""
    if kind == name:
        return
    needs = NEEDS.get(name)
    hint = f"it needs {' or '.join(needs)}" if needs else "see where each setting comes from with --dry"
    raise UsageError(f"--strategy {name}, but the other settings make it {kind}", hint=hint)
