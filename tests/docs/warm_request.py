"""Asking the warm process for something; imports next to nothing, because each command of a snippet does it."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence

__all__ = ["ask"]


def ask(path: str, request: dict[str, object], descriptors: Sequence[int]) -> int:
    """Have the warm process at the socket ``path`` do ``request`` with these three descriptors; its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        message = json.dumps({"directory": os.getcwd()} | request).encode()
        socket.send_fds(connection, [message], list(descriptors))
        answer = connection.recv(4)
    return array.array("i", answer)[0] if answer else 1
