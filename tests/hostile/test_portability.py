"""macOS and Windows, as far as Linux can tell: the other branches of loader/platform.py, and a clean import.

The library is imported anew in a process in which ``sys.platform`` is another and what those systems lack is gone.
What is Linux's own ends in a typed error, or is done more slowly; everything else has to work all the same.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hostile_operations import prepare
from subprocesses import run_snippet

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the others are simulated here")
SYSTEMS = pytest.mark.parametrize("system", ["darwin", "win32"])
PRETEND = """
import os
from pathlib import Path
from other_systems import pretend
platform = pretend(sys.argv[1])
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("sources"))


def test_importing_warns_of_nothing() -> None:
    run_snippet("import ort_delayed", python_options=("-W", "error"))


def test_importing_every_module_warns_of_nothing() -> None:
    code = """
    import importlib, pkgutil
    import ort_delayed
    found = [m.name for m in pkgutil.walk_packages(ort_delayed.__path__, "ort_delayed.") if "__main__" not in m.name]
    assert len(found) > 80, found
    for name in found:
        importlib.import_module(name)
    """
    # What matplotlib and its like warn of is theirs: the command line imports them when it draws.
    run_snippet(code, python_options=("-W", "error::DeprecationWarning:ort_delayed", "-W", "error::SyntaxWarning"))


def test_platform_branches_stand_in_one_place() -> None:
    """``sys.platform``, ``os.name`` and ``platform.system()`` are asked in loader/platform alone."""
    asked = []
    for package in ("loader", "ops", "ort_delayed"):
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] in (("ort_delayed", "loader"), ("ort_delayed", "ops")):
                continue
            if relative.parts[0] == "loader" and relative.parts[1].startswith("platform"):
                continue
            for found in ast.walk(ast.parse(path.read_text())):
                if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name):
                    name = f"{found.value.id}.{found.attr}"
                    if name in ("sys.platform", "os.name", "platform.system", "os.uname"):
                        asked.append(f"{relative}:{found.lineno}: {name}")
    assert asked == []


OPERATIONS = """
import onnxruntime
onnxruntime.set_default_logger_severity(4)
import hostile_operations
from hostile_operations import BUDGET, OPERATIONS, contents
import ort_delayed
sources, out = Path(sys.argv[2]), Path(sys.argv[3])
assert platform.__spec__.name in sys.modules and not platform.can_give_up_pages()
before = contents(sources)
for name, operation in OPERATIONS.items():
    try:
        operation(sources, out)
    except ort_delayed.RamProbeUnavailable as error:
        assert "budget" in name, (name, error)
        assert "Linux" in str(error), error
        print(name, "refused")
    except Exception as error:
        # This processor's instruction sets are unknown there: a graph laid out for another one is refused.
        raise SystemExit(f"{name}: {error!r}")
    else:
        assert name not in ("budget", "packed under a budget"), name
        print(name, "done")
    for path in out.iterdir():
        path.unlink()
assert contents(sources) == before
loader = ort_delayed.StreamingWeightLoader(sources / "artifacts", ram_budget=BUDGET)
report = loader.stream(lambda group: None)
assert report.peak_ram.peak_source == "highest-sample", report.peak_ram
options = onnxruntime.SessionOptions()
installed = ort_delayed.stream_install(sources / "model.onnx", options, ram_budget=BUDGET)
try:
    ort_delayed.StreamingWeightLoader(sources / "artifacts", ram_budget=1 << 16).stream(lambda group: None)
    raise SystemExit("a budget was not kept")
except ort_delayed.RamBudgetExceeded:
    pass
"""


@SYSTEMS
def test_what_the_library_does_there(system: str, sources: Path, tmp_path: Path) -> None:
    printed = run_snippet(PRETEND + OPERATIONS, system, sources, tmp_path, timeout=100)
    refused = {line.rsplit(" ", 1)[0] for line in printed.splitlines() if line.endswith("refused")}
    assert refused == {"budget", "packed under a budget"}


MODULE = """
import mmap, threading
from types import SimpleNamespace
import psutil
directory = Path(sys.argv[2])
content = os.urandom(100_000)
(directory / "w").write_bytes(content)

# Reading at a place, from several threads through one descriptor.
fd = os.open(directory / "w", os.O_RDONLY)
def read(n):
    for i in range(300):
        offset = (n * 7919 + i * 104729) % 99_000
        buffer = bytearray(500)
        assert platform.read_at(fd, memoryview(buffer), offset) == 500
        assert buffer == content[offset : offset + 500]
failed = []
def work(n):
    try:
        read(n)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
assert platform.read_at(fd, memoryview(bytearray(9)), 200_000) == 0

# Pages: closing is what gives them back.
with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapping:
    platform.give_back_pages(mapping)
    assert mapping[:] == content
os.close(fd)
platform.drop_from_page_cache(fd, 0, 10)
assert platform.file_mappings({str(directory / "w")}) == []
for function in (platform.give_up_pages, platform.reclaim_pages):
    try:
        function(0, 4096)
        raise SystemExit("given up")
    except NotImplementedError:
        pass
by_page = platform.PageByPage()
by_page.add(0, 4096)
assert not by_page.works
by_page.close()
by_page.close()

# Memory: what psutil says, or nothing.
assert platform.resident_bytes() > 1 << 20
assert platform.peak_resident_bytes() is None and platform.reset_peak_resident_bytes() is False
psutil.virtual_memory = lambda: SimpleNamespace(available=12345)
assert platform.available_memory_bytes() == 12345
platform.release_free_memory()
with platform.large_blocks_go_back():
    pass
assert platform.processor_features() == ("unknown",)
def fails():
    raise psutil.AccessDenied(1)
psutil.Process = lambda: SimpleNamespace(memory_info=fails)
assert platform.resident_bytes() is None
import ort_delayed
try:
    ort_delayed.loader.PeakRamProbe(ort_delayed.RamBudget(1 << 20)).start()
    raise SystemExit("it began")
except ort_delayed.RamProbeUnavailable:
    pass

# Locks.
lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
assert platform.hold_alone(lock) == (sys.argv[1] == "darwin")
"""


@SYSTEMS
def test_the_platform_module_itself(system: str, tmp_path: Path) -> None:
    run_snippet(PRETEND + MODULE, system, tmp_path)


CONFINED = """
import stat, threading, time
import ort_delayed
from ort_delayed.loader.files import NotARegularFileError, OutsideDirectoryError, confining_directories, open_weights
top = Path(sys.argv[2])
inside, outside = top / "inside", top / "outside"
for directory, content in ((inside, b"inside"), (outside, b"outside")):
    directory.mkdir()
    (directory / "w").write_bytes(content)
within = confining_directories(str(inside))

def content(path):
    fd = open_weights(str(path), within=within)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)

def refused(path, kind):
    try:
        content(path)
    except kind:
        return
    raise SystemExit(f"{path} was opened")

assert content(inside / "w") == b"inside"
(inside / "good").symlink_to("w")
assert content(inside / "good") == b"inside"
(inside / "bad").symlink_to("../outside/w")
(inside / "sub").symlink_to("../outside")
for path in (inside / "bad", inside / "sub" / "w", outside / "w", inside / ".." / "outside" / "w"):
    refused(path, OutsideDirectoryError)
refused(inside / "none", FileNotFoundError)
refused(inside, IsADirectoryError)
os.mkfifo(inside / "fifo")
refused(inside / "fifo", NotARegularFileError)

# What is checked is what is opened, whenever it is swapped: before the opening and back behind it.
link = inside / "link"
link.symlink_to("w")
real_open = os.open
def put(target):
    (inside / "new").symlink_to(target)
    (inside / "new").rename(link)
def swapped(path, *arguments, **settings):
    if os.fspath(path) != str(link):
        return real_open(path, *arguments, **settings)
    put("../outside/w")
    try:
        return real_open(path, *arguments, **settings)
    finally:
        put("w")
os.open = swapped
refused(link, OSError)
os.open = real_open

stop = False
def swap():
    turn = 0
    while not stop:
        put(("w", "../outside/w")[turn % 2])
        turn += 1
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=swap)
thread.start()
opened = other = 0
until = time.monotonic() + 1
while time.monotonic() < until:
    try:
        assert content(link) == b"inside"
        opened += 1
    except OSError:
        other += 1
stop = True
thread.join()
assert opened and other, (opened, other)
print(opened, other)
"""


@SYSTEMS
def test_confinement_there(system: str, tmp_path: Path) -> None:
    run_snippet(PRETEND + CONFINED, system, tmp_path)
