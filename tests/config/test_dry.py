"""`--dry`: the resolved job as TOML, which loads again as the same job."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.config.layers import Layer, Resolved, flags_layer, model_layer, resolve
from genctl.config.listed_knobs import PROCESSORS
from genctl.config.settings import to_toml
from genctl.config.toml import parse, write_key, write_value

QUIET = settings(max_examples=70, deadline=None)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.sampled_from([-0.0, 1e-7, 5e-324, 1e300])
)
PLAIN = st.recursive(
    st.one_of(TEXT, NUMBERS, st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def again(job: Resolved, **options: bool) -> Resolved:
    return resolve([Layer("dry.toml", parse(to_toml(job, **options), "dry.toml"))])


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, -0.0 told from 0.0."""
    return repr(one) == repr(other)


def assert_same_job(one: Resolved, other: Resolved) -> None:
    for field in ("generation", "runtime", "processors", "stopping", "about"):
        assert same(getattr(one, field), getattr(other, field)), field


@QUIET
@given(PLAIN)
def test_any_value_written_reads_back_exactly(value: Any) -> None:
    text = f"value = {write_value(value)}"
    assert text.isprintable()
    assert same(parse(text, "x")["value"], value)


@QUIET
@given(TEXT)
def test_any_key_written_reads_back_exactly(key: str) -> None:
    assert parse(f"{write_key(key)} = 1", "x") == {key: 1}


TABLES = st.lists(
    st.builds(
        lambda use, rest: {"use": f"mine:{use}", **rest},
        TEXT,
        st.dictionaries(TEXT.filter(lambda k: k != "use"), PLAIN, max_size=2),
    ),
    max_size=3,
)
JOBS = st.fixed_dictionaries(
    {},
    optional={
        "about": TEXT,
        "do_sample": st.just(True),
        "temperature": st.one_of(st.floats(0, 1e308), st.integers(0, 9)),
        "top_p": st.floats(0, 1),
        "repetition_penalty": st.floats(1e-300, 1e300),
        "guidance_scale": st.just(math.inf),
        "stop_strings": st.one_of(TEXT, st.lists(TEXT, max_size=3)),
        "bad_words": st.lists(TEXT, max_size=3),
        "logit_bias": st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
        "sequence_bias": st.lists(
            st.tuples(st.lists(st.integers(0, 9), max_size=2), st.floats(allow_nan=False)).map(list), max_size=2
        ),
        "watermarking_config": st.dictionaries(TEXT, PLAIN, max_size=3),
        "eos_token_id": st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3)),
        "max_new_tokens": st.integers(1, 2**63),
        "seed": st.integers(0, 2**64 - 1),
        "model": TEXT,
        "system": TEXT,
        "processors": TABLES,
        "stopping": TABLES,
    },
)


@QUIET
@given(JOBS, st.booleans())
def test_a_job_written_loads_again_as_the_same_job(values: dict[str, Any], defaults: bool) -> None:
    if "do_sample" not in values:
        values = {key: value for key, value in values.items() if key not in ("temperature", "top_p")}
    if values.get("temperature") == 0:
        values.pop("top_p", None)
    if "processors" in values:  # which would be left out of the list
        values = {key: value for key, value in values.items() if key not in PROCESSORS}
    job = resolve([Layer("some file.toml", values)])
    assert_same_job(job, again(job, defaults=defaults))


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [Layer("a", {"do_sample": True, "temperature": 0.7, "min_p": 0.1}), flags_layer({"do_sample": False})],
        [Layer("a", {"do_sample": True, "temperature": 0.7, "top_k": 3}), flags_layer({"temperature": 0})],
        [Layer("a", {"max_new_tokens": 5}), flags_layer({"max_length": 9})],
        [model_layer({"min_new_tokens": 50, "num_return_sequences": 3}), flags_layer({"max_new_tokens": 9})],
        [Layer("a", {"system": "hi"}), flags_layer({"chat": False})],
        [Layer("a", {"chat": False}), flags_layer({"system": "hi"})],
        [Layer("a", {"processors": [], "stopping": [{"use": "stop_strings", "stop_strings": ["."]}]})],
    ],
)
@pytest.mark.parametrize("defaults", [True, False])
def test_what_later_layers_made_moot_does_not_come_back(layers: list[Layer], defaults: bool) -> None:
    job = resolve(layers)
    assert_same_job(job, again(job, defaults=defaults))


def test_every_value_has_its_origin_beside_it() -> None:
    text = to_toml(resolve([Layer("p.toml", {"seed": 3}, {"seed": "p.toml:7"}), flags_layer({"model": 'a "b"'})]))
    assert 'model = "a \\"b\\""' in text
    rows = {line.split(" = ")[0]: line.rsplit("  # ", 1)[1] for line in text.splitlines() if " = " in line}
    assert rows["seed"] == "p.toml:7"
    assert rows["model"] == "flag --model"
    assert rows["top_k"] == "default"


def test_only_what_was_set_is_written_and_an_origin_stays_in_its_comment() -> None:
    job = resolve([Layer("a\nmodel = 3\x1b[2J.toml", {"seed": 3}, declared="user")])
    assert all(line.isprintable() for line in to_toml(job).splitlines())
    assert_same_job(job, again(job))
    assert to_toml(resolve([]), defaults=False) == ""
    assert to_toml(resolve([Layer("a.toml", {"seed": 3})]), defaults=False) == "# Run\nseed = 3  # a.toml\n"
