"""The stand-in for the name `deepspeed`: the same modules under both names, one line for what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zerofold as zf
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
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.pipe import LayerSpec, PipelineModule
assert split({"params": []}) == [{"params": []}] and not isinstance(deepspeed, (MoE, deepspeed.PipelineModule))
class Pipe(PipelineModule):
    pass
for line in ("MoE(hidden_size=8)", "Pipe(layers=[])", "deepspeed.moe.layer.MoE()", "deepspeed.PipelineModule()",
             "from deepspeed.ops.op_builder import CPUAdamBuilder", "from deepspeed.ops import lamb",
             "deepspeed.init_inference()", "import deepspeed.nothing", "from deepspeed.runtime import nothing"):
    try:
        exec(line)
    except (ImportError, AttributeError, NotImplementedError) as error:
        assert "the zerofold stand-in does not have it" in str(error) and "\\n" not in str(error), error
        print(error)
    else:
        raise AssertionError(line)
"""


def test_both_names_are_one_package() -> None:
    done = run(SAME_OBJECTS, path=[stand_in.stand_in_folder(), SOURCE])
    assert done.returncode == 0, done.stderr
    assert "deepspeed.moe.layer.MoE: the zerofold stand-in does not have it (expert parallelism" in done.stdout


INSTALLED = """
import sys, types
import zerofold.compat.deepspeed as ours
ours.install(); ours.install()
import deepspeed
assert deepspeed is ours and sys.path.count(str(ours.stand_in_folder())) == 1
sys.modules["accelerate.accelerator"] = types.ModuleType("accelerate.accelerator")
try:
    ours.install()
except RuntimeError as error:
    print(error)
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
    without, other = done.stdout.splitlines()
    assert without.startswith("accelerate was imported before and has found no deepspeed: call zerofold.compat")
    assert other.startswith("deepspeed is already imported from elsewhere/deepspeed/__init__.py: call zerofold.compat")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stand_in.ops.adam.FusedAdam([], bias_correction=False), "FusedAdam: bias_correction=False is not"),
        (lambda: stand_in.ops.adam.FusedAdam([], amsgrad=True), "FusedAdam: amsgrad=True is not available"),
        (lambda: stand_in.ops.adagrad.DeepSpeedCPUAdagrad([], amsgrad=True), "amsgrad=True with fp32_optimizer_states"),
        (lambda: stand_in.zero.register_external_parameter(1, 2), "wants a torch.nn.Module and a parameter"),
    ],
)
def test_refusals_name_the_value(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        make()  # type: ignore[operator]
    assert message in str(raised.value)


def an_engine(stage: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **options,
    }
    engine, *_ = stand_in.initialize(model=model, config=config)
    return engine


def train(engine: Any, steps: int = 2) -> None:
    kind = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 16, dtype=kind)).float().square().mean())
        engine.step()


def written_by_one_rank_alone(stage: int) -> list[Any]:
    """What scripts do at stages 1 and 2: no other rank takes part."""
    engine = an_engine(stage, bf16={"enabled": True})
    train(engine)
    state = {}
    if dist.get_rank() == 0:
        state = stand_in.checkpoint.utils.clone_tensors_for_torch_save(engine.module.state_dict())
    dist.barrier()
    masters = dict(zf.full_tensors(engine.module))
    kinds = {(type(value), value.dtype) for value in state.values()}
    same = all(torch.equal(state[name], masters[name].bfloat16()) for name in state)
    again = an_engine(stage, bf16={"enabled": True})
    again.module.load_state_dict({name: value.bfloat16() for name, value in masters.items()})
    loaded = [torch.equal(zf.full(p), masters[name].bfloat16().float()) for name, p in again.module.named_parameters()]
    engine.destroy(), again.destroy()
    return [len(state), kinds, same, all(loaded)]


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_alone_can_write_the_model_where_parameters_are_whole(ranks: Any, stage: int) -> None:
    first, second = ranks(2, written_by_one_rank_alone, stage)
    assert first == [6, {(torch.Tensor, torch.bfloat16)}, True, True]
    assert second[3]


def hooks_are_taken_off_and_put_on_again() -> list[Any]:
    """As TRL does around generation at stage 3."""
    engine = an_engine(3)
    train(engine, 1)
    held = engine.optimizer.parameter_offload
    with stand_in.zero.GatheredParameters(list(engine.module.parameters())):
        for _, parameter in [*held.module.named_parameters(), *held.module.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in held.forward_hooks + held.backward_hooks:
            hook.remove()
        held.forward_hooks, held.backward_hooks = [], []
        with torch.no_grad():
            inside = engine.module(torch.ones(2, 16))
        held._register_deepspeed_module(held.module)
    with torch.no_grad():
        outside = engine.module(torch.ones(2, 16))
    train(engine, 1)
    found = [torch.equal(inside, outside), engine.global_steps, hasattr(an_engine(1).optimizer, "parameter_offload")]
    engine.destroy()
    return found


def test_code_that_takes_hooks_off_finds_none(ranks: Any) -> None:
    assert ranks(2, hooks_are_taken_off_and_put_on_again) == [[True, 2, False]] * 2


def weights_come_out_of_a_checkpoint(folder: Path) -> list[Any]:
    from_checkpoint = stand_in.utils.zero_to_fp32
    engine = an_engine(3)
    train(engine)
    engine.save_checkpoint(folder)
    whole = dict(zf.full_tensors(engine.module))
    engine.destroy()
    read = from_checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder)
    fresh = from_checkpoint.load_state_dict_from_zero_checkpoint(nn.Sequential(), folder, tag="global_step2")
    if dist.get_rank() == 0:
        from_checkpoint.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "bin")
        from_checkpoint.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "safe", safe_serialization=True)
        files = [torch.load(folder / "bin" / "pytorch_model.bin"), load_file(folder / "safe" / "model.safetensors")]
    else:
        files = []
    agree = all(torch.equal(each[name], whole[name]) for each in [read, *files] for name in whole)
    return [agree, sorted(read) == sorted(whole), len(fresh.state_dict())]


def test_zero_to_fp32_reads_what_the_engine_wrote(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, weights_come_out_of_a_checkpoint, tmp_path) == [[True, True, 0]] * 2


def engine_outlives_its_group() -> bool:
    engine = an_engine(2)
    train(engine, 1)
    dist.destroy_process_group()  # Accelerate's end_training, before free_memory
    engine.destroy()
    return not hasattr(engine.module, "_zerofold_engine")


def test_an_engine_can_end_after_its_process_group(ranks: Any) -> None:
    assert ranks(1, engine_outlives_its_group) == [True]


def pad_by_nothing() -> list[Any]:
    """Transformers does so to the bias of a tied head, in from_pretrained."""
    torch.manual_seed(dist.get_rank())
    with stand_in.zero.Init():
        model = nn.Linear(4, 6)
    before = zf.full(model.bias)
    model.bias.data = nn.functional.pad(model.bias.data, (0, 0), "constant", 0)
    return [type(model.bias).__name__, torch.equal(zf.full(model.bias), before)]


def test_a_cut_bias_can_be_padded_by_nothing(ranks: Any) -> None:
    assert ranks(2, pad_by_nothing) == [["ShardedParameter", True]] * 2
