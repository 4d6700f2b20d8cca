"""No descriptor, no memory, no room on the disk: whatever step it is that fails, a typed error, and nothing left.

Each operation of the library is tried with just enough of the resource for its first step, for its second, and so on
until it succeeds. Everything runs in processes of its own: an abort is an exit status.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hostile_operations import OPERATIONS, WRITING, prepare
from subprocesses import run_snippet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux has them")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("sources"))


SETUP = """
import contextlib, gc, os, resource, shutil
from pathlib import Path
import onnxruntime
onnxruntime.set_default_logger_severity(4)
from hostile_operations import OPERATIONS, contents, is_typed, left_behind
sources, out = Path(sys.argv[1]), Path(sys.argv[2])
before = contents(sources)

def run_to_the_end(name):
    OPERATIONS[name](sources, out)
    made = contents(out)
    for path in out.iterdir():
        path.unlink()
    return made

def attempt(name, expected, limited=contextlib.nullcontext):
    try:
        with limited():
            OPERATIONS[name](sources, out)
    except BaseException as error:
        assert is_typed(error), repr(error)
        names = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
        assert not names, f"{error!r} left {names}"
        return f"{type(error).__name__}: {error}"[:200]
    assert contents(out) == expected, "it was done, but not as without a limit"
    for path in out.iterdir():
        path.unlink()
    return None
"""

DESCRIPTORS = """
@contextlib.contextmanager
def free_descriptors(count):
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 80, usual[1]))
    fillers = []
    try:
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(count):
        os.close(fillers.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for fd in fillers:
            os.close(fd)

for name in sys.argv[3].split(","):
    expected = run_to_the_end(name)  # what is imported late is imported here
    left = left_behind()
    errors = []
    while (error := attempt(name, expected, lambda: free_descriptors(len(errors)))) is not None:
        errors.append(error)
        assert len(errors) < 60, errors[-1]
    print(name, len(errors), *sorted(set(errors)), sep="\\n    ", flush=True)
    assert errors or name == "look", name
    assert left_behind() == left, (name, left, left_behind())
    run_to_the_end(name)
assert contents(sources) == before
"""

SESSIONS = [name for name in OPERATIONS if name not in WRITING]


@pytest.mark.parametrize("names", [",".join(SESSIONS), ",".join(WRITING)], ids=["reading", "writing"])
def test_no_descriptor_is_free(names: str, sources: Path, tmp_path: Path) -> None:
    print(run_snippet(SETUP + DESCRIPTORS, sources, tmp_path, names, timeout=120))


WITHOUT_DELAYED_NODES = ["packed", "stream", "install", "look"]  # a session under a budget has some: its clock
LARGER = """
import stand_ins
from pathlib import Path
stand_ins.WIDTH, stand_ins.VOCABULARY = 1024, 4000
"""


@pytest.fixture(scope="module")
def larger_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 MiB, 16 of them in one weight."""
    directory = tmp_path_factory.mktemp("larger")
    run_snippet(LARGER + "from hostile_operations import prepare\nprepare(Path(sys.argv[1]))", directory)
    return directory


MEMORY = """
from ort_delayed.loader.platform import release_free_memory

@contextlib.contextmanager
def more_memory(nbytes):
    gc.collect()
    release_free_memory()
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)

for name in sys.argv[3].split(","):
    expected = run_to_the_end(name)
    left = left_behind()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    errors = []
    for slack in (2, 8, 24, 64, 256, 1024):
        error = attempt(name, expected, lambda: more_memory(slack << 20))
        if error is None:
            break
        errors.append(error)
    print(name, len(errors), *sorted(set(errors)), sep="\\n    ", flush=True)
    assert error is None
    assert left_behind() == left, (name, left, left_behind())
    run_to_the_end(name)
assert contents(sources) == before
"""


@pytest.mark.parametrize("names", [",".join(WITHOUT_DELAYED_NODES), ",".join(WRITING)], ids=["reading", "writing"])
def test_no_memory(names: str, larger_sources: Path, tmp_path: Path) -> None:
    """From 2 MiB on: with less, the C library itself ends a process whose new thread needs its own variables.

    What a delayed node yields ONNX Runtime allocates inside onnxruntime-extensions, which ends the process where that
    fails (docs/limits.md); what we allocate before: tests/ort_delayed/test_interruptions.py.
    """
    print(run_snippet(LARGER + SETUP + MEMORY, larger_sources, tmp_path, names, timeout=120))


# --- a full disk ------------------------------------------------------------------------------------------------------

SMALL_DISK = """
import ctypes, os, sys

def small_disk():
    # A mount that nobody else sees. As root, or as nobody in a user namespace; before there is a second thread.
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, 1 << 18 | 1 << 14
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(new_mounts) != 0:
        if libc.unshare(new_mounts | new_user) != 0:
            return None
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if libc.mount(None, b"/", None, private, None) != 0:
        return None
    def resize(nbytes, flags=32):  # 32: of the mount that is there
        size = f"size={nbytes}".encode()
        return libc.mount(b"small", sys.argv[2].encode(), b"tmpfs", flags, size)
    return resize if resize(1 << 30, 0) == 0 else None

try:
    resize = small_disk()
except OSError:
    resize = None
if resize is None:
    print("not allowed")
    os._exit(0)
"""

FULL = """
for name in sys.argv[3].split(","):
    assert resize(1 << 30) == 0
    expected = run_to_the_end(name)
    errors = []
    for size in [1 << 12, 1 << 14, 1 << 16, *range(1 << 18, 1 << 26, 3 << 17)]:
        assert resize(size) == 0
        error = attempt(name, expected)
        if error is None:
            break
        errors.append(error)
    print(name, size, len(errors), *sorted(set(errors)), sep="\\n    ", flush=True)
    assert error is None and len(errors) > 4
    assert any("No space left" in e or "space" in e for e in errors), errors
assert contents(sources) == before
"""


def test_a_full_disk(sources: Path, tmp_path: Path) -> None:
    print(printed := run_snippet(SMALL_DISK + SETUP + FULL, sources, tmp_path, ",".join(WRITING), timeout=120))
    if "not allowed" in printed:
        pytest.skip("no small file system can be mounted here; test_a_limit_on_the_size_of_files goes without")


LIMITED = """
@contextlib.contextmanager
def files_of_at_most(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)

for name in sys.argv[3].split(","):
    expected = run_to_the_end(name)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    for size in [1, 1 << 12, 1 << 14, 1 << 16, *range(1 << 18, 1 << 26, 3 << 17)]:
        error = attempt(name, expected, lambda: files_of_at_most(size))
        if error is None:
            break
        errors.append(error)
    print(name, size, len(errors), *sorted(set(errors)), sep="\\n    ", flush=True)
    assert error is None and len(errors) > 4
assert contents(sources) == before
"""


def test_a_limit_on_the_size_of_files(sources: Path, tmp_path: Path) -> None:
    print(run_snippet(SETUP + LIMITED, sources, tmp_path, ",".join(WRITING), timeout=120))
