"""memlab: training steps of a live Megatron model, under memory settings changed in place, every byte accounted for.

Names are loaded when they are first used, so that `import memlab` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlab.analysis.checks import check, failure
    from memlab.analysis.diagnosis import diagnose, probability_of_exceeding, worst
    from memlab.architectures import ARCHITECTURES, Architecture
    from memlab.lab import Lab
    from memlab.layout import Layout
    from memlab.predictions import predict_ranks
    from memlab.record import StepRecord
    from memlab.regression.metrics import finish
    from memlab.scenario import Scenario
    from memlab.settings import MemorySettings
    from memlab.timeline import Timeline
    from memlab.views.display import compare, peaks, show
    from memlab.views.panel import panel

__version__ = "0.1.0"
__all__ = [
    "ARCHITECTURES",
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
    "panel",
    "peaks",
    "predict_ranks",
    "probability_of_exceeding",
    "show",
    "worst",
]

_HOMES = {
    "ARCHITECTURES": "memlab.architectures",
    "Architecture": "memlab.architectures",
    "Lab": "memlab.lab",
    "Layout": "memlab.layout",
    "MemorySettings": "memlab.settings",
    "Scenario": "memlab.scenario",
    "StepRecord": "memlab.record",
    "Timeline": "memlab.timeline",
    "check": "memlab.analysis.checks",
    "compare": "memlab.views.display",
    "diagnose": "memlab.analysis.diagnosis",
    "failure": "memlab.analysis.checks",
    "finish": "memlab.regression.metrics",
    "panel": "memlab.views.panel",
    "peaks": "memlab.views.display",
    "predict_ranks": "memlab.predictions",
    "probability_of_exceeding": "memlab.analysis.diagnosis",
    "show": "memlab.views.display",
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
