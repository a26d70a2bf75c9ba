"""What each rank did last, side by side: which calls do not fit together, and who waits for whom. No threads, no wires.

Calls are compared by their position in their group, the only order that ranks must share: gathers and reductions may
interleave differently.

position          55          56          57                             what it means
rank 0   gather   block 0     block 1     expert 0   waiting             57 is another call on rank 1: a mismatch,
rank 1   gather   block 0     block 1     expert 3   waiting             whatever the time it takes

rank 0   gather   block 0     block 1     block 2    waiting             rank 0 waits for rank 1, and rank 1 for rank 0
rank 1   reduce   block 5     the norm    waiting                        in another group: nobody can go on

rank 0   gather   block 0     block 1     block 2    waiting             rank 1 may still come: it has stopped, or it
rank 1   gather   block 0     block 1                                    is slow
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_SAME = "every rank must run the same modules in the same order"


@dataclass(frozen=True)
class Seen:
    """One call as others need to know it: equal on all ranks that do the same."""

    operation: str
    unit: str
    nbytes: int
    root: int | None = None  # the rank that sends, where one alone does

    def __str__(self) -> str:
        source = "" if self.root is None else f" from rank {self.root}"
        return f"{self.operation} of '{self.unit or 'the root'}'{source}"


@dataclass(frozen=True)
class Line:
    """A rank's last calls in one group."""

    ranks: list[int]
    count: int  # how many it has made, or is about to make
    calls: dict[int, Seen]  # the last of them, by position


@dataclass(frozen=True)
class Account:
    """What one rank tells about itself."""

    rank: int
    groups: dict[str, Line]
    idle: float  # seconds since its last call
    waiting: float = 0.0  # seconds for which a call of its has been unfinished
    blocked: tuple[str, int] | None = None  # group and position of the call that it cannot go on without
    where: str = ""  # in the user's code
    failed: str = ""  # why a call failed here
    last: str = ""  # call, in words

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Account:
        groups = {
            key: Line(line["ranks"], line["count"], {int(at): Seen(**call) for at, call in line["calls"].items()})
            for key, line in told["groups"].items()
        }
        blocked = None if told["blocked"] is None else (told["blocked"][0], told["blocked"][1])
        return cls(**{**told, "groups": groups, "blocked": blocked})


Accounts = Mapping[int, Account]


def find_mismatch(accounts: Accounts) -> str | None:
    """The first position of a group at which ranks made different calls."""
    for key in sorted({key for account in accounts.values() for key in account.groups}):
        lines = {rank: account.groups[key] for rank, account in accounts.items() if key in account.groups}
        for position in sorted({position for line in lines.values() for position in line.calls}):
            made = {rank: line.calls[position] for rank, line in lines.items() if position in line.calls}
            if len(set(made.values())) > 1:
                return _mismatch(position, key, made)
    return None


def _mismatch(position: int, key: str, made: dict[int, Seen]) -> str:
    by_call: dict[Seen, list[int]] = {}
    for rank, call in made.items():
        by_call.setdefault(call, []).append(rank)
    # The fewest first: most often one rank has gone another way.
    (odd, few), *rest = sorted(by_call.items(), key=lambda item: (len(item[1]), item[1]))
    sizes = len({(call.operation, call.unit, call.root) for call in by_call}) < len(by_call)
    others = " and ".join(f"{_ranks(ranks)} called {_call(call, sizes)}" for call, ranks in rest)
    return (
        f"{_ranks(few)} called {_call(odd, sizes)} as call #{position} of the {_name(key)} group while {others}: "
        f"{_SAME}. Look for a branch that only some ranks take (experts that are units of their own), uneven data "
        "(zf.join), or a call that all ranks must make"
    )


def _call(call: Seen, with_size: bool) -> str:
    return f"{call} ({call.nbytes} bytes)" if with_size else str(call)


def find_deadlock(accounts: Accounts) -> str | None:
    """Ranks that wait for each other in different groups; the others may wait for them."""
    waits = {rank: set(_awaited(account, accounts)) for rank, account in accounts.items() if account.blocked}
    caught = set(waits)
    while True:
        free = {rank for rank in caught if _can_go_on(accounts[rank], waits[rank], caught)}
        if not free:
            break
        caught -= free
    if not caught:
        return None
    by_call: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(caught):
        blocked = accounts[rank].blocked
        assert blocked is not None
        by_call.setdefault(blocked, []).append(rank)
    parts = []
    for (key, position), ranks in sorted(by_call.items(), key=lambda item: (len(item[1]), item[1])):
        call = accounts[ranks[0]].groups[key].calls.get(position)
        missing = sorted(set.union(*(waits[rank] for rank in ranks)) & caught)
        wait = "waits" if len(ranks) == 1 else "wait"
        not_called = f"which {_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not called"
        at = f" at {accounts[ranks[0]].where}" if accounts[ranks[0]].where else ""
        parts.append(f"{_ranks(ranks)} {wait} in {call} (call #{position} of the {_name(key)} group{at}), {not_called}")
    return (
        f"ranks wait for each other: {'; '.join(parts)}: a call that all ranks must make (optimizer.step, backward, "
        "full_params, zf.full) was made by some of them, a module was attached or unfrozen on some only, or generate() "
        "ended earlier on some (pass synced_gpus=True)"
    )


def _can_go_on(account: Account, awaited: set[int], caught: set[int]) -> bool:
    """Whether somebody that is not caught in a ring can end the call that blocks this rank.

    One that sends may wait for a slow receiver alone, whatever the others do: it is stuck when all of them are.
    """
    if _root(account) == account.rank:
        return not awaited or not awaited <= caught
    return not awaited & caught


def _root(account: Account) -> int | None:
    assert account.blocked is not None
    key, position = account.blocked
    call = account.groups[key].calls.get(position)
    return None if call is None else call.root


def _awaited(account: Account, accounts: Accounts) -> Iterable[int]:
    """Ranks without which the call that blocks this one cannot end."""
    assert account.blocked is not None
    key, position = account.blocked
    line, root = account.groups[key], _root(account)
    for rank in set(line.ranks) - {account.rank}:
        other = accounts.get(rank)
        is_behind = other is not None and key in other.groups and other.groups[key].count < position
        if is_behind and root in (None, rank, account.rank):
            yield rank


@dataclass(frozen=True)
class Stop:
    """Ranks that others wait for, and that may still come."""

    first_waiting: int
    text: str


def find_stop(accounts: Accounts, silent: Iterable[int], *, at_least: float) -> Stop | None:
    """Who has been waited for at least so many seconds; `silent` ranks answer no more."""
    silent = set(silent)
    waiting = [a for a in accounts.values() if a.waiting >= at_least and a.rank not in silent]
    places = [(account, *_place(account)) for account in sorted(waiting, key=lambda a: a.rank)]
    for account, key, position in places:
        line = account.groups[key]
        late = [r for r in line.ranks if r in silent or (r in accounts and accounts[r].groups[key].count < position)]
        late = [r for r in late if r in silent or accounts[r].blocked is None]
        if late:
            same = [a.rank for a, k, p in places if (k, p) == (key, position)]
            told = [_late(rank, None if rank in silent else accounts[rank]) for rank in late]
            return Stop(
                account.rank,
                f"{'; '.join(told)}; {_ranks(same)} {'waits' if len(same) == 1 else 'wait'} in "
                f"{line.calls.get(position)} (call #{position} of the {_name(key)} group) for {account.waiting:.0f} s. "
                "Uneven data? See zf.join",
            )
    return None


def _place(account: Account) -> tuple[str, int]:
    """Where a rank waits: the call that blocks it, or else the last of the group that has gone furthest."""
    if account.blocked is not None:
        return account.blocked
    key = max(account.groups, key=lambda key: account.groups[key].count)
    return key, account.groups[key].count


def _late(rank: int, account: Account | None) -> str:
    if account is None:
        return f"rank {rank} does not answer: its process is gone, stopped, or cannot be reached"
    where = f" and is at {account.where}" if account.where else ""
    return f"rank {rank} has made no call for {account.idle:.0f} s after {account.last or 'the start'}{where}"


def who_is_gone(accounts: Accounts, silent: Iterable[int]) -> str | None:
    """After a connection broke: ranks that do not answer, but for those that told of a failure before."""
    gone = [rank for rank in sorted(silent) if rank not in accounts or not accounts[rank].failed]
    if not gone:
        return None
    lasts = [f"{accounts[rank].last} was the last call known of rank {rank}" for rank in gone if rank in accounts]
    answer, its = ("does not", "its process") if len(gone) == 1 else ("do not", "their processes")
    return (
        f"{_ranks(gone)} {answer} answer any more: {its} ended (killed, out of host memory, or at the end of the "
        f"script before the others: uneven data? see zf.join){'; ' if lasts else ''}{'; '.join(lasts)}"
    )


def who_is_idle(accounts: Accounts) -> str | None:
    """After a time-out: ranks that wait for nothing and call nothing."""
    idle = [a for a in accounts.values() if a.blocked is None and not a.waiting and not a.failed]
    told = "; ".join(_late(account.rank, account) for account in sorted(idle, key=lambda a: a.rank))
    return f"{told}. Uneven data? See zf.join" if told else None


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    if len(listed) > 8:
        return f"ranks {', '.join(map(str, listed[:6]))} and {len(listed) - 6} more"
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _name(key: str) -> str:
    return key.split(":", 1)[0]
