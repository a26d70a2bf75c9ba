"""Which unit's states go where: wishes, sizes, and plans for real and for random machines."""

import random
from dataclasses import replace

import pytest
import torch

from zerofold.offload.budget import GIB, Budget, available
from zerofold.offload.plan import OffloadError, Plan, place
from zerofold.offload.sizes import UnitSize, bytes_of, summed
from zerofold.offload.wishes import AUTO, Offload, check_row, read_offload
from zerofold.placement import Tier, Tiers, row

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def test_wishes_are_read() -> None:
    assert read_offload(None) is None
    assert read_offload("auto") == Offload(optimizer=AUTO, parameters=AUTO)
    assert read_offload("host") == read_offload({"optimizer": "host"}) == Offload(optimizer=HOST)
    assert read_offload(0.25) == Offload(optimizer=0.25)
    wish = {"optimizer": "nvme", "parameters": "host", "path": "/disk", "host_limit": "1.5 GiB", "reserve": "500MB"}
    found = read_offload(wish | {"checksums": True, "threads": 3, "device_share": 0.5, "sums": True})
    assert found.sums
    assert (found.optimizer, found.parameters, found.host_limit, found.reserve) == (NVME, HOST, 1610612736, 500_000_000)
    assert (found.checksums, found.threads, found.device_share, found.path) == (True, 3, 0.5, "/disk")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("hots", ["offload['optimizer']='hots'", "did you mean 'host'?"]),
        ("cpu", ["'cpu'", "choose one of 'device', 'host', 'nvme', 'auto'"]),
        (True, ["offload=True is a bool"]),
        (1.5, ["1.5", "from 0 to 1"]),
        ("nvme", ["needs a folder", "'path'"]),
        ({"optimiser": "host"}, ["offload['optimiser']", "did you mean 'optimizer'?"]),
        ({"path": "/disk"}, ["names no state", "'optimizer'"]),
        ({"optimizer": "host", "host_limit": "40G"}, ["'40G'", "'40GiB'"]),
        ({"optimizer": "host", "device_limit": 0}, ["device_limit", "more than 0"]),
        ({"optimizer": "host", "threads": 0}, ["threads", "1 or more"]),
        ({"optimizer": "host", "checksums": 1}, ["checksums", "neither True nor False"]),
        ({"optimizer": "host", "parameters": 0.5}, ["parameters", "0.5", "choose one of"]),
    ],
)
def test_a_wrong_wish_is_one_line_that_names_it(wish: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read_offload(wish)  # type: ignore[call-overload]
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_parameters_leave_the_device_only_where_that_frees_something() -> None:
    both = read_offload({"optimizer": "host", "parameters": "host"})
    check_row(both, row(3))
    check_row(both, row("hsdp"))
    with pytest.raises(ValueError, match="stage '1' keeps them whole"):
        check_row(both, row(1))
    alone = read_offload({"parameters": "host"})
    check_row(alone, row(3), trains=False)
    with pytest.raises(ValueError, match="frees nothing while the optimizer's states"):
        check_row(alone, row(3))
    check_row(read_offload("auto"), row(0))


@pytest.mark.parametrize(
    ("unit", "tiers", "device", "host", "disk"),
    [
        (UnitSize("", 100), Tiers(), 1400, 0, 0),
        (UnitSize("", 100), Tiers(HOST, HOST), 200, 1400, 0),
        (UnitSize("", 100), Tiers(HOST, HOST, HOST), 0, 1400, 0),
        (UnitSize("", 100, gradient_bytes=4), Tiers(HOST, HOST), 200, 1600, 0),
        (UnitSize("", 100, gradient_bytes=4), Tiers(HOST, HOST, HOST), 0, 1600, 0),
        (UnitSize("", 100), Tiers(HOST, DEVICE, HOST), 200, 1400, 0),
        (UnitSize("", 100), Tiers(NVME, HOST), 200, 200, 1200),
        (UnitSize("", 100), Tiers(NVME, HOST, NVME), 0, 200, 1400),
        (UnitSize("", 100, frozen=50), Tiers(HOST, HOST, HOST), 0, 1500, 0),
        (UnitSize("", 0, frozen=50), Tiers(parameters=NVME), 0, 0, 100),
        (UnitSize("", 100, gathered_bytes=400, whole_parameters=True), Tiers(HOST, HOST), 400, 1400, 0),
        # fp32 compute: one copy serves as master and parameter where both are in one place
        (UnitSize("", 100, compute_bytes=4, gradient_bytes=4, has_master=False), Tiers(), 1600, 0, 0),
        (UnitSize("", 100, compute_bytes=4, gradient_bytes=4, has_master=False), Tiers(HOST, HOST), 400, 1600, 0),
        (UnitSize("", 100, compute_bytes=4, gradient_bytes=4, has_master=False), Tiers(HOST, HOST, HOST), 0, 1600, 0),
    ],
)
def test_sizes(unit: UnitSize, tiers: Tiers, device: int, host: int, disk: int) -> None:
    found = bytes_of(unit, tiers)
    assert [sum(found[tier].values()) for tier in Tier] == [device, host, disk]


def gpt(parameters: float, blocks: int) -> list[UnitSize]:
    root = int(parameters * 0.04)
    return [UnitSize("", root), *(UnitSize(f"h.{i}", int((parameters - root) / blocks)) for i in range(blocks))]


def order(plan: Plan) -> list[int]:
    return [list(Tier).index(tiers.optimizer) for tiers in plan.tiers.values()]


def test_a_40_gib_limit_keeps_half_on_the_device() -> None:
    units, wish = gpt(3.38e9, 28), read_offload({"optimizer": "auto", "device_limit": "40GiB"})
    plan = place(units, wish, Budget(40 * GIB, 110 * GIB), extra_device=3 * GIB // 2)
    assert order(plan) == sorted(order(plan)), "the first units stay, the last go"
    assert 0.5 < order(plan).count(0) / len(units) < 0.7
    assert plan.used(DEVICE) + plan.extra_device + plan.reserve <= 40 * GIB
    assert plan.reserve == 12 * GIB
    assert not plan.is_least_reserve
    assert "16 on the device, 13 on the host" in plan.text()
    assert "not used: offload= has no 'path'" in plan.text()


@pytest.mark.parametrize("blocks", [16, 60, 200])
def test_20e9_parameters_fill_device_host_and_disk(blocks: int) -> None:
    plan = place(
        gpt(20e9, blocks),
        read_offload({"optimizer": "auto", "path": "/disk"}),
        Budget(139 * GIB, 118 * GIB, 58 * GIB),
        extra_device=3 * GIB,
    )
    assert order(plan) == sorted(order(plan))
    assert set(order(plan)) == {0, 1, 2}
    assert plan.used(HOST) <= 118 * GIB
    assert plan.used(NVME) <= 58 * GIB
    assert plan.used(DEVICE) + plan.extra_device + plan.reserve <= 139 * GIB
    # Parameters leave the device before a unit goes to the disk, where its update takes forty times as long.
    assert plan.used(NVME) < (57 if blocks == 16 else 34) * GIB


def test_the_reserve_gives_way_before_the_plan_does() -> None:
    units, wish = gpt(1e9, 10), read_offload("auto")
    plan = place(units, wish, Budget(14 * GIB, GIB))
    assert plan.is_least_reserve
    assert "less than usual" in plan.text()
    with pytest.raises(OffloadError, match="the states need 13.0 GiB"):
        place(units, replace(wish, reserve=2 * GIB), Budget(14 * GIB, GIB))


def test_what_does_not_fit_is_refused_with_numbers_and_a_plan_that_fits() -> None:
    units = gpt(10e9, 40)
    with pytest.raises(OffloadError) as caught:
        place(units, read_offload("host"), Budget(80 * GIB, 96 * GIB))
    said = str(caught.value)
    assert "needs 130.4 GiB of host memory, where 96.0 GiB may be used" in said
    assert "fits: offload={'optimizer': 0.7} with" in said
    assert "\n" not in said
    with pytest.raises(OffloadError, match=r"needs .* of the disk of .*fits: offload=\{'optimizer': 0\.7\}"):
        place(units, read_offload({"optimizer": "nvme", "path": "/disk"}), Budget(80 * GIB, 96 * GIB, 10 * GIB))
    with pytest.raises(OffloadError, match=r"'path': '\.\.\.'.* on disk"):
        place(units, read_offload("host"), Budget(40 * GIB, 30 * GIB))
    with pytest.raises(OffloadError, match="nothing fits here"):
        place(units, read_offload("auto"), Budget(GIB, 0), extra_device=GIB)


def test_a_fraction_is_counted_in_whole_units_from_the_end() -> None:
    plan = place(gpt(1e9, 10), read_offload({"optimizer": 0.3, "parameters": "host"}), Budget(64 * GIB, 64 * GIB))
    assert order(plan) == [0] * 8 + [1] * 3
    assert [tiers.parameters for tiers in plan.tiers.values()] == [DEVICE] * 8 + [HOST] * 3


def random_units(rng: random.Random) -> list[UnitSize]:
    whole, fp32 = rng.random() < 0.2, rng.random() < 0.2
    common = {"gradient_bytes": 4 if fp32 else rng.choice([2, 4]), "compute_bytes": 4 if fp32 else 2}
    units = []
    for index in range(rng.randint(1, 14)):
        trained, frozen = rng.choice([0, rng.randint(1, 1000)]), rng.choice([0, rng.randint(1, 1000)])
        gathered = (trained + frozen) * common["compute_bytes"] * rng.randint(1, 4)
        units.append(
            UnitSize(
                f"unit{index}",
                trained,
                frozen,
                has_master=not fp32,
                gathered_bytes=gathered,
                whole_parameters=whole,
                **common,
            )
        )
    return units


def test_random_models_on_random_machines() -> None:
    rng, outcomes = random.Random(7), {"fits": 0, "refused": 0, "disk": 0}
    for _ in range(200):
        units = random_units(rng)
        everything = sum(summed(units, {unit.name: Tiers() for unit in units})[DEVICE].values())
        parts = [int(everything * rng.uniform(0.0, 1.2)) for _ in range(3)]
        budget = Budget(parts[0], parts[1], rng.choice([None, parts[2]]), one_memory=rng.random() < 0.1)
        extra, reserve = rng.randint(0, 200), rng.randint(0, 200)
        wish = Offload(optimizer=AUTO, parameters=rng.choice([AUTO, DEVICE]), reserve=reserve)
        try:
            plan = place(units, wish, budget, extra_device=extra)
        except OffloadError:
            outcomes["refused"] += 1
            assert everything > budget.device - extra - reserve or budget.one_memory
            continue
        outcomes["fits"] += 1
        outcomes["disk"] += plan.used(NVME) > 0
        assert plan == place(units, wish, budget, extra_device=extra), "the same every time"
        assert plan.predicted == summed(units, plan.tiers)
        room = budget.device - extra - reserve
        assert plan.used(DEVICE) <= room
        assert plan.used(HOST) + plan.used(DEVICE) * budget.one_memory <= budget.host
        assert plan.used(NVME) <= (budget.disk or 0)
        for unit in units:
            moved = summed(units, plan.tiers | {unit.name: Tiers()})
            if plan.tiers[unit.name].is_offloaded and not budget.one_memory:
                assert sum(moved[DEVICE].values()) > room, f"{unit.name} would fit on the device"
    assert min(outcomes.values()) > 10, outcomes


def test_the_budget_keeps_to_its_limits_and_shares_the_host(tmp_path: object) -> None:
    wish = read_offload({"optimizer": "auto", "path": f"{tmp_path}/later", "device_limit": "1MiB", "disk_limit": 1000})
    found = available(torch.device("cpu"), wish, 1)
    assert (found.device, found.disk, found.one_memory) == (2**20, 1000, True)
    assert available(torch.device("cpu"), wish, 4).host < found.host / 3
