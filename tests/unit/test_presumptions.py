"""Passes that are replayed before they are proven: only where an end of the row shows that they are right."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from memlab import Lab, MemorySettings
from memlab.lab.one_process import OneProcess
from memlab.replay import presumptions
from memlab.replay.presumptions import Presumptions
from tests.unit.inside import inside
from tests.unit.live import offload, recompute
from tests.unit.replayed import require_identical

_SEVERAL = [offload("core_attn"), offload("core_attn", "attn_proj"), offload("qkv_linear", "core_attn")]


def _stepped_and_replayed(architecture: str, settings: list[MemorySettings]) -> list[int]:
    """Compares two steps under each settings with those of new labs without replay; returns how many passes were replayed."""
    arguments: dict[str, Any] = {"num_layers": 8, "seq_length": 64, "backend": "simulated"}
    records, replayed = [], []
    with Lab(architecture, **arguments) as lab:
        session: Any = inside(lab)
        for each in settings:
            for _ in range(2):
                records.append(lab.step(each, warm_up=False))
                replayed.append(session.model.replay.num_replayed)
            assert session.model.replay.is_on
            assert lab.start_over()
    found = iter(records)
    for each in settings:
        with Lab(architecture, **arguments, replay=False) as lab:
            for _ in range(2):
                require_identical(lab.step(each, warm_up=False), next(found))
    return replayed


@pytest.mark.parametrize(
    ("architecture", "replayed"),
    [
        # The ends of a row are stepped, and in the second step also the second unit from either end: the last one does
        # not offload, and the first one has nothing to bring back. So is the second unit where the first one's input,
        # which the model keeps, is copied to the host.
        ("phi-4-tiny", [3, 3, 6, 4, 5, 4]),
        pytest.param("qwen3-moe-tiny", [3, 3, 6, 4, 5, 4], marks=pytest.mark.slow),
    ],
)
def test_a_row_of_equal_layers_is_stepped_at_its_ends_once_similar_settings_have_shown_what_ends_do(
    architecture: str, replayed: list[int]
) -> None:
    assert _stepped_and_replayed(architecture, _SEVERAL) == replayed


def test_the_experts_first_router_does_what_others_do_but_for_the_log_of_losses() -> None:
    """Megatron allocates the log once in a model; that layer's next pass is like those of other layers."""
    assert _stepped_and_replayed("qwen3-moe-tiny", [MemorySettings()]) == [3, 6]


def test_where_an_end_differs_from_what_was_presumed_the_step_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, what is known of ends in one step is taken for what they do in all."""
    begun: list[None] = []
    begin_again = OneProcess._begin_again

    def note(self: OneProcess, past: Any) -> Any:
        begun.append(None)
        return begin_again(self, past)

    monkeypatch.setattr(OneProcess, "_begin_again", note)
    monkeypatch.setattr(Presumptions, "_class_of", lambda self, unit, key: ())
    _stepped_and_replayed("phi-4-tiny", [MemorySettings(), recompute("core_attn"), *_SEVERAL[:2]])
    assert begun


def test_each_presumption_is_compared_with_a_stepped_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compared passes differ, it is given up, and what was seen before is not presumed again."""
    numbers = count()
    with Lab("phi-4-tiny", num_layers=8, seq_length=64, backend="simulated") as lab:
        session: Any = inside(lab)
        first = lab.step(recompute("core_attn"), warm_up=False)
        assert lab.start_over()
        agreed = session.model.replay._layers.presumptions._agree
        assert all(agreed.values())
        session.model.replay._layers.forget()  # what is proven
        with monkeypatch.context() as patch:
            patch.setattr(presumptions, "_does", lambda known, direction: next(numbers))
            require_identical(first, lab.step(recompute("core_attn"), warm_up=False))
        assert session.model.replay.is_on
        assert not all(agreed.values())
