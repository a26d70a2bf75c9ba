"""The outside counter on calls whose volume is known, and `zerofold verify` from end to end."""

import json

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from zerofold import verify
from zerofold.bench.gpt import GPT, GPTSize
from zerofold.bench.wire import count_elements

TINY = GPTSize(vocab=64, width=32, layers=2, heads=2, seq=16)


def make_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(verify.verify_command)
    return app


def counted(call) -> float:
    with count_elements() as wire:
        work = call()
    if work is not None and hasattr(work, "wait"):
        work.wait()
    return wire.elements


def volumes_of_collectives() -> dict[str, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    full, piece = torch.ones(12 * world), torch.ones(12)
    pieces = [torch.ones(12) for _ in range(world)]
    uneven = [5 if to == rank else 1 + to for to in range(world)]  # to itself 5, which stay here
    expected = [5 if source == rank else 1 + rank for source in range(world)]
    return {
        "broadcast": counted(lambda: dist.broadcast(full, src=world - 1, async_op=True)),
        "reduce": counted(lambda: dist.reduce(full, dst=0)),
        "scatter": counted(lambda: dist.scatter(piece, pieces if rank == 0 else None, src=0)),
        "gather": counted(lambda: dist.gather(piece, pieces if rank == 0 else None, dst=0)),
        "all_reduce": counted(lambda: dist.all_reduce(full)),
        "all_gather": counted(lambda: dist.all_gather(pieces, piece)),
        "all_gather_into_tensor": counted(lambda: dist.all_gather_into_tensor(full, piece)),
        "reduce_scatter_tensor": counted(lambda: dist.reduce_scatter_tensor(piece, full)),
        "all_to_all_single": counted(lambda: dist.all_to_all_single(torch.empty_like(full), full)),
        "all_to_all_single, uneven": counted(
            lambda: dist.all_to_all_single(torch.empty(sum(expected), 2), torch.ones(sum(uneven), 2), expected, uneven)
        ),
        "barrier": counted(dist.barrier),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_each_collective_counts_what_it_sends(ranks, world):
    by_rank = ranks(world, volumes_of_collectives)
    mean = {name: sum(each[name] for each in by_rank) / world for name in by_rank[0]}
    once = 12 * (world - 1)  # 12 N elements, (N-1)/N of them
    sent_unevenly = [2 * sum(1 + to for to in range(world) if to != rank) for rank in range(world)]
    assert mean == pytest.approx(
        {
            "broadcast": once,
            "reduce": once,
            "scatter": once / world,
            "gather": once / world,
            "all_reduce": 2 * once,
            "all_gather": once,
            "all_gather_into_tensor": once,
            "reduce_scatter_tensor": once,
            "all_to_all_single": once,
            "all_to_all_single, uneven": sum(sent_unevenly) / world,
            "barrier": 0,
        }
    )


def point_to_point_volumes() -> tuple[float, float]:
    rank = dist.get_rank()
    tensor, other = torch.ones(7), 1 - rank
    single = counted(lambda: dist.send(tensor, other) if rank == 0 else dist.recv(tensor, other))
    with count_elements() as wire:
        operation = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, other)]):
            work.wait()
    return single, wire.elements


def test_only_the_sender_counts(ranks):
    assert ranks(2, point_to_point_volumes) == [(7, 7), (0, 0)]


def functions_after_an_error() -> bool:
    before = {name: getattr(dist, name) for name in ("broadcast", "all_reduce", "isend")}
    try:
        with count_elements():
            assert dist.broadcast is not before["broadcast"]
            raise KeyError
    except KeyError:
        pass
    homes = (dist, dist.distributed_c10d)
    return all(getattr(home, name) is function for name, function in before.items() for home in homes)


def test_the_functions_come_back_after_an_error(ranks):
    assert ranks(2, functions_after_an_error) == [True, True]


def test_size_counts_the_parameters_of_the_model():
    assert TINY.parameters == sum(parameter.numel() for parameter in GPT(TINY).parameters())
    assert GPTSize().parameters == pytest.approx(33.6e6, rel=0.01)


def report(**changes) -> verify.RankReport:
    psi = TINY.parameters
    training = {
        "losses": [1.0],
        "elements_per_step": 1.5 * psi,
        "held_bytes": 8 * psi,
        "ledger_bytes": 8 * psi,
    }
    outcome = {"max_abs_diff": 0.0, "loss_diff": 0.0}
    for name, value in changes.items():
        (training if name in training else outcome)[name] = value
    return verify.RankReport(verify.Training(**training), **outcome)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"max_abs_diff": 1e-9}, False),
        ({"max_abs_diff": float("nan")}, False),
        ({"elements_per_step": 1.52 * TINY.parameters}, False),
        ({"ledger_bytes": 10 * TINY.parameters}, False),
        ({"held_bytes": 10 * TINY.parameters}, False),
    ],
)
def test_one_bad_rank_fails_its_stage(changes, ok):
    # At stage 3 on two ranks: 3Ψ/2 sent, 16Ψ/2 bytes held.
    task = verify.Task(stages=(3,), size=TINY)
    assert verify.judge(3, [report(), report(**changes)], task).ok is ok


def compare(task: verify.Task) -> list[verify.RankReport]:
    return verify.compare_with_ddp(task, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_stage_keeps_its_promises(ranks, world, optimizer):
    task = verify.Task(steps=4, optimizer=optimizer)
    by_rank = ranks(world, compare, task)
    for stage, reports in zip(task.stages, zip(*by_rank, strict=True), strict=True):
        assert verify.judge(stage, reports, task).ok, verify.judge(stage, reports, task)


def test_command_prints_json_and_succeeds():
    result = CliRunner().invoke(make_app(), ["--steps", "3", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["ok"]
    assert [each["stage"] for each in summary["stages"]] == [0, 1, 2, 3]
    assert summary["stages"][3]["state_bytes"] < summary["stages"][0]["state_bytes"]


@pytest.mark.parametrize("arguments", [["--stages", "7"], ["--stages", ","], ["--optimizer", "lion"]])
def test_misuse_is_one_line_and_exit_code_2(arguments):
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
