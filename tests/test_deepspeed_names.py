"""The stand-in for the name `deepspeed`: the same modules under both names, one line for what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerofold.compat import deepspeed as stand_in

SOURCE = Path(__file__).parent.parent / "src"


def run(code: str, *, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


SAME_OBJECTS = """
import sys, importlib, importlib.metadata, importlib.util
import zerofold.compat.deepspeed as ours
assert importlib.util.find_spec("deepspeed") is not None
import deepspeed
import deepspeed.ops.adam, deepspeed.comm.comm, deepspeed.runtime.zero.stage3
from deepspeed.ops.adam import FusedAdam
from deepspeed import comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
assert deepspeed is ours and deepspeed.ops.adam is ours.ops.adam and FusedAdam is ours.ops.adam.FusedAdam
assert DeepSpeedEngine is deepspeed.DeepSpeedEngine and dist is deepspeed.comm
twice = [name for name in sys.modules if name.startswith("deepspeed.") and
         sys.modules[name] is not sys.modules["zerofold.compat." + name]]
assert not twice, twice
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.8+zerofold"
assert not hasattr(deepspeed, "init_inference") and not hasattr(deepspeed.utils, "anything")
for line in ("import deepspeed.moe.layer", "from deepspeed import PipelineModule", "from deepspeed.ops import lamb",
             "deepspeed.init_inference()", "import deepspeed.nothing", "from deepspeed.runtime import nothing"):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        assert "the zerofold stand-in does not have it" in str(error) and "\\n" not in str(error), error
        print(error)
    else:
        raise AssertionError(line)
"""


def test_both_names_are_one_package() -> None:
    done = run(SAME_OBJECTS, path=[stand_in.stand_in_folder(), SOURCE])
    assert done.returncode == 0, done.stderr
    assert "deepspeed.moe.layer: the zerofold stand-in does not have it (expert parallelism" in done.stdout


INSTALLED = """
import sys, types
import zerofold.compat.deepspeed as ours
ours.install(); ours.install()
import deepspeed
assert deepspeed is ours and sys.path.count(str(ours.stand_in_folder())) == 1
other = types.ModuleType("deepspeed"); other.__file__ = "elsewhere/deepspeed/__init__.py"
sys.modules["deepspeed"] = other
try:
    ours.install()
except RuntimeError as error:
    print(error)
"""


def test_install_comes_first_or_says_so() -> None:
    done = run(INSTALLED, path=[SOURCE])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("deepspeed is already imported from elsewhere/deepspeed/__init__.py: call zerofold")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stand_in.ops.adam.FusedAdam([], bias_correction=False), "FusedAdam: bias_correction=False is not"),
        (lambda: stand_in.ops.adam.FusedAdam([], amsgrad=True), "FusedAdam: amsgrad=True is not available"),
        (lambda: stand_in.ops.adagrad.DeepSpeedCPUAdagrad([], amsgrad=True), "amsgrad=True with fp32_optimizer_states"),
        (lambda: stand_in.utils.set_z3_leaf_modules(stand_in_model(), ["Missing"]), "has no module of ['Missing']"),
        (lambda: stand_in.zero.register_external_parameter(1, 2), "wants a torch.nn.Module and a parameter"),
    ],
)
def test_refusals_name_the_value(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        make()  # type: ignore[operator]
    assert message in str(raised.value)


def stand_in_model() -> object:
    import torch

    return torch.nn.Linear(2, 2)
