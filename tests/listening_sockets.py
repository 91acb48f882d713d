"""Where processes listen, as the kernel says."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTENING = "0A"


def listening_addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Address and port of every TCP socket at which one of these processes listens (Linux)."""
    own = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING and fields[9] in own:
                address, port = fields[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def only_loopback(addresses: Iterable[tuple[str, int]]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address, _ in addresses)


def _address(words: str) -> str:
    """From the kernel's hexadecimal words, each in the machine's byte order."""
    data = b"".join(
        int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8)
    )
    address = ipaddress.ip_address(data)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)  # of an IPv4 address in a socket of both kinds, that address


def _socket_inodes(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
