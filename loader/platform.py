"""The one place where platforms differ. Everything else asks here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

__all__ = ["open_checked", "read_at"]
__all__ += ["FileMapping", "available_memory_bytes", "can_give_up_pages", "drop_from_page_cache", "file_mappings"]
__all__ += ["PageByPage", "give_up_pages"]
__all__ += ["hold_alone", "processor_features", "reclaim_pages"]
__all__ += [
    "give_back_pages",
    "large_blocks_go_back",
    "map_memory",
    "peak_resident_bytes",
    "release_free_memory",
    "reset_peak_resident_bytes",
    "resident_bytes",
]

_HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB
_Check = Callable[[os.stat_result, "str | None"], None]
_seek_lock = threading.Lock()
# O_NONBLOCK has no effect on regular files: a FIFO swapped in after the check does not block the process.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_checked(path: str, check: _Check, *, resolve: bool) -> int:
    """Open ``path`` for reading after ``check(stat, real_path)`` has accepted what it leads to.

    ``real_path`` is the path of the object that is opened, links resolved, or None unless ``resolve``. On Linux the
    object is held by an ``O_PATH`` descriptor from before the check until it is open, so nothing can be swapped in
    between, and nothing but an accepted object is ever opened for reading. Elsewhere what was opened must be what the
    accepted path leads to. Without ``resolve`` a regular file is accepted as it is, and ``check`` has to refuse
    everything else.
    """
    if sys.platform == "linux" and resolve:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            link = f"/proc/self/fd/{held}"
            check(os.fstat(held), os.readlink(link))
            return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(held)
    # This runs once per weight and run: what is a regular file takes no other call than these three.
    found = os.stat(path)
    if resolve or not stat.S_ISREG(found.st_mode):
        check(found, os.path.realpath(path) if resolve else None)
    fd = os.open(path, _OPEN_FLAGS)
    try:
        found = os.fstat(fd)
        if resolve or not stat.S_ISREG(found.st_mode):
            real = os.path.realpath(path) if resolve else None
            check(found, real)
            if real is not None and not os.path.samestat(found, os.stat(real)):
                raise OSError(errno.ESTALE, "another file was put in its place while it was opened", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


if hasattr(os, "preadv"):

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to ``len(buffer)`` bytes at ``offset`` into ``buffer``; returns how many, 0 at the end."""
        return os.preadv(fd, [buffer], offset)

else:

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        """Read up to ``len(buffer)`` bytes at ``offset`` into ``buffer``; returns how many, 0 at the end."""
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)


if sys.platform == "linux":
    # Kept open, because a pager asks several times a millisecond; -1 before the first time and in a forked child,
    # for which the parent's descriptor would go on telling of the parent.
    _statm = -1

    def resident_bytes() -> int | None:
        """Resident set size of this process in bytes, None if it cannot be measured."""
        global _statm
        try:
            return _resident_pages(_statm) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            pass  # not open yet, or somebody closed a descriptor that was not theirs
        try:
            _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            return _resident_pages(_statm) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            return None

    def _resident_pages(statm: int) -> int:
        return int(os.pread(statm, 128, 0).split()[1])

    def _forget_statm() -> None:
        global _statm
        if _statm >= 0:
            os.close(_statm)
        _statm = -1

    os.register_at_fork(after_in_child=_forget_statm)

    def peak_resident_bytes() -> int | None:
        """The kernel's high-water mark of the resident set size in bytes, None where there is none."""
        try:
            with open("/proc/self/status", "rb") as status:
                for line in status:
                    if line.startswith(b"VmHWM:"):
                        return int(line.split()[1]) << 10
        except (OSError, IndexError, ValueError):
            pass
        return None

    def reset_peak_resident_bytes() -> bool:
        """Set the kernel's high-water mark back to what is resident now; False where that is not possible."""
        try:
            # Unbuffered, so that a refusal is an error here and not when the file is closed.
            with open("/proc/self/clear_refs", "wb", buffering=0) as clear_refs:
                clear_refs.write(b"5")
        except OSError:
            return False
        return True

else:

    def resident_bytes() -> int | None:
        """Resident set size of this process in bytes, None if it cannot be measured."""
        import psutil

        try:
            return int(psutil.Process().memory_info().rss)
        except psutil.Error:
            return None

    def peak_resident_bytes() -> int | None:
        """None: a mark that can be set back is kept on Linux only."""
        return None

    def reset_peak_resident_bytes() -> bool:
        """False: a mark that can be set back is kept on Linux only."""
        return False


def give_back_pages(mapping: mmap.mmap) -> None:
    """Take a file mapping's pages out of this process; the next touch brings them back, with the same bytes.

    Where the platform has no such call, closing the mapping does it.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def map_memory(nbytes: int) -> mmap.mmap:
    """Fresh zeroed memory of this process alone, which goes back to the system at once when it is closed.

    A forked child gets a copy. On Linux it may consist of huge pages: filling fresh memory takes a page fault for every
    4 KiB otherwise, and copying from it as many entries of the processor's table of pages.

    Raises:
        OSError: the system refuses.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def release_free_memory() -> None:
    """Have the C library give freed memory back to the system, where it can (glibc's ``malloc_trim``).

    glibc keeps freed blocks of up to 32 MiB for later, which after a model has been parsed are most of its weights.
    """
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(ctypes.c_size_t(0))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK = 1 << 20
# What glibc's own adjusting comes to at most, and does come to in a process that frees weights (mallopt(3)).
_LARGEST_MMAP_THRESHOLD = 32 << 20


@contextmanager
def large_blocks_go_back() -> Iterator[None]:
    """While this lasts, freed blocks of 1 MiB and more go back to the system at once, where glibc is the C library.

    Otherwise it adjusts itself to blocks that are freed, and keeps such blocks in its heap; behind one small block that
    is still in use that can be many. The setting is the process's; afterwards it is what glibc's adjusting comes to
    in a process that has freed a block of 32 MiB, which cannot be told from what was before.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt if sys.platform == "linux" else None
    except (OSError, AttributeError):
        set_option = None
    if set_option is None:
        yield
        return
    set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


# --- Pages of file mappings that this process did not make itself ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileMapping:
    """One range of addresses of this process that shows a file.

    Attributes:
        address: its first byte.
        nbytes: its size, a multiple of the page size.
        offset: the file's byte at ``address``.
        path: the file, as the kernel names it (real path; unlinked files end with ``" (deleted)"``).
    """

    address: int
    nbytes: int
    offset: int
    path: str


if sys.platform == "linux":
    _MADV_DONTNEED, _MADV_NOHUGEPAGE, _MADV_PAGEOUT = 4, 15, 21
    # PyDLL keeps the GIL: these calls are short, and a thread that watches memory must not lose the GIL to each.
    _madvise = ctypes.PyDLL(None, use_errno=True).madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _madvise.restype = ctypes.c_int
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    # linux/userfaultfd.h
    _UFFD_USER_MODE_ONLY, _UFFD_FEATURE_WP_ASYNC, _UFFDIO_REGISTER_MODE_WP = 1, 1 << 15, 2
    _UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
    _OCTAL = re.compile(rb"\\([0-7]{3})")

    def can_give_up_pages() -> bool:
        """Whether pages of a file mapping can be taken out of the process, and mappings be listed."""
        return os.path.exists("/proc/self/maps")

    def give_up_pages(address: int, nbytes: int) -> None:
        """Take pages of a *file* mapping out of this process; the next touch brings the file's bytes back.

        Only for whole pages of a mapping of a file that nobody writes to: anonymous memory would lose its contents.
        """
        if _madvise(address, nbytes, _MADV_DONTNEED) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"madvise(MADV_DONTNEED) of {nbytes} bytes at {address:#x}: {os.strerror(code)}")

    class PageByPage:
        """Mappings of which a touch makes one page resident, and not what stands around it as well.

        The kernel maps 64 KiB around a touched page of a file, or a huge page. It does not in ranges that are
        registered with userfaultfd (``uffd_disable_fault_around``), for which registering in asynchronous
        write-protect mode does, without anybody having to serve faults: Linux 6.7, where not forbidden. Elsewhere
        huge pages at least are declined. A touch is slower, so memory grows more slowly too.

        Owns a descriptor; closing it ends the registration.
        """

        def __init__(self) -> None:
            number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
            self._fd = -1 if number is None else _syscall(number, os.O_CLOEXEC | _UFFD_USER_MODE_ONLY)
            if self._fd >= 0 and not self._control(_UFFDIO_API, struct.pack("QQQ", 0xAA, _UFFD_FEATURE_WP_ASYNC, 0)):
                self.close()

        @property
        def works(self) -> bool:
            """Whether single pages are what a touch maps."""
            return self._fd >= 0

        def add(self, address: int, nbytes: int) -> None:
            """Include whole pages of a file mapping."""
            _madvise(address, nbytes, _MADV_NOHUGEPAGE)
            if self._fd >= 0:
                self._control(_UFFDIO_REGISTER, struct.pack("QQQQ", address, nbytes, _UFFDIO_REGISTER_MODE_WP, 0))

        def close(self) -> None:
            """End it for all ranges. Safe to call twice."""
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

        def __del__(self) -> None:
            # For whoever was interrupted before having a name for this.
            with suppress(Exception):
                self.close()

        def _control(self, request: int, argument: bytes) -> bool:
            import fcntl

            try:
                fcntl.ioctl(self._fd, request, bytearray(argument))
            except OSError:
                return False
            return True

    def reclaim_pages(address: int, nbytes: int) -> None:
        """Take pages out of memory, whatever is at these addresses meanwhile: nothing loses its contents.

        For mappings that another thread may end at any moment, and put its own memory there. Slower than
        :func:`give_up_pages`, and the file's pages leave the page cache too. Pages that the process may not take out
        (the file is another user's) stay.
        """
        _madvise(address, nbytes, _MADV_PAGEOUT)

    def drop_from_page_cache(fd: int, offset: int, nbytes: int) -> None:
        """Ask the system to forget its cached pages of a range of a file. Pages that are mapped somewhere stay."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def file_mappings(paths: Collection[str]) -> list[FileMapping]:
        """The mappings of this process that show one of ``paths`` (real paths)."""
        found = []
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) < 6:
                    continue
                path = os.fsdecode(_OCTAL.sub(lambda m: bytes([int(m[1], 8)]), fields[5].rstrip(b"\n")))
                if path in paths:
                    start, _, end = fields[0].partition(b"-")
                    address = int(start, 16)
                    found.append(FileMapping(address, int(end, 16) - address, int(fields[2], 16), path))
        return found

    def available_memory_bytes() -> int | None:
        """Bytes that this process could still have resident or cached, caches that can be reclaimed counted as free.

        The least of what the system has and of what each memory control group that the process is in allows.
        """
        amounts = [_system_available(), *_control_group_available()]
        known = [a for a in amounts if a is not None]
        return min(known) if known else None

    def _system_available() -> int | None:
        try:
            with open("/proc/meminfo", "rb") as meminfo:
                for line in meminfo:
                    if line.startswith(b"MemAvailable:"):
                        return int(line.split()[1]) << 10
        except (OSError, ValueError):
            pass
        return None

    def _control_group_available() -> Iterator[int | None]:
        try:
            with open("/proc/self/cgroup") as groups:
                lines = [line.rstrip("\n").split(":", 2) for line in groups]
        except OSError:
            return
        for number, controllers, path in lines:
            if "memory" in controllers.split(","):
                root, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            elif number == "0" and not controllers:
                root, names = "/sys/fs/cgroup", ("memory.max", "memory.current", "")
            else:
                continue
            # Inside a container the path may be that of the host: then the root is the group itself.
            directory = root + path if os.path.isdir(root + path) else root
            while directory.startswith(root):
                yield _group_available(directory, *names)
                directory = os.path.dirname(directory)

    def _group_available(directory: str, limit: str, usage: str, prefix: str) -> int | None:
        try:
            with open(f"{directory}/{limit}") as file:
                allowed = int(file.read())
            with open(f"{directory}/{usage}") as file:
                used = int(file.read())
            with open(f"{directory}/memory.stat") as file:
                stat = dict(line.split() for line in file)
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        except (OSError, ValueError):  # no such controller; "max"
            return None
        return max(allowed - used + cached, 0)

else:

    def can_give_up_pages() -> bool:
        """False: no such call is known to work here."""
        return False

    def give_up_pages(address: int, nbytes: int) -> None:
        """Not possible here; see :func:`can_give_up_pages`."""
        raise NotImplementedError  # nobody asks where can_give_up_pages() is False

    class PageByPage:
        """Not known here."""

        works = False

        def add(self, address: int, nbytes: int) -> None:
            """Nothing is done."""

        def close(self) -> None:
            """Nothing is done."""

    def reclaim_pages(address: int, nbytes: int) -> None:
        """Not possible here; see :func:`can_give_up_pages`."""
        raise NotImplementedError  # nobody asks where can_give_up_pages() is False

    def drop_from_page_cache(fd: int, offset: int, nbytes: int) -> None:
        """Not known here: nothing is done."""

    def file_mappings(paths: Collection[str]) -> list[FileMapping]:
        """None that can be found here."""
        return []

    def available_memory_bytes() -> int | None:
        """What the system says is available, in bytes."""
        import psutil

        return int(psutil.virtual_memory().available)


# --- What the machine is, and who else is at work -------------------------------------------------------------------

# By what ONNX Runtime's math library (mlas, platform.cpp) chooses kernels and layouts of packed weights.
_X86_FEATURES: tuple[str, ...] = ("avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert")
_X86_FEATURES += ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16")
_X86_FEATURES += ("amx_tile", "amx_int8", "amx_bf16")
_ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "svei8mm", "svebf16", "sme", "sme2")


def processor_features() -> tuple[str, ...]:
    """The instruction sets of this processor that decide how ONNX Runtime packs weights, sorted.

    ``("unknown",)`` where the system does not say: only Linux lists them in a file.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return tuple(sorted({*_X86_FEATURES, *_ARM_FEATURES}.intersection(value.split())))
    except OSError:
        pass
    return ("unknown",)


def hold_alone(fd: int) -> bool:
    """Lock an open file for this process, without waiting; False if another one holds it.

    The lock goes with the process, however it ends. Where there are no such locks, nobody is ever found to be alone.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
