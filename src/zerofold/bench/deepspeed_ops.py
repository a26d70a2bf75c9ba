"""DeepSpeed compiles its kernels where it runs, at first use: what a build needs, and why one failed."""

from __future__ import annotations

import importlib
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

LONGEST_REASON = 300


@cache
def build_op(builder: str) -> str | None:
    """Compile and load one op, by the name of its builder. None if it works, the reason if not.

    One try: a failure may take a minute.
    """
    _prepare_environment()
    try:
        ops: Any = importlib.import_module("deepspeed.ops.op_builder")
        getattr(ops, builder)().load(verbose=True)  # or it keeps to itself what is missing
    except Exception as error:  # no compiler, another CUDA version, a header that is missing, a compile error
        return f"{builder.removesuffix('Builder')} cannot be built: {reason_of(error)}"
    return None


def _prepare_environment() -> None:
    """torch finds ninja and nvcc by PATH, and a venv that nobody activated is not on it."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    beside_python = str(Path(sys.executable).parent)
    if beside_python not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, beside_python])
    if torch.cuda.is_available():
        # For this GPU alone: the list that DeepSpeed makes up can name architectures that the compiler has dropped, and
        # it does not read names such as "9.0a", which compilers take.
        chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        if not chosen or re.search(r"\d[a-z]", chosen):
            os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
    # A CUDA compiler of another minor version than torch's is worth a try: if it does not do, the compiler tells.
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")


def forget_broken_builds(since: float) -> None:
    """Remove the locks of builds that were killed: the next build of the op would wait for ever.

    `since` is when the killed process started, in seconds since the epoch; older locks are somebody else's.
    """
    from torch.utils.cpp_extension import get_default_build_root  # slow, and only needed after a failure

    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = Path(chosen).glob("*/lock") if chosen else Path(get_default_build_root()).glob("*/*/lock")
    for lock in locks:
        if lock.stat().st_mtime >= since:
            lock.unlink()


def reason_of(error: BaseException) -> str:
    """The line of a failed build that tells most: the compiler's first error, else the first line of the message.

    >>> reason_of(RuntimeError("Error building extension 'x':\\n[1/2] g++ ...\\nx.cpp:1:10: fatal error: no x.h"))
    'RuntimeError: x.cpp:1:10: fatal error: no x.h'
    >>> reason_of(ImportError("no ninja"))
    'ImportError: no ninja'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    telling = next((line for line in lines if "error:" in line.lower() or "cannot find" in line), lines[0])
    return f"{type(error).__name__}: {telling}"[:LONGEST_REASON]
