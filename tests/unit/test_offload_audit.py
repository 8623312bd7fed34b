"""The offload account: what is expected against an architecture's formula, and every byte of it in one place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab
from memlab.record.offload_audit import ModuleAccount, OffloadAudit
from tests.unit.builders import record_of
from tests.unit.inside import inside
from tests.unit.live import FULL, offload

pytestmark = pytest.mark.versions

T, LAYERS = 128, 3
RECOMPUTED = replace(offload("moe_act"), recompute_granularity="selective", recompute_modules=("layernorm", "moe_act"))

LAST_OF_UNEVEN = Layout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|ttt|tt|tL", rank=1)


def saved_by_formula(name: str, architecture_name: str) -> int:
    """Bytes that one layer's module saves, from shapes alone: bf16, and fp32 for statistics and probabilities."""
    a = find_architecture(architecture_name)
    hidden = T * a.hidden_size * 2
    query, key = T * a.num_attention_heads * a.kv_channels * 2, T * a.num_query_groups * a.kv_channels * 2
    per_row = T * 4
    qk_norms = query + key + per_row * (a.num_attention_heads + a.num_query_groups) if a.qk_layernorm else 0
    routed = T * (a.moe_router_topk or 0)
    return {
        "attn_norm": 0,
        "qkv_linear": 2 * hidden + per_row + qk_norms,
        "core_attn": 2 * query + 2 * key + per_row * a.num_attention_heads,
        "attn_proj": query,
        "mlp_norm": hidden + per_row if a.routes else 0,
        "expert_fc1": routed * a.hidden_size * 2,
        "moe_act": routed * (2 * (a.moe_ffn_hidden_size or 0) * 2 + 4),
    }[name]


CASES = [
    *(
        pytest.param("qwen3-moe-tiny", (name,), marks=pytest.mark.slow)
        for name in ("attn_norm", "qkv_linear", "mlp_norm", "moe_act")
    ),
    *(("qwen3-moe-tiny", (name,)) for name in ("core_attn", "expert_fc1")),
    ("qwen3-moe-tiny", ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")),
    ("phi-4-tiny", ("mlp_norm", "qkv_linear")),
    ("phi-4-tiny", ("core_attn", "attn_proj")),
]


@pytest.mark.parametrize(("architecture", "names"), CASES, ids=str)
def test_expected_is_the_formula_and_each_byte_of_it_is_in_one_place(
    open_lab: Callable[..., Lab], architecture: str, names: tuple[str, ...]
) -> None:
    # All modules together are expected of several layers, and each alone of the one layer that does not stay.
    num_layers = LAYERS if len(names) > 1 else 2
    account = open_lab(architecture, num_layers=num_layers).audit_offload(offload(*names))
    for module in account.modules:
        assert module.expected_bytes == (num_layers - 1) * saved_by_formula(module.name, architecture), module
        assert module.last_group_bytes == saved_by_formula(module.name, architecture)
        assert module.transferred_bytes == account.offloaded.offloaded_bytes_by_module.get(module.name, 0)
    terms = account.terms()
    assert sum(terms.values()) == account.expected_bytes
    assert terms["saved"] == account.plain.activation_peak_bytes - account.offloaded.activation_peak_bytes
    # The tensors that were looked at, one by one, account for the whole difference between the two steps.
    assert (terms["never moved"], terms["added by offload itself"]) == (0, 0)
    assert all(size >= 0 for size in terms.values())
    assert all(held.holders for held in account.still_resident)


@pytest.mark.parametrize(
    ("scenario", "transferred", "kept"),
    [
        # The first of three layers is dense: of each pass, the second layer with experts stays.
        ({"architecture": "deepseek-tiny", "num_layers": 3, "backend": "simulated"}, 2, 2),
        # The last of two stages has three layers and then one: that one stays.
        ({"architecture": "qwen3-moe-tiny", "num_layers": 7, "backend": "simulated", "layout": LAST_OF_UNEVEN}, 6, 2),
    ],
    ids=["dense first", "uneven chunks"],
)
def test_the_last_group_of_a_pass_stays_whatever_layers_the_pass_has(
    scenario: dict[str, Any], transferred: int, kept: int
) -> None:
    with Lab(**scenario, seq_length=T, num_microbatches=2) as lab:
        account = lab.audit_offload(offload("moe_act"))
    (module,), one = account.modules, saved_by_formula("moe_act", scenario["architecture"])
    assert (module.transferred_bytes, module.expected_bytes) == (transferred * one, transferred * one)
    assert module.last_group_bytes == kept * one
    assert account.terms()["never moved"] == 0


def test_the_names_of_the_terms_are_those_of_lab_03_s_metrics() -> None:
    account = dict.fromkeys((field.name for field in fields(ModuleAccount)), 0) | {"name": "moe_act"}
    record = record_of(None)
    audit = OffloadAudit(
        plain=record,
        offloaded=record,
        modules=(ModuleAccount(**account),),  # type: ignore[arg-type]
        still_resident=(),
        plain_peak="",
        offloaded_peak="",
        freed_bytes=0,
    )
    (path, *_) = (Path(__file__).parents[2] / "papermill_runs" / "baselines" / "cpu").glob("activation-offload-*.json")
    metrics = json.loads(path.read_text())["measured"]["records"]["(lab)"]["metrics"]
    assert {f"{term.replace(' ', '_')}_bytes" for term in audit.terms()} < metrics.keys()


def test_attention_alone_leaves_its_output_to_the_linear_after_it(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=LAYERS)
    output = T * 128 * 2
    alone = lab.audit_offload(offload("core_attn"))
    assert [held.num_bytes for held in alone.still_resident] == [output] * (LAYERS - 1)
    assert [held.holders for held in alone.still_resident] == [
        (f"LinearBackward of decoder.layers.{layer}.self_attention.linear_proj",) for layer in range(LAYERS - 1)
    ]
    both = lab.audit_offload(offload("core_attn", "attn_proj"))
    assert not both.still_resident
    assert both.terms()["copied a second time"] == output * (LAYERS - 1)


def test_whoever_keeps_a_moved_tensor_is_named(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=LAYERS)
    before = lab.audit_offload(offload("qkv_linear"))
    linear = inside(lab).model.engine.live.chunk.module.decoder.layers[1].self_attention.linear_qkv

    def keep(module: Any, inputs: tuple[torch.Tensor]) -> None:
        module.probe = inputs[0].detach()

    handle = linear.register_forward_pre_hook(keep)
    after = lab.audit_offload(offload("qkv_linear"))
    handle.remove()
    kept = [held for held in after.still_resident if held not in before.still_resident]
    assert [(held.num_bytes, held.holders) for held in kept] == [
        (T * 128 * 2, ("attribute decoder.layers.1.self_attention.linear_qkv.probe",))
    ]
    assert after.terms()["still on the device"] == before.terms()["still on the device"] + T * 128 * 2
    assert sum(after.terms().values()) == after.expected_bytes == before.expected_bytes


def test_a_view_that_has_no_backward_any_more_does_not_end_an_audit(open_lab: Callable[..., Lab]) -> None:
    base = torch.ones(4, requires_grad=True) * 1
    view = base.chunk(2)[0]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        view.grad_fn  # noqa: B018  # torch finds out when it is asked
    audit = open_lab().audit_offload(offload("core_attn"))
    assert audit.modules


def test_a_peak_that_moved_is_told_from_a_tensor_that_stayed(open_lab: Callable[..., Lab]) -> None:
    account = open_lab("qwen3-moe-tiny", num_layers=LAYERS, seq_length=256).audit_offload(RECOMPUTED)
    terms = account.terms()
    assert account.plain_peak != account.offloaded_peak
    assert terms["lost to a peak elsewhere"] > 0
    # A checkpoint saves detached inputs; the fc1 output among them is emptied by Megatron, the probabilities are not.
    top_k = find_architecture("qwen3-moe-tiny").moe_router_topk or 0
    assert [held.num_bytes for held in account.still_resident] == [256 * top_k * 4] * (LAYERS - 1)
    assert all("AccumulateGrad" in held.holders[0] for held in account.still_resident)
    assert sum(terms.values()) == account.expected_bytes
    assert terms["added by offload itself"] == 0


def test_only_one_micro_batch_is_due_at_a_time(open_lab: Callable[..., Lab]) -> None:
    account = open_lab("qwen3-moe-tiny", num_layers=LAYERS, num_microbatches=2).audit_offload(offload("expert_fc1"))
    assert account.expected_bytes == 2 * (LAYERS - 1) * saved_by_formula("expert_fc1", "qwen3-moe-tiny")
    assert account.terms() == dict.fromkeys(account.terms(), 0) | {
        "not due at that moment": account.expected_bytes // 2,
        "saved": account.expected_bytes // 2,
    }


def test_tensors_under_the_minimum_are_not_expected(open_lab: Callable[..., Lab]) -> None:
    settings = replace(offload("mlp_norm"), min_offloaded_tensor_size=T + 1)  # between the statistics and the input
    (module,) = open_lab("qwen3-moe-tiny", num_layers=LAYERS).audit_offload(settings).modules
    assert module.too_small_bytes == LAYERS * T * 4
    assert module.expected_bytes == module.transferred_bytes == (LAYERS - 1) * T * 128 * 2


def test_an_audit_leaves_the_lab_as_it_was(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=LAYERS)
    before = lab.step(offload("core_attn"))
    account = lab.audit_offload(before.settings)
    lab.audit_offload(offload("expert_fc1"))
    after = lab.step()
    plain, other = MemorySettings(), offload("expert_fc1")
    assert [record.settings for record in lab.records] == [
        *(before.settings, plain, before.settings),
        *(plain, other, before.settings),
    ]
    for record in (account.offloaded, after):
        assert (record.peak_allocated_bytes, record.loss) == (before.peak_allocated_bytes, before.loss)


def test_steps_that_run_out_of_memory_are_not_audited() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=512, backend="simulated") as lab:
        lab.device_memory_bytes = lab.step().static_bytes
        with pytest.raises(ValueError, match=r"two steps that finish, and one did not: under 'none', .*requested"):
            lab.audit_offload(offload("core_attn"))


def test_what_cannot_be_audited_is_refused(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=LAYERS)
    for settings in (MemorySettings(), replace(FULL, offload_modules=("core_attn",))):
        with pytest.raises(ValueError, match="must have offload_modules and no full recompute"):
            lab.audit_offload(settings)
    assert lab.records == []


@pytest.mark.parametrize(
    ("rank", "chunks", "num_microbatches"),
    [
        (0, 1, 3),
        (1, 2, 4),
        # Each value again, beside others.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 1, 1), (1, 1, 1), (1, 1, 3), (0, 2, 4))),
    ],
)
def test_on_a_pipeline_stage_what_is_expected_moves_to_the_byte(rank: int, chunks: int, num_microbatches: int) -> None:
    layout = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks, rank=rank)
    num_layers = 4 * chunks  # two in each chunk: the last group of a chunk stays, and the one before it leaves
    workload: dict[str, Any] = {"num_layers": num_layers, "seq_length": 128, "num_microbatches": num_microbatches}
    with Lab("qwen3-moe-tiny", layout=layout, backend="simulated", **workload) as lab:
        account = lab.audit_offload(offload("moe_act", "expert_fc1"))
    for module in account.modules:
        assert module.transferred_bytes == module.expected_bytes > 0
        assert module.last_group_bytes * (2 * chunks * num_microbatches) == module.saved_bytes * (
            num_microbatches if rank else 1
        )


def test_a_simulated_step_that_is_repeated_expects_as_much_as_one_that_is_taken() -> None:
    settings = MemorySettings(offload_modules=["core_attn"], min_offloaded_tensor_size=0)
    expected = []
    for replay in (False, True):
        with Lab("phi-4-tiny", num_layers=3, seq_length=32, backend="simulated", replay=replay) as lab:
            lab.step()
            expected.append(lab.audit_offload(settings).expected_bytes)
    assert expected[0] == expected[1] > 0
