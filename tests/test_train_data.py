"""The text and its batches: the same everywhere, different on each rank, and validation never trained on."""

import sysconfig
from pathlib import Path

import pytest
import torch

from zerofold.train.data import ByteText, library_source


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in {
        "b.py": "second\n",
        "a.py": "first\n",
        "notes.txt": "no source\n",
        "pkg/c.py": "third\n",
        "pkg/tests/test_c.py": "a test\n",
        "test/d.py": "a test\n",
        "site-packages/other.py": "installed\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def test_source_files_come_in_order_without_tests_and_installed_packages(library: Path) -> None:
    assert library_source(library) == b"first\nsecond\nthird\n"


def test_source_is_capped(library: Path) -> None:
    assert library_source(library, limit_bytes=8) == b"first\nse"


def test_no_source_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use a Python whose standard library is unpacked"):
        library_source(tmp_path)


def test_this_machine_has_enough_to_learn_from() -> None:
    text = library_source(limit_bytes=2**20)
    assert len(text) == 2**20
    assert Path(sysconfig.get_paths()["stdlib"], "abc.py").read_bytes()[:100] in text


def test_a_batch_is_a_pure_function_of_seed_step_and_rank() -> None:
    text = ByteText(bytes(range(256)) * 64, seq=16)
    batch = text.batch(4, seed=1, step=2, rank=3)
    assert torch.equal(batch.tokens, text.batch(4, seed=1, step=2, rank=3).tokens)
    for other in ({"seed": 0}, {"step": 0}, {"rank": 0}):
        where = {"seed": 1, "step": 2, "rank": 3} | other
        assert not torch.equal(batch.tokens, text.batch(4, **where).tokens)


def test_targets_are_the_next_bytes() -> None:
    batch = ByteText(bytes(range(256)) * 64, seq=16).batch(4, seed=0, step=0, rank=0)
    assert batch.tokens.shape == batch.targets.shape == (4, 16)
    assert torch.equal((batch.tokens + 1) % 256, batch.targets)


def test_validation_text_is_held_out_and_split_over_the_ranks() -> None:
    text = ByteText(b"t" * 1900 + b"v" * 100, seq=8)
    assert set(text.training.tolist()) == {ord("t")}
    assert set(text.validation.tolist()) == {ord("v")}
    text = ByteText(bytes(range(256)) * 64, seq=8)
    whole = text.validation_batch(6, rank=0, world=1).tokens.tolist()
    parts = [text.validation_batch(3, rank=rank, world=2).tokens.tolist() for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for sequences of 64"):
        ByteText(b"short" * 10, seq=64)
