"""Ports for processes that communicate on this machine."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """Return a socket that reserves a free port as long as it is open.

    The server of ``jax.distributed`` can still listen on the port, because it sets SO_REUSEPORT too.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
