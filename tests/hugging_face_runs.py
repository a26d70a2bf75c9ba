"""Starts the jobs of hugging_face_jobs.py on two gloo ranks, on the stand-in or on DeepSpeed from PyPI.

python tests/hugging_face_runs.py zerofold 3/trainer,3/lora     # stage/job; prints what rank 0 found
python tests/hugging_face_runs.py deepspeed 3/trainer
python tests/hugging_face_runs.py record                        # makes tests/data/hugging_face.json again
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE / "data" / "hugging_face.json"
SOURCE = HERE.parent / "src"
RANKS = 2
# In every test run: some where DeepSpeed may be installed too, the others where it is not. Further ones take longer.
BESIDE = ["1/trainer", "2/trainer"]
ALONE = ["3/trainer", "3/accelerate", "3/lora", "3/pretrained"]
FURTHER = ["1/accelerate", "1/best", "2/accelerate", "2/lora", "2/best", "3/best"]


def start(library: str, names: list[str], *, hide: bool = False, limit_s: float = 300.0) -> dict[str, Any]:
    """What rank 0 found, by job; an error shows the end of each rank's output.

    hide  runs where DeepSpeed is not installed
    """
    with tempfile.TemporaryDirectory(prefix="hugging-face-") as name:
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        packages = without_deepspeed(folder / "packages") if hide else []
        environment = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join([*path_for(library), str(SOURCE), *packages]),
            "WORLD_SIZE": str(RANKS),
        }
        # Without -S the interpreter would add its own packages, and DeepSpeed with them.
        command = [sys.executable, *(["-S"] if hide else []), str(HERE / "hugging_face_jobs.py")]
        processes, outputs = [], [folder / f"rank{rank}.txt" for rank in range(RANKS)]
        for rank, output in enumerate(outputs):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with output.open("w") as stream:
                arguments = [*command, ",".join(names), str(folder)]
                processes.append(subprocess.Popen(arguments, env=own, stdout=stream, stderr=subprocess.STDOUT))
        codes = wait(processes, limit_s)
        if any(codes):
            said = "\n".join(f"--- rank {rank}: {output.read_text()[-4000:]}" for rank, output in enumerate(outputs))
            raise AssertionError(f"{library} {names}: exit codes {codes}\n{said}")
        return dict(json.loads((folder / "results.json").read_text()))


def wait(processes: list[subprocess.Popen[bytes]], limit_s: float) -> list[int]:
    """Exit codes; 1 for one that had to be ended, since another had failed before or time was up."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + 5.0)
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return [1 if code is None else code for code in codes]


def without_deepspeed(folder: Path) -> list[str]:
    """A folder with a link to every installed package but DeepSpeed."""
    folder.mkdir()
    for place in [Path(entry) for entry in sys.path if entry.endswith("site-packages")]:
        for entry in place.iterdir():
            if not entry.name.startswith(("deepspeed", "zerofold", "__editable__")) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return [str(folder)]


def path_for(library: str) -> list[str]:
    if library == "deepspeed":
        return []
    from zerofold.compat.deepspeed import stand_in_folder

    return [str(stand_in_folder())]


def main() -> None:
    if sys.argv[1] == "record":
        RECORDED.write_text(json.dumps(start("deepspeed", BESIDE + ALONE + FURTHER), indent=1) + "\n")
        return
    sys.path.insert(0, str(SOURCE))
    print(json.dumps(start(sys.argv[1], sys.argv[2].split(",")), indent=1))


if __name__ == "__main__":
    main()
