"""Interleaved pipeline stages: several model chunks on one rank, and how many of their passes wait for backward."""

from __future__ import annotations

import pytest

from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from memlab.vocabulary import PHASES, POOLS
from tests.unit.inside import inside
from tests.unit.live import FULL, offload

LAYERS, MICROBATCHES = 8, 4


def open_lab(rank: int, chunks: int, architecture: str = "phi-4-tiny") -> Lab:
    layout = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks, rank=rank)
    return Lab(
        architecture,
        num_layers=LAYERS,
        seq_length=256,
        num_microbatches=MICROBATCHES,
        layout=layout,
        backend="simulated",
    )


def passes_before_backward(record: StepRecord, layer: int) -> int:
    """Returns how often a layer's first linear had run when the first backward began."""
    timeline = record.timeline
    assert timeline is not None
    linear = timeline.modules.index(f"decoder.layers.{layer}.mlp.linear_fc1")
    first_backward = (timeline.phase == PHASES.index("backward")).argmax()
    made = (timeline.module == linear) & (timeline.delta_bytes > 0) & (timeline.pool == POOLS.index("device"))
    sizes = timeline.delta_bytes[:first_backward][made[:first_backward]]
    return int((sizes == sizes.max()).sum())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_as_many_passes_wait_as_the_schedule_says(rank: int, chunks: int) -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Megatron's ``get_pp_rank_microbatches``."""
    stages = 2
    warm_up = (stages - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * stages
    with open_lab(rank, chunks) as lab:
        record = lab.step()
        assert len(inside(lab).model.engine.live.chunks) == chunks
        assert [len(chunk.module.decoder.layers) for chunk in inside(lab).model.engine.live.chunks] == [
            4 // chunks
        ] * chunks
    first_layers = range(0, LAYERS // stages, LAYERS // stages // chunks)
    assert sum(passes_before_backward(record, layer) for layer in first_layers) == warm_up + 1


def test_layers_are_numbered_through_and_all_of_them_step() -> None:
    with open_lab(0, 2) as lab:
        record = lab.step()
        live = inside(lab).model.engine.live
        numbers = [layer.layer_number for layer in live.layers]
        assert numbers == [1, 2, 5, 6]  # of the whole model, from 1: this rank's first and third quarter
        names = {name for name, _ in live.named_modules()}
    assert {f"decoder.layers.{number}" for number in range(4)} <= names
    assert "decoder.layers.4" not in names
    assert record.timeline is not None
    assert all(f"decoder.layers.{number}.mlp.linear_fc1" in record.peak_by_module for number in range(4))


@pytest.mark.parametrize("architecture", ["phi-4-tiny", pytest.param("qwen3-moe-tiny", marks=pytest.mark.slow)])
def test_settings_reach_every_chunk(architecture: str) -> None:
    with open_lab(0, 2, architecture) as lab:
        plain = lab.step()
        away = MemorySettings(offload_parameters=True, offload_optimizer=True)
        for settings in (FULL, offload("qkv_linear", "core_attn"), away):
            record = lab.step(settings)
            assert record.status == "ok"
            if settings is away:
                assert record.offloaded_bytes_by_group["parameters"] == pytest.approx(
                    plain.peak_by_category["parameters"], rel=0.2
                )
            else:
                assert record.activation_peak_bytes < 0.95 * plain.activation_peak_bytes
            assert not record.without_effect
        assert lab.step().peak_by_category["activations"] == plain.peak_by_category["activations"]
        lab.drop()
        assert inside(lab).model.meter.live_bytes() == 0


@pytest.mark.parametrize(
    ("sizes", "others", "refusal"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, {}, "must be 1 where pipeline_model_parallel_size is 1"),
        (
            {"virtual_pipeline_model_parallel_size": 3, "pipeline_model_parallel_size": 2},
            {"num_microbatches": 2},
            "must divide the 4 layers of a pipeline stage: choose from 1, 2, 4",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"num_microbatches": 3},
            "num_microbatches is 3, must be a multiple of the number of stages, 2, .* choose from 2, 4, 6",
        ),
        (
            {
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 2,
            },
            {"num_layers": 7, "num_microbatches": 2},
            "must divide the 5 layers of a pipeline stage: choose from 1",
        ),
    ],
)
def test_what_megatron_refuses_is_refused_with_the_choices(
    sizes: dict[str, int], others: dict[str, int], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        Scenario.of(architecture="phi-4-tiny", layout=Layout(**sizes), **({"num_layers": 8} | others))


def test_layers_are_grouped_within_a_chunk() -> None:
    """Megatron's uniform recompute reads past the end of a chunk whose layers do not divide."""
    layout = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    scenario = Scenario.of(architecture="phi-4-tiny", num_layers=12, num_microbatches=2, layout=layout)
    pairs = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    with pytest.raises(ValueError, match=r"but a model chunk's 3 layers do not divide .* choose from 1, 3"):
        check_on_model(pairs, scenario)
    many = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=4)
    with pytest.raises(ValueError, match="but a model chunk has 3 layers: give a number from 1 to 3"):
        check_on_model(many, scenario)


def test_uneven_stages_are_interleaved_where_each_divides() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
    for rank, numbers in ((0, [1, 4]), (1, [2, 3, 5, 6])):
        layout = Layout(virtual_pipeline_model_parallel_size=2, rank=rank, **sizes)
        with Lab(
            "phi-4-tiny", num_layers=6, seq_length=64, num_microbatches=2, layout=layout, backend="simulated"
        ) as lab:
            assert lab.step().status == "ok"
            assert [layer.layer_number for layer in inside(lab).model.engine.live.layers] == numbers
