"""What is known of a pass is filed under all that decides about it: equal keys mean equal events, whatever else changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from memlab import Lab, MemorySettings
from memlab.config.option import options_of
from memlab.replay.knowledge import Knowledge
from memlab.replay.passes import Key, Known
from tests.unit.inside import inside
from tests.unit.live import offload, recompute
from tests.unit.replayed import require_identical

_BLOCK = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
_OFFLOAD = offload("core_attn", "qkv_linear")
_ON_HOST = MemorySettings(
    offload_parameters=True, offload_gradients=True, offload_optimizer=True, offload_optimizer_except_update=True
)
_OF_ALL = [
    MemorySettings(),
    _BLOCK,
    replace(_BLOCK, recompute_num_layers=3),
    replace(_BLOCK, recompute_method="uniform"),
    replace(_BLOCK, recompute_method="uniform", recompute_num_layers=1),
    recompute("core_attn"),
    _OFFLOAD,
    offload("core_attn"),
    replace(_OFFLOAD, min_offloaded_tensor_size=5000),
    replace(_OFFLOAD, **_BLOCK.changed()),
    replace(_OFFLOAD, **_ON_HOST.changed()),
    _ON_HOST,
]
_OF_EXPERTS = [
    recompute("moe"),
    recompute("moe_act"),
    offload("expert_fc1"),
    replace(_BLOCK, checkpoint_input_remedy="detach"),
]
_NOT_REPLAYED = {"activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"}
_OF_OTHER_ENGINES = {"selective_ac", "checkpoint_every"}
_OF_NEWER_CORE = {"fine_grained_offloading_max_inflight_offloads"}


def test_every_memory_setting_is_changed_here() -> None:
    settings = [*_OF_ALL, *_OF_EXPERTS]
    changed = {name for each in settings for name in each.changed()}
    assert changed | _NOT_REPLAYED | _OF_OTHER_ENGINES | _OF_NEWER_CORE == set(options_of(MemorySettings))


@pytest.mark.parametrize("architecture", ["phi-4-tiny", pytest.param("qwen3-moe-tiny", marks=pytest.mark.slow)])
def test_passes_with_one_key_have_the_same_events_under_all_settings(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass is stepped, in the first step of a model and in the second one."""
    seen: defaultdict[tuple[int, Key], dict[Any, MemorySettings]] = defaultdict(dict)
    settings = _OF_ALL if architecture == "phi-4-tiny" else [*_OF_ALL, *_OF_EXPERTS]
    learn = Knowledge.learn

    def note(self: Knowledge, key: Key, known: Known) -> None:
        seen[self._num_steps, key].setdefault((known.recording.signature, known.calls), lab.settings)
        learn(self, key, known)

    monkeypatch.setattr(Knowledge, "learn", note)
    monkeypatch.setattr(Knowledge, "forward_of", lambda self, one, key: None)
    with Lab(architecture, num_layers=6, seq_length=64, backend="simulated") as lab:
        session: Any = inside(lab)
        for each in settings:
            for _ in range(2):
                lab.step(each, warm_up=False)
                assert session.model.replay.num_replayed == 0
            assert lab.start_over()
    shared = [key for key, events in seen.items() if len(events) == 1]
    assert shared
    for key, events in seen.items():
        assert len(events) == 1, f"{key}: {', '.join(str(each) for each in events.values())}"


@pytest.mark.parametrize("architecture", ["phi-4-tiny", "qwen3-moe-tiny"])
def test_settings_that_passes_do_not_see_share_what_is_known(architecture: str) -> None:
    """What is on the host between steps, and how a model is divided into checkpoints, changes no pass."""
    settings = [MemorySettings(), _ON_HOST, _BLOCK, replace(_BLOCK, recompute_method="uniform", recompute_num_layers=1)]
    arguments: dict[str, Any] = {"num_layers": 8, "seq_length": 64, "backend": "simulated"}
    expected, replayed = {}, []
    for each in settings:
        with Lab(architecture, **arguments, replay=False) as lab:
            expected[each] = [lab.step(each, warm_up=False) for _ in range(2)]
    with Lab(architecture, **arguments) as lab:
        session: Any = inside(lab)
        for each in settings:
            for record in expected[each]:
                require_identical(record, lab.step(each, warm_up=False))
                replayed.append(session.model.replay.num_replayed)
            assert lab.start_over()
    first, second, *_ = replayed
    assert replayed[2] > first, "the other settings leave the passes of the first step as they are"
    assert replayed[4] > first - 2, "the layers that are not in checkpoints"
    assert replayed[6] > replayed[4] - 4, "those that are"
    assert replayed[3] >= second
