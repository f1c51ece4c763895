"""Decoding modes: conflicts between the knobs of one, once all settings are resolved, and the modes by name. No torch.

`conflicts` checks the settings of several layers; here the layers are merged, and values have no origin.
Functions raise UsageError with the first conflict, or return all of them as sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genctl.config.layers import Layer
from genctl.errors import PresetError, UsageError, nearest, quote
from genctl.params import DRAFTING, GRAMMARS, Generation

MODES = (*DRAFTING, "dola_layers", "amateur_model")  # knobs that select a strategy of their own


def check_returned(generation: Generation) -> None:
    """The number of sequences that a beam search returns. Raises UsageError."""
    beams, returned = generation.num_beams, generation.num_return_sequences
    if beams > 1 and returned > beams:
        raise UsageError(f"num_return_sequences = {returned} cannot exceed num_beams = {beams}")


def check_distinct(generation: Generation) -> None:
    """The number of sequences of a search without beams. Raises UsageError."""
    returned = generation.num_return_sequences
    if returned > 1 and not generation.do_sample:
        raise UsageError(
            f"num_return_sequences = {returned} would return identical sequences: do_sample is false and num_beams = 1"
        )


def check_beams(generation: Generation) -> None:
    """Beam search of every kind, and contrastive search. Raises UsageError."""
    beams, groups = generation.num_beams, generation.num_beam_groups
    penalty = generation.diversity_penalty
    check_returned(generation)
    if groups > beams:
        raise UsageError(f"num_beam_groups = {groups} cannot exceed num_beams = {beams}")
    if beams % groups:
        raise UsageError(f"num_beams = {beams} cannot be divided into num_beam_groups = {groups} equal groups")
    if groups > 1 and generation.do_sample:
        raise UsageError(
            f"num_beam_groups = {groups} cannot be combined with do_sample = true: diverse beam search does not sample"
        )
    if groups > 1 and not penalty:
        raise UsageError(f"num_beam_groups = {groups} needs diversity_penalty above 0, or all groups are identical")
    if penalty and groups == 1:
        raise UsageError(f"diversity_penalty = {penalty:g} has no effect with num_beam_groups = 1")
    if generation.sampler != "multinomial" and beams > 1 and generation.do_sample:
        raise UsageError(
            f'sampler = "{generation.sampler}" draws one token for each row, but num_beams = {beams} needs several'
        )
    if generation.penalty_alpha and beams > 1:
        raise UsageError(f"penalty_alpha = {generation.penalty_alpha:g} is contrastive search, but num_beams = {beams}")


def check_forced_words(generation: Generation) -> None:
    """Constrained beam search. Raises UsageError."""
    name = "force_words_ids" if generation.force_words_ids else "force_words"
    if generation.num_beams == 1:
        raise UsageError(f"{name} needs num_beams above 1, but num_beams = 1")
    if generation.do_sample:
        raise UsageError(f"{name} cannot be combined with do_sample = true: constrained beam search does not sample")
    if generation.num_beam_groups > 1:
        raise UsageError(f"{name} cannot be combined with num_beam_groups = {generation.num_beam_groups}")


def check_contrastive(generation: Generation) -> None:
    """Contrastive search. Raises UsageError."""
    alpha, returned = generation.penalty_alpha or 0.0, generation.num_return_sequences
    if generation.do_sample:
        raise UsageError(
            f"penalty_alpha = {alpha:g} cannot be combined with do_sample = true: contrastive search does not sample"
        )
    if generation.top_k < 2:
        raise UsageError(f"penalty_alpha = {alpha:g} compares candidates, but top_k = {generation.top_k}")
    if returned > 1:
        raise UsageError(f"penalty_alpha = {alpha:g} finds one sequence, but num_return_sequences = {returned}")


def mode_of(generation: Generation) -> str | None:
    """The knob in `MODES` that is set. Raises UsageError, in one sentence, for a knob that conflicts with it."""
    knobs = [name for name in MODES if getattr(generation, name) is not None]
    if not knobs:
        return None
    way = knobs[0]
    others = {
        **{name: True for name in knobs[1:]},
        f"num_beams = {generation.num_beams}": generation.num_beams > 1,
        "penalty_alpha": bool(generation.penalty_alpha),
        "force_words": bool(generation.force_words or generation.force_words_ids),
    }
    for other, there in others.items():
        if there:
            raise UsageError(f"{way} and {other} are two ways to search, and a text is found in one")
    returned = generation.num_return_sequences
    if returned > 1 and way in DRAFTING:
        raise UsageError(f"{way} writes one sequence at a time, but num_return_sequences = {returned}")
    if returned > 1 and not generation.do_sample:
        raise UsageError(f"num_return_sequences = {returned} would return identical sequences: do_sample is false")
    if generation.do_sample and generation.sampler != "multinomial":
        if way not in DRAFTING:
            raise UsageError(f'sampler = "{generation.sampler}" is for plain sampling, and {way} draws in its own way')
        if generation.draft_sampling == "rejection":
            raise UsageError(
                f'draft_sampling = "rejection" makes its own draws, and sampler = "{generation.sampler}" others'
            )
    return way


LONGEST_BAN = 1000  # characters of a text: each new token is compared with every part of it
MOST_BANNED = 1 << 20  # of all together


def bans(generation: Generation) -> list[str]:
    """The conflicts of `ban`, one sentence each."""
    g = generation
    if not g.ban:
        return []
    others = {
        **{f"num_beams = {g.num_beams}": g.num_beams > 1, "penalty_alpha": g.penalty_alpha},
        **{f"num_return_sequences = {g.num_return_sequences}": g.num_return_sequences > 1},
        **{name: getattr(g, name) is not None for name in ("best_of", "mbr_samples", *MODES)},
    }
    phrases = ", ".join(map(quote, g.ban[:5])) + (", …" if len(g.ban) > 5 else "")
    messages = [
        f"ban = {phrases} cannot be combined with {name}: it takes back the text of a single row"
        for name, there in others.items()
        if there
    ]
    longest, total = max(g.ban, key=len), sum(map(len, g.ban))
    if len(longest) > LONGEST_BAN:
        sizes = f"has {len(longest):,} characters, and at most {LONGEST_BAN:,} are allowed"
        messages.append(f"ban: the text that begins with {quote(longest[:40])} {sizes}")
    elif total > MOST_BANNED:
        messages.append(f"ban: {len(g.ban):,} texts have {total:,} characters, and at most {MOST_BANNED:,} are allowed")
    if "" in g.ban:
        messages.append("ban: an empty text is in every text")
    if (broken := next((one for one in g.ban if "\N{REPLACEMENT CHARACTER}" in one), None)) is not None:
        messages.append(f"ban: {quote(broken)} has U+FFFD, the sign for an incomplete character")
    return messages


def steering(generation: Generation) -> list[str]:
    """The conflict of mirostat and adaptive-p, in a sentence."""
    if generation.mirostat_tau is None or generation.adaptive_target is None:
        return []
    return [
        f"mirostat_tau = {generation.mirostat_tau:g} and adaptive_target = {generation.adaptive_target:g} both steer "
        "by what is written; leave out one of them"
    ]


def reranking(generation: Generation) -> list[str]:
    """The conflicts of best_of and mbr_samples, one sentence each."""
    g = generation
    messages = []
    for name, count in (("best_of", g.best_of), ("mbr_samples", g.mbr_samples)):
        if count is None:
            continue
        if not g.do_sample or g.temperature == 0.0:
            why = "do_sample is false" if not g.do_sample else "temperature is 0"
            messages.append(f"{name} = {count} chooses among samples, but {why}")
        if g.num_beams > 1:
            messages.append(f"{name} = {count} chooses among independent samples, but num_beams = {g.num_beams}")
        if g.num_return_sequences > count:
            messages.append(f"num_return_sequences = {g.num_return_sequences} cannot exceed {name} = {count}")
    if g.best_of is not None and g.mbr_samples is not None:
        messages.append("best_of and mbr_samples both say which samples are returned; leave out one of them")
    return messages


def structures(generation: Generation) -> list[str]:
    """The conflicts of grammars, prefixes, token healing and budgets of thought, one sentence each."""
    knobs = [knob for knob in GRAMMARS if getattr(generation, knob) is not None]
    messages = [f"{knobs[0]} and {other} both say what the text must be; leave out one of them" for other in knobs[1:]]
    if generation.grammar_after == "":
        messages.append("grammar_after is empty: the grammar begins at once")
    if generation.token_healing:
        messages += [
            f"token_healing cannot be combined with {knob}: its text would begin in the prompt" for knob in knobs
        ]
        if generation.stop_regex is not None:
            messages.append("token_healing cannot be combined with stop_regex: it could match in the part taken back")
    if generation.thinking_budget is not None:
        begins = {"prefix": generation.prefix, "token_healing": generation.token_healing}
        begins |= {} if generation.grammar_after else dict.fromkeys(knobs, True)
        messages += [
            f"thinking_budget = {generation.thinking_budget} cannot be combined with {name}: both say how the text "
            "begins" + ("; grammar_after lets the grammar begin after the thought" if name in knobs else "")
            for name, there in begins.items()
            if there
        ]
    tags = generation.thinking_tags
    if tags is not None and (not all(tags) or tags[0] == tags[1]):
        messages.append(f"thinking_tags = {list(tags)}: two different texts are needed, neither of them empty")
    return messages


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
    """The layer of a strategy, at the level of flags, without the knobs that flags or `--set` set themselves.

    For an unknown name the layer is `broken`, so that all mistakes are reported together.
    """
    if name not in NAMED:
        error = PresetError(unknown(name), hint=f"there are: {', '.join(NAMED)}")
        return Layer("flag", {}, declared="command", broken=(error,))
    own = {key for flag in flags for key in flag.values}
    values = {key: value for key, value in NAMED[name].items() if key not in own}
    return Layer("flag", values, {key: f"--strategy {name}" for key in values}, "command")


def unknown(name: str, place: str = "", others: Iterable[str] = ()) -> str:
    """The sentence for a name that no strategy has. `place`: where it stands; `others` may be meant, too."""
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
