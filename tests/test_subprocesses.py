"""The helper that the tests of crashes rely on: it must notice a crash, a hang and a failed assertion."""

import pytest
from subprocesses import run_snippet


def test_output_and_arguments() -> None:
    assert run_snippet("import sys; print(sys.argv[1:])", "a", "b") == "['a', 'b']\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "exit status -6"),
        ("assert 1 == 2, 'numbers differ'", "numbers differ"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_a_process_that_does_not_end_well(code: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_snippet(code)


def test_a_process_that_hangs() -> None:
    with pytest.raises(AssertionError, match=r"hung(.|\n)*before"):
        run_snippet("import time; print('before', flush=True); time.sleep(60)", timeout=2)
