"""Kills training jobs at random moments, with SIGKILL, and looks at what is left: python -m tests.kill_loop --kills 200

Each kill takes one rank or the whole job; half of them wait for a save to be under way. After each, the newest
checkpoint must be whole, none may have been lost, a surviving rank must end by itself, and the next life must go on at
the step of that checkpoint. A run that reaches its end must have the metrics, weights and optimizer states of one that
was never killed, to the bit; then the next run begins.

Importing torch takes seconds, so ranks are forked from this process, which has imported it and started no thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # which the first optimizer of a process imports: in each life that took longer than the training
import torch.distributed as dist

from zerofold.checkpoint import save
from zerofold.checkpoint.manifest import TEMPORARY, candidates
from zerofold.checkpoint.native import read_native, verify_native
from zerofold.train import loop
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import MEASURED
from zerofold.train.options import METRICS_FILE, TrainOptions

WORLD, STEPS, SAVE_EVERY = 2, 40, 2
ENDS_WITHIN_S, LONGEST_RUN_S = 30.0, 300.0
LIFE_S = 1.2  # of a job until it is killed, at most; a save may be waited for
TINY = GPTConfig(layers=1, hidden=16, heads=2, seq=16)


@dataclass
class Tally:
    kills: int = 0
    of_one_rank: int = 0
    in_a_save: int = 0
    runs: int = 0
    longest_end_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Run:
    """One training run, in as many lives as it takes."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self.log = folder / "log"
        self.lives = 0
        self.saved_step = 0  # the newest checkpoint after the last kill
        folder.mkdir(parents=True)

    def start(self) -> list[int]:
        self.lives += 1
        store = self.out.parent / f"store{self.lives}"
        return [self._fork(rank, store) for rank in range(WORLD)]

    def _fork(self, rank: int, store: Path) -> int:
        process = os.fork()
        if process:
            return process
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)  # line by line, or a kill would take the last ones along
            timeout = timedelta(seconds=ENDS_WITHIN_S)
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD, timeout=timeout
            )
            options = TrainOptions(
                out=self.out,
                resume=True,
                gpt=TINY,
                steps=STEPS,
                batch=1,
                save_every=SAVE_EVERY,
                sample_bytes=1,
            )
            loop.train(options, rank, WORLD, torch.device("cpu"))
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    @property
    def checkpoints(self) -> list[Path]:
        return candidates(self.out / "checkpoints") if (self.out / "checkpoints").is_dir() else []

    @property
    def last_step(self) -> int:
        return int(self.checkpoints[0].name.removeprefix("step-")) if self.checkpoints else 0

    def resumed_steps(self) -> list[int]:
        """The step after which each life went on, as far as they came to say so."""
        if not self.log.exists():
            return []
        said = [line for line in self.log.read_text().splitlines() if line.startswith("Training a GPT")]
        found = [re.search(r"after step (\d+)", line) for line in said]
        return [int(match[1]) if match else 0 for match in found]

    def outcome(self) -> tuple[list[str], dict[str, bytes]]:
        """What must be the same whether it was killed or not."""
        lines = [json.loads(line) for line in (self.out / METRICS_FILE).read_text().splitlines()]
        timed = {"seconds", "tokens_per_second", "comm_bytes", "state_bytes", *MEASURED}
        contents = read_native(self.out / "checkpoints")
        stored = {f"model {name}": tensor for name, tensor in contents.tensors.items()}
        for name, states in contents.optimizers[0].states.items():
            stored |= {f"{state} of {name}": held for state, held in states.items() if hasattr(held, "read")}
        tensors = {k: t.read(0, torch.Size(t.shape).numel()).numpy().tobytes() for k, t in stored.items()}
        return [str({name: line[name] for name in line if name not in timed}) for line in lines], tensors


def kill_loop(kills: int, seed: int, folder: Path) -> Tally:
    random.seed(seed)
    tally, number = Tally(), 0
    reference = Run(folder / "reference")
    if any(os.waitpid(process, 0)[1] for process in reference.start()):
        raise RuntimeError(f"the run without kills failed:\n{reference.log.read_text()}")
    expected = reference.outcome()
    while tally.kills < kills or number == 0:
        run, number = Run(folder / f"run{number}"), number + 1
        while not live_and_die(run, tally, kills):
            check_after_kill(run, tally)
        tally.runs += 1
        if run.outcome() != expected:
            tally.problems.append(f"{run.out}: not the outcome of the run without kills")
        if not tally.problems:
            shutil.rmtree(run.out.parent)
    return tally


def live_and_die(run: Run, tally: Tally, kills: int) -> bool:
    """One life; whether it came to the end of the run."""
    before, said_before = run.last_step, len(run.resumed_steps())
    processes: dict[int, int | None] = dict.fromkeys(run.start())
    was_killed = tally.kills < kills and wait_for_the_moment(run, processes)
    if was_killed:
        tally.in_a_save += is_saving(run)
        victims = list(processes) if random.random() < 0.4 else [random.choice(list(processes))]
        for process in victims:
            os.kill(process, signal.SIGKILL)
        tally.kills += 1
        tally.of_one_rank += len(victims) == 1
        if len(run.resumed_steps()) == said_before:
            # Ranks that have not met yet wait for each other until a time-out; a launcher ends them, and so do we.
            for process in processes:
                os.kill(process, signal.SIGKILL)
    killed_at = time.monotonic()
    while not ended(processes):
        time.sleep(0.002)
        if time.monotonic() - killed_at > ENDS_WITHIN_S + (0 if was_killed else LONGEST_RUN_S):
            for process in [each for each, code in processes.items() if code is None]:
                os.kill(process, signal.SIGKILL)
            raise RuntimeError(f"a rank does not end:\n{run.log.read_text()[-3000:]}")
    if was_killed:
        tally.longest_end_s = max(tally.longest_end_s, time.monotonic() - killed_at)
    elif any(processes.values()):
        raise RuntimeError(f"a run failed without a kill:\n{run.log.read_text()[-3000:]}")
    said = run.resumed_steps()[said_before:]
    if said and said[0] != before:
        tally.problems.append(f"{run.out}: went on after step {said[0]}, and the last checkpoint was of step {before}")
    return not any(processes.values())


def wait_for_the_moment(run: Run, processes: dict[int, int | None]) -> bool:
    """Returns at a random moment, half of the times in a save; False if the run came to its end before."""
    waits_for_save = random.random() < 0.5
    moment = time.monotonic() + random.uniform(0, LIFE_S)
    while time.monotonic() < moment or (waits_for_save and not is_saving(run)):
        if ended(processes):
            return False
        time.sleep(0.002)
    if waits_for_save:
        time.sleep(random.uniform(0, 0.02))
    return not any(code is not None for code in processes.values()) and not ended(processes)


def ended(processes: dict[int, int | None]) -> bool:
    """Notes the exit codes of those that have ended; whether all have."""
    for process in [each for each, code in processes.items() if code is None]:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            processes[process] = os.waitstatus_to_exitcode(status)
    return None not in processes.values()


def is_saving(run: Run) -> bool:
    folder = run.out / "checkpoints"
    return folder.is_dir() and any(name.startswith(TEMPORARY) for name in os.listdir(folder))


def check_after_kill(run: Run, tally: Tally) -> None:
    for checkpoint in run.checkpoints:
        for problem in verify_native(checkpoint):
            tally.problems.append(f"after kill {tally.kills}: {problem}")
    if run.last_step < run.saved_step:
        tally.problems.append(f"{run.out}: step {run.saved_step} had been saved, and now {run.last_step} is the newest")
    run.saved_step = run.last_step


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill training jobs at random moments and look at what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # no pool of threads, which a fork would not copy
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    text = loop.library_source()[: 2**20]
    loop.library_source = lambda: text  # type: ignore[attr-defined]
    save.MEETING = timedelta(seconds=2)  # nobody ends a rank that waits for one that was killed while they connect
    folder = Path(tempfile.mkdtemp(prefix="zerofold-kill-"))
    start = time.monotonic()
    tally = kill_loop(options.kills, options.seed, folder)
    verdict = "every run equal to the one without kills to the bit, every checkpoint whole, none lost"
    print(
        f"{tally.kills} kills ({tally.of_one_rank} of one rank, {tally.kills - tally.of_one_rank} of the whole job; "
        f"{tally.in_a_save} during a save) in {tally.runs} runs of {STEPS} steps: "
        f"{f'{len(tally.problems)} problems' if tally.problems else verdict}; "
        f"all ranks had ended {tally.longest_end_s:.1f} s after a kill at the latest; {time.monotonic() - start:.0f} s"
    )
    for problem in tally.problems:
        print(f"  {problem}")
    if not tally.problems:
        shutil.rmtree(folder)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
