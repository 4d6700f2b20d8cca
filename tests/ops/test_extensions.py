"""Importing ort_delayed leaves the environment, which other processes inherit, as it was."""

from __future__ import annotations

import pytest
from subprocesses import run_snippet

VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@pytest.mark.parametrize("value", [None, "upb"])
def test_the_environment_is_as_it_was(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    code = "import os; before = dict(os.environ); import ort_delayed; print(os.environ == before)"
    assert run_snippet(code) == "True\n"


def test_a_process_started_from_one_that_has_imported_it_reads_models_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    code = """
        import subprocess
        from google.protobuf.internal import api_implementation
        import ort_delayed
        show = "from google.protobuf.internal import api_implementation; print(api_implementation.Type())"
        child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
        print(child.stdout.strip() == api_implementation.Type())
        """
    assert run_snippet(code) == "True\n"


def test_extensions_alone_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, onnxruntime-extensions has stopped doing so, and ops/extensions.py can go."""
    code = f"import os; import onnxruntime_extensions; print(os.environ.get({VARIABLE!r}))"
    monkeypatch.delenv(VARIABLE, raising=False)
    assert run_snippet(code) == "python\n"
