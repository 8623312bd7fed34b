"""What `import memlab` costs: nothing heavy is loaded before it is used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import memlab

HEAVY = ("torch", "megatron", "numpy", "plotly", "ipywidgets", "IPython", "ipyparallel", "papermill", "nbformat")


@pytest.mark.parametrize(
    "statement",
    [
        "import memlab",
        "import memlab.cli",
        "from memlab.cli import main; main(['measure', 'phi-4-tiny', '--seed', 'x'])",
        "import memlab.commands.search, memlab.lab.search_workers",
    ],
)
def test_importing_memlab_loads_neither_torch_nor_plotly(statement: str) -> None:
    # The command line knows the plain values, and a record's timeline is made of numpy's columns.
    allowed = {"numpy"} if statement != "import memlab" else set()
    code = f"{statement}\nimport sys\nprint(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= allowed


@pytest.mark.parametrize("name", memlab.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    value = getattr(memlab, name)
    assert value if name.isupper() else value.__name__ == name
    assert name in dir(memlab)


def test_an_unknown_name_is_an_attribute_error_with_the_choices() -> None:
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'Labb': choose from ARCHITECTURES, AllocatorSettings, Architecture, Attempt, GROUPS, Job, JobRecord, Lab,",
    ):
        _ = memlab.Labb


def test_importing_the_lab_is_silent_and_loads_no_compiler_without_a_gpu() -> None:
    # megatron-core warns about optional packages when it is imported, and a CUDA build of torch logs that there is a
    # compiler for CUDA (CUDA_HOME names it) and no GPU: `memlab.engines.megatron` imports it first, with these silenced.
    loaded = "*(name in sys.modules for name in ('torch._inductor.compile_fx', 'ipyparallel'))"
    code = f"from memlab import Lab\nimport gc, sys\nprint({loaded}, gc.get_freeze_count() > 200_000)"
    environment = os.environ | {"CUDA_HOME": sys.prefix}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    # Triton's bindings of torch 2.15 name what they leave behind when Python ends; no import prints that.
    printed = "".join(
        line for line in done.stderr.splitlines(True) if not line.startswith(("nanobind:", " - ", "See https"))
    )
    assert done.stdout + printed == f"{torch.cuda.device_count() > 0} False True\n", "and collections pass over torch"


def test_a_headless_run_does_not_import_the_parser_of_urls_that_takes_2_seconds() -> None:
    code = "import memlab.regression.run.execute, sys\nprint('rfc3987_syntax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
