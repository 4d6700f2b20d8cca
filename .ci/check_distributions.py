"""Checks what ``python -m build`` made: real files for the two linked packages, and nothing where it does not belong.

python .ci/check_distributions.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected_modules() -> dict[str, bytes]:
    """Every module that must be in both, by its path in the wheel."""
    modules = {"ort_delayed/py.typed": b""}
    for directory, subdirectories, names in os.walk(ROOT / "ort_delayed", followlinks=True):
        subdirectories[:] = [name for name in subdirectories if name != "__pycache__"]
        for path in (Path(directory) / name for name in names if name.endswith(".py")):
            modules[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    return modules


def compare(kind: str, found: dict[str, bytes]) -> None:
    """Fail where a module is missing, is not the repository's, or is not expected."""
    expected = expected_modules()
    wrong = [name for name, data in expected.items() if found.get(name) != data]
    wrong += [name for name in found if name.startswith("ort_delayed/") and name not in expected]
    if wrong:
        raise SystemExit(f"{kind}: missing, changed or unexpected: {', '.join(sorted(wrong))}")
    print(f"{kind}: {len(expected)} files of the package, as in the repository")


def check_sdist(path: Path) -> None:
    """The sdist must hold files, not links, which dangle where it is unpacked without the rest."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if member.issym() or member.islnk():
                raise SystemExit(f"sdist: {member.name} is a link to {member.linkname}")
            file = archive.extractfile(member)
            if file is not None:
                found[member.name.split("/", 1)[1]] = file.read()
    compare("sdist", found)


def check_wheel(path: Path) -> None:
    """The wheel must bring ``ort_delayed`` and no other name into site-packages."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    tops = {name.split("/", 1)[0] for name in found if ".dist-info/" not in name}
    if tops != {"ort_delayed"}:
        raise SystemExit(f"wheel: brings {sorted(tops)} into site-packages, ort_delayed alone is expected")
    compare("wheel", found)


if __name__ == "__main__":
    built = Path(sys.argv[1])
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
