"""A generator in a process of its own: what it yields arrives one by one, so that whoever is killed keeps the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from zerofold.launch import how_it_ended, one_line

T = TypeVar("T")


class StreamFailed(RuntimeError):
    """The generator raised or its process died; the message is one line."""


@dataclass(frozen=True)
class _Raised:
    message: str


class _Done:
    """Nothing more comes."""


class Stream(Generic[T]):
    """Starts a process that imports what the function needs, and waits there for `begin`, or for somebody to iterate.

    So the next process can come up while the last one has the device to itself. None outlives this process.

    >>> with Stream(range, 3) as numbers:
    ...     print(list(numbers))
    [0, 1, 2]
    """

    def __init__(self, function: Callable[..., Iterable[T]], *arguments: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()  # or its death would not close the pipe
        self._has_begun = False

    def begin(self) -> None:
        """What it yields waits in the pipe until somebody asks for it."""
        if not self._has_begun:
            self._has_begun = True
            with suppress(BrokenPipeError):  # it has died already: whoever iterates is told
                self._pipe.send("begin")

    def __iter__(self) -> Iterator[T]:
        self.begin()
        try:
            while not isinstance(item := self._pipe.recv(), _Done):
                if isinstance(item, _Raised):
                    raise StreamFailed(item.message)
                yield item
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise StreamFailed(how_it_ended(self._process.exitcode)) from None

    def end(self) -> None:
        """Its process is gone when this returns, and with it all memory that it had. A second time does nothing."""
        self._pipe.close()
        self._process.kill()  # it has said all that it has to say, or nobody listens any more
        self._process.join()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _serve(pipe: Connection, function: Callable[..., Iterable[Any]], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.recv()
    except EOFError:
        return  # nobody wants to know
    try:
        for item in function(*arguments):
            pipe.send(item)
        pipe.send(_Done())
    except Exception as error:
        pipe.send(_Raised(one_line(error)))
