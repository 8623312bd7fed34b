"""memlab runs training steps of a live Megatron model, changes memory settings in place, and accounts for every byte.

Names are loaded when they are first used, so that `import memlab` is quick and imports no torch.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab._version import __version__  # noqa: F401
from memlab.quiet_import import imported

if TYPE_CHECKING:  # the one list of public names; the module reads it below
    from memlab.analysis.diagnosis import diagnose as diagnose
    from memlab.analysis.diagnosis import probability_of_exceeding as probability_of_exceeding
    from memlab.analysis.diagnosis import worst as worst
    from memlab.analysis.kept import kept_by_module as kept_by_module
    from memlab.config.allocator_settings import AllocatorSettings as AllocatorSettings
    from memlab.config.architectures import ARCHITECTURES as ARCHITECTURES
    from memlab.config.architectures import Architecture as Architecture
    from memlab.config.layout import Layout as Layout
    from memlab.config.lora import LoRA as LoRA
    from memlab.config.scenario import Scenario as Scenario
    from memlab.config.settings import MemorySettings as MemorySettings
    from memlab.config.settings import validation_error as validation_error
    from memlab.config.training_state import TrainingState as TrainingState
    from memlab.config.versions import Versions as Versions
    from memlab.exercises.checks import check as check
    from memlab.exercises.checks import failure as failure
    from memlab.exercises.records import Attempt as Attempt
    from memlab.jobs.job import Job as Job
    from memlab.lab.lab import Lab as Lab
    from memlab.lab.predictions import predict_ranks as predict_ranks
    from memlab.lab.request import PassRequest as PassRequest
    from memlab.lab.request import StepRequest as StepRequest
    from memlab.lab_files import labs_folder as labs_folder
    from memlab.ranks.ranks import Ranks as Ranks
    from memlab.record.job_record import JobRecord as JobRecord
    from memlab.record.measured_steps import measured_steps as measured_steps
    from memlab.record.notebook_result import finish as finish
    from memlab.record.step_record import StepRecord as StepRecord
    from memlab.record.timeline import Timeline as Timeline
    from memlab.record.transfer import GROUPS as GROUPS
    from memlab.units import format_bytes as format_bytes
    from memlab.views.calculator import calculator as calculator
    from memlab.views.display import compare as compare
    from memlab.views.display import line_by_line as line_by_line
    from memlab.views.display import over_steps as over_steps
    from memlab.views.display import peaks as peaks
    from memlab.views.display import savings as savings
    from memlab.views.display import show as show
    from memlab.views.panel.panel import panel as panel
    from memlab.views.questions import guess as guess
    from memlab.views.questions import quiz as quiz
    from memlab.watching.watch import watch as watch


def _homes() -> dict[str, str]:
    """Returns the module of each public name, as this file imports it above for type checkers."""
    (block,) = (node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}: choose from {', '.join(__all__)}")
    value = getattr(imported(home), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Adds the cell magic ``%%memlab`` to IPython, as ``%load_ext memlab`` asks for it."""
    from memlab.watching.magic import register

    register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
