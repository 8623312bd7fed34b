"""Where chromium is, and how it comes to a machine that has none."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Root has no sandbox to give away, containers have no GPU, and nothing shall be fetched while a test waits.
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_INSTALL = "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y chromium fonts-dejavu-core"


class NoChromiumError(Exception):
    """No chromium on this machine, with the reason and what to do."""


def find_chromium() -> str:
    """Returns the path of a chromium, after installing Debian's where it is missing and allowed.

    Raises:
        NoChromiumError: If there is none and none can be installed.
    """
    return _on_path() or _install()


def _on_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _install() -> str:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoChromiumError(
            f"no {', '.join(NAMES)} on the PATH, and no right to install one: apt-get install chromium"
        )
    folder = Path(tempfile.gettempdir())
    log = folder / "memlab-chromium-install.log"
    with (folder / "memlab-chromium-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process installs, the others wait for it here
        if path := _on_path():
            return path
        with log.open("w") as output:
            subprocess.run(["/bin/sh", "-c", _INSTALL], stdout=output, stderr=subprocess.STDOUT, check=False)
    if path := _on_path():
        return path
    raise NoChromiumError(f"no {', '.join(NAMES)} on the PATH, and apt-get could not install chromium: see {log}")
