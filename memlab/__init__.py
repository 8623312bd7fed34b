"""memlab: training steps of a live Megatron model, under memory settings changed in place, every byte accounted for.

Names are loaded when they are first used, so that `import memlab` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memlab._version import __version__  # noqa: F401

if TYPE_CHECKING:
    from memlab.analysis.diagnosis import diagnose, probability_of_exceeding, worst
    from memlab.config.architectures import ARCHITECTURES, Architecture
    from memlab.config.layout import Layout
    from memlab.config.scenario import Scenario
    from memlab.config.settings import MemorySettings, validation_error
    from memlab.exercises import check, failure
    from memlab.lab.lab import Lab
    from memlab.lab.predictions import predict_ranks
    from memlab.record.metrics import finish
    from memlab.record.step_record import StepRecord
    from memlab.record.timeline import Timeline
    from memlab.record.transfer import GROUPS
    from memlab.units import format_bytes
    from memlab.views.display import compare, peaks, show
    from memlab.views.panel.panel import panel

__all__ = [
    "ARCHITECTURES",
    "GROUPS",
    "Architecture",
    "Lab",
    "Layout",
    "MemorySettings",
    "Scenario",
    "StepRecord",
    "Timeline",
    "check",
    "compare",
    "diagnose",
    "failure",
    "finish",
    "format_bytes",
    "panel",
    "peaks",
    "predict_ranks",
    "probability_of_exceeding",
    "show",
    "validation_error",
    "worst",
]

_HOMES = {
    "ARCHITECTURES": "memlab.config.architectures",
    "Architecture": "memlab.config.architectures",
    "GROUPS": "memlab.record.transfer",
    "Lab": "memlab.lab.lab",
    "Layout": "memlab.config.layout",
    "MemorySettings": "memlab.config.settings",
    "Scenario": "memlab.config.scenario",
    "StepRecord": "memlab.record.step_record",
    "Timeline": "memlab.record.timeline",
    "check": "memlab.exercises",
    "compare": "memlab.views.display",
    "diagnose": "memlab.analysis.diagnosis",
    "failure": "memlab.exercises",
    "finish": "memlab.record.metrics",
    "format_bytes": "memlab.units",
    "panel": "memlab.views.panel.panel",
    "peaks": "memlab.views.display",
    "predict_ranks": "memlab.lab.predictions",
    "probability_of_exceeding": "memlab.analysis.diagnosis",
    "show": "memlab.views.display",
    "validation_error": "memlab.config.settings",
    "worst": "memlab.analysis.diagnosis",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}: choose from {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
