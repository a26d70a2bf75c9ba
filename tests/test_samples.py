"""zf.Samples: the same samples in the same steps whatever the number of ranks, and no sample lost or repeated."""

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import zerofold as zf
from zerofold.samples import share


def steps_of(count: int, ranks: int, state: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    """The global batches of the next steps, put together from what each rank gets."""
    everyone = [zf.Samples(rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for samples in everyone:
        if state is not None:
            samples.load_state_dict(state)
    steps = []
    for _ in range(count):
        micro_batches = zip(*(samples.indices for samples in everyone), strict=True)
        steps.append([index for ranks_lists in micro_batches for part in ranks_lists for index in part])
        for samples in everyone:
            samples.step()
    return steps


@pytest.mark.parametrize("micro", [None, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int, micro: int | None) -> None:
    options = {"length": 50, "batch": 12, "seed": 3}
    assert steps_of(9, ranks, micro=micro, **options) == steps_of(9, 1, **options)


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    order = [index for step in steps_of(15, 2, length=20, batch=4) for index in step]
    epochs = [order[:20], order[20:40], order[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(20))
    assert steps_of(15, 2, length=20, batch=4, seed=1) != steps_of(15, 2, length=20, batch=4)


def test_a_batch_at_the_end_of_an_epoch_goes_on_in_the_next_or_is_dropped() -> None:
    options = {"length": 10, "batch": 4, "shuffle": False}
    assert steps_of(4, 2, **options) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert steps_of(3, 2, drop_last=True, **options) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert steps_of(1, 1, length=2, batch=5, shuffle=False) == [[0, 1, 0, 1, 0]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_it_goes_on_at_the_exact_sample_with_fewer_ranks(taken: int, drop_last: bool) -> None:
    options = {"length": 27, "batch": 8, "drop_last": drop_last}
    samples = zf.Samples(rank=0, ranks=4, **options)
    for _ in range(taken):
        samples.step()
    state = json.loads(json.dumps(samples.state_dict()))  # plain
    assert steps_of(6, 2, state, **options) == steps_of(taken + 6, 4, **options)[taken:]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_fetched_ahead_does_not_count(workers: int) -> None:
    data = torch.arange(40)
    samples = zf.Samples(len(data), batch=4)
    loader = DataLoader(data, batch_sampler=samples, num_workers=workers, prefetch_factor=4 if workers else None)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        samples.step()
        if len(seen) == 12:
            break
    resumed = zf.Samples(len(data), batch=4)
    resumed.load_state_dict(samples.state_dict())
    assert (len(resumed), resumed.steps) == (7, 3)
    for batch in DataLoader(data, batch_sampler=resumed):
        seen += batch.tolist()
        resumed.step()
    assert sorted(seen) == list(range(40))
    assert (resumed.epoch, resumed.state_dict()["sample"]) == (1, 0)


def test_epochs_follow_each_other_in_a_loop_over_a_loader() -> None:
    samples = zf.Samples(10, batch=4, micro=2)
    seen = []
    for _ in range(2):
        for number, indices in enumerate(samples):
            seen += indices
            if number % samples.accumulate == 1:
                samples.step()
    assert sorted(seen) == sorted([*range(10), *range(10)])


def test_an_epoch_without_a_step_is_not_repeated_silently() -> None:
    samples = zf.Samples(8, batch=4)
    list(samples)
    with pytest.raises(RuntimeError, match="call samples.step\\(\\) after every optimizer.step"):
        list(samples)


def test_what_does_not_divide_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match="32 = 3 x 10 \\+ 2, for 3 ranks.*use a batch of 33, or 1, 2, 4, 8, 16 or 32"):
        zf.Samples(100, batch=32, rank=0, ranks=3)
    with pytest.raises(ValueError, match="12 = 8 x 1 \\+ 4, for 2 ranks x 4 samples at a time"):
        share(12, 2, micro=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0 must be a whole number of at least 1"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"micro": 0}, "micro=0"),
        ({"seed": -1}, "seed=-1"),
        ({"batch": 40, "drop_last": True}, "20 samples do not fill a batch of 40"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.Samples(**{"length": 20, "batch": 4} | options)


def test_a_position_in_another_order_is_refused() -> None:
    state = zf.Samples(20, batch=4, seed=1).state_dict()
    with pytest.raises(ValueError, match="saved with seed=1, and here it is 0"):
        zf.Samples(20, batch=4).load_state_dict(state)
