"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest

from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(2, fn, *args)` runs `fn` on two gloo ranks and returns what each returned; see ranks.py."""
    pool = RankPool(keep=4)
    yield pool
    pool.close()
