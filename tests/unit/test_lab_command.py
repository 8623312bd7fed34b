"""``memlab lab`` hands over to JupyterLab."""

from __future__ import annotations

import os
from typing import Any

import pytest

from memlab.cli import main


@pytest.mark.parametrize(
    ("user", "options", "is_said"), [(0, [], True), (0, ["--allow-root"], False), (1000, [], False)]
)
def test_root_is_told_what_jupyterlab_asks_for(
    user: int, options: list[str], is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def execve(_: str, command: list[str], __: Any) -> None:
        started.append(command)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    main(["lab", "--", "--no-browser", *options])
    assert started[0][-len(options) - 1 :] == ["--no-browser", *options]
    assert ("memlab lab -- --allow-root" in capsys.readouterr().err) == is_said
