"""Ports for processes that meet on this machine."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A socket on a port that no other process is given while it is open.

    Whoever sets SO_REUSEPORT, as the server of ``jax.distributed`` does, may listen there all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
