"""The order of results, and what happens to groups whose workers die, with a Ray that the test controls."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genctl.config.layers import resolve
from genctl.engines.pool import engine
from genctl.engines.pool.cluster import RayCluster
from genctl.engines.pool.engine import PoolEngine, WorkGroup, _groups
from genctl.engines.pool.worker import OpenedWorker, own_genctl
from genctl.engines.protocol import About, EngineSetup, Report, Request, Skipped
from genctl.errors import ModelError
from genctl.params import Runtime
from tests.engines.pool.fake_ray import Died, FakeRay

Behave = Callable[[int, str, tuple[Any, ...]], Any]


def opened(number: int, **identity: Any) -> OpenedWorker:
    identity = {"genctl": own_genctl(computes=True), "torch": "1", **identity}
    return OpenedWorker(f"node {number}", identity, About(""))


def well(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
    """A worker that answers every call."""
    return opened(number) if method == "open" else [f"result of {arguments[0]}"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PoolEngine]:
    def start(behave: Behave, workers: int = 3, seed: int = 0) -> PoolEngine:
        monkeypatch.setitem(sys.modules, "ray", FakeRay(behave, seed))  # type: ignore[arg-type]
        return PoolEngine(RayCluster(workers, 0, 1, True, ""), EngineSetup(Runtime()))

    return start


def groups(count: int, taken: list[int] | None = None) -> Iterator[WorkGroup]:
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield WorkGroup("decode", (f"group {number}",), "" if number % 7 == 3 else "ab", 2 * number + 1)


def summary(results: Iterator[WorkGroup]) -> list[tuple[int, Any]]:
    return [(group.last // 2, group.lost or next(iter(group.results), None)) for group in results]


def expected(count: int) -> list[tuple[int, Any]]:
    return [(number, None if number % 7 == 3 else f"result of group {number}") for number in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_results_come_in_order_and_few_groups_are_on_their_way(seed: int, started: Callable[..., PoolEngine]) -> None:
    pool, taken, given = started(well, seed=seed), list[int](), list[WorkGroup]()
    for result in pool.results(groups(60, taken), lambda: False):
        given.append(result)
        assert all(len(worker.groups) <= engine.IN_FLIGHT for worker in pool.workers)
        assert len(taken) - len(given) <= engine.HELD * len(pool.workers) + 1
    assert summary(iter(given)) == expected(60)
    pool = started(well, seed=seed)
    unordered = summary(pool.results(groups(60), lambda: False, ordered=False))
    assert unordered != expected(60)
    assert sorted(unordered) == expected(60)


@pytest.mark.parametrize("seed", range(10))
def test_only_the_group_that_kills_alone_is_lost(seed: int, started: Callable[..., PoolEngine]) -> None:
    tries = Counter[int]()

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "decode":
            group = int(arguments[0].removeprefix("group "))
            tries[group] += 1
            beside = group in (4, 6, 8) and tries[group] == 1  # it was on the worker that group 5 killed
            if tries[5] > 1 and group == 5:
                assert not pool.workers[number - 1].groups, "it is tried alone"
            if group == 5 or beside:
                raise Died
        return well(number, method, arguments)

    pool = started(behave, seed=seed)
    results = summary(pool.results(groups(30), lambda: False))
    lost = results.pop(5)
    assert results == [one for one in expected(30) if one[0] != 5]
    row = "each time with this row or others of its group"
    assert lost[1] in {f"workers died 2 times, worker {number} on node {number} last, {row}" for number in (1, 2, 3)}
    assert tries[5] == 2
    assert tries[4] in (2, 3)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_worker_that_dies_go_to_the_others(seed: int, started: Callable[..., PoolEngine]) -> None:
    by: dict[str, set[int]] = {}

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "decode":
            by.setdefault(arguments[0], set()).add(number)
            if number == 2:
                raise Died
        return well(number, method, arguments)

    assert summary(started(behave, seed=seed).results(groups(60), lambda: False)) == expected(60)
    assert any(2 in workers and len(workers) > 1 for workers in by.values())


def test_a_worker_that_cannot_load_again_ends_the_run(started: Callable[..., PoolEngine]) -> None:
    calls = Counter[str]()

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        calls[f"{method} {number}"] += 1
        if method == "decode" or calls[f"open {number}"] > 1:
            raise Died
        return well(number, method, arguments)

    with pytest.raises(ModelError, match=r"worker . on node . died 3 times while it loaded the checkpoint$"):
        list(started(behave).results(groups(60), lambda: False))


def test_workers_that_would_write_something_else_are_refused(started: Callable[..., PoolEngine]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return opened(number, torch=str(number)) if method == "open" else well(number, method, arguments)

    message = "torch: not the same on node [12] and node [12]: [12] and [12], so their results would differ"
    with pytest.raises(ModelError, match=message):
        list(started(behave, workers=2).results(groups(60), lambda: False))


def test_a_worker_that_dies_while_it_loads_ends_the_run(started: Callable[..., PoolEngine]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        raise Died

    with pytest.raises(ModelError, match="worker 1 died 3 times while it loaded the checkpoint"):
        started(behave, workers=1)


def test_results_do_not_wait_for_groups_that_come_late(started: Callable[..., PoolEngine]) -> None:
    given: list[WorkGroup] = []

    def late() -> Iterator[WorkGroup | None]:
        yield from groups(2)
        while len(given) < 2:
            yield None
        yield WorkGroup("decode", ("group 2",), "ab", 5)

    for result in started(well).results(late(), lambda: False):
        given.append(result)
    assert summary(iter(given)) == expected(3)


def test_an_interrupt_ends_it_before_the_next_result(started: Callable[..., PoolEngine]) -> None:
    given: list[WorkGroup] = []
    for result in started(well).results(groups(60), lambda: len(given) == 2):
        given.append(result)
    assert len(given) == 2


@pytest.mark.parametrize("part", ["version", "sources", "products"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_with_another_genctl_is_an_error_that_names_both(
    part: str, alone: bool, started: Callable[..., PoolEngine]
) -> None:
    ours = own_genctl(computes=True)
    pattern = {"version": r"^[\d.]+", "sources": r"(?<=sources )\w+", "products": r"(?<=products: )\w+"}[part]
    theirs = re.sub(pattern, "other", ours)
    assert theirs != ours

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "open" and (alone or number == 2):
            return opened(number, genctl=theirs)
        return well(number, method, arguments)

    with pytest.raises(ModelError) as caught:
        list(started(behave).results(groups(50), lambda: False))
    assert re.match(rf"genctl: not the same on .* and node \d: {re.escape(ours)} and ", caught.value.message)
    assert theirs in caught.value.message
    assert "GENCTL_PRODUCTS" in caught.value.hint


def test_a_worker_on_a_gpu_has_no_products(started: Callable[..., PoolEngine]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "open":
            return opened(number, genctl=own_genctl(computes=False))
        return well(number, method, arguments)

    assert summary(started(behave).results(groups(5), lambda: False)) == expected(5)


def test_rows_of_a_slow_pipe_do_not_wait_for_others_of_their_group() -> None:
    rows = [Request(f"row {number}", resolve([]), number, prompt_ids=(5,), index=number) for number in range(5)]
    coming = [rows[0], None, None, rows[1], Skipped(2), rows[3], None, rows[4]]

    def spans(*, whole: bool) -> Iterator[tuple[int, int] | None]:
        for group in _groups(iter(coming), 4, (Report(), 4), whole=whole):
            yield None if group is None else (len(group.rows), group.last)

    assert list(spans(whole=False)) == [(1, 0), None, (2, 3), None, (1, 4)]
    assert list(spans(whole=True)) == [None, None, (3, 3), None, (1, 4)]
