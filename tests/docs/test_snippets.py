"""Every command and snippet of README and docs runs, as a reader would type it. How: tests/docs/snippets.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE))

from setups import SETUPS  # noqa: E402
from snippets import Segment, Snippet, segments  # noqa: E402
from warm_request import ask  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models" / "README.md"]
RUNS = [(page, number) for page in PAGES for number, _ in enumerate(segments(page.read_text()))]


@pytest.fixture(scope="module")
def warm_process(tmp_path_factory) -> Iterator[str]:
    """The socket of a process that forks for each segment."""
    # Below the system's own directory: the path of a socket is short.
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        command = [sys.executable, str(HERE / "warm_process.py"), path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield path
            finally:
                process.kill()


@pytest.mark.parametrize(("page", "number"), RUNS, ids=lambda v: v.name if isinstance(v, Path) else str(v))
def test_a_page_does_what_it_says(page, number, warm_process, tmp_path):
    work, shown = tmp_path / "work", tmp_path / "shown"
    work.mkdir()
    with open(os.devnull) as nothing, open(shown, "w") as output:
        request = {"page": str(page), "number": number, "directory": str(work)}
        status = ask(warm_process, request, (nothing.fileno(), output.fileno(), output.fileno()))
    assert status == 0, f"{page.name}\n{shown.read_text()[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_set_ups_that_exist(page):
    assert {segment.setup for segment in segments(page.read_text())} <= set(SETUPS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    import re

    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_blocks_are_found_in_order():
    page = "text\n```python\na = 1\n```\n- item\n\n  ```sh\n  ls\n  ```\n```text\nno\n```\n"
    assert segments(page) == (Segment("standard", (Snippet("python", 2, "a = 1\n"), Snippet("sh", 7, "ls\n"))),)


def test_a_set_up_begins_a_segment_and_a_skipped_block_is_left_out():
    page = (
        "<!-- snippet: skip=it installs -->\n```sh\npip\n```\n<!-- snippet: setup=packed -->\n"
        "```python\nx\n```\n```python\ny\n```\n<!-- snippet: setup=standard -->\n```sh\nz\n```\n"
    )
    assert [(s.setup, [b.text for b in s.snippets]) for s in segments(page)] == [
        ("packed", ["x\n", "y\n"]),
        ("standard", ["z\n"]),
    ]


@pytest.mark.parametrize("page", ["<!-- snippet: run=no -->\n", "<!-- snippet -->\n", "```python\nx\n"])
def test_what_is_not_understood_is_refused(page):
    with pytest.raises(ValueError, match=r"snippet|block"):
        segments(page)
