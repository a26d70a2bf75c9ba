"""A job seen from the terminal: one agent per host is started, told its plan, listened to, and ended with the others.

start ─► every host says hello ─► plans are sent ─► lines … ─► done, or failed ─► the others are stopped
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import IO, Any

import torch

from zerofold.launcher.agent import main as agent_main
from zerofold.launcher.failures import Failure, exit_code, first_failure, short, told
from zerofold.launcher.network import Address, meeting_address
from zerofold.launcher.output import Output
from zerofold.launcher.plan import HostPlan, unpack
from zerofold.launcher.processes import Copy, Process, start_command

HELLO_S = 180.0  # importing torch from a cold network disk takes its time
PATIENCE_S = 15.0
ECHO_S = 1.0  # for the failures of other hosts, one of which may be the first
POLL_S = 0.2
BLOCKED_S = 3 * POLL_S  # a step that takes longer: nobody takes what this process writes
LATE_S = 5.0  # beyond the grace of the ranks, for an agent to end
CLOCK_S = 1.0  # clocks of hosts closer than this are taken as equal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotStart(RuntimeError):
    """The job does not fit the hosts; the message is for the user."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks find each other, as far as the user said so."""

    address: str | None = None
    port: int | None = None
    default_port: int = 29500


@dataclass
class _Agent:
    plan: HostPlan
    process: Process
    command: Sequence[str]
    hello: dict[str, Any] = field(default_factory=dict)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=15))
    open_streams: int = 2
    answered: bool = False
    """Whether it said how the ranks ended."""

    @property
    def host(self) -> str:
        return self.plan.host

    @property
    def ended(self) -> bool:
        return self.open_streams == 0

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which its streams say
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()


class Job:
    """Runs once; `run` returns the exit code for the shell."""

    def __init__(self, output: Output, meeting: Meeting) -> None:
        self._output = output
        self._meeting = meeting
        self._agents: list[_Agent] = []
        # Bounded: ranks that write faster than the terminal shows wait, as they would on a plain terminal.
        self._messages: queue.Queue[tuple[_Agent, str | None]] = queue.Queue(maxsize=1000)
        self._failures: list[Failure] = []
        self._restarted: list[list[Failure]] = []
        self._lost: list[str] = []
        self._failed_at = self._stopped_at = float("inf")
        self._signals: list[int] = []
        self._obeyed = 0
        self._moved_at = time.monotonic()

    def run(self, plans: Sequence[HostPlan], commands: Mapping[str, Sequence[str]]) -> int:
        with self._catching_signals():
            try:
                self._start(plans, commands)
                self._wait_for_hellos()
                if not self._signals:
                    self._send_plans()
                self._listen()
            finally:
                self._end()
        self._output.close()
        return self._conclude()

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            if self._signals and time.monotonic() > self._moved_at + BLOCKED_S:
                os._exit(128 + number)  # the end of their orders stops the agents
            self._signals.append(number)

        # One that is ignored stays so: nohup and a shell's background jobs count on it.
        caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, plans: Sequence[HostPlan], commands: Mapping[str, Sequence[str]]) -> None:
        """Hosts without a command are this one."""
        port = self._port(several=plans[0].nodes > 1)
        for plan in sorted(plans, key=lambda plan: plan.host in commands):
            command = commands.get(plan.host, ())
            try:
                process = start_command(command) if command else Copy(partial(agent_main, torch.cuda.device_count()))
            except OSError as error:
                raise CannotStart(f"{plan.host}: {command[0]} cannot be run: {error.strerror}") from error
            self._agents.append(_Agent(plan, process, command))
        self._agents.sort(key=lambda started: started.plan.node_rank)
        for started in self._agents:
            for stream in (started.process.stdout, started.process.stderr):
                threading.Thread(target=self._read, args=(started, stream), daemon=True).start()
            started.tell(f'{{"port": {port if started.plan.node_rank == 0 else 0}}}')

    def _port(self, *, several: bool) -> int:
        if self._meeting.port is not None:
            return self._meeting.port
        return self._meeting.default_port if several else 0

    def _read(self, agent: _Agent, stream: IO[str]) -> None:
        for line in stream:
            self._messages.put((agent, line.removesuffix("\n")))
        self._messages.put((agent, None))

    def _wait_for_hellos(self) -> None:
        begin = time.monotonic()
        tell_at = begin + PATIENCE_S
        while (missing := [agent for agent in self._agents if not agent.hello]) and not self._signals:
            self._take()
            for agent in missing:
                if agent.ended:
                    raise CannotStart(f"{agent.host}: {self._how_it_was_lost(agent)}")
            hosts = ", ".join(agent.host for agent in missing)
            if time.monotonic() > begin + HELLO_S:
                raise CannotStart(f"no answer from {hosts} within {HELLO_S:g} s: is it up, and reached by this shell?")
            if time.monotonic() > tell_at:
                tell_at = float("inf")
                self._output.note(f"zerofold launch: waiting for {hosts}")

    def _send_plans(self) -> None:
        first, *others = self._agents
        self._check_gpus()
        several = first.plan.nodes > 1
        port = self._port(several=several)
        if not first.hello["port_free"]:
            raise CannotStart(f"port {port} of {first.host} is taken: choose another one with --master_port")
        address = self._meeting.address or ("127.0.0.1" if not several else self._address_of(first, others))
        for agent in self._agents:
            agent.plan = replace(agent.plan, master_addr=address, master_port=port)
            agent.tell(agent.plan.to_json())

    def _address_of(self, first: _Agent, others: Sequence[_Agent]) -> str:
        addresses = [[Address(*address) for address in agent.hello["addresses"]] for agent in (first, *others)]
        address = meeting_address(addresses[0], addresses[1:])
        if address is None:
            raise CannotStart(f"{first.host} has no IPv4 address but its loopback: give one with --master_addr")
        return address

    def _check_gpus(self) -> None:
        with_gpus = [agent for agent in self._agents if agent.hello["gpus"]]
        for agent in self._agents:
            gpus, highest = agent.hello["gpus"], max(agent.plan.slots)
            if with_gpus and not gpus:
                raise CannotStart(f"{agent.host} has no GPU but {with_gpus[0].host} has: leave one of them out")
            if gpus and highest >= gpus:
                raise CannotStart(f"{agent.host} has {gpus} GPUs and no slot {highest}: use slots 0 to {gpus - 1}")

    def _listen(self) -> None:
        while not all(agent.ended for agent in self._agents):
            self._take()
            self._check_signals()
            now = time.monotonic()
            if now > self._failed_at + ECHO_S:
                self._stop(signal.SIGTERM)
            grace = max(agent.plan.grace for agent in self._agents)
            if now > self._stopped_at + grace + LATE_S:
                return

    def _take(self) -> None:
        self._moved_at = time.monotonic()
        try:
            agent, line = self._messages.get(timeout=POLL_S)
        except queue.Empty:
            return
        if line is None:
            agent.open_streams -= 1
            if agent.ended and agent.hello and not agent.answered and not self._signals:
                self._lose(agent)
            return
        message = unpack(line)
        if message is None:
            agent.last_lines.append(line)
            if agent.hello:
                self._output.note(f"{agent.host}: {line}")
        else:
            self._handle(agent, message)

    def _handle(self, agent: _Agent, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "lines":
            self._output.lines(agent.host, **message)
        elif kind == "live":
            self._output.live(agent.host, **message)
        elif kind == "hello":
            skew = time.time() - message["time"]
            agent.hello = {**message, "skew": skew if abs(skew) > CLOCK_S else 0.0}
        elif kind == "restarted":
            self._note_restart(agent, message["failures"])
        else:
            agent.answered = True
            if kind == "failed":
                self._failures += [self._failure(agent, values) for values in message["failures"]]
            elif kind == "refused":
                self._lost.append(f"{agent.host}: {message['message']}")
            if kind in ("failed", "refused"):
                self._failed_at = min(self._failed_at, time.monotonic())

    def _note_restart(self, agent: _Agent, failures: list[dict[str, Any]]) -> None:
        """Once for all hosts: those without a failed rank start theirs again too."""
        self._restarted.append([self._failure(agent, values) for values in failures])
        attempt, others = divmod(len(self._restarted), len(self._agents))
        if others:
            return
        every = [failure for found in self._restarted[-len(self._agents) :] for failure in found]
        causes = [failure for failure in every if not failure.was_ended]
        cause = short(first_failure(causes)) if causes else "a rank failed"
        restarts = agent.plan.max_restarts
        self._output.note(f"zerofold launch: {cause}; starting all ranks again ({attempt} of {restarts} restarts)")

    def _lose(self, agent: _Agent) -> None:
        text = self._how_it_was_lost(agent)
        self._failed_at = min(self._failed_at, time.monotonic())
        if self._stopped_at != float("inf"):  # it was told to stop: that it took too long is no cause of anything
            self._lost.append(f"{agent.host}: {text}")
            return
        ranks_before = sum(len(other.plan.slots) for other in self._agents[: self._agents.index(agent)])
        code = agent.process.poll() or 1
        lost = Failure(host=agent.host, rank=ranks_before, exit_code=code, when=time.time(), lost=text)
        self._failures.append(lost)

    def _failure(self, agent: _Agent, values: dict[str, Any]) -> Failure:
        return Failure(host=agent.host, **{**values, "when": values["when"] + agent.hello["skew"]})

    def _check_signals(self) -> None:
        if len(self._signals) > self._obeyed:
            self._obeyed = len(self._signals)
            number = self._signals[-1]
            again = self._stopped_at != float("inf")
            self._stop(number)
            if again:
                for agent in self._agents:
                    agent.tell("kill")
            elif number == signal.SIGINT:
                self._output.note("zerofold launch: ending the ranks; Ctrl-C again ends them at once")

    def _stop(self, number: int) -> None:
        if self._stopped_at == float("inf"):
            self._stopped_at = time.monotonic()
            for agent in self._agents:
                agent.tell(f"stop {int(number)}")

    def _end(self) -> None:
        """No agent outlives this, however it came: the end of its orders stops it, and then it is killed."""
        for agent in self._agents:
            assert agent.process.stdin is not None
            with contextlib.suppress(OSError):
                agent.process.stdin.close()
        deadline = time.monotonic() + max((agent.plan.grace for agent in self._agents), default=0.0) + LATE_S
        while self._agents and not all(agent.ended for agent in self._agents) and time.monotonic() < deadline:
            self._take()  # an agent that cannot write does not end
        for agent in self._agents:
            try:
                agent.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()

    def _how_it_was_lost(self, agent: _Agent) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.process.wait(1.0)
        code = agent.process.poll()
        lines = "".join(f"\n  {line}" for line in agent.last_lines)
        if agent.hello:
            return f"the agent there ended with exit code {code} and said nothing more{lines}"
        if not agent.command:
            return f"the agent did not start (exit code {code}){lines}"
        return (
            f"the agent did not start (exit code {code}): {' '.join(agent.command)}{lines}\n"
            "  Can this host be reached without a password, and is zerofold installed there for the same Python?"
        )

    def _conclude(self) -> int:
        if self._signals:
            self._output.note(f"zerofold launch: ended by {signal.Signals(self._signals[0]).name}")
            return 128 + self._signals[0]
        for line in self._lost:
            self._output.note(f"zerofold launch: {line}")
        if not self._failures:
            return 1 if self._lost else 0
        first = first_failure(self._failures)
        several = self._agents[0].plan.nodes > 1
        last = self._output.last_lines(first.rank)
        self._output.note(told(first, self._failures, last, several_hosts=several))
        return exit_code(first)
