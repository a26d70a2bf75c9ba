"""Functions that a user names as module:function: found, called, and what is said where they raise."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def find_function(option: str, name: str) -> Callable[..., Any]:
    """`option` is what an error speaks of."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{option} {name!r} must be module:function, such as my_models:build")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: a file beside where the command is run
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{option} {name}: {error}; is it installed, or in this folder?") from None
    except Exception as error:
        raise ValueError(f"{option} {name}: importing it raised {said_of(error)}") from error
    make = getattr(found, attribute, None)
    if not callable(make):
        raise ValueError(f"{option} {name}: {module} has no function {attribute!r}")
    return call_of(option, name, make)


def call_of(option: str, name: str, function: Callable[..., Any], what: str = "it") -> Callable[..., Any]:
    """The same function, whose errors are one line."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(f"{option} {name}: {what} raised {said_of(error)}") from error

    return call


def said_of(error: BaseException) -> str:
    """What, and the last line of the user's own code that led there.

    >>> def bad(): raise KeyError("oops")
    >>> try: bad()
    ... except KeyError as error: said_of(error).startswith("KeyError: 'oops'")
    True
    """
    first = (str(error).strip().splitlines() or [""])[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first}{where}"


def _is_users(file: str) -> bool:
    path = Path(file)
    ours = Path(__file__).parent.parent
    return path.is_file() and ours not in path.parents and not {"site-packages", "importlib"} & set(path.parts)
