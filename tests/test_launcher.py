"""`zerofold launch`: which slots, what the ranks see, what the terminal shows, and how a job ends."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from zerofold.cli import build_app
from zerofold.launcher.environment import BadVariable, env_files, exported
from zerofold.launcher.failures import Failure, first_failure
from zerofold.launcher.hosts import BadHosts, choose, read_hostfile
from zerofold.launcher.output import Output
from zerofold.launcher.relay import Lines

SOURCE = Path(__file__).parent.parent / "src"
KNOWN = {"a": [0, 1], "b": [0, 1, 2]}

# Two ranks that train a model cut over both, and say what a script sees of its surroundings.
TRAIN = """
import os, sys
import torch, torch.distributed as dist
import zerofold as zf

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
for step in range(3):
    loss = model(torch.full((4, 8), rank + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with zf.full_params(model):
    print("sum", model.weight.sum().item())
print("main", __name__, sys.modules["__main__"].__file__, sys.path[0])
print("arguments", sys.argv[1:])
print("told", os.environ["WORDS"], len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])
for part in (10, 20, 100):
    print(f"\\r{part}%", end="", file=sys.stderr)
print(file=sys.stderr)
dist.destroy_process_group()
"""

FAIL = """
import os, sys, time, signal
print("step", 1)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the second rank is wrong")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(100)
"""

# Fails at the first start; at the second one it needs longer to end than a patient launcher gives it between signals.
SAVE = """
import os, signal, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("at first")
    time.sleep(100)
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
print("ready", flush=True)
while not seen:
    time.sleep(0.1)
end = time.monotonic() + 3
while time.monotonic() < end:
    time.sleep(0.1)
print("saved after", len(seen), flush=True)
"""

HANG = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
print("process", os.getpid(), flush=True)
print("process", child.pid, flush=True)
time.sleep(100)
"""


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zerofold", "launch", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's background jobs ignore it, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def launch(*arguments: str, cwd: Path, seconds: float = 120) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output, errors


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\n\nworker-0 slots=2\nworker-1   slots=1 # small\nc slots=1 max_slots=4\n")
    assert read_hostfile(file) == {"worker-0": [0, 1], "worker-1": [0], "c": [0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slot=2\n", ':2: "b slot=2" is no host: write "name slots=4"'),
        ("a slots=2\n\na slots=1\n", ":3: a is named a second time"),
        ("a slots=0\n", ":1: a has slots=0: give at least 1"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(BadHosts, match=re.escape(message)):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ({}, KNOWN),
        ({"include": "b@a:1"}, {"a": [1], "b": [0, 1, 2]}),
        ({"include": "a:1@b:2@a:0"}, {"a": [0, 1], "b": [2]}),
        ({"include": "b:1@b"}, {"b": [0, 1, 2]}),
        ({"exclude": "a@b:0"}, {"b": [1, 2]}),
        ({"exclude": "a:0,1"}, {"b": [0, 1, 2]}),
        ({"num_nodes": 1}, {"a": [0, 1]}),
        ({"num_slots": 1}, {"a": [0], "b": [0]}),
    ],
)
def test_slots_are_chosen(wanted: dict[str, object], chosen: dict[str, list[int]]) -> None:
    assert choose(KNOWN, **wanted) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude together: give one of them"),
        ({"include": "a", "num_slots": 1}, "--include together with --num_nodes or --num_gpus"),
        ({"include": "c:0"}, 'there is no host "c", there are a:0,1 b:0,1,2'),
        ({"exclude": "a:4"}, "a has no slot 4, there are a:0,1 b:0,1,2"),
        ({"include": "a:x"}, '"x" are no slots of a: write a:0,1'),
        ({"exclude": "a@b"}, "leaves no slot"),
        ({"num_nodes": 3}, "--num_nodes 3: there are 2"),
        ({"num_slots": 3}, "--num_gpus 3: a has 2: use 1 to 2"),
        ({"num_slots": 0}, "--num_gpus 0: use 1 or more"),
    ],
)
def test_slots_that_do_not_exist_are_refused(wanted: dict[str, object], message: str) -> None:
    with pytest.raises(BadHosts, match=re.escape(message)):
        choose(KNOWN, **wanted)  # type: ignore[arg-type]


def test_variables_for_the_ranks(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n# no more\nPLACE=a b\n")
    assert env_files(tmp_path, tmp_path, ".deepspeed_env") == {"NCCL_DEBUG": "INFO", "PLACE": "a b"}
    (tmp_path / "bad").write_text("A=1\nB\n")
    with pytest.raises(BadVariable, match=r'bad:2: "B" sets no variable: write NAME=VALUE'):
        env_files(tmp_path, tmp_path, "bad")
    with pytest.raises(BadVariable, match="--export GONE: it is not set here"):
        exported(["GONE"], {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.py"], "no_such.py is no file: name a script"),
        (["--module", "--no_python", "x"], "--module and --no_python together"),
        (["--launcher", "mpi", "script.py"], "--launcher mpi: use ssh or slurm"),
        (["--launcher", "slurm", "script.py"], "SLURM_JOB_NODELIST is not set"),
        (["--remote-shell", "ssh", "script.py"], "no {host} in it"),
        (["--hostfile", "nowhere", "script.py"], "--hostfile nowhere cannot be read"),
        (["--node_rank", "1", "script.py"], "--node_rank 1 without --no_ssh"),
        (["--no-ssh", "--num-nodes", "2", "script.py"], "--no_ssh needs --node_rank 0 to 1"),
        (["--num_nodes", "2", "script.py"], "--num_nodes 2: there are 1"),
        (["--bind_core_list", "0-x", "script.py"], '"0-x" is no number or range'),
        (["--bind_core_list", "1-0", "script.py"], '"1-0" is no number or range'),
        (["--master_port", "99999", "script.py"], "--master_port 99999: use 0 to 65535"),
        (["--num_gpus", "2", "--only-rank", "7", "script.py"], "--only-rank 7: there is no rank 7: use 0 to 1"),
        (["--num_gpus", "-1", "--num_nodes", "2", "script.py"], "--num_nodes 2: there are 1"),
        (["--no_such_option", "script.py"], "No such option"),
    ],
)
def test_bad_options_get_a_line_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["launch", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_lines_stay_whole_and_progress_bars_end_in_one() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed("o €".encode()[:-1]) == []
    assert lines.feed("€".encode()[-1:] + b"\n\n") == ["two €", ""]
    for part in range(100):
        assert lines.feed(f"\r{part}%".encode()) == []
    assert lines.unfinished() == "99%"
    assert lines.feed(b"\r100%\r\n\x1b[A") == ["100%"]
    assert lines.rest() == []


def test_a_terminal_keeps_the_progress_bar_below_the_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    output = Output(several_hosts=False, stdout=screen, stderr=screen)
    output.live("a", 0, "stderr", "10%")
    output.lines("a", 1, "stdout", ["step 1"])
    output.lines("a", 0, "stderr", ["100%"])
    drawn = screen.getvalue().split("\r\x1b[K")
    assert drawn == ["", "[rank 0] 10%", "[rank 1] step 1\n[rank 0] 10%", "[rank 0] 100%\n"]


def test_a_rank_killed_by_the_agent_is_never_the_first() -> None:
    late = Failure(host="a", rank=0, exit_code=-9, when=40.0)  # it did not listen to SIGTERM
    ended = Failure(host="a", rank=2, exit_code=-15, when=9.0)
    cause = Failure(host="b", rank=3, exit_code=1, trace="ValueError", when=10.0)
    assert first_failure([late, ended, cause]) is cause


ECHO = Failure(
    host="a", rank=0, exit_code=1, message="RuntimeError: Connection closed by peer", trace="Traceback", when=10.0
)
RAISED = Failure(host="a", rank=1, exit_code=1, message="ValueError: no", trace="Traceback", when=10.0)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([RAISED, Failure(host="a", rank=2, exit_code=5, when=10.2)], 1),  # a handler of SIGTERM left at once
        ([RAISED, Failure(host="a", rank=2, exit_code=-9, when=10.2, by_agent=True)], 1),
        ([RAISED, Failure(host="a", rank=2, exit_code=-6, when=10.2)], 1),  # as NCCL does
        ([RAISED, Failure(host="a", rank=2, exit_code=-9, when=10.2)], 2),
        ([ECHO, Failure(host="a", rank=2, exit_code=5, when=10.2)], 2),
        ([ECHO, Failure(host="a", rank=2, exit_code=-6, when=10.2)], 2),
        ([ECHO, Failure(host="b", rank=2, exit_code=1, when=10.2, lost="the agent there ended")], 2),
    ],
)
def test_the_cause_is_told_from_its_consequences(failures: list[Failure], rank: int) -> None:
    assert first_failure(failures).rank == rank


def test_a_terminal_without_the_letters_shows_escapes() -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Output(stdout=terminal).lines("a", 0, "stdout", ["loss ≈ 1"])
    terminal.seek(0)
    assert terminal.read() == "[rank 0] loss \\u2248 1\n"


def test_two_ranks_train_with_all_that_a_script_expects(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    cores = len(os.sched_getaffinity(0))
    options = [
        "--num_gpus=2",
        *(["--bind-cores"] if cores > 1 else []),
        "--export",
        "WORDS=a b",
        "--log-dir",
        "logs",
        "--only-rank",
        "0,1",
    ]
    code, output, errors = launch(*options, "train.py", "--deepspeed", "c.json", "--num_gpus", "-x", cwd=tmp_path)
    assert code == 0, errors
    for rank in (0, 1):
        seen = [line.removeprefix(f"[rank {rank}] ") for line in output.splitlines() if f"[rank {rank}]" in line]
        assert f"main __main__ train.py {tmp_path}" in seen
        assert "arguments ['--deepspeed', 'c.json', '--num_gpus', '-x']" in seen
        shares = {max(1, cores // 2), (cores + 1) // 2}
        assert any(f"told a b {share} {share}" in seen for share in shares)
        logged = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(logged) == sorted([*seen, "100%"])
        assert f"[rank {rank}] 100%" in errors
    sums = re.findall(r"sum (\S+)", output)
    assert len(sums) == 2
    assert sums[0] == sums[1]


def test_the_first_failure_is_shown_last_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text(FAIL)
    begin = time.monotonic()
    code, output, errors = launch("--num_gpus", "2", "--grace", "1", "--module", "package.job", "raise", cwd=tmp_path)
    assert code == 1
    assert "[rank 0] step 1" in output
    block = errors[errors.index("rank 1 failed first: exit code 1") :]
    assert block.splitlines()[-2] == "  ValueError: the second rank is wrong"
    assert "in <module>" in block
    assert "entry.py" not in errors
    assert time.monotonic() - begin < 30  # which torch's agent alone would wait for the rank that does not listen


def test_a_killed_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FAIL)
    begin = time.monotonic()
    code, _, errors = launch("--num_gpus", "2", "--grace", "1", "job.py", "kill", cwd=tmp_path)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 1 failed first: .*SIGKILL.*\n  The last that it wrote:\n  step 1\n", errors)
    assert time.monotonic() - begin < 60


def test_a_restart_is_told_and_one_signal_leaves_the_ranks_their_grace(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SAVE)
    command = start("--num_gpus", "2", "--max-restarts", "1", "--grace", "60", "job.py", cwd=tmp_path)
    assert command.stdout is not None
    assert [command.stdout.readline().split()[-1] for _ in range(2)] == ["ready", "ready"]
    command.terminate()
    output, errors = command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGTERM
    assert "rank 1 failed: ValueError: at first; starting all ranks again (1 of 1 restarts)" in errors
    assert output.count("saved after 1") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_no_process_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "job.py").write_text(HANG)
    command = start("--num_gpus", "2", "--grace", "2", "job.py", cwd=tmp_path)
    assert command.stdout is not None
    processes = [int(command.stdout.readline().split()[-1]) for _ in range(4)]
    begin = time.monotonic()
    command.send_signal(number)
    command.wait(30)
    if number == signal.SIGINT:
        assert command.returncode == 128 + signal.SIGINT
    while any(psutil.pid_exists(process) for process in processes) and time.monotonic() < begin + 20:
        time.sleep(0.1)
    assert [process for process in processes if psutil.pid_exists(process)] == []
    command.communicate()


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    (tmp_path / "hosts").write_text("near slots=1\nfar slots=1\n")
    shell = "sh -c 'echo no route to {host} >&2; exit 255'"
    code, _, errors = launch("--hostfile", "hosts", "--remote-shell", shell, "job.py", cwd=tmp_path)
    assert code == 1
    assert "the agent did not start (exit code 255)" in errors
    assert re.search(r"\n  no route to (near|far)\n", errors)
    assert "Traceback" not in errors


def test_slurm_tells_the_hosts_and_starts_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text('#!/bin/sh\nif [ "$*" = "show hostnames n[1-2]" ]; then echo n1; echo n2; fi\n')
    # As srun does it: its own options end at the first word without a dash.
    (programs / "srun").write_text(
        '#!/bin/sh\nwhile :; do case $1 in --nodelist=*) export NODE=${1#*=};; -*);; *) exec "$@";; esac; shift; done\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job.py").write_text('import os; print("node", os.environ["NODE"], os.environ["WORLD_SIZE"])')
    code, output, errors = launch("--nproc", "2", "--master_addr", "127.0.0.1", "job.py", cwd=tmp_path)
    assert code == 0, errors
    nodes = [f"n{1 + rank // 2}" for rank in range(4)]
    assert sorted(output.splitlines()) == [f"{node} [rank {rank}] node {node} 4" for rank, node in enumerate(nodes)]


def test_the_stand_in_is_what_the_ranks_import_as_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import deepspeed, sys; print(deepspeed.__file__, sys.argv[1:])")
    code, output, errors = launch("--num_gpus", "1", "--as-deepspeed", "job.py", "--lr", "1", cwd=tmp_path)
    assert code == 0, errors
    assert "zerofold" in output
    assert "['--local_rank=0', '--lr', '1']" in output  # scripts of DeepSpeed's launcher count on it
    code, output, errors = launch("--num_gpus", "1", "--as-deepspeed", "--no_local_rank", "job.py", cwd=tmp_path)
    assert code == 0, errors
    assert " []" in output


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, the ip command and root")
    names = [f"zf{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for side, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.7.{side + 1}/24", "dev", f"v{side}")
            ip("-n", name, "link", "set", f"v{side}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def test_two_hosts_train_together(tmp_path: Path, two_hosts: list[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in two_hosts))
    options = ["--hostfile", "hosts", "--remote-shell", "ip netns exec {host}", "--export", "WORDS=from afar"]
    code, output, errors = launch(*options, "train.py", "--steps", "3", cwd=tmp_path)
    assert code == 0, errors
    sums = []
    for rank, name in enumerate(two_hosts):
        assert f"{name} [rank {rank}] arguments ['--steps', '3']" in output
        assert f"{name} [rank {rank}] told from afar" in output
        sums += re.findall(rf"{name} \[rank {rank}\] sum (\S+)", output)
    assert len(sums) == 2
    assert sums[0] == sums[1]
