"""How fast the host updates AdamW states, as a share of a plain copy.

By threads and cores while the calling thread is busy, as in training: "caller" is how many small operations it got
done. By size of blocks while it sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zerofold.bench.io_rows import Rate, with_shares
from zerofold.memory.host import usable_cores
from zerofold.optim import adam_cpu
from zerofold.optim.host_speed import HostSpeed, host_candidates, measure_host_update, try_host_updates
from zerofold.optim.host_worker import HostWorker
from zerofold.optim.onepass import AdamSettings, AdamTensors

PART = "host update"
ROUNDS = 5  # the fastest counts
STATE_BYTES = 16  # of a parameter: bf16 gradient and copy, fp32 master and moments
MOVED_BYTES = 28  # the gradient is read, the copy written, the rest both
BLOCKS = tuple(2**power for power in range(16, 22))
SETTINGS = AdamSettings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def host_rates(nbytes: int) -> list[Rate]:
    """Updates of states of `nbytes` in all."""
    elements = max(1, nbytes // STATE_BYTES)
    cores = usable_cores()
    copy = Rate(PART, "plain copy", _copy_gb_per_s(elements, cores), note=_threads(cores))
    ladder: list[tuple[int, frozenset[int] | None]] = [
        (2**power, None) for power in range(cores.bit_length()) if 2**power <= cores
    ]
    candidates = dict.fromkeys([*ladder, *host_candidates()])
    trials = try_host_updates(elements, sorted(candidates, key=lambda each: (each[1] is not None, each[0])))
    rates = [
        Rate(
            PART,
            _name(trial.speed),
            trial.speed.parameters_per_second * MOVED_BYTES / 1e9,
            note=f"{trial.speed.parameters_per_second / 1e9:.2f}e9 params/s; caller {trial.caller_rate / 1e3:.0f}k/s",
        )
        for trial in trials
    ]
    chosen = measure_host_update(elements)
    rates.append(Rate(PART, "chosen", chosen.parameters_per_second * MOVED_BYTES / 1e9, note=_name(chosen)))
    rates += _block_rates(elements, chosen)
    return with_shares([copy, *rates], copy)


def _name(speed: HostSpeed) -> str:
    return _threads(speed.threads) + ("" if speed.cores is None else ", bound")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _copy_gb_per_s(elements: int, threads: int) -> float:
    source, target = torch.zeros(elements), torch.zeros(elements)
    return 8 * elements / _seconds(lambda: target.copy_(source), HostSpeed(threads, None, 0.0)) / 1e9


def _block_rates(elements: int, how: HostSpeed) -> list[Rate]:
    fp32 = [torch.zeros(elements) for _ in range(3)]
    bf16 = [torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2)]
    states = AdamTensors(fp32[0], bf16[0], fp32[1], fp32[2], bf16[1], step=1, seed=0)
    rates = []
    for block in BLOCKS:

        def update(block: int = block) -> None:
            adam_cpu.update([states], SETTINGS, None, None, block=block)

        name, note = f"blocks of 2**{block.bit_length() - 1}", "the size in use" if block == adam_cpu.BLOCK else ""
        rates.append(Rate(PART, name, MOVED_BYTES * elements / _seconds(update, how) / 1e9, note=note))
    return rates


def _seconds(run: Callable[[], object], how: HostSpeed) -> float:
    """The fastest of some rounds, with this thread asleep."""
    worker, seconds = HostWorker(how.threads, how.cores), []

    def timed() -> None:
        begin = time.perf_counter()
        with torch.no_grad():
            run()
        seconds.append(time.perf_counter() - begin)

    for _ in range(ROUNDS):
        worker.submit(timed)
    worker.close()
    return min(seconds)
