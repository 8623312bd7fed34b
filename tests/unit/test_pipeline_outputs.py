"""What a pipeline stage has sent to the next one stays until its backward pass, or is freed at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab import Lab, Layout, MemorySettings, StepRecord, TrainingState
from memlab.config.architectures import find_architecture
from tests.unit.job_files import read_job

NUM_TOKENS, NUM_MICROBATCHES = 256, 4
PLAIN = MemorySettings()
FREED = TrainingState(deallocate_pipeline_outputs=True)
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def stage_step(
    architecture: str,
    layout: Layout,
    state: TrainingState,
    settings: MemorySettings = PLAIN,
    *,
    num_layers: int = 4,
    replays: bool = True,
) -> StepRecord:
    workload = {"num_layers": num_layers, "seq_length": NUM_TOKENS, "num_microbatches": NUM_MICROBATCHES}
    with Lab(architecture, backend="simulated", layout=layout, state=state, replay=replays, **workload) as lab:
        return lab.step(settings)


@pytest.mark.parametrize(("chunks", "outputs_in_flight"), [(1, 2), (2, 4)])
@pytest.mark.parametrize(("architecture", "settings"), [("phi-4-tiny", PLAIN), ("qwen3-moe-tiny", FULL)])
def test_the_first_stage_frees_the_outputs_of_all_passes_in_flight(
    architecture: str, chunks: int, outputs_in_flight: int, settings: MemorySettings
) -> None:
    layout = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks)
    kept, freed = (stage_step(architecture, layout, state, settings) for state in (TrainingState(), FREED))
    output = 2 * NUM_TOKENS * find_architecture(architecture).hidden_size  # bf16
    one_element = 512  # what Megatron puts in an output's place, in the allocator's smallest block
    assert kept.peak_allocated_bytes - freed.peak_allocated_bytes == outputs_in_flight * (output - one_element)
    assert freed.static_bytes == kept.static_bytes


@pytest.mark.parametrize(("chunks", "rank"), [(1, 0), (2, 1)])
def test_replayed_layers_free_their_outputs_as_stepped_ones_do(chunks: int, rank: int) -> None:
    layout = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks, rank=rank)
    stepped, replayed = (
        stage_step("phi-4-tiny", layout, FREED, num_layers=12 * chunks, replays=replays) for replays in (False, True)
    )
    assert stepped.peak_allocated_bytes == replayed.peak_allocated_bytes
    assert stepped.peak_by_category == replayed.peak_by_category


def test_without_pipeline_stages_the_option_has_no_effect() -> None:
    record = stage_step("phi-4-tiny", Layout(), FREED)
    assert record.without_effect == {"deallocate_pipeline_outputs": "only a pipeline stage sends outputs"}
    assert record.peak_allocated_bytes == stage_step("phi-4-tiny", Layout(), TrainingState()).peak_allocated_bytes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            (
                "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096 "
                "--pipeline_model_parallel_size {stages} --expert_model_parallel_size 2 --micro_batch_size 1 "
                "--global_batch_size 32"
            ),
        ),
        (
            "config.yaml",
            (
                "model: {{hf_model_id: Qwen/Qwen3-30B-A3B, pipeline_model_parallel_size: {stages}, seq_length: 4096}}\n"
                "world_size: 8\ntrain: {{micro_batch_size: 1, global_batch_size: 32}}\n"
                "ddp: {{grad_reduce_in_fp32: true}}\n"
            ),
        ),
    ],
)
def test_the_stages_of_a_framework_free_their_outputs(name: str, text: str, tmp_path: Path) -> None:
    for stages in (1, 2):
        scenario, _ = read_job(text.format(stages=stages), tmp_path, name).required()
        assert scenario.state.deallocate_pipeline_outputs == (stages > 1)
