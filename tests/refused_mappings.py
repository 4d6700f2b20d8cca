"""Private mappings of files, as onnxruntime makes them, that Linux refuses to a process from now on: a seccomp filter.

Python's own mappings are shared ones, and stay possible.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

__all__ = ["CAN_REFUSE", "refuse_private_file_mappings"]

_MMAP = {"x86_64": 9, "aarch64": 222}.get(platform.machine(), 0)
CAN_REFUSE = platform.system() == "Linux" and _MMAP != 0
"""Whether this is a system for which the filter is written."""

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _FLAGS, _FD = 0, 16 + 3 * 8, 16 + 4 * 8  # of struct seccomp_data: the system call, two of its arguments
_MAP_PRIVATE = 2


def refuse_private_file_mappings() -> bool:
    """They fail with ENODEV from now on, in this thread and those that it starts; False if that is not allowed."""
    program = [
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_EQUAL, 0, 5, _MMAP),
        (_LOAD, 0, 0, _FD),
        (_JUMP_IF_EQUAL, 3, 0, 0xFFFFFFFF),
        (_LOAD, 0, 0, _FLAGS),
        (_JUMP_IF_ANY_BIT, 0, 1, _MAP_PRIVATE),
        (_RETURN, 0, 0, _FAIL | errno.ENODEV),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    done: int = prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described), 0, 0)
    return done == 0
