"""A cluster as its users have one, on this machine: a controller, engines started one by one, hosts, notebooks.

A `Host` needs Linux, root and the command ``ip``: it is a network namespace with a host name and an /etc/hosts of its
own, in which its own name is 127.0.1.1, as on Debian. All hosts are connected by one bridge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import ipyparallel
import psutil
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]
PROFILE = "failures"
LOOPBACK = "127.0.0.1"
_BRIDGE, _NETWORK = "memlab-hosts", "10.213.77"
OF_BRIDGE = f"{_NETWORK}.1"
"""The address of this machine, as the hosts see it."""
_START_SECONDS = 120


class Cluster:
    """A controller and its engines, with a profile folder of their own; `memlab.Ranks.connect(PROFILE)` finds it.

    Args:
        address: Where the controller listens.
    """

    def __init__(self, address: str = LOOPBACK) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="memlab-cluster-"))
        os.environ["IPYTHONDIR"] = str(self._folder)  # for this process and its notebooks
        self._of_profile = f"--profile-dir={self._folder / f'profile_{PROFILE}'}"
        self._processes = [_start(["ipyparallel.controller", self._of_profile, f"--ip={address}", "--nodb"])]
        connection = self._folder / f"profile_{PROFILE}" / "security" / "ipcontroller-engine.json"
        deadline = time.monotonic() + _START_SECONDS
        while not connection.exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    def start_engine(self, host: Host | None = None, source: Path = ROOT) -> subprocess.Popen[bytes]:
        """Starts an engine.

        Args:
            host: Where; None is this machine itself.
            source: The folder of its package ``memlab``.
        """
        words = ["ipyparallel.engine", self._of_profile]
        engine = _start(words, [] if host is None else host.prefix, source)
        self._processes.append(engine)
        return engine

    def wait_for(self, engines: list[subprocess.Popen[bytes]]) -> None:
        """Waits until the controller lists as many engines, and none that has ended."""
        with ipyparallel.Client(profile=PROFILE, timeout=_START_SECONDS) as client:
            deadline = time.monotonic() + _START_SECONDS
            while len(client.ids) != len(engines) and time.monotonic() < deadline:
                time.sleep(0.1)

    def end_engine(self, engine: subprocess.Popen[bytes]) -> None:
        """Ends an engine as its launchers do."""
        engine.terminate()
        engine.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        processes = [psutil.Process(one.pid) for one in self._processes if one.poll() is None]
        for process in [child for one in processes for child in one.children(recursive=True)] + processes:
            process.kill()
        for one in self._processes:
            one.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Host:
    """A host that can be cut off.

    Args:
        number: From 0 on; no two hosts have the same.
        num_hosts: How many there are: each finds the others by their names.
    """

    def __init__(self, number: int, num_hosts: int) -> None:
        self._name = _name(number)
        if number == 0:
            _ip(f"link add {_BRIDGE} type bridge")
            _ip(f"address add {OF_BRIDGE}/24 dev {_BRIDGE}")
            _ip(f"link set {_BRIDGE} up")
        _ip(f"netns add {self._name}")
        _ip(f"link add {self._name} type veth peer name eth0 netns {self._name}")
        _ip(f"link set {self._name} master {_BRIDGE} up")
        _ip(f"-n {self._name} address add {_address(number)}/24 dev eth0")
        _ip(f"-n {self._name} link set eth0 up")
        _ip(f"-n {self._name} link set lo up")
        names = [f"{_address(other)} {_name(other)}" for other in range(num_hosts) if other != number]
        self._names = Path(tempfile.mkstemp(prefix=f"{self._name}-")[1])
        self._names.write_text("\n".join([f"{LOOPBACK} localhost", f"127.0.1.1 {self._name}", *names]) + "\n")
        enter = f'hostname {self._name}; mount --bind {self._names} /etc/hosts; exec ip netns exec {self._name} "$@"'
        self.prefix = ["unshare", "--uts", "--mount", "sh", "-c", enter, "sh"]
        """Before a command, runs it on this host."""

    def cut(self) -> None:
        """Cuts the host off: what is sent to it or by it is lost without a word."""
        _ip(f"link set {self._name} down")

    def mend(self) -> None:
        """Undoes `cut`."""
        _ip(f"link set {self._name} up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        _ip(f"netns delete {self._name}")
        self._names.unlink()
        if self._name == _name(0):
            _ip(f"link delete {_BRIDGE}")


class Notebook:
    """A kernel of Jupyter, and the cells that it runs."""

    def __init__(self) -> None:
        self._manager = KernelManager()
        self._manager.start_kernel(stderr=subprocess.DEVNULL)
        self._connect()

    @property
    def pid(self) -> int:
        """The number of the kernel's process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]  # it has started

    def begin(self, code: str) -> str:
        """Runs a cell without waiting for it, and returns its number."""
        return str(self._client.execute(code))

    def run(self, code: str) -> str:
        """Runs a cell, and returns what it prints, or the error that it raises."""
        return self.wait(self.begin(code))

    def wait(self, number: str) -> str:
        """Waits for a cell that has begun; the same answer as from `run`."""
        text = ""
        while True:
            message = self._client.get_iopub_msg(timeout=_START_SECONDS)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != number:
                continue
            if kind == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif kind == "error":
                text += f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return text.strip()

    def restart(self, *, now: bool) -> None:
        """Restarts the kernel, as its menu entry does; `now` kills it, as Jupyter does after 5 s without an answer."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def _start(words: list[str], prefix: list[str] | None = None, source: Path = ROOT) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*(prefix or []), sys.executable, "-m", *words],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _name(number: int) -> str:
    return f"failing{number}"


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 2}"


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)  # noqa: S607  # where it is differs
