"""The Slurm profile of labs/slurm_profile, with stand-ins for Slurm's commands that run the batch script here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ipyparallel
import psutil
import pytest

from memlab import JobRecord, Lab, Layout, Ranks

PROFILE = Path(__file__).parents[2] / "labs" / "slurm_profile"
COMMANDS = {
    "sbatch": """\
export SLURM_NTASKS=$(sed -n 's/^#SBATCH --ntasks=//p' "$1")
setsid sh "$1" > "$1.out" 2>&1 < /dev/null &
echo "Submitted batch job $!"
""",
    "srun": """\
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
for task in $(seq "$SLURM_NTASKS"); do "$@" & done
wait
""",
    "scancel": """\
signal=TERM
if [ "$1" = -s ]; then signal=$2; shift 2; fi
kill -s "$signal" -- "-$1"
""",
}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The profile ``slurm`` in a folder of its own, which only this user can read."""
    folder = tmp_path / "profile_slurm"
    shutil.copytree(PROFILE, folder)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PROFILE.parents[1]))
    yield folder
    left = psutil.wait_procs(_processes_of(tmp_path), timeout=20)[1]
    for process in left:
        process.kill()
    assert not left, "ipcluster stop and scancel end everything"


def _processes_of(ipython_folder: Path) -> list[psutil.Process]:
    """Returns what `ipcluster` has started, and what that has started: all have the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or it has just ended
            if process.environ().get("IPYTHONDIR") == str(ipython_folder):
                found.append(process)
    return found


def ipcluster(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "ipyparallel.cluster", *arguments, "--profile=slurm"],
        cwd=folder,  # it writes the batch script there
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_a_lab_runs_on_the_engines_of_a_slurm_job(profile: Path) -> None:
    ipcluster(profile, "start", "-n", "2", "--daemonize", "--ip=127.0.0.1")
    try:
        with ipyparallel.Client(profile="slurm", timeout=60) as client:
            client.wait_for_engines(2, timeout=60, interactive=False)
        started = [process.cmdline() for process in _processes_of(profile.parent)]
        assert any("ipyparallel.controller" in words and "--nodb" in words for words in started), (
            "the profile's options"
        )
        script = (profile / "slurm_engine.sbatch").read_text()
        assert "#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=2\n" in script
        with (
            Ranks.connect("slurm") as ranks,
            Lab("qwen3-moe-tiny", seq_length=64, layout=Layout(data_parallel_size=2), ranks=ranks) as lab,
        ):
            record = lab.step()
            assert isinstance(record, JobRecord)
            assert [rank.scenario.layout.rank for rank in record.ranks] == [0, 1]
            assert len({rank.loss for rank in record.ranks}) == 1, "the mean over both copies"
    finally:
        ipcluster(profile, "stop")
