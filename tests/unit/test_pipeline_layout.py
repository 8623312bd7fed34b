"""Layouts of a pipeline that name each stage's layers: Megatron's own reading, other ways to say the same, and jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from memlab.cli import build_parser
from memlab.commands.shared.asked_step import asked_step
from memlab.config.layout import Layout
from memlab.config.pipeline_layout import (
    extra_layers,
    layers_of_pipeline_chunks,
    text_of_layout,
    without_extra_layers,
)
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError
from memlab.fitting.estimate import bytes_in_layers
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from tests.unit.inside import inside


@pytest.mark.parametrize("text", ["EttL", "Ettt|(tt|)*29L", "E|t*3|t|L", "E,tt|(t|t)*2,t|L", "(Et)*1|t*12|L"])
def test_a_text_has_the_layers_that_megatron_reads(text: str) -> None:
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert layers_of_pipeline_chunks(text) == tuple(chunk.count(LayerType.decoder) for chunk in theirs)


@pytest.mark.parametrize("text", ["Ett|ttmL", "Ett|ttm*2L", "Ett|t*2(m)*3L", "Ett|tt(m,m)*2L", "Ett|(tm)*1L"])
def test_layers_of_multi_token_prediction_are_those_that_megatron_reads(text: str) -> None:
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert extra_layers(text) == sum(chunk.count(LayerType.mtp) for chunk in theirs)
    without = PipelineParallelLayerLayout.parse_str_to_list(without_extra_layers(text))
    assert without == [[layer for layer in chunk if layer is not LayerType.mtp] for chunk in theirs]


def stage_bytes(stages: int, rank: int, **layout: Any) -> tuple[list[int], int, int]:
    """Returns the layers of a stage's chunks in Megatron's live model, and the bytes of a predicted step."""
    where = Layout(pipeline_model_parallel_size=stages, rank=rank, **layout)
    with Lab(
        "deepseek-tiny", num_layers=4, seq_length=64, num_microbatches=4, layout=where, backend="simulated"
    ) as lab:
        live = [len(chunk.module.decoder.layers) for chunk in inside(lab).model.engine.live.chunks]
        assert live == [len(chunk) for chunk in lab.scenario.chunks_of_rank]
        record = lab.step(warm_up=False)
    return live, record.static_bytes, record.peak_allocated_bytes


def test_a_layout_is_another_way_to_say_how_many_layers_the_ends_have() -> None:
    for rank in (0, 1, 2):
        ends = stage_bytes(3, rank, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1)
        assert stage_bytes(3, rank, pipeline_model_parallel_layout="Et|tt|tL") == ends
    chunks = stage_bytes(2, 1, virtual_pipeline_model_parallel_size=2)
    assert stage_bytes(2, 1, pipeline_model_parallel_layout="Et|t|t|tL") == chunks


def test_a_stage_may_have_no_layer_and_chunks_may_differ() -> None:
    """Megatron-Core's own example has the loss alone on the last stage."""
    assert [stage_bytes(3, rank, pipeline_model_parallel_layout="Ett|tt|L")[0] for rank in (0, 2)] == [[2], [0]]
    layers = [range(1), range(3, 3), range(1, 3), range(3, 4)]
    scenario = Scenario.of(
        "phi-4-tiny",
        layout=Layout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt||tL"),
        num_microbatches=2,
    )
    assert [*map(list, scenario.chunks)] == [*map(list, layers)]


def test_a_stage_without_layers_is_predicted_where_passes_may_be_replayed() -> None:
    layout = Layout(pipeline_model_parallel_size=3, rank=2, pipeline_model_parallel_layout="Ett|tt|L")
    small: dict[str, Any] = {"num_layers": 4, "seq_length": 64, "num_microbatches": 4, "layout": layout}
    peaks = []
    for replay in (True, False):
        with Lab("phi-4-tiny", backend="simulated", replay=replay, **small) as lab:
            peaks.append(lab.step().peak_allocated_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("text", "stages", "words"),
    [
        ("Etttt", 2, "must begin with one E and end with one L"),
        ("Ett|txL", 2, "may have only E, t, m, L"),
        ("Ett|ttmL", 2, "must have 0 m, one for each of mtp_num_layers"),
        ("Etttm|tL", 2, "must have m only just before L"),
        ("Ett|tL", 2, "with 3 layers, must have the 4 of the model"),
        ("Ett|t|tL", 2, "with 3 chunks, must have 1 for each of the 2 pipeline stages"),
        ("E(t)*99999|(t)*99999L", 2, "must have at most 100,000 layers"),
        (("Ett", "ttL"), 2, "must be a text such as"),
    ],
)
def test_a_layout_that_no_job_has_is_refused_in_a_line(text: str, stages: int, words: str) -> None:
    with pytest.raises(RuleError, match=words) as refused:
        Scenario.of(
            "phi-4-tiny", layout=Layout(pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text)
        )
    assert "\n" not in str(refused.value)


def test_a_layout_is_asked_for_and_read_from_jobs(tmp_path: Path) -> None:
    flags = (
        "predict phi-4-tiny --pipeline-model-parallel-size 2 --world-size 2 --pipeline-model-parallel-layout Et|tttL"
    )
    assert asked_step(build_parser().parse_args(flags.split())).scenario.layers_of_rank == (0,)
    lists = [["embedding", *["decoder"] * 10], ["decoder"] * 18 + ["mtp", "loss"]]
    assert text_of_layout(lists) == f"E{'t' * 10}|{'t' * 18}mL"
    nemo = {
        "policy": {
            "model_name": "Qwen/Qwen3-0.6B",
            "train_micro_batch_size": 1,
            "megatron_cfg": {
                "enabled": True,
                "pipeline_model_parallel_size": 2,
                "pipeline_model_parallel_layout": lists,
            },
        },
        "cluster": {"gpus_per_node": 2, "num_nodes": 1},
        "grpo": {"num_prompts_per_step": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nemo))
    verl = "actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout"
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.path=Qwen/Qwen3-0.6B "
        f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 '+{verl}=Et*10|t*18L'"
    )
    for job in (
        Job.read(tmp_path / "config.yaml"),
        Job.read(tmp_path / "run.sh", world_size=2, version="2026-08-20"),
    ):
        assert job.required()[0].layers_of_chunks == (10, 18)
        assert not [one for one in job.not_modelled if "layout" in one.key]
    nemo["policy"]["megatron_cfg"]["pipeline_model_parallel_layout"] = [{"stage": "Et"}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nemo))
    with pytest.raises(
        ValueError, match=r"line \d+: policy\.megatron_cfg\.pipeline_model_parallel_layout is a list of 1 "
    ):
        Job.read(tmp_path / "config.yaml")


def test_layers_of_chunks_of_other_sizes_are_counted_by_their_place_in_the_chunk() -> None:
    layout = Layout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|tt|L")
    scenario = Scenario.of("qwen2.5-tiny", layout=layout, num_microbatches=2)
    by_module = {f"decoder.layers.{number}": num_bytes for number, num_bytes in enumerate((1, 10, 100))}
    assert bytes_in_layers(by_module, scenario) == {(0, ""): 1 + 10, (1, ""): 100}, "chunks of one layer and of two"
