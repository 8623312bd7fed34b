"""A job that is written for a framework, and read from what was written, is the same job."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import ARCHITECTURES, HUGGING_FACE_NAMES, Architecture, find_architecture
from memlab.config.layout import Layout
from memlab.config.model_restrictions import check_on_model
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.settings import NEWER_SETTINGS, OFFLOAD_MODULES, RECOMPUTE_MODULES, MemorySettings
from memlab.config.training_state import COMPARE_WITH_TEACHER, READ_CHUNK_SIZE, Loss, TrainingState
from memlab.config.versions import Versions
from memlab.jobs.frameworks.registry import FRAMEWORKS
from memlab.jobs.job import Job
from memlab.jobs.writing import GPU_DECIDES, unsaid, written

PACKING = ("verl", "nemo-rl", "skyrl", "slime")
"""A budget of tokens makes rows of any number of equally long sequences."""
FILES = {"nemo-rl": "config.yaml", "bridge": "run_config.yaml", "automodel": "recipe.yaml"}
OF_MEGATRON = [name for name, framework in FRAMEWORKS.items() if framework.engine == "megatron"]
of_few_and_many_jobs = pytest.mark.parametrize("share", [1, pytest.param(4, marks=pytest.mark.slow)], ids=["", "many"])
"""The first of the drawn jobs, or four times as many: what they find beyond the first is new only where keys are."""
LAUNCHERS = {
    "megatron-lm": "torchrun --nproc-per-node {ranks} pretrain_gpt.py \\\n",
    "slime": "python3 train.py \\\n",
    "ms-swift": "megatron sft \\\n",
    "verl": "python3 -m verl.trainer.main_ppo \\\n",
    "skyrl": "uv run -m skyrl.train.entrypoints.main_base \\\n",
    "verl-sft": "python3 -m verl.trainer.sft_trainer_ray \\\n",
    "skyrl-sft": "python -m skyrl.train.main_sft \\\n",
}


def random_job(dice: random.Random) -> tuple[Scenario, MemorySettings]:
    """Draws a job that Megatron accepts."""
    while True:
        architecture = dice.choice(
            [ARCHITECTURES[name] for name in ("qwen3-30b-a3b", "phi-4", "qwen3-235b-a22b", "phi-4-mini")]
        )
        tensor, context, stages = dice.choice((1, 2, 4)), dice.choice((1, 1, 2)), dice.choice((1, 1, 2, 4))
        experts = dice.choice((1, 2, 8)) if architecture.routes else 1
        if dice.random() < 0.4:
            architecture = replace(architecture, name=odd_name(dice))
        values = {name: draw(dice) for name, draw in STATES.items() if dice.random() < 0.4}
        try:
            scenario = Scenario.of(
                architecture,
                seq_length=1024 * dice.choice((1, 4, 10)),
                micro_batch_size=dice.choice((1, 1, 2)),
                num_microbatches=stages * dice.choice((1, 2, 5)),
                layout=Layout(
                    tensor_model_parallel_size=tensor,
                    context_parallel_size=context,
                    pipeline_model_parallel_size=stages,
                    virtual_pipeline_model_parallel_size=dice.choice((1, 1, 2)),
                    expert_model_parallel_size=experts,
                    expert_tensor_parallel_size=1
                    if architecture.routes and tensor > 1 and dice.random() < 0.7
                    else None,
                    data_parallel_size=dice.choice((1, 2, 8)),
                ),
                packed_sequences=dice.choice((None, None, 1, 4)),
                state=TrainingState(**values),
            )
            settings = random_settings(dice)
            check_on_model(settings, scenario)
        except ValueError:
            continue
        return scenario, settings


def odd_name(dice: random.Random) -> str:
    """Draws the name of a folder that a shell, Hydra or YAML would change."""
    return "m" + "".join(dice.choice(" '\"$*#;&|()<>`\\!?[]{}~=,:%@é") for _ in range(9)) + "x"


def write_model(architecture: Architecture, folder: Path) -> Architecture:
    """Writes the model's own config.json, and returns what memlab reads from it."""
    values: dict[str, Any] = {
        "model_type": "qwen3_moe" if architecture.routes else "phi3",
        "num_hidden_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_query_groups,
        "head_dim": architecture.kv_channels,
        "vocab_size": architecture.vocab_size,
        "rope_theta": architecture.rotary_base,
        "rms_norm_eps": architecture.layernorm_epsilon,
        "tie_word_embeddings": architecture.share_embeddings_and_output_weights,
        "partial_rotary_factor": architecture.rotary_percent,
        "num_experts": architecture.num_moe_experts,
        "num_experts_per_tok": architecture.moe_router_topk,
        "moe_intermediate_size": architecture.moe_ffn_hidden_size,
        "router_aux_loss_coef": architecture.moe_aux_loss_coeff,
        "norm_topk_prob": not architecture.moe_router_pre_softmax,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return find_architecture(folder)


def random_settings(dice: random.Random) -> MemorySettings:
    """Draws settings; not every model takes them."""
    granularity = dice.choice((None, "full", "selective"))
    offload = dice.random() < 0.4
    return MemorySettings(
        recompute_granularity=granularity,
        recompute_method=dice.choice(("uniform", "block")) if granularity == "full" else None,
        recompute_num_layers=dice.choice((1, 1, 2)) if granularity == "full" else None,
        recompute_modules=dice.sample(RECOMPUTE_MODULES, dice.randint(1, 2)) if granularity == "selective" else None,
        checkpoint_input_remedy=dice.choice((None, "detach")),
        offload_modules=dice.sample(OFFLOAD_MODULES, dice.randint(1, 3)) if offload else None,
        min_offloaded_tensor_size=dice.choice((0, 1024 * 1024)),
        offload_parameters=dice.random() < 0.3,
        offload_optimizer=dice.random() < 0.3,
        offload_gradients=dice.choice((None, True, False)),
    )


def dtype(*choices: str):  # noqa: ANN201
    """Draws one of these."""
    return lambda dice: dice.choice(choices)


STATES = {
    "use_distributed_optimizer": dtype(True, True, False),
    "grad_reduce_in_bf16": dtype(True, False),
    "overlap_grad_reduce": dtype(True),
    "overlap_param_gather": dtype(True, False),
    "ddp_bucket_size": dtype(40_000_000),
    "use_precision_aware_optimizer": dtype(True),
    "exp_avg_dtype": dtype("bf16", "fp8"),
    "exp_avg_sq_dtype": dtype("bf16", "fp16"),
    "main_params_dtype": dtype("fp16"),
    "optimizer_cpu_offload": dtype(True),
    "optimizer_offload_fraction": dtype(0.5, 1.0, 0.0),
    "overlap_cpu_optimizer_d2h_h2d": dtype(True),
    "pin_cpu_grads": dtype(False),
    "manual_gc": dtype(True),
    "loss": dtype(*get_args(Loss)),
    "fp32_output": dtype(True),
    "logprobs_chunk_size": dtype(512),
    "cross_entropy_loss_fusion": dtype(True),
    "cross_entropy_fusion_impl": dtype("te"),
    "attention_backend": dtype("flash", "fused", "unfused"),
    "apply_rope_fusion": dtype(True),
    "moe_router_dtype": dtype("params_dtype", "fp64"),
    "deallocate_pipeline_outputs": dtype(True, False),
    "fp8_format": dtype("hybrid", "e4m3"),
    "fp8_recipe": dtype("blockwise", "tensorwise"),
}


def in_effect(scenario: Scenario) -> Scenario:
    """Returns a scenario in which sequences are split where nothing splits them, which a job may say or not."""
    layout = scenario.layout
    return replace(scenario, layout=replace(layout, sequence_parallel=not layout.has_whole_sequences))


def layout_said(name: str, layout: Layout, scenario: Scenario) -> Layout:
    """Returns a layout without chunks where the framework has none, and without context where it packs rows for it."""
    rows, is_padded = scenario.micro_batch_size, scenario.packed_sequences is None
    if (name.startswith("skyrl") and rows > 1) or (name == "nemo-rl" and is_padded):
        layout = replace(layout, context_parallel_size=1)
    has_chunks = "virtual_pipeline_model_parallel_size" not in FRAMEWORKS[name].cannot_write
    return layout if has_chunks else replace(layout, virtual_pipeline_model_parallel_size=1)


def without_what_is_unsaid(name: str, scenario: Scenario, settings: MemorySettings) -> tuple[Scenario, MemorySettings]:
    """Returns the job with the framework's own values where the framework can say nothing else."""
    scenario = replace(scenario, layout=layout_said(name, scenario.layout, scenario))
    state = saying(name, scenario.state.to_dict(), TrainingState())
    state |= {field: value for field, value in FRAMEWORKS[name].fixed.items() if field in state}
    if scenario.layout.pipeline_model_parallel_size == 1:
        state["deallocate_pipeline_outputs"] = False
    state |= {} if scenario.architecture.routes else {"moe_router_dtype": "fp32"}
    packed = packed_sequences_said(name, scenario)
    state |= loss_said(name, scenario, state) | {"create_attention_mask": mask_said(name, scenario, state)}
    unread = UNREAD["cpu"] if not state["optimizer_cpu_offload"] else ()
    unread += UNREAD["fp8"] if state["fp8_format"] is None else ()
    unread += UNREAD["fusion"] if not state["cross_entropy_loss_fusion"] or state["loss"] != "cross_entropy" else ()
    state |= {field: getattr(TrainingState(), field) for field in unread}
    kept = saying(name, settings.to_dict(), MemorySettings())
    if not settings.offload_modules:
        kept |= {field: getattr(MemorySettings(), field) for field in ("min_offloaded_tensor_size", *NEWER_SETTINGS)}
    unsaid = FRAMEWORKS[name].cannot_write_of(scenario, settings)
    unsaid.pop("allocator", None)
    own = {
        "moe_token_dispatcher_type": "alltoall",
        "overlap_param_gather": False,
        "grad_reduce_in_bf16": state["main_grads_dtype"] == "bf16",
    }
    state |= {field: value for field, value in own.items() if unsaid.pop(field, None)}
    for own in ("loss", "logprobs_chunk_size", "create_attention_mask"):
        unsaid.pop(own, None)
    if unsaid:
        moved = kept["offload_parameters"]
        kept |= {"offload_gradients": moved}
        if "offload_optimizer" in unsaid or name != "nemo-rl":
            kept["offload_optimizer"] = moved and not (name == "nemo-rl" and state["optimizer_cpu_offload"])
        if name == "nemo-rl" and kept["recompute_granularity"] == "full":
            kept |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if name == "ms-swift" and state["loss"] == "cross_entropy":
        kept |= dict.fromkeys(("offload_parameters", "offload_gradients", "offload_optimizer"), False)
    kept["checkpoint_input_remedy"] = FRAMEWORKS[name].fixed.get("checkpoint_input_remedy")
    passes = scenario.num_microbatches
    if packed is not None:  # with more rows, a step needs no more memory
        passes = min(passes, 2 * scenario.layout.pipeline_model_parallel_size)
    if name in ("skyrl-sft", "verl"):  # they switch expandable segments on
        scenario = replace(scenario, allocator=AllocatorSettings(expandable_segments=True))
    scenario = replace(scenario, versions=Versions(transformer_engine=FRAMEWORKS[name].transformer_engine))
    scenario = padded(name, scenario, settings, state)
    written_of_it = replace(scenario, state=TrainingState(**state), packed_sequences=packed, num_microbatches=passes)
    return written_of_it, MemorySettings(**kept)


def padded(name: str, scenario: Scenario, settings: MemorySettings, state: dict[str, Any]) -> Scenario:
    """Returns a scenario with its packed rows as the framework pads them in FP8, which it says."""
    pads, context = FRAMEWORKS[name].padding_in_fp8, scenario.layout.context_parallel_size
    if pads is None or state["fp8_format"] is None or packed_sequences_said(name, scenario) is None:
        return scenario
    unit = scenario.layout.tensor_model_parallel_size * (2 * context if context > 1 else 1)
    _, multiple = pads(unit, context, state["fp8_recipe"])
    tokens = -(-scenario.seq_length // multiple) * multiple
    assert ("seq_length" in unsaid(FRAMEWORKS[name], scenario, settings)) == (tokens != scenario.seq_length)
    return replace(scenario, seq_length=tokens)


def packed_sequences_said(name: str, scenario: Scenario) -> int | None:
    """Returns the packed sequences of a row, where the framework packs."""
    return scenario.packed_sequences if name in PACKING else None


def mask_said(name: str, scenario: Scenario, state: dict[str, Any]) -> bool:
    """Returns whether the framework gives the rows a mask: NeMo-RL does if it does not pack them."""
    is_fused = state["attention_backend"] != "unfused" and scenario.dtype == "bf16"
    is_packed = packed_sequences_said(name, scenario) is not None
    return name == "nemo-rl" and is_fused and not is_packed and scenario.layout.context_parallel_size == 1


def loss_said(name: str, scenario: Scenario, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the loss as the framework has them: its own loss where it does not compute the job's."""
    packed = packed_sequences_said(name, scenario)
    own = {
        "nemo-rl": ("logprobs_one_hot",) if packed is None else ("logprobs_by_sequence", "logprobs_one_hot"),
        "slime": ("softmax", "scaled_softmax"),
        "ms-swift": ("cross_entropy", "log_softmax"),
    }.get(name, (FRAMEWORKS[name].fixed.get("loss", "cross_entropy"),))
    loss, chunk, fp32 = (state[field] for field in ("loss", "logprobs_chunk_size", "fp32_output"))
    loss = loss if loss in own else own[0]
    fp32 = loss != "cross_entropy" if name == "ms-swift" else fp32
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    chunk = 1024 if name == "skyrl-sft" else chunk
    is_one_chunk = name.startswith("skyrl") and (chunk or 0) >= tokens
    if loss not in READ_CHUNK_SIZE or is_one_chunk or (name == "nemo-rl" and fp32):
        chunk = None
    return {"loss": loss, "logprobs_chunk_size": chunk, "fp32_output": fp32}


UNREAD: dict[str, tuple[str, ...]] = {
    "cpu": ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"),
    "fp8": ("fp8_recipe", "fp8_param_gather"),
    "fusion": ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
}


def saying(name: str, values: dict[str, Any], default: object) -> dict[str, Any]:
    """Returns the values with defaults where the framework has no key."""
    never = FRAMEWORKS[name].cannot_write
    return {field: getattr(default, field) if field in never else value for field, value in values.items()}


def read_lines(name: str, lines: list[str], ranks: int, path: Path) -> Job:
    """Writes lines as the framework's job, and reads it."""
    path.parent.mkdir(exist_ok=True)
    if name in LAUNCHERS:
        variables = [line for line in lines if line.partition("=")[0].isupper()]
        words = [line for line in lines if line not in variables and not line.startswith("#")]
        start = LAUNCHERS[name].format(ranks=ranks)
        lines = [*(f"export {line}" for line in variables), start + " \\\n".join(words)]
    path.write_text("\n".join(lines) + "\n")
    return Job.read(
        path,
        format_name=name,
        version="0.9.1" if name.startswith("verl") else None,
        world_size=ranks if name == "bridge" else None,
    )


@of_few_and_many_jobs
@pytest.mark.parametrize("name", OF_MEGATRON)
def test_reading_what_was_written_gives_the_same_job(name: str, share: int, tmp_path: Path) -> None:
    dice = random.Random(f"jobs {name}")
    for number in range(15 * share):
        try:
            drawn, settings = random_job(dice)
            scenario, settings = without_what_is_unsaid(name, drawn, settings)
        except ValueError:
            continue  # without what cannot be said, the rest is refused
        path = tmp_path / str(number) / FILES.get(name, "run.sh")
        path.parent.mkdir()
        if scenario.architecture.name not in ARCHITECTURES:
            model = write_model(scenario.architecture, path.parent / scenario.architecture.name)
            scenario = replace(scenario, architecture=model)
        lines = list(written(name, replace(scenario, num_microbatches=drawn.num_microbatches), settings).lines)
        job = read_lines(name, lines, scenario.layout.world_size, path)
        assert job.scenario is not None, (job.cannot_start, job.not_supported, path.read_text())
        names = [one.value for one in job.taken if one.field == "architecture" and one.place != "default"]
        if names:
            assert names[0] in (scenario.architecture.name, HUGGING_FACE_NAMES.get(scenario.architecture.name))
        if FRAMEWORKS[name].writes_sizes or not names:  # then these decide, and a model of known sizes has its own name
            read = job.scenario.architecture
            same = {field: getattr(read, field) for field in ("name", "default_seq_length")}
            scenario = replace(scenario, architecture=replace(scenario.architecture, **same))
        for cls in (Layout, TrainingState):
            part = {Layout: "layout", TrainingState: "state"}[cls]
            for field in fields(cls):
                both = in_effect(job.scenario), scenario
                found, expected = (getattr(getattr(one, part), field.name) for one in both)
                assert found == expected, (field.name, path.read_text())
        assert in_effect(job.scenario) == scenario, path.read_text()
        assert job.settings == settings, path.read_text()
        assert not [one for one in job.not_modelled if one.effect == "unknown"], job.not_modelled


def edited(name: str, lines: list[str], changes: tuple[str, ...]) -> list[str]:
    """Returns a job's lines as a user has them who did what the changes say."""
    if name not in LAUNCHERS:
        tree: dict[str, Any] = yaml.safe_load("\n".join(lines)) or {}
        merge(tree, yaml.safe_load("\n".join(changes)) or {})
        return [yaml.safe_dump(tree)]
    removed = [flag for line in changes if line.startswith("# remove ") for flag in line.split()[2:]]
    assert all(any(line.split()[0] == flag for line in lines) for flag in removed), "the job has what is removed"
    return [*(line for line in lines if line.split()[0] not in removed), *changes]


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Puts the other's values into a tree."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


STAYS = "--colocate\n--no-offload-train"


def other_spellings(name: str, lines: list[str]) -> list[str]:
    """Returns the lines of a job with what else says the same."""
    text = "\n".join(lines)
    if name in ("megatron-lm", "slime") and "--recompute-granularity selective" in text:
        text = text.replace("--recompute-granularity selective", "--recompute-activations")
        text = re.sub(r"(--recompute-modules .*) moe\n", r"\1\n--moe-layer-recompute\n", text)
    if name == "slime":
        text = text.replace("--colocate", "--offload-train") if "--colocate" in text else f"{text}\n{STAYS}"
    if name == "verl":
        # verl's own keys of types take fp32 and bf16 only
        text = re.sub(r"optim\.override_optimizer_config(?!\S*_dtype)", "optim", text)
        text = re.sub(r"megatron\.(param|optimizer)_offload=true", r"megatron.offload.\1.target=cpu", text)
    return text.split("\n")


@pytest.mark.parametrize("loss", get_args(Loss))
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_loss_is_written_or_said_to_be_another(name: str, loss: Any, tmp_path: Path) -> None:
    for fp32_output in (False, True):
        if fp32_output and loss == "cross_entropy":
            continue
        reference = "copy" if loss in COMPARE_WITH_TEACHER else "none"
        state = TrainingState(loss=loss, fp32_output=fp32_output, reference_model=reference)
        scenario = Scenario.of("phi-4", num_layers=2, seq_length=1024, state=state)
        said = written(name, scenario, MemorySettings())
        if {"loss", "fp32_output"} & said.unsaid.keys():
            continue
        path = tmp_path / str(fp32_output) / FILES.get(name, "run.sh")
        job = read_lines(name, list(said.lines), 1, path)
        assert job.scenario is not None, job.cannot_start
        assert (job.scenario.state.loss, job.scenario.state.fp32_output) == (loss, fp32_output)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", OF_MEGATRON)
def test_how_tokens_are_permuted_is_written_once(name: str, is_fused: bool, tmp_path: Path) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", state=TrainingState(moe_permute_fusion=is_fused))
    lines = written(name, scenario, MemorySettings()).lines
    assert sum("permute" in line for line in lines) <= 1, lines
    job = read_lines(name, lines, scenario.layout.world_size, tmp_path / FILES.get(name, "run.sh"))
    assert job.scenario is not None
    assert job.scenario.state.moe_permute_fusion == is_fused


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("name", OF_MEGATRON)
def test_how_tokens_are_dispatched_is_written_once_or_named(name: str, dispatcher: Any, tmp_path: Path) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", state=TrainingState(moe_token_dispatcher_type=dispatcher))
    new = written(name, scenario, MemorySettings())
    assert sum("dispatcher" in line for line in new.lines) <= 1, new.lines
    job = read_lines(name, list(new.lines), scenario.layout.world_size, tmp_path / FILES.get(name, "run.sh"))
    is_same = job.required()[0].state.moe_token_dispatcher_type == dispatcher
    assert is_same != ("moe_token_dispatcher_type" in new.unsaid)


@pytest.mark.parametrize("name", ["skyrl", "skyrl-sft", "nemo-rl"])
def test_rows_are_packed_and_named_with_context_parallelism(name: str, tmp_path: Path) -> None:
    layout = Layout(context_parallel_size=2)
    scenario = Scenario.of("qwen3-moe-tiny", seq_length=512, micro_batch_size=2, layout=layout)
    new = written(name, scenario, MemorySettings())
    read = read_lines(name, list(new.lines), 2, tmp_path / FILES.get(name, "run.sh")).required()[0]
    assert (read.micro_batch_size, read.packed_sequences, read.seq_length) == (1, 2, 1024)
    assert "micro_batch_size" in new.unsaid


@pytest.mark.parametrize("model", ["gpt-tiny", "nemotron-tiny", "nemotron-h-tiny", "nemotron-3-tiny"])
def test_megatron_bridge_s_models_keep_their_positions_norms_and_mlps(model: str, tmp_path: Path) -> None:
    positions = find_architecture(model).max_position_embeddings
    scenario = Scenario.of(model, seq_length=positions or 64)
    new = written("bridge", scenario, MemorySettings())
    read = read_lines("bridge", list(new.lines), 1, tmp_path / "run_config.yaml").required()[0].architecture
    assert replace(read, name=model, family=scenario.architecture.family) == scenario.architecture
    assert new.unsaid == {}
    shorter = written("bridge", replace(scenario, seq_length=32), MemorySettings())
    assert ("max_position_embeddings" in shorter.unsaid) == (positions is not None)


def test_megatron_bridge_s_two_sections_say_the_same_of_the_distributed_optimizer(tmp_path: Path) -> None:
    """``_validate_and_sync_distributed_optimizer_settings`` (training/config.py, 0.6.2) lets one switch both on."""
    path, layout = tmp_path / "run_config.yaml", Layout(data_parallel_size=2)
    off, on = (
        Scenario.of("phi-4", num_layers=2, seq_length=1024, layout=layout, state=TrainingState(**values))
        for values in ({"use_distributed_optimizer": False, "overlap_param_gather": False}, {})
    )
    lines = list(written("bridge", off, MemorySettings()).lines)
    assert read_lines("bridge", lines, 2, path).required()[0].state == off.state
    lines = list(written("bridge", on, MemorySettings()).lines)
    changes = written("bridge", off, MemorySettings(), source=read_lines("bridge", lines, 2, path)).lines
    job = read_lines("bridge", edited("bridge", lines, changes), 2, path)
    assert job.required()[0].state == off.state


def test_megatron_bridge_s_precision_aware_optimizer_is_written_beside_what_it_needs(tmp_path: Path) -> None:
    """Its own section is validated before ``ddp`` switches the distributed optimizer on."""
    before = Scenario.of("phi-4", num_layers=2, seq_length=1024, layout=Layout(data_parallel_size=2))
    lines = list(written("bridge", before, MemorySettings()).lines)
    section = {"optimizer": {"use_distributed_optimizer": False}, "ddp": {"use_distributed_optimizer": True}}
    lines = edited("bridge", lines, tuple(yaml.safe_dump(section).split("\n")))
    source = read_lines("bridge", lines, 2, tmp_path / "run_config.yaml")
    after = replace(source.required()[0], state=TrainingState(use_precision_aware_optimizer=True))
    changes = written("bridge", after, MemorySettings(), source=source).lines
    job = read_lines("bridge", edited("bridge", lines, changes), 2, tmp_path / "run_config.yaml")
    assert job.required()[0].state.use_precision_aware_optimizer, job.cannot_start


def test_megatron_bridge_s_config_holds_the_function_of_an_activation(tmp_path: Path) -> None:
    """``instantiate_node`` (utils/instantiate_utils.py) calls a ``_target_`` unless ``_call_`` is false."""
    lines = written("bridge", Scenario.of("gpt-oss-20b"), MemorySettings()).lines
    function = {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False}
    assert yaml.safe_load("\n".join(lines))["model"]["activation_func"] == function
    job = read_lines("bridge", list(lines), 1, tmp_path / "run_config.yaml")
    assert job.required()[0].architecture.quick_geglu
    assert "model.activation_func" not in {one.key for one in job.not_modelled}
    assert not any(
        "activation_func" in line for line in written("bridge", Scenario.of("gpt-tiny"), MemorySettings()).lines
    )


@of_few_and_many_jobs
@pytest.mark.parametrize("name", OF_MEGATRON)
def test_what_is_to_be_changed_makes_a_job_the_other_one(name: str, share: int, tmp_path: Path) -> None:
    dice = random.Random(f"changes {name}")
    num_changed = 0
    for number in range(40 * share):
        folder = tmp_path / str(number)
        try:
            (before, own), (after, settings) = random_job(dice), random_job(dice)
            if before.architecture.name not in ARCHITECTURES or after.architecture.name not in ARCHITECTURES:
                continue
            layout = layout_said(name, dice.choice((before.layout, after.layout)), after)
            after = replace(after, architecture=before.architecture, num_layers=before.num_layers, layout=layout)
            check_on_model(settings, after)
            before, own = without_what_is_unsaid(name, before, own)
            lines = other_spellings(name, list(written(name, before, own).lines))
            source = read_lines(name, lines, before.layout.world_size, folder / FILES.get(name, "run.sh"))
            if layout == before.layout:
                after = replace(after, num_microbatches=source.required()[0].num_microbatches)
            wanted = without_what_is_unsaid(name, after, settings)
        except ValueError:
            continue
        changes = written(name, *wanted, source=source).lines
        changed = edited(name, lines, changes)
        job = read_lines(name, changed, layout.world_size, folder / FILES.get(name, "run.sh"))
        assert job.scenario is not None, (job.cannot_start, job.not_supported, lines, changes)
        read = replace(in_effect(job.scenario), architecture=before.architecture)
        assert (str(read), f"{job.settings}") == tuple(map(str, wanted)), (lines, changes)
        assert (read, job.settings) == wanted, (lines, changes)
        num_changed += 1
    assert num_changed >= 5 * share


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_option_that_a_framework_has_no_key_for_is_named(name: str) -> None:
    """So a new option is never left out of the lines without a word."""
    option = "gradient_accumulation_fusion"
    keys = tuple(key for key in FRAMEWORKS[name].keys if key.field != option)
    framework = replace(FRAMEWORKS[name], keys=keys, cannot_write={}, fixed={})
    state = TrainingState(gradient_accumulation_fusion=True)
    scenario = Scenario(architecture=find_architecture("phi-4"), num_layers=2, seq_length=128, state=state)
    assert unsaid(framework, scenario, MemorySettings())[option] == f"{framework.title} has no key for it"
    assert option not in unsaid(framework, replace(scenario, state=TrainingState()), MemorySettings())


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_what_a_job_says_of_a_published_model_s_layers_is_written(name: str) -> None:
    said: dict[str, Any] = {
        "add_qkv_bias": True,
        "moe_aux_loss_coeff": 0.25,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
    }
    model = replace(find_architecture("qwen3-30b-a3b"), **said)
    scenario = Scenario(architecture=model, num_layers=48, seq_length=128)
    text = "\n".join(written(name, scenario, MemorySettings()).lines).replace("-", "_")
    assert not [field for field in said if field not in text]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_whole_sequences_are_never_written_as_sequence_parallelism(name: str, tmp_path: Path) -> None:
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=False)
    scenario = Scenario(architecture=find_architecture("llama-3.2-1b"), num_layers=16, seq_length=128, layout=layout)
    new = written(name, scenario, MemorySettings())
    is_named = "sequence_parallel" in new.unsaid
    is_of_fsdp2 = name == "automodel"  # which has a key for it
    assert is_named == (FRAMEWORKS[name].style != "flags" and not is_of_fsdp2)
    said = [line.strip() for line in new.lines if "sequence-parallel" in line.replace("_", "-")]
    assert is_named or said == (["sequence_parallel: false"] if is_of_fsdp2 else [])
    if name == "megatron-lm":
        (tmp_path / "run.sh").write_text("pretrain_gpt.py " + " ".join(new.lines[1:]))
        job = Job.read(tmp_path / "run.sh", format_name=name, world_size=2)
        assert job.required()[0].layout.sequence_parallel is False
        wider = replace(job.required()[0], layout=replace(layout, tensor_model_parallel_size=4))
        assert "--sequence-parallel" not in written(name, wider, MemorySettings(), source=job).lines


def test_sequence_parallelism_is_written_where_megatron_bridge_leaves_it_off(tmp_path: Path) -> None:
    layout = Layout(tensor_model_parallel_size=2)
    scenario = Scenario(architecture=find_architecture("llama-3.2-1b"), num_layers=16, seq_length=128, layout=layout)
    (tmp_path / "run_config.yaml").write_text("\n".join(written("bridge", scenario, MemorySettings()).lines))
    assert Job.read(tmp_path / "run_config.yaml", format_name="bridge").not_modelled == ()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_option_has_a_key_or_an_answer(name: str) -> None:
    framework = FRAMEWORKS[name]
    kinds = options_of(MemorySettings) | options_of(TrainingState)
    options = {name for name, one in kinds.items() if framework.engine in one.engines}
    answered = {key.field for key in framework.keys} | framework.cannot_write.keys() | framework.fixed.keys()
    assert options - answered - GPU_DECIDES.keys() <= framework.without_own_key
    assert not framework.without_own_key & {key.field for key in framework.keys}


@pytest.mark.parametrize("name", ["verl", "verl-sft", "skyrl", "skyrl-sft"])
def test_sequences_that_a_framework_pads_in_fp8_are_named(name: str) -> None:
    """Two of 2,056 tokens; it would take 2,064, the next multiple of 16."""
    state = TrainingState(fp8_format="hybrid", fp8_recipe="tensorwise")
    scenario = Scenario.of("qwen3-8b", seq_length=2056, micro_batch_size=2, state=state)
    reasons = written(name, scenario, MemorySettings()).unsaid
    assert reasons["seq_length"].endswith("pads sequences in FP8 to a multiple of 16 tokens")


@pytest.mark.parametrize("has_mask", [True, False])
def test_megatron_lm_s_masks_of_the_data_loader_are_written_once(has_mask: bool, tmp_path: Path) -> None:
    state = TrainingState(create_attention_mask_in_dataloader=has_mask)
    scenario = Scenario.of("llama-3.2-1b", seq_length=2048, state=state)
    lines = list(written("megatron-lm", scenario, MemorySettings()).lines)
    assert lines.count("--no-create-attention-mask-in-dataloader") == (not has_mask)
    assert read_lines("megatron-lm", lines, 1, tmp_path / "run.sh").required()[0].state == state
