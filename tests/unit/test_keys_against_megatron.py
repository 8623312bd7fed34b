"""What the lists of keys say, against a step of Megatron's own code: no effect, or at most the bound."""

from __future__ import annotations

from typing import Any

import pytest

from memlab import Lab, Layout, MemorySettings
from memlab.engines.megatron import megatron_config
from memlab.jobs.bounds import BOUNDS
from memlab.jobs.frameworks.without_effect import keys_without_effect

pytestmark = pytest.mark.versions


def step_bytes(
    monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, Any], settings: MemorySettings, **job: Any
) -> tuple[int, int, Any]:
    """Returns the bytes at the start and at the peak of a simulated step of a model with other values of its config."""

    class Config(megatron_config.TransformerConfig):  # type: ignore[misc, valid-type]  # a class of the real framework
        def __init__(self, **given: Any) -> None:
            super().__init__(**(given | values))

    with monkeypatch.context() as patch:
        patch.setattr(megatron_config, "TransformerConfig", Config)
        with Lab(name, backend="simulated", replay=False, **job) as lab:
            record = lab.step(settings)
            return record.static_bytes, record.peak_allocated_bytes, lab.scenario


@pytest.mark.parametrize("rank", [0, 3])
def test_an_interleaved_pipeline_without_overlap_takes_less_by_at_most_its_bound(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, rank=rank)
    job = {"num_layers": 8, "seq_length": 1024, "micro_batch_size": 1, "layout": layout, "num_microbatches": 8}
    other = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    _, before, scenario = step_bytes(monkeypatch, "phi-4", {}, MemorySettings(), **job)
    _, after, _ = step_bytes(monkeypatch, "phi-4", other, MemorySettings(), **job)
    assert 0 < before - after <= BOUNDS["overlap_p2p_comm"](scenario)


def test_keys_without_effect_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "attention_softmax_in_fp32": False,
        "apply_query_key_layer_scaling": True,
        "masked_softmax_fusion": True,
        "persist_layer_norm": True,
        "memory_efficient_layer_norm": True,
        "bias_dropout_fusion": False,
        "layernorm_zero_centered_gamma": True,
        "moe_router_bias_update_rate": 0.01,
        "cuda_graph_warmup_steps": 5,
        "tp_comm_bulk_wgrad": False,
        "barrier_with_L1_time": False,
        "use_ring_exchange_p2p": True,
    }
    assert values.keys() <= keys_without_effect("megatron_core_model")
    job = {"num_layers": 2, "seq_length": 512, "micro_batch_size": 1}
    *before, _ = step_bytes(monkeypatch, "qwen3-30b-a3b", {}, MemorySettings(), **job)
    *after, _ = step_bytes(monkeypatch, "qwen3-30b-a3b", values, MemorySettings(), **job)
    assert before == after
