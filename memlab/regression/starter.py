"""The first nightly of a model of one's own: a suite, a notebook, and a workflow for GitHub, as files to change."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat

from memlab._version import __version__
from memlab.config.architectures import ARCHITECTURES
from memlab.regression.suite.notebooks import PARAMETERS_TAG, RECORD_TAG

_NAME = "my_model"
_QUESTION = """\
# What does a step of my model need?

Change what follows: the model's name or the path of its `config.json`, the workload, and the settings that you compare.
Each record that `finish` gets has a baseline, and a nightly run fails if one of its bytes changes."""
_PARAMETERS = """\
architecture: str = {architecture!r}  # a name that memlab knows, or the path of a Hugging Face config.json
num_layers: int = 2  # transformer layers; 0 takes all
seq_length: int = 4096  # tokens in a sequence
backend: str = "simulated"  # simulated predicts a GPU's step; cpu and cuda measure one"""
_STEPS = """\
from memlab import Lab, MemorySettings, compare, finish

lab = Lab(architecture, num_layers=num_layers or None, seq_length=seq_length, backend=backend)
plain = lab.step()
full = lab.step(MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1))
compare(plain, full)"""
_RECORD = """\
finish({"plain": plain, "full": full})"""
_SUITE = """\
# Runs with: memlab nightly papermill_runs/suites/{name}.yaml
# The first time, add --allow-missing; then memlab baseline update papermill_runs/suites/{name}.yaml keeps the values.
backend: simulated # a GPU's step, predicted; cpu and cuda measure one
baselines: {name} # this suite's folder in papermill_runs/baselines/
timeout_seconds: 900
cases:
  - lab: {name}
    matrix:
      seq_length: [4096, 8192]
"""
_WORKFLOW = """\
# The nightly of papermill_runs/suites/{name}.yaml. GitHub runs a schedule only on the default branch.
name: memlab
on:
  schedule:
    - cron: "17 3 * * *"
  workflow_dispatch:
permissions:
  contents: read
jobs:
  {name}:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    env:
      PIP_EXTRA_INDEX_URL: https://download.pytorch.org/whl/cpu
      MEMLAB: ./memlab-{version}-py3-none-any.whl # no package index has memlab: commit the wheel that you installed
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: "3.11"
      - run: pip install "$MEMLAB[cpu]"
      - run: memlab nightly papermill_runs/suites/{name}.yaml --jobs 2
      - if: ${{{{ !cancelled() }}}}
        uses: actions/upload-artifact@v6
        with:
          name: memlab
          path: papermill_runs/runs
          if-no-files-found: ignore
          retention-days: 14
"""


def starter_files(architecture: str) -> dict[Path, str]:
    """Returns what a first nightly needs: the text of each file, by its path below the current folder.

    Args:
        architecture: The model of the notebook: a name of `memlab.ARCHITECTURES`, or the path of a ``config.json``.
    """
    if architecture not in ARCHITECTURES and Path(architecture).exists():
        architecture = os.path.relpath(architecture, "labs")  # a notebook runs in its own folder
    cells = [
        nbformat.v4.new_markdown_cell(_QUESTION),
        nbformat.v4.new_code_cell(_PARAMETERS.format(architecture=architecture), metadata={"tags": [PARAMETERS_TAG]}),
        nbformat.v4.new_code_cell(_STEPS),
        nbformat.v4.new_code_cell(_RECORD, metadata={"tags": [RECORD_TAG]}),
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    return {
        Path("labs") / f"{_NAME}.ipynb": f"{nbformat.writes(notebook)}\n",
        Path("papermill_runs/suites") / f"{_NAME}.yaml": _SUITE.format(name=_NAME),
        Path(".github/workflows/memlab.yml"): _WORKFLOW.format(name=_NAME, version=__version__),
    }
