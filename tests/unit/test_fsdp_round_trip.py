"""A job of FSDP that is written for a framework, and read from what was written, is the same job, or it is named."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from memlab.config import without_effect
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.lora import LINEARS, LoRA
from memlab.config.option import options_of, unread
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import ModelClasses, TrainingState
from memlab.config.transformers_linears import adapted_linears
from memlab.jobs.frameworks.registry import FRAMEWORKS, writer_of
from memlab.jobs.job import Job
from memlab.jobs.writing import GPU_DECIDES, Written, written
from tests.unit.test_job_round_trip import FILES, edited, in_effect, of_few_and_many_jobs, read_lines

OF_FSDP = [name for name in FRAMEWORKS if writer_of(name, "fsdp2").engine == "fsdp2"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "grad_reduce_in_bf16": (True,),
    "cp_comm_type": ("a2a", "a2a", "p2p"),
    "fsdp_version": (1, 2),
    "use_orig_params": (True,),
    "fp32_sharded_params": (True, True, False),
    "reshard_after_forward": ("all_but_last", "all", "none"),
    "reshard_after_forward_ranks": (2, 4),
    "fsdp2_forward_prefetch_depth": (1, 2),
    "fsdp2_backward_prefetch_depth": (1, 2),
    "dp_replicate_size": (2,),
    "fsdp_cpu_offload": (True,),
    "defer_fsdp_grad_sync": (True,),
    "separate_embeddings": ("none", "input", "both"),
    "reshard_root_after_forward": (True,),
    "loss_of_transformers": ("cross_entropy", "masked_cross_entropy", "logprobs_flash_attn", "logprobs_by_row"),
    "attn_implementation": ("sdpa", "flash_attention_2", "eager"),
    "adam_implementation": ("foreach", "fused", "for_loop", "te_fused"),
    "master_weights": (True,),
    "store_param_remainders": (True,),
    "lora": (
        LoRA(rank=8, target_modules=(), exclude_modules=("lm_head",), enable_input_require_grads=True),
        LoRA(rank=16, target_modules=("q_proj", "o_proj"), enable_input_require_grads=True, dropout=0.25),
        LoRA(rank=4, target_modules=(), exclude_modules=("lm_head", "down_proj"), enable_input_require_grads=True),
        LoRA(target_modules=("*_proj",), fsdp2_library="automodel", dropout_position="post"),
        LoRA(rank=8, alpha=64, target_modules=(), fsdp2_library="automodel", dropout=0.5),
        LoRA(target_modules=(), exclude_modules=("*o_proj",), fsdp2_library="automodel"),
    ),
}
OF_COPIES = ("data_parallel_size", "dp_replicate_size", "num_microbatches", "sequence_parallel")
OF_ROWS = ("seq_length", "packed_sequences")
"""What the sequences of a step fill, of which a rank has fewer with more copies."""
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MEMORY: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"offload_parameters": True},
    {"offload_parameters": True, "offload_optimizer": True},
    {"offload_optimizer": True},
    {"offload_parameters": True, "offload_gradients": False},
    {"offload_optimizer_except_update": True},
)
CHECKPOINTS: tuple[dict[str, Any], ...] = (
    {},
    WHOLE,
    WHOLE,
    WHOLE | {"selective_ac": True},
    WHOLE | {"checkpoint_every": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
)


def random_job(dice: random.Random) -> tuple[Scenario, MemorySettings]:
    """Draws a job that memlab's engine takes; what no other option reads has its default."""
    while True:
        values = {name: dice.choice(each) for name, each in CHOICES.items() if dice.random() < 0.25}
        options = TrainingState(**values).options() if _is_valid(values) else None
        if options is None:
            continue
        left_out = {name for name in unread(TrainingState, options) if name in values}
        try:
            scenario = Scenario.of(
                dice.choice(("llama-3.1-8b", "qwen3-8b", "phi-4")),
                num_layers=dice.choice((None, 4)),
                seq_length=1024 * dice.choice((1, 3, 8)),
                micro_batch_size=dice.choice((1, 1, 2)),
                num_microbatches=dice.choice((1, 2, 5)),
                engine="fsdp2",
                dtype=dice.choice(("bf16", "bf16", "bf16", "fp32")),
                layout=Layout(
                    tensor_model_parallel_size=dice.choice((1, 1, 1, 2)),
                    context_parallel_size=dice.choice((1, 1, 2)),
                    data_parallel_size=dice.choice((2, 4, 8)),
                    sequence_parallel=dice.choice((True, False)),
                ),
                packed_sequences=dice.choice((None, None, 1, 4)),
                allocator=AllocatorSettings(expandable_segments=dice.random() < 0.5),
                state=TrainingState(**{name: one for name, one in values.items() if name not in left_out}),
            )
            settings = MemorySettings(**dice.choice(MEMORY), **dice.choice(CHECKPOINTS))
        except ValueError:
            continue
        classes = random.Random(repr(values)).choice(get_args(ModelClasses))
        with suppress(ValueError):  # of a family without such classes
            scenario = replace(scenario, state=replace(scenario.state, model_classes=classes))
        return _in_effect(scenario), settings


def _is_valid(values: dict[str, Any]) -> bool:
    try:
        TrainingState(**values)
    except ValueError:
        return False
    return True


def _in_effect(scenario: Scenario) -> Scenario:
    """Returns a scenario without what the engine does not read."""
    scenario = in_effect(scenario)
    if scenario.layout.tensor_model_parallel_size == 1:
        layout = replace(scenario.layout, sequence_parallel=Layout().sequence_parallel)
        scenario = replace(scenario, layout=layout)
    options = options_of(TrainingState)
    own = {field.name for field in fields(TrainingState)}
    unread_here = {name: options[name].default for name in without_effect.of_scenario(scenario) if name in own}
    return replace(scenario, state=replace(scenario.state, **unread_here))


def read_again(name: str, said: Written, scenario: Scenario, path: Path) -> Job:
    """Reads what was written."""
    return read_lines(name, list(said.lines), scenario.layout.world_size, path / FILES.get(name, "run.sh"))


def differing(one: tuple[Scenario, MemorySettings], other: tuple[Scenario, MemorySettings]) -> dict[str, Any]:
    """Returns the fields of the second job that the first has otherwise; of adapters, of which one has none, one."""
    found = {}
    for left, right in zip(map(_values, one), map(_values, other), strict=True):
        found |= {name: (value, right[name]) for name, value in left.items() if right[name] != value}
    if one[0].packed_sequences is not None and 1 not in found.get("num_microbatches", (1,)):
        del found["num_microbatches"]  # with more rows than two, a step needs no more memory
    if "lora_rank" in found:
        found = {name: both for name, both in found.items() if name == "lora_rank" or not name.startswith("lora_")}
    return found


def _values(part: Scenario | MemorySettings) -> dict[str, Any]:
    if isinstance(part, MemorySettings):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    own = {field.name: getattr(part, field.name) for field in fields(part) if field.name not in ("layout", "state")}
    layout = {field.name: getattr(part.layout, field.name) for field in fields(part.layout)}
    return own | layout | part.state.options() | {"versions": None}


@of_few_and_many_jobs
@pytest.mark.parametrize("name", OF_FSDP)
def test_what_is_written_for_fsdp_is_read_again_or_named(name: str, share: int, tmp_path: Path) -> None:
    dice, of_fields = random.Random(f"FSDP {name}"), set[str]()
    for number in range(40 * share):
        scenario, settings = random_job(dice)
        said = written(name, scenario, settings)
        job = read_again(name, said, scenario, tmp_path / str(number))
        # Ulysses is around flash-attn only, which the job does not have; ranks that cannot share a layer are more copies,
        # for which the sequences may not be enough.
        if job.scenario is None and {"cp_comm_type", "tensor_model_parallel_size"} & said.unsaid.keys():
            continue
        assert job.scenario is not None, (job.cannot_start, job.not_supported, said, scenario)
        read = _in_effect(job.scenario), job.required()[1]
        silent = {one: both for one, both in differing((scenario, settings), read).items() if one not in said.unsaid}
        if "tensor_model_parallel_size" in said.unsaid:  # these ranks are more copies then
            silent = {one: both for one, both in silent.items() if one not in (*OF_COPIES, *OF_ROWS)}
        assert not silent, (silent, said)
        assert not [one for one in job.not_modelled if one.effect == "unknown"], job.not_modelled
        again = written(name, *read)
        assert not again.unsaid, (again, read)
        second = read_again(name, again, read[0], tmp_path / f"{number} again")
        assert not differing(read, (_in_effect(second.required()[0]), second.required()[1])), again
        of_fields |= read[0].state.changed().keys() | read[1].changed().keys()
    assert len(of_fields) > 15, "and much of it is written"


@of_few_and_many_jobs
@pytest.mark.parametrize("name", OF_FSDP)
def test_what_is_to_be_changed_makes_a_job_of_fsdp_the_other_one(name: str, share: int, tmp_path: Path) -> None:
    dice, num_changed = random.Random(f"changes of FSDP {name}"), 0
    for number in range(15 * share):
        folder = tmp_path / str(number)
        sources = [
            read_again(name, written(name, *job), job[0], folder) for job in (random_job(dice), random_job(dice))
        ]
        if any(source.scenario is None for source in sources):
            continue
        (before, own), (after, settings) = (source.required() for source in sources)
        try:
            after = replace(after, architecture=before.architecture, num_layers=before.num_layers, layout=before.layout)
        except ValueError:
            continue
        source = read_again(name, written(name, before, own), before, folder)
        changes = written(name, after, settings, source=source)
        lines = edited(name, list(written(name, before, own).lines), changes.lines)
        job = read_lines(name, lines, before.layout.world_size, folder / FILES.get(name, "run.sh"))
        if job.scenario is None and {"cp_comm_type", "context_parallel_size"} & changes.unsaid.keys():
            continue
        assert job.scenario is not None, (job.cannot_start, lines)
        silent = differing((after, settings), (job.scenario, job.required()[1])).keys() - changes.unsaid.keys()
        assert silent <= {"num_microbatches"}, (silent, changes, lines)
        num_changed += 1
    assert num_changed > 5 * share


@pytest.mark.parametrize("name", OF_FSDP)
def test_adapters_of_megatron_s_linears_are_written_by_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    of_peft = name in ("skyrl", "skyrl-sft", "verl", "verl-sft")
    lora = LoRA(
        rank=8,
        target_modules=LINEARS,
        fsdp2_library="peft" if of_peft else "automodel",
        enable_input_require_grads=of_peft,
        dropout_position="pre" if of_peft else "post",
    )
    state = TrainingState(lora=lora, fp32_sharded_params=True)
    for model in ("qwen3-8b", "phi-4"):
        scenario = Scenario.of(model, seq_length=1024, engine="fsdp2", state=state, layout=Layout(data_parallel_size=2))
        read = read_again(name, written(name, scenario, MemorySettings()), scenario, tmp_path / model).required()[0]
        assert read.state.lora is not None and read.state.lora.target_modules != LINEARS
        found, wanted = (adapted_linears(one.architecture, 2, one.state.lora or lora) for one in (read, scenario))
        assert list(found) == list(wanted)
        without = replace(read, state=replace(read.state, lora=None))
        source = read_again(name, written(name, read, MemorySettings()), read, tmp_path / model)
        changes = written(name, without, MemorySettings(), source=source).lines
        lines = edited(name, list(written(name, read, MemorySettings()).lines), changes)
        again = read_lines(name, lines, 2, tmp_path / model / FILES.get(name, "run.sh"))
        assert again.required()[0].state.lora is None, (changes, lines)


@pytest.mark.parametrize("name", OF_FSDP)
def test_every_option_of_fsdp_has_a_key_or_an_answer(name: str) -> None:
    framework = writer_of(name, "fsdp2")
    kinds = options_of(MemorySettings) | options_of(TrainingState)
    options = {name for name, one in kinds.items() if framework.engine in one.engines}
    answered = {key.field for key in framework.keys} | framework.cannot_write.keys() | framework.fixed.keys()
    assert options - answered - GPU_DECIDES.keys() <= framework.without_own_key
    assert not framework.without_own_key & {key.field for key in framework.keys}


def test_what_is_written_for_the_dtensor_policy_is_recognized(tmp_path: Path) -> None:
    scenario = Scenario.of("qwen3-8b", seq_length=1024, engine="fsdp2", layout=Layout(data_parallel_size=2))
    (tmp_path / "config.yaml").write_text("\n".join(written("nemo-rl", scenario, MemorySettings()).lines))
    assert Job.read(tmp_path / "config.yaml").framework == "nemo-rl-dtensor"


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_verl_s_engine_is_a_group_which_hydra_does_not_add_by_force(engine: Any) -> None:
    """Hydra 1.3.2: "force-add of config groups is not supported: '++model_engine=dp'"."""
    lines = written("verl", Scenario.of("qwen3-8b", seq_length=1024, engine=engine), MemorySettings()).lines
    assert [line for line in lines if "model_engine" in line] in (["model_engine=dp"], ["model_engine=megatron"])
