"""Which address of the first host the others use, and through which interface a host reaches it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

import psutil

# Networks inside one machine: their addresses are often the same on every host, and none reaches another one.
INSIDE = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


class Address(NamedTuple):
    interface: str
    address: str
    netmask: str


def own_addresses() -> list[Address]:
    """IPv4 addresses of this host, the likely ones first; not the loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        Address(name, entry.address, entry.netmask or "255.255.255.255")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name in up and not entry.address.startswith("127.")
    ]
    return sorted(found, key=lambda address: address.interface.startswith(INSIDE))


def meeting_address(first: Sequence[Address], others: Sequence[Sequence[Address]]) -> str | None:
    """An address of the first host in a network that every other host is in; else the likeliest of its addresses.

    >>> eth = Address("eth0", "10.0.0.1", "255.255.255.0")
    >>> docker = Address("docker0", "172.17.0.1", "255.255.0.0")
    >>> meeting_address([docker, eth], [[Address("ens3", "10.0.0.2", "255.255.255.0"), docker]])
    '10.0.0.1'
    """
    for candidate in first:
        network = ipaddress.ip_network(f"{candidate.address}/{candidate.netmask}", strict=False)
        if all(any(_is_other(network, candidate, address) for address in host) for host in others):
            return candidate.address
    return first[0].address if first else None


def _is_other(network: ipaddress.IPv4Network | ipaddress.IPv6Network, candidate: Address, address: Address) -> bool:
    return ipaddress.ip_address(address.address) in network and address.address != candidate.address


def way_to(master: str) -> Address | None:
    """The interface and address of this host that its packets to `master` leave from; None if nothing leads there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: a datagram socket only looks for the route
        own = probe.getsockname()[0]
        return next((address for address in own_addresses() if address.address == own), None)
    return None


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
