"""Which rank failed first, and the block that says so when all is over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from signal import SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGTERM

from zerofold.launch import how_it_ended

# A rank that dies without a word is noticed by looking, a little later than the others raise because of it.
NOTICED_S = 2.0
RULE = "-" * 72
# No rank ends itself like this because another one is gone. SIGABRT is not among them: NCCL aborts its process then.
CRASHES = frozenset(-number for number in (SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE))
# How a rank fails that talks to one that is gone.
ECHO = re.compile(
    r"Dist(Network|Backend|Store)Error|Connection (closed|reset|refused)|Broken pipe|gloo/transport|NCCL (error|comm)"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank ended. A negative exit code is a signal."""

    host: str
    rank: int
    exit_code: int
    message: str = ""
    trace: str = ""
    when: float = 0.0
    """Seconds, by the clock of the terminal."""
    by_agent: bool = False
    """Whether the agent killed it, because it outlived the failure of another one."""
    lost: str = ""
    """How the agent of the host was lost; `rank` is then the first of that host."""

    @property
    def was_ended(self) -> bool:
        """By the agent, as the others are after the first failure."""
        return (self.by_agent or self.exit_code == -SIGTERM) and not self.trace and not self.lost

    @property
    def crashed(self) -> bool:
        return not self.trace and (bool(self.lost) or self.exit_code in CRASHES)

    @property
    def is_echo(self) -> bool:
        return ECHO.search(self.message or self.trace) is not None


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The one that the others followed.

    >>> killed = Failure(host="a", rank=1, exit_code=-9, when=10.9)
    >>> echo = Failure(host="a", rank=0, exit_code=1, trace="Connection closed by peer", when=10.4)
    >>> first_failure([echo, killed]).rank
    1
    >>> first_failure([echo, Failure(host="b", rank=3, exit_code=1, trace="ValueError", when=10.1)]).rank
    3
    """
    every = list(failures)
    own = [failure for failure in every if not failure.was_ended] or every
    earliest = min(own, key=lambda failure: failure.when)
    close = [failure for failure in own if failure.when <= earliest.when + NOTICED_S]
    likelier = [failure for failure in close if failure.crashed]
    if earliest.is_echo and not likelier:
        likelier = [failure for failure in close if not failure.trace]
    return min(likelier or [earliest], key=lambda failure: failure.when)


def exit_code(failure: Failure) -> int:
    """As a shell would give it.

    >>> exit_code(Failure(host="a", rank=0, exit_code=-9)), exit_code(Failure(host="a", rank=0, exit_code=3))
    (137, 3)
    """
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


def short(failure: Failure) -> str:
    """One line.

    >>> short(Failure(host="a", rank=1, exit_code=1, message="ValueError: no\\nsuch file", trace="..."))
    'rank 1 failed: ValueError: no'
    """
    cause = failure.message.partition("\n")[0] or how_it_ended(failure.exit_code)
    return f"rank {failure.rank} failed: {cause}"


def told(failure: Failure, others: Sequence[Failure], last_lines: Sequence[str], *, several_hosts: bool) -> str:
    """The block at the very end.

    >>> print(told(Failure(host="a", rank=1, exit_code=-9), [], ["step 7"], several_hosts=False).split("\\n")[1])
    rank 1 failed first: the process was killed (SIGKILL), most often for lack of memory: use a smaller model or batch
    """
    where = f"rank {failure.rank} on {failure.host}" if several_hosts else f"rank {failure.rank}"
    if failure.lost:
        where, (how, *details) = failure.host, (line.strip() for line in failure.lost.splitlines())
    elif failure.trace:
        how, details = f"exit code {failure.exit_code}", failure.trace.rstrip().splitlines()
    else:
        how, details = how_it_ended(failure.exit_code), [*last_lines]
        if details:
            details.insert(0, "The last that it wrote:")
    lines = [RULE, f"{where} failed first: {how}", *(f"  {line}" for line in details)]
    later = sorted({other.rank for other in others if other.rank != failure.rank and not other.was_ended})
    if later:
        ranks = "rank" if len(later) == 1 else "ranks"
        lines.append(f"After it failed {ranks} {', '.join(str(rank) for rank in later)}.")
    return "\n".join([*lines, RULE])
