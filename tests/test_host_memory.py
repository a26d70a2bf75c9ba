"""Host memory for offloaded states, and how much of it there is."""

from __future__ import annotations

import gc
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerofold.memory import TierMemory
from zerofold.memory.arena import HostArena
from zerofold.memory.host import HostMemory, host_memory, peak_resident, usable_cores
from zerofold.placement import Tier

PAGE = 4096
MIB, GIB = 2**20, 2**30


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


class FakeDriver:
    """Stands in for the CUDA runtime: remembers what is registered, and refuses what a real one refuses."""

    def __init__(self, limit: int = 2**40) -> None:
        self.cudaError = SimpleNamespace(success=0)
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.resident_at_registration: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert address % PAGE == nbytes % PAGE == flags == 0
        if sum(self.registered.values()) + nbytes > self.limit:
            return 2
        self.registered[address] = nbytes
        self.resident_at_registration.append(resident_bytes())
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert is_mapped(address), "the memory went before its registration"
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {2: "out of memory", 713: "not registered"}[code]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return fake


def test_a_segment_takes_what_was_asked_for_and_goes_with_its_last_view() -> None:
    arena = HostArena(pins=False)
    before = resident_bytes()
    blocks = [arena.take(nbytes) for nbytes in (1, PAGE, 40 * MIB + 1)]
    assert [block.numel() for block in blocks] == [1, PAGE, 40 * MIB + 1]
    assert all(block.data_ptr() % PAGE == 0 and not block.any() for block in blocks[:2])
    assert arena.nbytes == 40 * MIB + 3 * PAGE
    large = blocks.pop()
    assert not large.any()
    large.fill_(1)
    view = large[8:24].view(torch.float32)
    address = view.data_ptr()
    arena.wait(view)
    arena.give(view)
    del large
    gc.collect()
    assert is_mapped(address)
    assert view.untyped_storage().nbytes() == 40 * MIB + PAGE
    del view
    assert resident_bytes() < before + 8 * MIB
    assert arena.nbytes == 2 * PAGE
    arena.close()
    assert arena.nbytes == 0


def test_segments_are_pinned_in_order_while_their_owner_writes(driver: FakeDriver) -> None:
    shown: list[tuple[int, int]] = []
    arena = HostArena(pins=True, show=lambda pinned, taken: shown.append((pinned, taken)))
    before = resident_bytes()
    first, second = arena.take(100 * MIB), arena.take(10)
    first[:: 8 * MIB] = 7  # at once, so that pinning must leave it
    arena.wait(second)
    assert list(driver.registered) == [first.data_ptr(), second.data_ptr()]
    assert driver.resident_at_registration[0] > before + 96 * MIB, "the driver would fault the pages in, one by one"
    assert (first[:: 8 * MIB] == 7).all()
    assert shown == [(100 * MIB, 100 * MIB + PAGE), (100 * MIB + PAGE, 100 * MIB + PAGE)]
    arena.give(first)
    assert list(driver.registered) == [second.data_ptr()]
    arena.close()
    assert not driver.registered
    with pytest.raises(RuntimeError, match="this arena is closed"):
        arena.take(1)


def test_closing_does_not_wait_for_what_is_not_pinned_yet(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    started, gate = threading.Event(), threading.Event()
    monkeypatch.setattr("zerofold.memory.arena._touch", lambda mapping: (started.set(), gate.wait(10)))
    arena = HostArena(pins=True)
    blocks = [arena.take(PAGE) for _ in range(3)]
    started.wait(10)
    arena.give(blocks[1])
    threading.Timer(0.05, gate.set).start()
    arena.close()
    assert not driver.registered
    assert len(driver.resident_at_registration) == 1, "only the one that was under way"


def test_an_arena_that_nobody_closes_unpins_before_its_memory_goes(driver: FakeDriver) -> None:
    arena = HostArena(pins=True)
    block = arena.take(PAGE)
    arena.wait()
    del arena
    gc.collect()
    assert driver.registered
    block.fill_(1)
    del block
    gc.collect()
    assert not driver.registered


def test_a_refused_registration_is_raised_where_it_is_waited_for(driver: FakeDriver) -> None:
    driver.limit = 3 * PAGE
    arena = HostArena(pins=True)
    fits, fails = arena.take(2 * PAGE), arena.take(2 * PAGE)
    arena.wait(fits)
    for block in (fails, None):
        with pytest.raises(MemoryError, match=r"cannot pin 0.00 GiB of host memory: out of memory; .*`ulimit -l`"):
            arena.wait(block)
    arena.give(fails)
    arena.wait()
    arena.close()
    assert not driver.registered


def test_wrong_blocks_and_sizes_are_named() -> None:
    arena = HostArena(pins=False)
    block = arena.take(10)
    arena.give(block)
    for call in (arena.give, arena.wait):
        with pytest.raises(ValueError, match="this block of 10 bytes is not of this arena, or was given back"):
            call(block)
    with pytest.raises(ValueError, match=r"take\(0\)"):
        arena.take(0)
    with pytest.raises(MemoryError, match=r"cannot take 1048576.00 GiB of host memory: Cannot allocate"):
        arena.take(2**50)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_copies_return_at_once() -> None:
    arena = HostArena(pins=True)
    block = arena.take(256 * MIB + 1)
    arena.wait(block)
    assert block.is_pinned()
    values = block[PAGE : 128 * MIB].view(torch.float32).fill_(3)
    on_device = torch.empty_like(values, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
    on_device.copy_(values, non_blocking=True)
    assert not torch.cuda.current_stream().query(), "the copy waited for the GPU"
    torch.cuda.synchronize()
    assert torch.equal(on_device, torch.full_like(on_device, 3))
    arena.give(block)
    assert not block.is_pinned()
    assert values[0] == 3
    arena.close()


def machine(folder: Path, cgroups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup of a machine with 100 GiB, 80 GiB of them available."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    texts = {
        proc / "meminfo": f"MemTotal: {100 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {80 * 2**20} kB\nHugePages: 0\n",
        proc / "self/status": "Name:\tpython\nVmSize:\t1048576 kB\nVmHWM:\t2048 kB\nThreads:\t7\n",
        proc / "self/cgroup": cgroups,
        **{cgroup / name: text for name, text in files.items()},
    }
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroup


def group(folder: str, limit: str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit + "\n",
        f"{folder}/memory.current": f"{used * GIB}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cache * GIB}\n",
    }


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/\n", {}, (100, 80)),
        ("0::/a/b\n", {**group("a/b", "max", 9, 0), **group("a", "max", 9, 0)}, (100, 80)),
        # The parent has less left than the child.
        ("0::/a/b\n", {**group("a/b", f"{60 * GIB}", 10, 5), **group("a", f"{64 * GIB}", 40, 8)}, (60, 32)),
        # The path is one of the host; the container sees its own folder as the root.
        ("0::/outside/x\n", group(".", f"{50 * GIB}", 20, 1), (50, 31)),
        ("0::/../../y\n", group(".", f"{50 * GIB}", 50, 0), (50, 0)),
        (
            "4:cpu,memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": f"{30 * GIB}",
                "memory/job/memory.usage_in_bytes": f"{12 * GIB}",
                "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": f"{99 * GIB}",
            },
            (30, 20),
        ),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, cgroups: str, files: dict[str, str], expected: tuple[int, int]) -> None:
    total, available = expected
    assert host_memory(*machine(tmp_path, cgroups, files)) == HostMemory(total * GIB, available * GIB)


def test_the_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * GIB, 9 * GIB))
    proc, cgroup = machine(tmp_path, "", {})
    assert host_memory(proc, cgroup) == HostMemory(8 * GIB, 7 * GIB)
    assert peak_resident(proc) == 2 * MIB


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        ("0::/a\n", {"a/cpu.max": "max 100000"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 2),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_quota_of_time_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(*machine(tmp_path, cgroups, files)) == expected


def test_the_peak_is_of_this_process() -> None:
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert resident_bytes() <= peak_resident()
    assert block.nbytes < peak_resident()


def test_memory_is_counted_while_an_update_takes_some() -> None:
    memory = TierMemory(torch.device("cpu"), HostArena(pins=False), None)
    taking = threading.Thread(target=lambda: [memory.borrow(8) for _ in range(1000)])
    taking.start()
    while taking.is_alive():
        memory.bytes_by_state(Tier.HOST)
    taking.join()
    assert memory.bytes_by_state(Tier.HOST) == {"staging": 8000}
    memory.close()
