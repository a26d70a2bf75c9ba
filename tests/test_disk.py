"""The NVMe tier on real files: both ways to the same bytes, and every way in which a disk can fail."""

import errno
import fcntl
import gc
import itertools
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerofold.memory import disk_queue
from zerofold.memory.disk import PAGE, DiskError, DiskStore

KB = 1024


def pages(nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Page-aligned memory with random bytes."""
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).random_()
    return memory.view(dtype)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "made" / "for it", 4 << 20, threads=2, block=64 * KB) as store:
        yield store


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system of 8 MiB at `folder`; skips where this user may not mount."""
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(["size=8m", *options]), "tmpfs", str(folder)])
    if mount.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("nbytes", [4, PAGE, 3 * PAGE + 100, 64 * KB, 1000 * KB + 2])
def test_tensor_and_requests_show_the_same_bytes(store: DiskStore, nbytes: int, touched: bool) -> None:
    store.take(PAGE, "before")
    extent = store.take(nbytes, "states")
    after = store.tensor(store.take(PAGE, "after")).fill_(7)
    tensor = store.tensor(extent)
    if touched:
        tensor.fill_(1)
        store.flush(extent)
    for _ in range(2):
        source, back = pages(nbytes), pages(nbytes)
        store.write(extent.offset, source).wait()
        assert torch.equal(tensor[:nbytes], source)
        tensor[:nbytes].add_(3)
        store.flush(extent)
        store.read(extent.offset, back).wait()
        assert torch.equal(back, source + 3)
    assert after.eq(7).all()
    assert store.bytes_read == store.bytes_written == 2 * extent.nbytes
    assert all(rate > 0 for rate in store.rates())


def test_parts_of_an_extent_and_any_dtype(store: DiskStore) -> None:
    extent = store.take(10 * PAGE, "master")
    source, back = pages(10 * PAGE, torch.float32), pages(5 * PAGE, torch.bfloat16)
    for start in range(0, 10 * PAGE, 2 * PAGE):
        store.write(extent.offset + start, source.view(torch.uint8)[start : start + 2 * PAGE])
    store.read(extent.offset + 3 * PAGE, back).wait()
    assert torch.equal(back.view(torch.uint8), source.view(torch.uint8)[3 * PAGE : 8 * PAGE])
    odd = pages(PAGE + 2)
    store.read(extent.offset, odd).wait()
    assert torch.equal(odd, source.view(torch.uint8)[: PAGE + 2])
    store.write(extent.offset, torch.empty(0)).wait()
    try:
        os.close(os.open(Path(store.path).parent / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        assert store.is_direct
    except OSError:
        assert not store.is_direct


def test_requests_on_the_same_bytes_keep_their_order(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.pwritev, []

    def slow_at_first(*args: object) -> int:
        calls.append(args)
        time.sleep(0.1 if len(calls) == 1 else 0)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", slow_at_first)
    extent = store.take(64 * KB, "states")
    sources = [pages(64 * KB) for _ in range(3)]
    back = pages(64 * KB)
    for source in sources:
        store.write(extent.offset, source)
    store.read(extent.offset, back).wait()
    assert torch.equal(back, sources[-1])


def test_many_requests_at_once_see_each_other_in_order(tmp_path: Path) -> None:
    """Against a plain tensor that does the same one after the other."""
    random.seed(0)
    with DiskStore(tmp_path, 64 * PAGE, threads=3, block=3 * PAGE, checksums=True) as store:
        extent = store.take(64 * PAGE, "states")
        plain = store.tensor(extent).zero_().clone()
        requests, expected = [], []
        for _ in range(100):
            start = random.randrange(60) * PAGE
            end = min(start + random.randrange(1, 20) * PAGE, 64 * PAGE)
            memory = pages(end - start)
            if random.random() < 0.5:
                requests.append(store.write(extent.offset + start, memory))
                plain[start:end] = memory
            else:
                requests.append(store.read(extent.offset + start, memory))
                expected.append((memory, plain[start:end].clone()))
        for request in requests:
            request.wait()
        assert all(torch.equal(read, right) for read, right in expected)
        assert torch.equal(store.tensor(extent), plain)


@pytest.mark.parametrize("in_bursts", [False, True])
def test_reads_do_not_wait_behind_writes_but_in_bursts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bursts: bool
) -> None:
    write, read, order = os.pwritev, os.preadv, []

    def slow_write(*args: object) -> int:
        time.sleep(0.02)
        order.append("write")
        return write(*args)  # type: ignore[arg-type]

    def noted_read(fd: int, parts: list[memoryview], offset: int) -> int:
        order.append(offset)
        return read(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", slow_write)
    monkeypatch.setattr(os, "preadv", noted_read)
    with DiskStore(tmp_path, 1 << 20, threads=1, block=PAGE) as store:
        store.in_bursts = in_bursts
        order.clear()
        a, b = (store.take(8 * PAGE, name) for name in "ab")
        source, back = pages(8 * PAGE), pages(8 * PAGE)
        writing = store.write(a.offset, source)
        reading = store.read(b.offset, back)
        reading.wait()
        writing.wait()
        kinds = ["write" if step == "write" else "read" for step in order]
        changes = sum(one != other for one, other in itertools.pairwise(kinds))
        assert changes == 1 if in_bursts else changes >= 13


def test_memory_and_ranges_that_cannot_be_used_are_named(store: DiskStore) -> None:
    extent = store.take(4 * PAGE, "moments of block 3")
    memory = pages(5 * PAGE)
    with pytest.raises(ValueError, match="moments of block 3.*512 bytes into a page"):
        store.read(extent.offset, memory[512 : 512 + PAGE])
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        store.read(extent.offset, memory[: 2 * PAGE : 2])
    with pytest.raises(ValueError, match="offset is no multiple of 4096"):
        store.write(extent.offset + 512, memory[:PAGE])
    with pytest.raises(ValueError, match="goes on behind it"):
        store.write(extent.offset, memory[: PAGE + 8])
    with pytest.raises(ValueError, match="not inside one extent"):
        store.write(extent.offset, memory)
    with pytest.raises(ValueError, match="block a multiple of 4096"):
        DiskStore(store.path, 1, block=1000)


def test_room_is_taken_given_back_and_told_in_the_manifest(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * PAGE, rank=3)
    extents = [store.take(3 * PAGE - 5, f"unit {index}") for index in range(3)]
    with pytest.raises(DiskError, match=r"no room for unit 4: 8,192 bytes .* 4,096 of 4,096"):
        store.take(2 * PAGE, "unit 4")
    store.give(extents[0])
    store.give(extents[1])
    with pytest.raises(ValueError, match="is not taken"):
        store.give(extents[1])
    large = store.take(6 * PAGE, "large")
    assert (large.offset, store.free, store.nbytes) == (extents[0].offset, PAGE, 10 * PAGE)
    store.read(large.offset, pages(PAGE)).wait()
    manifest = json.loads(Path(store.path + ".json").read_text())
    assert manifest["rank"] == 3
    assert manifest["pid"] == os.getpid()
    assert manifest["tag"] in store.path
    assert [(extent["label"], extent["bytes"]) for extent in manifest["extents"]] == [
        ("large", 6 * PAGE),
        ("unit 2", 3 * PAGE),
    ]
    assert json.loads(Path(store.path).read_bytes()[:PAGE])["tag"] == manifest["tag"]
    assert os.stat(store.path).st_mode & 0o777 == 0o600
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(DiskError, match="the store is closed"):
        store.tensor(large)
    with pytest.raises(DiskError, match="the store is closed"):
        store.read(large.offset, pages(PAGE))


def test_a_disk_that_others_have_filled_costs_the_manifest_alone(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    extent, data, read = store.take(8 * KB, "states"), pages(8 * KB), pages(8 * KB)
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"manifest .* cannot be written .* states are not concerned"):
        store.write(extent.offset, data).wait()
    store.read(extent.offset, read).wait()
    assert torch.equal(data, read)


def test_a_file_grows_under_tensors_and_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DiskStore(tmp_path, 4 * PAGE) as store:
        first = store.take(3 * PAGE, "first")
        before = store.tensor(first)
        writing = [store.write(first.offset, pages(3 * PAGE).fill_(number)) for number in range(1, 20)]
        for number in range(1, 20):
            store.make_room(9 * PAGE)
            extent = store.take(9 * PAGE, f"extent {number}")
            store.write(extent.offset, pages(9 * PAGE).fill_(number)).wait()
            store.tensor(extent)[-1] = 99
            store.forget(extent)
            read = pages(9 * PAGE)
            store.read(extent.offset, read).wait()
            assert read.unique().tolist() == sorted([number, 99])
        for request in writing:
            request.wait()
        assert before.unique().tolist() == store.tensor(first).unique().tolist() == [19]
        before.fill_(7)
        store.forget(first)
        read = pages(3 * PAGE)
        store.read(first.offset, read).wait()
        assert read.unique().tolist() == [7]
        assert os.stat(store.path).st_size == PAGE + store.nbytes
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskError, match=r"bytes more could not be reserved \(No space left"):
            store.make_room(9 * PAGE)
        assert os.stat(store.path).st_size == PAGE + store.nbytes
    assert not list(tmp_path.iterdir())


def test_a_store_grows_to_its_limit_and_says_what_would_go_beyond(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 4 * PAGE, most=12 * PAGE) as store:
        store.take(4 * PAGE, "states")
        store.make_room(8 * PAGE)
        store.take(8 * PAGE, "of what was unfrozen")
        with pytest.raises(DiskError, match=f"4,096 bytes more, .* would be over disk_limit={12 * PAGE}: raise it"):
            store.make_room(1)
        assert store.nbytes == 12 * PAGE


def test_a_store_that_nobody_closed_takes_its_file_along(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, PAGE)
    count = threading.active_count()
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert threading.active_count() == count - 4


def test_forget_lets_go_of_memory(store: DiskStore) -> None:
    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(store.path)[1].splitlines()
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * KB

    extent = store.take(2 << 20, "states")
    tensor = store.tensor(extent).fill_(5)
    assert resident() >= 2 << 20
    store.forget(extent)
    assert resident() == 0
    assert tensor.eq(5).all()


def test_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "small") as folder:
        with pytest.raises(
            DiskError, match=r"small has too little room: 16,781,312 bytes needed.*8,388,608 free"
        ) as at:
            DiskStore(folder, 16 << 20)
        assert at.value.errno == errno.ENOSPC
        assert not list(folder.iterdir())
        with DiskStore(folder, 5 << 20), pytest.raises(DiskError, match="too little room"):
            DiskStore(folder, 5 << 20)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The system refuses to write a file beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_reserved_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(DiskError, match="2,101,248 bytes could not be reserved .File too large"):
        DiskStore(tmp_path, 2 << 20)
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="is a file; name a folder"):
            DiskStore(folder, PAGE)
    with mounted(tmp_path / "fixed", "ro") as folder:
        with pytest.raises(DiskError, match="fixed: no file can be made in it .Read-only file system"):
            DiskStore(folder, PAGE)
        with pytest.raises(DiskError, match="fixed/new does not exist and cannot be made"):
            DiskStore(folder / "new", PAGE)


def failing(call: Callable[..., int], after: int, code: int = errno.EIO) -> Callable[..., int]:
    """`call` until it was called `after` times, then an error each time."""
    calls = []

    def wrapped(*args: object) -> int:
        calls.append(args)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return call(*args)

    return wrapped


@pytest.mark.parametrize("fault", ["EIO", "too large"])
def test_after_a_failed_write_nothing_of_it_is_read(
    store: DiskStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = store.take(256 * KB, "good"), store.take(256 * KB, "block 2")
    source, back = pages(256 * KB), pages(256 * KB)
    store.write(good.offset, source).wait()
    with largest_file(bad.offset + 100 * KB) if fault == "too large" else monkeypatch.context() as patch:
        if patch is not None:
            patch.setattr(os, "pwritev", failing(os.pwritev, 2))
        request = store.write(bad.offset, source)
        behind = store.read(bad.offset, back)
        for _ in range(2):
            reason = "Input/output error" if fault == "EIO" else "File too large"
            with pytest.raises(DiskError, match=rf"write of block 2 .*{store.path}.* failed at bytes .*{reason}; "):
                request.wait()
            with pytest.raises(DiskError, match="cannot be trusted, because the write of block 2"):
                behind.wait()
    with pytest.raises(DiskError, match="cannot be trusted"):
        store.read(bad.offset, back[:PAGE]).wait()  # a part that was written before the fault
    with pytest.raises(DiskError, match="block 2 cannot be trusted"):
        store.tensor(bad)
    store.read(good.offset, back).wait()
    assert torch.equal(back, source)
    store.write(bad.offset, source).wait()
    store.read(bad.offset, back.zero_()).wait()
    assert torch.equal(back, source)


def test_a_failed_read_raises_at_every_wait(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = store.take(256 * KB, "block 2")
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1))
    request = store.read(extent.offset, pages(256 * KB))
    for _ in range(2):
        with pytest.raises(DiskError, match="read of block 2 .* Input/output error") as at:
            request.wait()
        assert at.value.errno == errno.EIO


@pytest.mark.parametrize("to", [0, 100 * KB + 7])
def test_a_file_cut_by_somebody_is_noticed_and_not_filled_with_zeros(store: DiskStore, to: int) -> None:
    extent = store.take(4 << 20, "states")
    store.write(extent.offset, pages(4 << 20)).wait()
    os.truncate(store.path, to)
    for request in (store.write(extent.offset, pages(4 << 20)), store.read(extent.offset, pages(PAGE))):
        with pytest.raises(DiskError, match="no longer its 4,198,400 bytes"):
            request.wait()
    with pytest.raises(DiskError, match="no longer its 4,198,400 bytes"):
        store.make_room(8 << 20)


def test_calls_that_move_only_a_part_are_continued(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(call: Callable[..., int]) -> Callable[..., int]:
        def half(fd: int, parts: list[memoryview], offset: int) -> int:
            part = parts[0]
            return call(fd, [part[: max(PAGE, len(part) // 2 // PAGE * PAGE)]], offset)

        return half

    monkeypatch.setattr(os, "pwritev", halved(os.pwritev))
    monkeypatch.setattr(os, "preadv", halved(os.preadv))
    nbytes = 5 * PAGE + 77
    extent, source, back = store.take(nbytes, "states"), pages(nbytes), pages(nbytes)
    store.write(extent.offset, source).wait()
    store.read(extent.offset, back).wait()
    assert torch.equal(back, source)
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    with pytest.raises(DiskError, match="only 100 of the 24,576 bytes"):
        store.read(extent.offset, back).wait()


def test_checksums_find_bytes_that_changed_on_the_disk(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 1 << 20, block=16 * KB, checksums=True) as store:
        extent = store.take(64 * KB - 10, "moments of block 1")
        source, back = pages(64 * KB - 10), pages(64 * KB - 10)
        store.write(extent.offset, source).wait()
        store.read(extent.offset, back).wait()
        with open(store.path, "r+b") as file:
            file.seek(extent.offset + 40 * KB)
            file.write(bytes([int(source[40 * KB]) ^ 1]))
        store.read(extent.offset, back[: 32 * KB]).wait()  # whole blocks beside it
        for part in (back, back[32 * KB : 48 * KB]):
            at = extent.offset + part.data_ptr() - back.data_ptr()
            message = "read of moments of block 1 .* gave back other bytes than were written"
            with pytest.raises(DiskError, match=message):
                store.read(at, part).wait()
        store.changed(extent)
        store.read(extent.offset, back).wait()
        store.write(extent.offset, source).wait()
        other = pages(PAGE)
        store.write(extent.offset + 40 * KB, other).wait()  # the sum of the block around it is void
        store.read(extent.offset, back).wait()
        source[40 * KB : 44 * KB] = other
        assert torch.equal(back, source)


def make_and_die(folder: Path) -> str:
    """The file of a process that was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            store = DiskStore(folder, 1 << 20)
            os.write(writer, store.path.encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    path = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    return path


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_only_files_that_dead_processes_left_are_removed(tmp_path: Path) -> None:
    left = make_and_die(tmp_path)
    foreign = tmp_path / "zerofold-rank0-pid1-0123456789abcdef.states"
    foreign.write_bytes(Path(left).read_bytes())  # a copy: its header is of another file
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.warns(UserWarning, match=rf"removed {left} \(1,052,672 bytes\), left behind by process"):
        beside = DiskStore(tmp_path, PAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = DiskStore(tmp_path, PAGE)
    assert {str(path) for path in tmp_path.iterdir()} == {
        str(foreign),
        str(notes),
        beside.path,
        beside.path + ".json",
        store.path,
        store.path + ".json",
    }
    extent, source = beside.take(PAGE, "states"), pages(PAGE)
    beside.write(extent.offset, source).wait()
    assert torch.equal(beside.tensor(extent), source)
    beside.close()
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_of_another_machine_is_named_and_left(tmp_path: Path) -> None:
    left = Path(make_and_die(tmp_path))
    with left.open("r+b") as file:
        about = json.loads(file.read(PAGE))
        file.seek(0)
        file.write(json.dumps({**about, "host": "elsewhere"}).encode().ljust(PAGE))
    with pytest.warns(UserWarning, match=rf"{left} .* on elsewhere; if that has ended, remove it by hand") as caught:
        DiskStore(tmp_path, PAGE).close()
    assert left.exists()
    assert Path(caught[0].filename).name == Path(__file__).name  # the line that made the store


def test_without_o_direct_it_says_so_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(change(fd, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.warns(UserWarning, match=f"the file system of {tmp_path} has no O_DIRECT"):
        store = DiskStore(tmp_path, 1 << 20, block=16 * KB)
    with store:
        extent, source, back = store.take(50 * KB + 1, "states"), pages(50 * KB + 1), pages(50 * KB + 1)
        store.write(extent.offset, source).wait()
        store.read(extent.offset, back).wait()
        assert torch.equal(back, source)
        assert not store.is_direct


def test_a_disk_that_does_not_answer_is_named_once(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def slow(*args: object) -> int:
        time.sleep(0.3)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(disk_queue, "STUCK_SECONDS", 0.05)
    extent = store.take(PAGE, "block 2")
    with pytest.warns(UserWarning, match=f"not answered for .* read of block 2 .*{store.path}") as caught:
        store.read(extent.offset, pages(PAGE)).wait()
    assert len(caught) == 1
