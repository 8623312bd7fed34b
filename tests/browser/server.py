"""A JupyterLab server of its own: port, working folder, configuration and kernels go when it goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import psutil

START_SECONDS = 60
# Nothing pops up over the page, and nothing is fetched from the network. A save that meets JupyterLab's own, each two
# minutes, asks whether the file has changed on the disk, and waits for an answer.
SETTINGS = {
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# No notebook needs them, and they work whenever the server starts (for language servers, it asks npm) or a page is loaded.
SERVER_EXTENSIONS = {"ipyparallel": False, "jupyter_lsp": False, "jupyter_server_terminals": False}
DISABLED_ON_PAGE = {
    "ipyparallel-labextension": True,
    "@jupyterlab/debugger-extension": True,
    "@jupyterlab/extensionmanager-extension": True,
    "@jupyterlab/fileeditor-extension:language-server": True,
    "@jupyterlab/lsp-extension": True,
    "@jupyterlab/notebook-extension:language-server": True,
    "@jupyterlab/terminal-extension": True,
}


class JupyterServer:
    """Serves one folder on a free loopback port, from its start to `close`.

    Args:
        folder: An empty folder; notebooks go to `work` below it.
        settings: JupyterLab's user settings by ``package/plugin``, beside those that keep it quiet.
    """

    def __init__(self, folder: Path, settings: dict[str, dict[str, Any]] | None = None) -> None:
        self.work = folder / "work"
        self.log = folder / "server.log"
        self.work.mkdir(parents=True)
        files = {
            f"lab/user-settings/{name}.jupyterlab-settings": values
            for name, values in {**SETTINGS, **(settings or {})}.items()
        }
        files["jupyter_server_config.json"] = {"ServerApp": {"jpserver_extensions": SERVER_EXTENSIONS}}
        files["labconfig/page_config.json"] = {"disabledExtensions": DISABLED_ON_PAGE}
        for name, values in files.items():
            path = folder / "config" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        folders = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
        environment = {f"JUPYTER_{name}_DIR": str(folder / place) for name, place in folders.items()}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
        command += ["--ip=127.0.0.1", "--ServerApp.port=0", f"--notebook-dir={self.work}"]
        # A test run that is killed cannot close this; then it ends by itself, once nobody is connected any more.
        command += ["--MappingKernelManager.cull_idle_timeout=600", "--ServerApp.shutdown_no_activity_timeout=600"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "IPYTHONDIR": str(folder / "ipython")},
                start_new_session=True,  # Ctrl+C is the test run's, which then closes this
            )
        try:
            self._wait_until_it_answers(folder / "runtime")
        except BaseException:
            self.close()
            raise

    def address(self, notebook: str) -> str:
        """Returns where a browser opens a notebook; the token in it keeps every other visitor out."""
        return f"{self._url}doc/tree/{notebook}?token={self._token}"

    def kernel_rss(self) -> int:
        """Returns the resident bytes of the server's kernels."""
        children = psutil.Process(self._process.pid).children()
        return sum(child.memory_info().rss for child in children if "ipykernel_launcher" in child.cmdline())

    def close(self) -> None:
        """Ends the server with every process that it started."""
        try:
            processes = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in processes:
            if process.is_running():
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait_until_it_answers(self, runtime: Path) -> None:
        """The server writes down the port and the token that it chose, before it answers there."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            for path in runtime.glob("jpserver-*.json"):
                try:
                    said = json.loads(path.read_text())
                    self._url, self._token = said["url"], said["token"]
                    self._request("api/sessions")
                except (OSError, ValueError):
                    continue
                return
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start within {START_SECONDS} s: {self.log.read_text()[-2000:]}")

    def _request(self, path: str) -> Any:
        headers = {"Authorization": f"token {self._token}"}
        request = urllib.request.Request(f"{self._url}{path}", headers=headers)  # noqa: S310  # the server's own url
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever proxy is set
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)
