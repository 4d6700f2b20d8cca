"""Tables and JSON: plain in a pipe, with rich on a terminal, complete without it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ort_delayed.cli.printing import Table, console_of, format_table, print_json
from ort_delayed.cli.sizes import parse_size, size_text

NAMES = ("embeddings.word_embeddings.weight", "b")


def test_a_table_that_fits_is_aligned():
    table = Table(("name", "size"), (("a", "10 B"), ("bb", "1 B")), right=(1,))
    assert format_table(table, 80) == "name  size\na     10 B\nbb     1 B"


def test_flexible_columns_give_way_the_widest_first():
    table = Table(("name", "why"), ((NAMES[0], "x" * 20),), flexible=(0, 1))
    lines = format_table(table, 30).splitlines()
    assert max(map(len, lines)) == 30
    assert lines[1] == "embedd..weight  xxxxxx..xxxxxx"


def test_columns_that_cannot_give_way_make_the_line_longer():
    table = Table(("name", "path"), ((NAMES[0], "y" * 90),))
    assert "y" * 90 in format_table(table, 80)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (90 << 20, "90.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_are_written(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("text", "count"), [("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("300000000", 300_000_000)]
)
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


@dataclass(frozen=True)
class Report:
    path: Path
    names: tuple[str, ...]
    inner: object


def test_json_of_a_report(capsys):
    print_json(Report(Path("a/b"), ("ü", "[x]"), {"n": 1, "none": None}))
    assert json.loads(capsys.readouterr().out) == {
        "path": "a/b",
        "names": ["ü", "[x]"],
        "inner": {"n": 1, "none": None},
    }


def test_no_console_where_there_is_no_terminal():
    assert console_of(io.StringIO()) is None


def in_a_terminal(arguments: list[str], directory: Path, *, with_rich: bool) -> str:
    """What a command prints on a terminal of 80 columns, standard error included."""
    hide = "" if with_rich else "sys.modules['rich'] = sys.modules['rich.console'] = None; "
    code = f"import sys; {hide}sys.argv[0] = 'ort-delayed'; from ort_delayed.cli import main; sys.exit(main())"
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=slave, stderr=slave, cwd=directory, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so at the end
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


@pytest.mark.parametrize("with_rich", [True, False])
def test_on_a_terminal(files, with_rich):
    if with_rich:
        pytest.importorskip("rich")
    shown = in_a_terminal(["stream", "artifacts", "--ram", "64MiB"], files, with_rich=with_rich)
    assert ("\x1b[1m" in shown) == with_rich
    for text in ("embeddings", "layer-0002", "classifier", "peak so far", "streaming"):
        assert text in shown
    converted = in_a_terminal(["convert", "inline.onnx", "d.onnx"], files, with_rich=with_rich)
    assert "converting" in converted
    assert "encoder.layer.0.dense.weight" in converted
