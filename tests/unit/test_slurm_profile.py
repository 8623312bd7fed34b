"""The Slurm profile of labs/slurm_profile, with stand-ins for Slurm's commands that run the batch script here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import ipyparallel
import psutil
import pytest

from memlab import JobRecord, Lab, Layout, Ranks

pytestmark = pytest.mark.slow

PROFILE = Path(__file__).parents[2] / "labs" / "slurm_profile"
PAGE = (PROFILE.parent / "SCALING_UP.md").read_text(encoding="utf-8").partition("## Slurm\n")[2].partition("\n## ")[0]
START, LIST = (shlex.split(line) for line in re.findall(r"^(?:ipcluster|squeue) .*$", PAGE, re.MULTILINE))
(STOP,) = (shlex.split(line) for line in re.findall(r"`(ipcluster stop .*?)`", PAGE))
(NOTEBOOK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = {
    "sbatch": """\
export SLURM_NTASKS=$(sed -n 's/^#SBATCH --ntasks=//p' "$1")
setsid sh "$1" > "$1.out" 2>&1 < /dev/null &
echo "$! $(sed -n 's/^#SBATCH --job-name=//p' "$1")" >> "$0.jobs"
echo "Submitted batch job $!"
""",
    # A job that has ended is not listed, nor is one whose parent has not asked yet how it ended, which has no command.
    "squeue": """\
if [ "$*" != --me ]; then echo "squeue: this stand-in knows only --me" >&2; exit 1; fi
columns="%18.18s %9.9s %8.8s %8.8s %2.2s %10.10s %6.6s %s\\n"
printf "$columns" JOBID PARTITION NAME USER ST TIME NODES "NODELIST(REASON)"
while read -r job name; do
    if grep -q . "/proc/$job/cmdline"; then printf "$columns" "$job" all "$name" me R 0:01 1 "$(uname -n)"; fi
done 2> /dev/null < "$(dirname "$0")/sbatch.jobs"
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


def ipcluster(folder: Path, words: list[str]) -> None:
    """Runs a line of the page that begins with `ipcluster`."""
    subprocess.run(
        [sys.executable, "-m", "ipyparallel.cluster", *words[1:]],
        cwd=folder,  # it writes the batch script there
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def states_of_jobs() -> dict[str, str]:
    """Runs the page's line that lists the jobs; returns the state of each by its name, both as Slurm abbreviates them."""
    listed = subprocess.check_output(LIST, text=True).splitlines()
    names, *jobs = (line.split() for line in listed)
    return {job[names.index("NAME")]: job[names.index("ST")] for job in jobs}


def test_a_lab_runs_on_the_engines_of_a_slurm_job_which_squeue_lists_until_it_is_stopped(profile: Path) -> None:
    two = list(START)
    two[two.index("-n") + 1] = "2"
    ipcluster(profile, [*two, "--ip=127.0.0.1"])
    try:
        assert states_of_jobs() == {"memlab-e": "R"}
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
        assert states_of_jobs() == {"memlab-e": "R"}, "the engines stay for the next notebook"
    finally:
        ipcluster(profile, STOP)
    deadline = time.monotonic() + 20
    while states_of_jobs() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert states_of_jobs() == {}


def test_the_page_s_job_has_an_engine_and_a_task_of_the_batch_job_for_each_rank_and_fits_on_gpus_of_80_gb(
    profile: Path,
) -> None:
    opened: list[tuple[str, Layout, str]] = []
    names = {
        "Layout": Layout,
        "Ranks": SimpleNamespace(connect=lambda name: name),
        "Lab": lambda architecture, *, layout, ranks: opened.append((architecture, layout, ranks)),
    }
    exec(NOTEBOOK, names)  # noqa: S102  # the page's own lines
    ((architecture, layout, name),) = opened
    assert profile.name == f"profile_{name}"
    assert f"--profile={name}" in START and f"--profile={name}" in STOP
    number = int(START[START.index("-n") + 1])
    assert layout.world_size == number
    cluster = ipyparallel.Cluster(profile_dir=str(profile), cluster_id="")
    assert cluster.controller_ip == "*", "engines on other nodes reach it"
    launcher = cluster.engine_launcher_class(work_dir=str(profile), parent=cluster, profile_dir=str(profile))
    launcher.write_batch_script(number)
    script = Path(launcher.batch_file).read_text()
    assert f"#SBATCH --ntasks={number}\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script
    with Lab(architecture, layout=layout, backend="simulated") as lab:
        assert lab.fit(lab.step(), "79GiB").fits
