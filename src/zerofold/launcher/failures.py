"""Which rank failed first, and the block that says so when all is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from signal import SIGABRT, SIGTERM

from zerofold.launch import how_it_ended

# A rank that dies without a word is noticed by looking, a little later than the others raise because of it.
NOTICED_S = 2.0
RULE = "─" * 72


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

    @property
    def was_ended(self) -> bool:
        """By the agent, as the others are after the first failure."""
        return self.exit_code == -SIGTERM and not self.trace

    @property
    def died_without_a_word(self) -> bool:
        # NCCL aborts its process when another rank is gone: that is an echo.
        return not self.trace and self.exit_code not in (-SIGTERM, -SIGABRT)


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
    earliest = min(failure.when for failure in own)
    silent = [failure for failure in own if failure.died_without_a_word and failure.when <= earliest + NOTICED_S]
    return min(silent or own, key=lambda failure: failure.when)


def exit_code(failure: Failure) -> int:
    """As a shell would give it.

    >>> exit_code(Failure(host="a", rank=0, exit_code=-9)), exit_code(Failure(host="a", rank=0, exit_code=3))
    (137, 3)
    """
    return 128 - failure.exit_code if failure.exit_code < 0 else failure.exit_code


def told(failure: Failure, others: Sequence[Failure], last_lines: Sequence[str], *, several_hosts: bool) -> str:
    """The block at the very end.

    >>> print(told(Failure(host="a", rank=1, exit_code=-9), [], ["step 7"], several_hosts=False).split("\\n")[1])
    rank 1 failed first: the process was killed (SIGKILL), most often for lack of memory: use a smaller model or batch
    """
    where = f"rank {failure.rank} on {failure.host}" if several_hosts else f"rank {failure.rank}"
    if failure.trace:
        how, details = f"exit code {failure.exit_code}", failure.trace.rstrip().splitlines()
    else:
        how, details = how_it_ended(failure.exit_code), [*last_lines]
        if details:
            details.insert(0, "The last that it wrote:")
    lines = [RULE, f"{where} failed first: {how}", *(f"  {line}" for line in details)]
    later = sorted(other.rank for other in others if other.rank != failure.rank and not other.was_ended)
    if later:
        ranks = "rank" if len(later) == 1 else "ranks"
        lines.append(f"After it failed {ranks} {', '.join(str(rank) for rank in later)}.")
    return "\n".join([*lines, RULE])
