"""The panel on a real GPU: the same controls, and what only a real allocator has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine, which needs a GPU")


def everything_in(widget: Any) -> Iterator[Any]:
    """Yields a widget and all that it contains."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from everything_in(child)


def test_controls_and_run_step_the_gpu(open_gpu_lab: Callable[..., Any]) -> None:
    from memlab.config.settings import MemorySettings
    from memlab.views.panel.panel import panel
    from tests.unit.test_panel import drive, press

    lab = open_gpu_lab()
    shown = panel(lab)
    try:
        drive(shown, "offload_modules:moe_act", True)
        press(shown.run_bar.run)
        deadline = time.monotonic() + 120
        while shown.state.busy and time.monotonic() < deadline:
            time.sleep(0.1)
        record = shown.state.shown.record
        assert record.status == "ok" and record.settings == MemorySettings(offload_modules=["moe_act"])
        assert record.offloaded_bytes_by_module["moe_act"] > 0
        words = " ".join(str(widget.value) for widget in everything_in(shown) if hasattr(widget, "value"))
        assert "on cuda" in words and "reserved" in repr(shown._repr_mimebundle_())
    finally:
        shown.close()
