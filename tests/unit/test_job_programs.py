"""What a framework's own program reads where its command names no configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.job_files import read_job

PROGRAM = """
    if not args.config:
        args.config = os.path.join(
            os.path.dirname(__file__),
            "configs",
            "{}",
        )
"""
DTENSOR = "policy: {dtensor_cfg: {enabled: true}, megatron_cfg: {enabled: false}, max_total_sequence_length: 256, train_micro_batch_size: 1}\n"
SEPARATE = """\
defaults: base.yaml
policy:
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true}
  generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 1}}}
cluster: {num_nodes: 1}
grpo: {num_prompts_per_step: 4}
"""
RUN = "uv run {}examples/run_grpo.py {} policy.model_name=Qwen/Qwen3-0.6B cluster.gpus_per_node=2"


def _checkout(folder: Path, named: str) -> Path:
    (folder / "examples" / "configs").mkdir(parents=True)
    (folder / "examples" / "run_grpo.py").write_text(PROGRAM.format(named))
    (folder / "examples" / "configs" / "base.yaml").write_text(DTENSOR)
    (folder / "examples" / "configs" / "separate.yaml").write_text(SEPARATE)
    return folder


@pytest.mark.parametrize(
    ("start", "named", "framework", "ranks"),
    [
        ("", "base.yaml", "nemo-rl-dtensor", 2),
        ("$(cd .. && pwd)/", "base.yaml", "nemo-rl-dtensor", 2),
        ("", "separate.yaml", "nemo-rl", 1),
    ],
)
def test_a_program_of_nemo_rl_reads_the_file_that_its_source_names(
    start: str, named: str, framework: str, ranks: int, tmp_path: Path
) -> None:
    """``main`` in examples/run_grpo.py and run_grpo_single_controller.py at 7ea279ab."""
    job = read_job(RUN.format(start, ""), _checkout(tmp_path, named))
    assert job.framework == framework
    assert (job.required()[0].layout.world_size, job.required()[0].seq_length) == (ranks, 256)
    assert any(f"run_grpo.py reads {named}" in one for one in job.warnings)


def test_a_file_that_a_command_of_nemo_rl_names_is_read_whatever_its_name(tmp_path: Path) -> None:
    """The one that ``run_grpo.py`` reads by itself has the DTensor policy, and is read where a command names it too."""
    folder = _checkout(tmp_path, "separate.yaml")
    (folder / "examples" / "configs" / "base.yaml").rename(folder / "examples" / "configs" / "grpo_math_1B.yaml")
    job = read_job(RUN.format("", "--config examples/configs/grpo_math_1B.yaml"), folder)
    assert job.framework == "nemo-rl-dtensor"
    assert job.required()[0].seq_length == 256


@pytest.mark.parametrize(
    ("keys", "framework"),
    [
        ("", "nemo-rl-dtensor"),
        ("policy.megatron_cfg.enabled=true", "nemo-rl"),
        ("policy.megatron_cfg.tensor_model_parallel_size=1", "nemo-rl"),
        ("policy.dtensor_cfg.enabled=true", "nemo-rl-dtensor"),
    ],
)
def test_a_file_that_is_not_near_is_told_and_has_nemo_rl_s_usual_engine(
    keys: str, framework: str, tmp_path: Path
) -> None:
    job = read_job(RUN.format("", "") + f" {keys}", tmp_path)
    assert job.framework == framework
    assert any("the configuration 'grpo_math_1B' is not beside the job" in one for one in job.warnings)


@pytest.mark.parametrize(
    ("program", "bypasses", "buckets"),
    [
        ("verl.trainer.main_ppo", False, 1),
        ("verl.experimental.fully_async_policy.fully_async_main", True, 2),
        ("verl.experimental.one_step_off_policy.main_ppo", True, 2),
        (
            "verl.experimental.fully_async_policy.fully_async_main --config-name=fully_async_ppo_megatron_trainer",
            True,
            2,
        ),
        (
            "verl.experimental.one_step_off_policy.main_ppo --config-name=one_step_off_ppo_megatron_trainer.yaml",
            True,
            2,
        ),
    ],
)
@pytest.mark.parametrize("given", ["", " algorithm.rollout_correction.bypass_mode=False"])
def test_programs_of_verl_have_the_defaults_of_their_own_configurations(
    program: str, bypasses: bool, buckets: int, given: str, tmp_path: Path
) -> None:
    """``verl/experimental/*/config/*.yaml`` (0.9.1 and 1dda039b): the engine's log-probabilities, and NCCL's buckets."""
    engine = "model_engine=megatron" if "megatron" in program else "actor_rollout_ref.actor.strategy=fsdp2"
    text = (
        f"python -m {program} {engine} actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.hybrid_engine=False"
    )
    job = read_job(text + given, tmp_path, version="0.9.1")
    rollout = job.rollout
    assert rollout is not None
    assert rollout.computes_log_probabilities is not (bypasses and not given)
    assert rollout.bucket_copies == buckets
    assert not any("is not beside" in one for one in job.warnings)
