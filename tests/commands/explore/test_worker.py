"""The thread of the model: one command at a time, stopped at the next token, looked at meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from genctl.commands.explore.screen_worker import CommandBegan, CommandDone, DiffersAt, ModelThread, NodeLook
from genctl.errors import UsageError


class Hands:
    """Counts to a hundred, a step each time that it is let."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.paused = False
        self.fails: type[Exception] | None = None

    def do(self, line: str, /) -> Iterator[int]:
        self.paused = False
        for number in range(100):
            self.turns.acquire()
            if self.fails is not None:
                raise self.fails("no")
            if self.paused:
                return
            yield number

    def pause(self) -> None:
        self.paused = True

    def look(self, node: int, /) -> NodeLook:
        return NodeLook(node, 0)

    def differs(self, node: int, /) -> bool:
        return node % 2 == 1


class Heard:
    def __init__(self) -> None:
        self.all: list[object] = []
        self.more = threading.Condition()

    def __call__(self, told: object) -> None:
        with self.more:
            self.all.append(told)
            self.more.notify_all()

    def wait(self, kind: type) -> object:
        with self.more:
            assert self.more.wait_for(lambda: any(isinstance(each, kind) for each in self.all), 10)
            return next(each for each in self.all if isinstance(each, kind))


def working() -> tuple[ModelThread, Hands, Heard]:
    hands, heard = Hands(), Heard()
    worker = ModelThread(hands, heard)
    worker.start()
    return worker, hands, heard


def test_a_second_command_is_refused_while_one_runs() -> None:
    worker, hands, heard = working()
    assert worker.submit(["generate"])
    assert not worker.submit(["undo"])
    heard.wait(CommandBegan)
    worker.stop()
    hands.turns.release(100)
    assert heard.wait(CommandDone) == CommandDone("generate", stopped=True)
    assert worker.close(10)


def test_a_stop_before_the_command_began_stops_it_at_its_first_token() -> None:
    worker, hands, heard = working()
    hands.turns.release(100)
    worker.submit(["generate"])
    worker.stop()
    heard.wait(CommandDone)
    assert sum(isinstance(told, int) for told in heard.all) < 100
    worker.close(10)


def test_a_look_is_answered_between_two_tokens() -> None:
    worker, hands, heard = working()
    worker.submit(["generate"])
    heard.wait(CommandBegan)
    worker.look(3)
    worker.look(4)
    hands.turns.release(1)
    assert heard.wait(NodeLook) == NodeLook(4, 0)
    assert not any(isinstance(told, CommandDone) for told in heard.all)
    worker.stop()
    hands.turns.release(100)
    assert worker.close(10)


def test_commands_after_one_that_fails_are_dropped() -> None:
    worker, hands, heard = working()
    hands.fails = UsageError
    hands.turns.release(100)
    worker.submit(["goto 3", "take 1"])
    assert heard.wait(CommandDone) == CommandDone("goto 3", "no")
    assert not worker.busy
    hands.fails = ZeroDivisionError
    heard.all.clear()
    worker.submit(["generate"])
    assert heard.wait(CommandDone) == CommandDone("generate", "unexpected ZeroDivisionError: no", "this is a bug")
    worker.close(10)


def test_nodes_are_compared_while_there_is_nothing_else_to_do() -> None:
    worker, _, heard = working()
    worker.compare([1, 2, 3])
    assert heard.wait(DiffersAt) == DiffersAt({1: True, 2: False, 3: True})
    worker.close(10)
