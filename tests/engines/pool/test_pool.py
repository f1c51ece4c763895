"""The order of results, and what becomes of groups whose workers die, with a Ray that does what a test says."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genctl.engines.pool import pool as pools
from genctl.engines.pool.cluster import start_cluster
from genctl.engines.pool.pool import WorkerPool, WorkGroup
from genctl.engines.pool.worker import DecodedGroup, OpenedWorker, ScoredGroup, WorkerSetup, own_genctl
from genctl.engines.protocol import About
from genctl.errors import ModelError
from genctl.params import Runtime
from tests.engines.pool.fake_ray import Died, FakeRay

LOADS = pytest.mark.parametrize("load", [{}, {"at_once": 6, "held": 20}], ids=["groups", "rows that join"])
Behave = Callable[[int, str, tuple[Any, ...]], Any]


def opened(number: int, **identity: Any) -> OpenedWorker:
    return OpenedWorker(f"node {number}", {"torch": "1", **identity}, About(""), own_genctl(True))


def well(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
    """A worker that does everything."""
    return opened(number) if method == "open" else ScoredGroup((), (f"result of {arguments[0]}",))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerPool]:
    def start(behave: Behave, workers: int = 3, seed: int = 0) -> WorkerPool:
        monkeypatch.setitem(sys.modules, "ray", FakeRay(behave, seed))  # type: ignore[arg-type]
        pool = WorkerPool(start_cluster(None, workers, gpu=False), WorkerSetup(Runtime(), (), 1, "."))
        pool.open(lambda line: None)
        return pool

    return start


def groups(count: int, taken: list[int] | None = None) -> Iterator[WorkGroup]:
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield WorkGroup(f"group {number}", 0 if number % 7 == 3 else 2, 2 * number, 2 * number + 1)


def summary(results: Iterator[WorkGroup]) -> list[tuple[int, Any]]:
    return [(group.first // 2, group.lost or (group.value and group.value.findings[0])) for group in results]


def expected(count: int) -> list[tuple[int, Any]]:
    return [(number, None if number % 7 == 3 else f"result of group {number}") for number in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_results_come_in_order_and_few_groups_are_on_their_way(seed: int, started: Callable[..., WorkerPool]) -> None:
    pool, taken, given = started(well, seed=seed), list[int](), list[WorkGroup]()
    for result in pool.results(groups(60, taken), lambda: False):
        given.append(result)
        assert all(len(worker.groups) <= pools.IN_FLIGHT for worker in pool.workers)
        assert len(taken) - len(given) <= pools.HELD * len(pool.workers) + 1
    assert summary(iter(given)) == expected(60)
    pool = started(well, seed=seed)
    unordered = summary(pool.results(groups(60), lambda: False, ordered=False))
    assert unordered != expected(60)
    assert sorted(unordered) == expected(60)


@LOADS
@pytest.mark.parametrize("seed", range(10))
def test_only_the_group_that_kills_alone_is_lost(
    seed: int, load: dict[str, int], started: Callable[..., WorkerPool]
) -> None:
    tries = Counter[int]()

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "work":
            group = int(arguments[0].removeprefix("group "))
            tries[group] += 1
            beside = group in (4, 6, 8) and tries[group] == 1  # it was there when another killed
            if tries[5] > pools.RETRIES + 1 and group == 5:
                assert not pool.workers[number - 1].groups, "it is tried alone"
            if group == 5 or beside:
                raise Died
        return well(number, method, arguments)

    pool = started(behave, seed=seed)
    results = summary(pool.results(groups(30), lambda: False, **load))
    lost = results.pop(5)
    assert results == [one for one in expected(30) if one[0] != 5]
    assert lost[1] in {f"workers died 6 times, worker {number} on node {number} last" for number in (1, 2, 3)}
    assert (tries[5], tries[4], tries[20]) == (2 * (pools.RETRIES + 1), 2, 1)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_worker_that_dies_go_to_the_others(seed: int, started: Callable[..., WorkerPool]) -> None:
    by: dict[str, set[int]] = {}

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "work":
            by.setdefault(arguments[0], set()).add(number)
            if number == 2:
                raise Died
        return well(number, method, arguments)

    assert summary(started(behave, seed=seed).results(groups(60), lambda: False, at_once=6, held=20)) == expected(60)
    assert any(2 in workers and len(workers) > 1 for workers in by.values())


@LOADS
@pytest.mark.parametrize("seed", range(10))
def test_groups_of_a_worker_that_is_gone_go_to_the_others(
    seed: int, load: dict[str, int], started: Callable[..., WorkerPool]
) -> None:
    calls = Counter[str]()

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        calls[f"{method} {number}"] += 1
        if number == 2 and (calls["work 2"] > 3 or (method == "open" and calls["open 2"] > 1)):
            raise Died
        return well(number, method, arguments)

    pool = started(behave, seed=seed)
    assert summary(pool.results(groups(60), lambda: False, **load)) == expected(60)
    assert [worker.dead for worker in pool.workers] == [False, True, False]


def test_when_all_workers_are_gone_the_run_ends(started: Callable[..., WorkerPool]) -> None:
    calls = Counter[str]()

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        calls[f"{method} {number}"] += 1
        if method == "work" or calls[f"open {number}"] > 1:
            raise Died
        return well(number, method, arguments)

    with pytest.raises(
        ModelError, match="all workers are gone: each died 3 times while it loaded the checkpoint again"
    ):
        list(started(behave).results(groups(60), lambda: False))


def test_workers_that_would_write_something_else_are_refused(started: Callable[..., WorkerPool]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return opened(number, torch=str(number)) if method == "open" else well(number, method, arguments)

    message = "torch: not the same on node [12] and node [12]: [12] and [12], so their results would differ"
    with pytest.raises(ModelError, match=message):
        list(started(behave, workers=2).results(groups(60), lambda: False))


def test_a_worker_that_dies_while_it_loads_ends_the_run(started: Callable[..., WorkerPool]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        raise Died

    with pytest.raises(ModelError, match="worker 1 died 3 times while it loaded the checkpoint"):
        started(behave, workers=1)


def test_results_do_not_wait_for_groups_that_come_late(started: Callable[..., WorkerPool]) -> None:
    given: list[WorkGroup] = []

    def late() -> Iterator[WorkGroup | None]:
        yield from groups(2)
        while len(given) < 2:
            yield None
        yield WorkGroup("group 2", 2, 4, 5)

    for result in started(well).results(late(), lambda: False):
        given.append(result)
    assert summary(iter(given)) == expected(3)


def test_an_interrupt_ends_it_before_the_next_result(started: Callable[..., WorkerPool]) -> None:
    given: list[WorkGroup] = []
    for result in started(well).results(groups(60), lambda: len(given) == 2):
        given.append(result)
    assert len(given) == 2


@pytest.mark.parametrize("part", ["version", "sources", "products"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_with_another_genctl_is_an_error_that_names_both(
    part: str, alone: bool, started: Callable[..., WorkerPool]
) -> None:
    ours = own_genctl(True)
    pattern = {"version": r"^[\d.]+", "sources": r"(?<=sources )\w+", "products": r"(?<=products: )\w+"}[part]
    theirs = re.sub(pattern, "other", ours)
    assert theirs != ours

    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "open" and (alone or number == 2):
            return OpenedWorker(f"node {number}", {"torch": "1"}, About(""), theirs)
        return well(number, method, arguments)

    with pytest.raises(ModelError) as caught:
        list(started(behave).results(groups(50), lambda: False))
    assert f"has genctl {theirs}, and this is genctl {ours}" in caught.value.message
    assert re.match(r"worker \d on node \d has ", caught.value.message)
    assert "GENCTL_PRODUCTS" in caught.value.hint


def test_a_worker_that_does_not_tell_its_genctl_is_another_one(started: Callable[..., WorkerPool]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return OpenedWorker("node", {}, About("")) if method == "open" else None

    with pytest.raises(ModelError, match=r"worker . on node has genctl another one, and this is genctl"):
        started(behave)


def test_a_worker_on_a_gpu_has_no_products(started: Callable[..., WorkerPool]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "open":
            return OpenedWorker(f"node {number}", {}, About(""), own_genctl(False))
        return well(number, method, arguments)

    assert summary(started(behave).results(groups(5), lambda: False)) == expected(5)


def test_a_machine_without_genctl_is_named_as_one(started: Callable[..., WorkerPool]) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        raise Died("The actor failed to import on the worker.\nModuleNotFoundError: No module named 'genctl'")

    with pytest.raises(ModelError, match=r"worker . cannot import genctl, and this is genctl .*sources "):
        started(behave)


def test_progress_counts_finished_groups_whose_results_wait_for_an_earlier_one(
    started: Callable[..., WorkerPool],
) -> None:
    def behave(number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return opened(number) if method == "open" else DecodedGroup((), tokens=5)

    pool, seen = started(behave, seed=1), list[tuple[int, int]]()
    pool.on_progress = lambda: seen.append((pool.progress().rows, pool.progress().tokens))
    given = sum(group.rows for group in pool.results(groups(30), lambda: False))
    assert max(rows for rows, _ in seen) > 2
    assert seen[-1][1] == sum(worker.tokens for worker in pool.workers) == 5 * given // 2
    assert [tokens for _, tokens in seen] == sorted(tokens for _, tokens in seen)
