"""The tests' own look at where a process listens, on sockets of each kind."""

from __future__ import annotations

import os
import socket

import pytest
from listening_sockets import listening_addresses, only_loopback


@pytest.mark.parametrize(
    ("family", "address", "shown", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", "0.0.0.0", False),
        (socket.AF_INET6, "::1", "::1", True),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1", True),
        (socket.AF_INET6, "::", "::", False),
    ],
)
def test_a_socket_is_seen_where_it_listens(
    family: socket.AddressFamily, address: str, shown: str, loopback: bool
) -> None:
    with socket.socket(family) as server:
        if family is socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        server.listen()
        found = (shown, server.getsockname()[1])
        assert found in listening_addresses([os.getpid()])
        assert only_loopback([found]) is loopback
