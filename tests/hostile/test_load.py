"""Eight threads and fifty sessions of every kind in one process, for a minute; for ten in ``make soak``.

``ORT_DELAYED_LOAD_SECONDS`` says how long the short one takes (60), and a tenth of the long one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from subprocesses import run_snippet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self, and budgets need Linux")
SECONDS = float(os.environ.get("ORT_DELAYED_LOAD_SECONDS", "60"))
LOAD = """
from pathlib import Path
from loaded_process import main
main(Path(sys.argv[1]), float(sys.argv[2]))
"""


def test_a_minute_of_load(tmp_path: Path) -> None:
    print(run_snippet(LOAD, tmp_path, str(SECONDS), timeout=10 * SECONDS + 120))


@pytest.mark.soak
def test_ten_minutes_of_load(tmp_path: Path) -> None:
    print(run_snippet(LOAD, tmp_path, str(10 * SECONDS), timeout=20 * SECONDS + 120))
