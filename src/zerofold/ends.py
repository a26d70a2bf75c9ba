"""When calls to other ranks end, seen by a thread of Python's own.

A callback on such a call would be simpler, and would end finished scripts with an abort: the backend's thread asks for
the interpreter's lock to run it, and once more to let go of it. A call may be under way when the script ends, and a
thread that asks an interpreter that is gone is ended where it stands, which C++ takes for an error. So the one
thread that waits is ended before the interpreter is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

# gloo can be waited for in slices; asking again after one that was too short costs nothing and breaks nothing.
SLICE = timedelta(seconds=0.5)


class Ends:
    """Of one group's calls, which end in the order in which they begin, or nearly so.

    >>> seen = []
    >>> class Work:
    ...     def wait(self, timeout): seen.append(timeout)
    >>> ends = Ends()
    >>> ends.watch(Work(), seen.append)
    >>> while len(seen) < 2: time.sleep(0.01)
    >>> seen[0] == SLICE, seen[1] <= time.perf_counter()
    (True, True)
    >>> ends.close()
    """

    def __init__(self) -> None:
        self._begun: SimpleQueue[Any] = SimpleQueue()
        is_over = threading.Event()
        thread = threading.Thread(target=_run, args=(self._begun, is_over), name="zerofold wire", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._begun, is_over, thread)  # at exit at the latest

    def watch(self, work: Any, tell: Callable[[float], None]) -> None:
        """Tells the time on `time.perf_counter()` when `work` is over."""
        self._begun.put((work, tell))

    def close(self) -> None:
        """What is under way is not waited for longer than a slice: the other ranks may never come."""
        self._end()


def _run(begun: SimpleQueue[Any], is_over: threading.Event) -> None:
    while (item := begun.get()) is not None:
        work, tell = item
        while not is_over.is_set():
            if _has_ended(work):
                tell(time.perf_counter())
                break
        del item, work, tell  # tensors, which would be held until the next call


def _has_ended(work: Any) -> bool:
    try:
        work.wait(SLICE)
    except RuntimeError:  # it has failed, which whoever uses the result is told, or the slice was too short
        return bool(work.is_completed())
    return True


def _end(begun: SimpleQueue[Any], is_over: threading.Event, thread: threading.Thread) -> None:
    is_over.set()
    begun.put(None)
    if thread is not threading.current_thread():  # where garbage is collected is nobody's choice
        thread.join()
