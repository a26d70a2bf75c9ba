"""How the name `deepspeed` comes to mean this package: a folder on the path, and one finder for the submodules.

    stand_in/deepspeed/__init__.py           found by `import deepspeed`; puts this package under that name
    stand_in/deepspeed-….dist-info/METADATA  found by importlib.metadata, which Transformers and Accelerate ask
    StandInFinder                            `deepspeed.ops.adam` is the module object of `<this package>.ops.adam`

A second copy of a module under the other name would bring second classes, and `isinstance` would fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from zerofold.compat.deepspeed.refusals import PACKAGE, absent, does_not_have, is_deferred, missing

NAME = "deepspeed"


def stand_in_folder() -> Path:
    """The folder that makes `import deepspeed` mean zerofold in any program that has it first on PYTHONPATH.

    >>> sorted(entry.name for entry in stand_in_folder().iterdir())
    ['deepspeed', 'deepspeed-0.19.8+zerofold.dist-info']
    """
    return Path(__file__).parent.parent / "stand_in"


def install() -> None:
    """From here on `import deepspeed` gives zerofold, in this process; call it before transformers and accelerate.

    It does not matter whether DeepSpeed is installed. Programs that take no change get the same with the folder of
    `stand_in_folder()` first on PYTHONPATH, which is what `zerofold launch --as-deepspeed` does.

    >>> import sys, zerofold.compat.deepspeed as stand_in
    >>> had = list(sys.path)
    >>> stand_in.install()
    >>> import deepspeed.ops.adam
    >>> deepspeed is stand_in, deepspeed.ops.adam is stand_in.ops.adam
    (True, True)
    >>> sys.path[:] = had
    """
    present = sys.modules.get(NAME)
    if present is not None and present is not sys.modules.get(PACKAGE):
        raise RuntimeError(
            f"deepspeed is already imported from {present.__file__}: call zerofold.compat.deepspeed.install() before "
            "the first import of deepspeed, accelerate, transformers or peft"
        )
    accelerate = sys.modules.get("accelerate.accelerator")
    if accelerate is not None and not hasattr(accelerate, "DeepSpeedEngineWrapper"):
        raise RuntimeError(
            "accelerate was imported before and has found no deepspeed: call zerofold.compat.deepspeed.install() "
            "before importing accelerate or transformers"
        )
    folder = str(stand_in_folder())
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    importlib.invalidate_caches()
    importlib.import_module(NAME)


def answer_to(name: str) -> None:
    """Puts this package under `name` too, and every submodule with it."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
    sys.modules[name] = importlib.import_module(PACKAGE)


class StandInFinder(MetaPathFinder):
    """Finds `deepspeed.<inner>` as `zerofold.compat.deepspeed.<inner>`, and says which name is missing otherwise."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{NAME}."):
            real = PACKAGE + fullname.removeprefix(NAME)
            found = importlib.util.find_spec(real)
            assert found is not None  # a missing one was refused below
            return ModuleSpec(fullname, _SameModule(real), is_package=found.submodule_search_locations is not None)
        if fullname.startswith(f"{PACKAGE}.") and PathFinder.find_spec(fullname, path) is None:
            if is_deferred(fullname.removeprefix(f"{PACKAGE}.")):
                return ModuleSpec(fullname, _AbsentModule(), is_package=True)
            # Under the short name: `from deepspeed import x` lets an error pass only for a name it has not tried.
            raise ModuleNotFoundError(does_not_have(fullname), name=NAME + fullname.removeprefix(PACKAGE))
        return None


class _AbsentModule(Loader):
    """A module of a feature that is missing: whatever is asked of it can be named, and raises when it is used."""

    def exec_module(self, module: ModuleType) -> None:
        def name_it(name: str) -> Any:
            if name.startswith("__"):
                raise missing(module.__name__, name)
            return absent(module.__name__, name)

        vars(module)["__getattr__"] = name_it


class _SameModule(Loader):
    def __init__(self, real: str) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.real)
