"""FP8 without a GPU: what each layer allocates and saves, which settings it refuses, and steps that an H200 measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch

from memlab.backends import cuda, simulated
from memlab.backends.simulated import of_labs_before_0_4, of_the_cpu_backend
from memlab.backends.simulated_version import imitating
from memlab.config.architectures import find_architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import Fp8Recipe, TrainingState
from memlab.config.versions import Versions
from memlab.engines.megatron.layers.fake_fp8 import Fp8Padding
from memlab.engines.megatron.training_step import _labels_in_engine_checkpoints
from memlab.lab.lab import Lab
from memlab.meter import kept_gathers
from memlab.meter.labels import Labels
from memlab.upstream.private_names import replaceable
from memlab.views.text.record import record_table
from memlab.vocabulary import PHASES, POOLS
from tests.unit.inside import inside, skip_first_calls
from tests.unit.live import FULL, offload, recompute
from tests.unit.refusal import refusal

pytestmark = pytest.mark.versions

GIB, MIB = 2**30, 2**20
SMALL = {"num_layers": 2, "seq_length": 256, "backend": "simulated"}


PRECISION_AWARE = {"use_precision_aware_optimizer": True}
OF_MXFP8 = {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}


def fp8(recipe: Fp8Recipe = "tensorwise", **others: Any) -> TrainingState:
    return TrainingState(fp8_format="hybrid", fp8_recipe=recipe, **others)


@pytest.mark.parametrize(
    ("state", "at_rest", "peak"),
    [
        (fp8("delayed"), 30.0288, 33.5654),
        (fp8("tensorwise"), 30.0255, 33.5230),
        (fp8("blockwise"), 30.0257, 33.5303),
        (fp8("delayed", fp8_param_gather=True), 28.7530, 32.2897),
        (fp8("tensorwise", fp8_param_gather=True), 28.7530, 32.2506),
        (fp8("blockwise", fp8_param_gather=True), 28.7533, 32.2576),
    ],
)
def test_a_dense_model_is_an_h200_s(state: TrainingState, at_rest: float, peak: float) -> None:
    # Measured with memlab, Megatron-Core 0.16.1 and Transformer Engine 2.12.0; steps after the second are equal.
    with Lab("phi-4", num_layers=2, seq_length=4096, backend=of_labs_before_0_4(), state=state) as lab:
        record = lab.step()
    assert record.static_bytes / GIB == pytest.approx(at_rest, rel=5e-5)
    assert record.peak_allocated_bytes / GIB == pytest.approx(peak, rel=1e-4)


@pytest.mark.parametrize(
    ("state", "at_rest", "peak"),
    [(fp8("tensorwise"), 33.9988, 38.2256), (fp8("blockwise", fp8_param_gather=True), 31.5982, 35.8206)],
)
def test_a_model_with_experts_is_an_h200_s(state: TrainingState, at_rest: float, peak: float) -> None:
    # There the router decided how many rows of each expert were padded.
    with Lab("qwen3-30b-a3b", num_layers=2, backend="simulated", routing="random:7", state=state) as lab:
        skip_first_calls(lab)  # there were jobs before it in the same process
        record = lab.step()
    assert record.static_bytes / GIB == pytest.approx(at_rest, rel=2e-4)
    assert record.peak_allocated_bytes / GIB == pytest.approx(peak, rel=3e-4)


@pytest.fixture
def exact_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts bytes as they are requested, without the allocator's rounding."""
    monkeypatch.setattr("memlab.lab.lab.find_backend", lambda name: of_the_cpu_backend())


def _matrices(lab: Lab) -> list[tuple[int, ...]]:
    layers = inside(lab).model.engine.live.layers
    return [
        tuple(weight.shape)
        for layer in layers
        for name, weight in layer.named_parameters()
        if "linear_" in name and weight.dim() == 2
    ]


@pytest.mark.parametrize(
    ("recipe", "scale_bytes"),
    [
        ("delayed", lambda rows, width: 0),
        ("tensorwise", lambda rows, width: 0),
        # fp32 per 128 x 128 values; the second dimension is padded to a multiple of 4.
        ("blockwise", lambda rows, width: 16 * (_tiles(rows, width, 128, 512) + _tiles(width, rows, 128, 512))),
        # One byte per 32 values of a row or of a column, padded to tiles of 128 x 4 bytes.
        ("mxfp8", lambda rows, width: 512 * (_tiles(rows, width, 128, 128) + _tiles(width, rows, 128, 128))),
    ],
)
@pytest.mark.usefixtures("exact_bytes")
def test_weights_stay_allocated_in_fp8_by_row_and_by_column(recipe: Fp8Recipe, scale_bytes: Any) -> None:
    model = find_architecture("phi-4-tiny")
    model = replace(model, hidden_size=512, ffn_hidden_size=1024)
    with Lab(model, state=fp8(recipe), **SMALL) as lab:
        before = lab.step().static_bytes
        matrices = _matrices(lab)
    with Lab(model, **SMALL) as lab:
        without = lab.step().static_bytes
    expected = sum(2 * rows * width + scale_bytes(rows, width) for rows, width in matrices)
    quantizers = {"tensorwise": 512, "delayed": 10 * 4 + 512}.get(recipe, 0)
    assert before - without == expected + len(matrices) * quantizers


@pytest.mark.parametrize(("version", "keeps_scales", "holds"), [("2.14", 1, 0), ("2.15", 1, 1), ("2.16", 0, 1)])
@pytest.mark.usefixtures("exact_bytes")
def test_a_version_keeps_scales_of_each_quantizer_or_holds_a_replaced_weight(
    version: str, keeps_scales: int, holds: int
) -> None:
    versions = Versions(transformer_engine=version)
    with Lab("qwen3-moe-tiny", state=fp8(), num_layers=1, seq_length=64, versions=versions, backend="simulated") as lab:
        linear = inside(lab).model.engine.live.layers[0].mlp.experts.linear_fc1
        submit = inside(lab).worker.submit
        first = submit(lambda: (linear.quantize_weight(columnwise=False), linear._fp8_workspaces["weight"])[1]).result()
        held = submit(lambda: linear.quantize_weight(columnwise=True)).result()
        assert (held is first) == holds and linear._fp8_workspaces["weight"] is not first
        scales = [tensor.nbytes for state in linear.quantizers["all"] for tensor in state.tensors]
        assert scales == [2 * 5 * 8 * 512] * keeps_scales


@pytest.mark.parametrize(("recipe", "stored"), [("delayed", {}), ("tensorwise", {"fp8_param_gather": True})])
@pytest.mark.usefixtures("exact_bytes")
def test_blackwell_keeps_no_transposed_copy_of_a_weight(recipe: Fp8Recipe, stored: dict[str, bool]) -> None:
    starts, saved = [], []
    for options in (stored, {**stored, "non_tn_fp8_gemm": True}):
        with Lab("qwen3-moe-tiny", state=fp8(recipe, **options), **SMALL | {"num_layers": 1}) as lab:
            starts.append(lab.step(warm_up=False).static_bytes)
            in_matrices = sum(rows * width for rows, width in _matrices(lab))
            starts[-1] = lab.step(warm_up=False).static_bytes
            saved.append(sorted(_saved_bytes(lab, "self_attention.linear_qkv")))
    assert starts[0] - starts[1] == in_matrices
    assert saved[0] == saved[1]  # of an input one of the two copies is kept on either GPU


def test_only_recipes_with_transposed_copies_can_leave_them_out() -> None:
    assert "must have delayed or tensorwise" in refusal(lambda: fp8("blockwise", non_tn_fp8_gemm=True))


@pytest.mark.parametrize(
    ("capability", "needs_none"), [((9, 0), False), ((10, 3), True), ((11, 0), True), ((12, 0), False), ((13, 0), True)]
)
def test_the_gpu_decides_whether_copies_are_left_out(
    capability: tuple[int, int], needs_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``is_non_tn_fp8_gemm_supported`` of Transformer Engine 2.16.1, by which 12.0, as of an RTX 5090, has copies."""
    engine = SimpleNamespace(is_fp8_available=lambda return_reason: (True, ""))
    monkeypatch.setattr(cuda, "import_module", lambda name: engine)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    cuda.check_fp8_support(fp8("delayed", non_tn_fp8_gemm=needs_none))
    assert f"must be {needs_none}" in refusal(
        lambda: cuda.check_fp8_support(fp8("delayed", non_tn_fp8_gemm=not needs_none))
    )


@pytest.mark.usefixtures("exact_bytes")
def test_mxfp8_parameters_are_outside_ddp_s_buffers_and_core_0_16_keeps_the_others_twice() -> None:
    model = replace(find_architecture("phi-4-tiny"), hidden_size=512, ffn_hidden_size=1024)
    starts = []
    for state in (fp8("mxfp8"), fp8("mxfp8", **OF_MXFP8)):
        with Lab(model, state=state, **SMALL) as lab:
            starts.append(lab.step().static_bytes)
            in_matrices = sum(rows * width for rows, width in _matrices(lab))
            others = sum(parameter.numel() for parameter in inside(lab).model.engine.live.parameters()) - in_matrices
    twice = megatron.core.__version__.startswith("0.16")
    assert starts[0] - starts[1] == 2 * in_matrices - twice * 2 * others


def test_mxfp8_parameters_are_gathered_in_forward_too() -> None:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, **PRECISION_AWARE}
    copies = Layout(data_parallel_size=2)
    model = replace(find_architecture("qwen3-moe-tiny"), moe_ffn_hidden_size=64)
    with Lab(model, layout=copies, state=fp8("mxfp8", **OF_MXFP8, **overlap), **SMALL) as lab:
        assert lab.step().residual_bytes == lab.step().residual_bytes == 0
        assert "parameters and gradients share a buffer" in refusal(
            lambda: lab.step(MemorySettings(offload_parameters=True))
        )


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        ("mxfp8", {"fp8_param_gather": True}),
        ("blockwise", OF_MXFP8),
        ("mxfp8", {"reuse_grad_buf_for_mxfp8_param_ag": True}),
    ],
)
def test_mxfp8_parameters_and_no_others_are_gathered_in_the_gradients_buffer(recipe: Fp8Recipe, given: Any) -> None:
    assert "must be True with 'mxfp8' and True, since Transformer Engine moves no MXFP8 parameter" in refusal(
        lambda: fp8(recipe, **given)
    )


def _tiles(rows: int, width: int, height_of_tile: int, width_of_tile: int) -> int:
    return -(-rows // height_of_tile) * -(-width // width_of_tile)


ROWS = 256
SPLITS = [64, 32, 32, 16, 64, 16, 32, 0]
"""Rows of each expert of the tiny model; one has none."""
BF16_INPUT, FP8_INPUT = ROWS * 128 * 2, ROWS * 128
NORM = [BF16_INPUT, ROWS * 4]
"""A fused norm saves its input, and a number in fp32 per row."""
SCALAR = 512
"""What torch's allocator takes for a scale."""


@pytest.mark.parametrize(
    ("recipe", "linear_qkv", "linear_proj", "linear_fc1"),
    [
        ("delayed", [FP8_INPUT, SCALAR], [FP8_INPUT, SCALAR], [*(rows * 128 for rows in SPLITS), 8 * SCALAR]),
        # The projection saves attention's output, which attention saves too.
        ("tensorwise", [FP8_INPUT, SCALAR], [BF16_INPUT], [*(rows * 128 for rows in SPLITS), 8 * SCALAR]),
        # By column a scale in fp32 per 128 rows; that of all experts is one buffer.
        ("blockwise", [FP8_INPUT, 2 * 128 * 4], [BF16_INPUT], [ROWS * 128 + 7 * 128 * 4]),
        # By column a byte per 32 rows; 4 x 128 of them are the least for each expert.
        ("mxfp8", [FP8_INPUT, 8 * 128], [BF16_INPUT], [ROWS * 128 + 7 * 4 * 128]),
    ],
)
def test_layers_save_for_backward_what_transformer_engine_saves(
    recipe: Fp8Recipe, linear_qkv: list[int], linear_proj: list[int], linear_fc1: list[int]
) -> None:
    with Lab("qwen3-moe-tiny", state=fp8(recipe), **SMALL) as lab:
        assert sorted(_saved_bytes(lab, "self_attention.linear_qkv")) == sorted([*NORM, *linear_qkv])
        assert _saved_bytes(lab, "self_attention.linear_proj") == linear_proj
        assert _saved_bytes(lab, "mlp.experts.linear_fc1") == linear_fc1


def _saved_bytes(lab: Lab, part: str) -> list[int]:
    """Returns the bytes of each tensor that a module of the first layer saves for backward, weights left out."""
    module = inside(lab).model.engine.live.layers[0].get_submodule(part)
    weights = list(module.parameters())
    saved: list[int] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if all(tensor is not weight for weight in weights):
            saved.append(tensor.untyped_storage().nbytes())
        return tensor

    def run() -> None:
        arguments: tuple[Any, ...] = (SPLITS,) if "experts" in part else ()
        shape = (ROWS, 128) if "experts" in part else (ROWS, 1, 128)
        inputs = torch.empty(shape, dtype=torch.bfloat16, device=torch.cuda.current_device(), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            module(inputs, *arguments)

    inside(lab).worker.submit(run).result()
    return saved


def test_full_recompute_frees_column_wise_weights_only_of_the_blockwise_recipe() -> None:
    # A cached weight of the tensorwise recipe that lacks the values for backward is replaced for good; that of the
    # blockwise recipe is completed in backward, and cut again by the next step's forward.
    freed = {}
    for recipe in ("tensorwise", "blockwise"):
        with Lab("qwen3-moe-tiny", state=fp8(recipe), num_layers=2, seq_length=64, backend="simulated") as lab:
            lab.step(FULL)
            weights = inside(lab).model.engine.live.layers[0].mlp.experts.linear_fc1
            inside(lab).model.engine.live.chunk.module.set_is_first_microbatch()
            with torch.no_grad():
                inside(lab).worker.submit(lambda linear=weights: linear.quantize_weight(columnwise=False)).result()
            freed[recipe] = not weights._fp8_workspaces["weight"].columnwise
    assert freed == {"tensorwise": False, "blockwise": True}


def test_from_2_20_on_a_checkpoint_prepares_for_a_second_pass_only_where_autograd_sees_a_trained_tensor() -> None:
    trained, other = torch.ones(1, requires_grad=True), torch.ones(1)
    for version, expected in (("2.19", "inside layers"), ("2.20", None)):
        with imitating(Versions(transformer_engine=version)):
            assert simulated._as_seen("inside layers", (None, trained)) == "inside layers"
            # The layers of multi-token prediction of megatron-core 0.16.1 give their tensors by name.
            assert simulated._as_seen("inside layers", (None, other)) == expected
            with torch.no_grad():
                assert simulated._as_seen("inside layers", (trained,)) == expected


def test_from_2_18_on_a_norm_s_linear_frees_its_output_s_quantized_gradient_before_the_norm_s_backward() -> None:
    tokens, live = 256, {}
    for version in ("2.17", "2.18"):
        with Lab(
            "qwen3-moe-tiny",
            num_layers=1,
            seq_length=tokens,
            layout=Layout(tensor_model_parallel_size=2),
            state=fp8("blockwise"),
            versions=Versions(transformer_engine=version),
            backend="simulated",
        ) as lab:
            line, model = lab.step().timeline, lab.scenario.architecture
        on_device = line.pool == POOLS.index("device")
        sizes, module = line.delta_bytes[on_device], line.module[on_device]
        linear = line.modules.index("decoder.layers.0.self_attention.linear_qkv")
        in_backward = (line.phase[on_device] == PHASES.index("backward")) & (module == linear)
        of_norm_weight = in_backward & (sizes == 512)
        (live[version],) = sizes.cumsum()[of_norm_weight].tolist()
    width = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels // 2
    by_row_and_column = 2 * tokens * width
    assert live["2.17"] - live["2.18"] == pytest.approx(by_row_and_column, rel=0.05)


def test_experts_rows_are_padded_where_they_do_not_divide() -> None:
    rows, splits = torch.empty(50, 8, requires_grad=True), [16, 30, 4, 0]
    padded, lengths = Fp8Padding(4, 16)(rows, splits)
    assert lengths == [16, 32, 16, 0]
    assert padded.shape == (64, 8)
    padded.backward(torch.empty_like(padded))
    assert rows.grad is not None
    assert rows.grad.shape == rows.shape
    aligned = torch.empty(48, 8)
    assert Fp8Padding(2, 16)(aligned, [16, 32]) == (aligned, [16, 32])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp32"}, "dtype is 'fp32', must be 'bf16'"),
        ({"seq_length": 24}, "holds 24 tokens of a micro-batch, must be a multiple of 16"),
        ({"state": fp8("mxfp8"), "seq_length": 48}, "holds 48 tokens of a micro-batch, must be a multiple of 32"),
        (
            {"state": fp8("blockwise"), "layout": Layout(tensor_model_parallel_size=2), "seq_length": 192},
            "holds 96 tokens of a micro-batch, must be a multiple of 128",
        ),
    ],
)
def test_what_transformer_engine_cannot_multiply_is_refused(changes: dict[str, Any], words: str) -> None:
    values = {"num_layers": 1, "seq_length": 256, "state": fp8()} | changes
    assert words in refusal(lambda: Scenario.of("qwen3-moe-tiny", **values))


def test_widths_that_do_not_divide_are_refused() -> None:
    narrow = replace(find_architecture("qwen3-moe-tiny"), moe_ffn_hidden_size=24)
    message = refusal(lambda: Scenario.of(narrow, state=fp8()))
    assert "moe_ffn_hidden_size on a rank is 24, must be a multiple of 16" in message


@pytest.mark.parametrize("settings", [recompute("moe_act"), recompute("layernorm"), offload("expert_fc1")])
def test_the_delayed_recipe_refuses_what_needs_the_original_input(settings: Any) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=256, state=fp8("delayed"))
    assert "which the FP8 recipe 'delayed' does not support" in refusal(lambda: check_on_model(settings, scenario))
    check_on_model(settings, replace(scenario, state=fp8("blockwise", fp8_param_gather=True)))


@pytest.mark.parametrize(
    ("modules", "saves"),
    [((), True), (("layernorm",), True), (("shared_experts",), False), (("layernorm", "shared_experts"), False)],
)
def test_shared_experts_save_the_router_s_input_unless_a_checkpoint_saves_it(
    modules: tuple[str, ...], saves: bool
) -> None:
    """As ``SharedExpertMLP.__init__`` and ``MoELayer.set_for_recompute_pre_mlp_layernorm`` of megatron-core 0.16.1."""
    with Lab("qwen2-moe-tiny", num_layers=1, seq_length=256, backend="simulated", state=fp8()) as lab:
        lab.step(recompute(*modules) if modules else MemorySettings(), warm_up=False)
        shared = inside(lab).model.engine.live.chunk.module.decoder.layers[0].mlp.shared_experts
        assert shared.linear_fc1.save_original_input is saves


@pytest.mark.parametrize("name", ["qkv_linear", "attn_proj", "expert_fc1"])
def test_megatron_cannot_offload_a_cached_weight_in_fp8(name: str) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=256, state=fp8())
    assert "offload the linear's FP8 weight" in refusal(lambda: check_on_model(offload("core_attn", name), scenario))
    check_on_model(offload("core_attn", "moe_act", "mlp_norm"), scenario)


@pytest.mark.parametrize("remedy", ["clear_gradient", "release_storage"])
def test_remedies_of_megatron_s_checkpoint_are_refused(remedy: Any) -> None:
    # Megatron checkpoints with Transformer Engine's function under FP8, which the remedy would not reach.
    scenario, settings = Scenario.of("qwen3-moe-tiny", state=fp8()), replace(FULL, checkpoint_input_remedy=remedy)
    assert "must be 'detach'" in refusal(lambda: check_on_model(settings, scenario))
    check_on_model(replace(FULL, checkpoint_input_remedy="detach"), scenario)


def test_what_transformer_engine_recomputes_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pass:
        def __init__(self, recompute_phase: bool) -> None:
            self.recompute_phase = recompute_phase

        def __enter__(self) -> None:
            assert labels.recomputing == self.recompute_phase

        def __exit__(self, *_: object) -> None:
            pass

    name = "transformer_engine.pytorch.distributed"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(activation_recompute_forward=Pass))
    labels = Labels()
    ((replaced, labelled),) = _labels_in_engine_checkpoints(labels).items()
    assert replaced in replaceable()
    for recomputes in (False, True):
        with labelled(recompute_phase=recomputes):
            assert labels.recomputing == recomputes
        assert not labels.recomputing


def test_an_optimizer_of_fp8_parameters_is_rebuilt_with_its_model() -> None:
    # Megatron drops the values from which it makes main parameters when the first optimizer is built.
    stored = fp8(fp8_param_gather=True)
    with Lab("qwen3-moe-tiny", state=stored, **SMALL) as lab:
        first = lab.step()
        for changed, rebuilt in (
            (fp8(), "model"),
            (replace(fp8(), exp_avg_dtype="bf16", **PRECISION_AWARE), "optimizer"),
        ):
            assert lab.set_state(changed).rebuilt == rebuilt
        assert lab.set_state(replace(stored, **PRECISION_AWARE)).rebuilt == "model"
        assert lab.set_state(stored).rebuilt == "model"
        last = lab.step()
    assert last.peak_allocated_bytes == first.peak_allocated_bytes


def test_the_rows_of_the_first_workload_need_not_suit_a_later_state() -> None:
    with Lab("qwen3-moe-tiny", num_layers=1, seq_length=24, backend="simulated") as lab:
        lab.set_workload(seq_length=32)
        lab.set_state(fp8())
        lab.set_workload(seq_length=64)
        assert lab.step().scenario.seq_length == 64
        with pytest.raises(ValueError, match="a rank holds 24 tokens of a micro-batch"):
            lab.set_workload(seq_length=24)


def test_a_prediction_that_was_never_measured_says_so() -> None:
    def table(recipe: Fp8Recipe) -> str:
        with Lab("qwen3-moe-tiny", num_layers=1, seq_length=64, backend="simulated", state=fp8(recipe)) as lab:
            return " ".join(record_table(lab.step(warm_up=False)).split())

    assert "memlab has measured nothing" in table("mxfp8")
    assert "memlab has measured nothing" not in table("blockwise")


def test_the_cpu_refuses_fp8() -> None:
    assert "which needs a GPU" in refusal(lambda: Lab("qwen3-moe-tiny", backend="cpu", state=fp8()))


def test_fp8_parameters_need_the_distributed_optimizer() -> None:
    message = refusal(lambda: fp8(fp8_param_gather=True, use_distributed_optimizer=False))
    assert "fp8_param_gather is True without the distributed optimizer" in message


def test_main_parameters_of_fp8_parameters_are_those_that_their_optimizer_can_update() -> None:
    stored = {"fp8_param_gather": True, **PRECISION_AWARE}
    assert "must be 'fp16' there" in refusal(lambda: fp8("delayed", **stored))
    assert "must be 'fp32' there" in refusal(lambda: fp8("blockwise", main_params_dtype="fp16", **stored))
    for state in (fp8("delayed", main_params_dtype="fp16", **stored), fp8("tensorwise", **stored)):
        with Lab("qwen3-moe-tiny", state=state, **SMALL) as lab:
            assert lab.step().residual_bytes == 0


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_an_installed_engine_is_not_asked_for_a_gpu(recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_gpu(*_: Any, **__: Any) -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr("megatron.core.transformer.transformer_block.get_fp8_context", needs_gpu)
    with Lab("phi-4-tiny", state=fp8(recipe), **SMALL) as lab:
        assert lab.step(FULL).status == lab.step(MemorySettings()).status == "ok"


@pytest.mark.parametrize(
    "recipe",
    ["delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorwise", "mxfp8")), "blockwise"],
)
def test_every_recipe_steps_on_split_layers_and_leaves_nothing(recipe: Fp8Recipe) -> None:
    layout = Layout(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    with Lab("qwen3-moe-tiny", layout=layout, num_microbatches=2, state=fp8(recipe), **SMALL) as lab:
        none = MemorySettings()
        first, *_, last = [lab.step(settings) for settings in (none, FULL, recompute("moe"), none)]
    assert first.residual_bytes == last.residual_bytes == 0
    assert last.activation_peak_bytes == first.activation_peak_bytes


def test_torch_may_keep_what_the_last_gathers_of_blockwise_values_and_scales_sent_and_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measured on two H100s after this step: 577.5 MiB, freed by the next collective. Its peak was 84.8 MiB higher.
    over_ranks = Layout(tensor_model_parallel_size=2)
    job: dict[str, Any] = {"num_layers": 4, "seq_length": 4096, "layout": over_ranks, "backend": "simulated"}
    with Lab("phi-4", **job, state=fp8("blockwise")) as lab:
        kept_bytes = lab.step().kept_gather_bytes
        meter: Any = inside(lab).model.meter
        assert sum(num_bytes for _, num_bytes, _ in meter.storages.memory.gathers.kept) == 577.5 * MIB
        in_forward = 87.5 * MIB
        assert kept_bytes == in_forward + 577.5 * MIB, "the four layers' forward passes, and all of the step before"
        monkeypatch.setattr(kept_gathers, "_MOST_KEPT", 26)
        assert lab.step().kept_gather_bytes == kept_bytes - 6 * in_forward / 8, "of 24 gathers before, the last 18"
        monkeypatch.setattr(kept_gathers, "_MOST_KEPT", 4)
        assert lab.step().kept_gather_bytes == in_forward / 2, "each layer gathers twice"
    with Lab("phi-4", **job, state=fp8("tensorwise")) as lab:
        assert lab.step().kept_gather_bytes == 0, "values that are gathered alone are waited for"
