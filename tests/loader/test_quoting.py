"""What messages quote: escaped and short."""

from __future__ import annotations

from ort_delayed.loader.quoting import listed, quoted, quoted_path


def test_names() -> None:
    assert quoted("w") == "'w'"
    assert quoted("a\n\x1b[2J") == r"'a\n\x1b[2J'"
    assert quoted("n" * 200) == repr("n" * 200)
    assert quoted("n" * 201) == f"'{'n' * 200}'... (201 characters)"
    assert quoted(b"\xff" * 300).endswith("... (300 bytes)")


def test_lists() -> None:
    assert listed([]) == "[]"
    assert listed((2, 3)) == "[2, 3]"
    assert listed(["a\n", "b"]) == r"['a\n', 'b']"
    assert listed([7] * 16) == str([7] * 16)
    assert listed([7] * 17) == f"[{'7, ' * 16}... (17 in all)]"
    assert len(listed([2**62] * 200_000)) < 500


def test_paths() -> None:
    assert quoted_path(r"C:\models\w") == r"'C:\models\w'"
    assert quoted_path("/" + "d" * 1000) == f"'/{'d' * 1000}'"
    assert quoted_path("/a\nb") == r"'/a\nb'"
    assert len(quoted_path("/" + "d" * 5000)) < 300
