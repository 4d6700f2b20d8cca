"""A process that has imported everything, and forks for each segment of a page and each command in it.

    python warm_process.py SOCKET

Starting Python and importing ONNX Runtime takes longer than what most snippets do. A forked child is as fresh: no
session has been made before the fork. A request is JSON with three file descriptors (input, output, errors); the answer
is the child's exit status.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# The root too: tests/ort_delayed would pass for the package, which has precedence wherever it stands.
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1])]

__all__ = ["serve"]


def serve(path: str) -> None:
    """Answer requests until the process is ended."""
    import setups  # noqa: F401

    import ort_delayed.checking
    import ort_delayed.cli
    import ort_delayed.inspecting
    import ort_delayed.packing
    import ort_delayed.planning  # noqa: F401

    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(_run(json.loads(message), descriptors, path))
        for descriptor in descriptors:
            os.close(descriptor)
        threading.Thread(target=_answer, args=(connection, child), daemon=True).start()


def _answer(connection: socket.socket, child: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(array.array("i", [status]).tobytes())
    connection.close()


def _run(request: dict[str, Any], descriptors: Sequence[int], path: str) -> int:
    """In the child: the request, as if this process had been started for it."""
    status = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.chdir(request["directory"])
        if "command" in request:
            from ort_delayed.cli import main

            sys.argv = ["ort-delayed", *request["command"]]
            status = main(request["command"])
        else:
            from run_segment import run_segment

            run_segment(request["page"], request["number"], Path(request["directory"]), path)
            status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    serve(sys.argv[1])
