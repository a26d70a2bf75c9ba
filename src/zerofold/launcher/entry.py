"""What each rank's process runs first. Started by path and not as a module, so that nothing of torch or zerofold is
imported before the script: a script may set variables that torch reads while it is imported.

    python entry.py OPTIONS TARGET ARGUMENTS...     OPTIONS: a JSON object, see `main`
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def main(argv: Sequence[str]) -> None:
    options: dict[str, Any] = json.loads(argv[1])
    target, arguments = argv[2], list(argv[3:])
    end_with_parent()
    tell_process_number()
    local_rank = int(os.environ["LOCAL_RANK"])
    if options["bind"]:
        cores = slice_of(options["cores"], local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if options["local_rank_argument"]:
        arguments.insert(0, f"--local_rank={local_rank}")
    if options["kind"] == "program":
        run_program(target, arguments)
    try:
        run = run_module if options["kind"] == "module" else run_script
        run(target, arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            record(end, without_this_file(end))
        raise
    except BaseException as error:
        trace = without_this_file(error)
        record(error, trace)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def run_script(path: str, arguments: list[str]) -> None:
    """As `python path arguments`: the same sys.argv, sys.path[0] and __main__."""
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """As `python -m name arguments`."""
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_program(path: str, arguments: list[str]) -> NoReturn:
    try:
        os.execvp(path, [path, *arguments])
    except OSError as error:
        print(f"{path} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


def slice_of(cores: Sequence[int], local_rank: int, local_world: int) -> list[int]:
    """This rank's share, in order; shares differ by one core at most.

    >>> [slice_of([0, 1, 2, 3, 4], rank, 2) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return list(cores[local_rank * len(cores) // local_world : (local_rank + 1) * len(cores) // local_world])


def end_with_parent() -> None:
    """When the agent is killed nobody is left to end this process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell_process_number() -> None:
    """Beside the error file, for the agent: see watch.py."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(f"{file}.pid", "w", encoding="utf-8") as out:
            out.write(str(os.getpid()))


def without_this_file(error: BaseException) -> types.TracebackType | None:
    """The traceback as it would be under plain Python: without the frames that stand here and in runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def exit_code_of(error: BaseException) -> int:
    """That of the process that ends by it; a signal is negative.

    >>> exit_code_of(SystemExit(3)), exit_code_of(SystemExit("no data")), exit_code_of(ValueError())
    (3, 1, 1)
    """
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def record(error: BaseException, trace: types.TracebackType | None) -> None:
    """In the file and the format that torch's elastic agent reads, with the time in full."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    extra = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "time": time.time(),
        "exit_code": exit_code_of(error),
    }
    # The error itself matters more than a full disk.
    with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as out:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, out)


if __name__ == "__main__":
    main(sys.argv)
