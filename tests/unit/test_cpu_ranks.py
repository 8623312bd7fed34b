"""Live ranks on CPUs, joined by gloo: to the byte what is predicted for each rank, and the values of one rank."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state

import memlab.lab.lab
from memlab.backends import simulated_routing
from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.architectures import Architecture, find_architecture
from memlab.config.layout import Layout
from memlab.config.lora import CANONICAL, LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.megatron import training_step
from memlab.engines.megatron.megatron_versions import PADS_PACKED_VALUES
from memlab.lab.lab import Lab
from memlab.record.step_record import StepRecord
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute
from tests.unit.once_a_run import once_a_run
from tests.unit.processes import on_processes

QWEN, PHI, GPT, LATENT = map(find_architecture, ("qwen3-moe-tiny", "phi-4-tiny", "gpt-tiny", "deepseek-tiny"))


@dataclass(frozen=True)
class Job:
    """A model in a layout, and the settings of its steps."""

    sizes: dict[str, int]
    settings: tuple[MemorySettings, ...] = (MemorySettings(),)
    architecture: Architecture = QWEN
    state: TrainingState = field(default_factory=TrainingState)
    packed_sequences: int | None = None
    is_rare: bool = False
    """Whether the nightly run alone takes it: the other jobs have its rules one by one."""

    @property
    def num_layers(self) -> int:
        least = 4 if len(self.sizes) > 1 and "pipeline_model_parallel_size" in self.sizes else 2
        layout = Layout(**self.sizes)
        return max(least, layout.pipeline_model_parallel_size * layout.virtual_pipeline_model_parallel_size)

    @property
    def num_microbatches(self) -> int:
        return 4 if "pipeline_model_parallel_size" in self.sizes else 2

    def steps(self, lab: Lab) -> list[StepRecord]:
        """Takes the steps: one that recomputes at once, for it does and leaves what each later one does and leaves.

        Others have a warm-up: it allocates Adam's moments, moves groups, or teaches Megatron its offload groups.
        """
        return [lab.step(settings, warm_up=settings.recompute_granularity is None) for settings in self.settings]

    def lab(self, rank: int, **others: Any) -> Lab:
        workload = {"num_layers": self.num_layers, "seq_length": 64, "num_microbatches": self.num_microbatches}
        return Lab(
            self.architecture,
            layout=Layout(**self.sizes, rank=rank),
            backend="cpu",
            state=self.state,
            packed_sequences=self.packed_sequences,
            **workload,
            **others,
        )


class Values(NamedTuple):
    """What a step computed, in fp32, of weights that do not depend on the layout."""

    loss: float | None
    gradient_norm: float
    """Megatron's, over the parameters of all ranks."""


@dataclass(frozen=True)
class OfRank:
    """What a rank did."""

    records: list[StepRecord]
    tokens_per_expert: list[list[int]]
    """Of this rank's tokens, by call of the dispatcher."""
    values: Values
    step_count_bytes: int
    """torch's AdamW counts its steps in a tensor of 4 bytes for each weight, Transformer Engine's in a number."""


def take_steps(jobs: list[Job]) -> list[OfRank]:
    """Runs on every rank."""
    return [_take_steps(job) for job in jobs]


def _take_steps(job: Job) -> OfRank:
    with job.lab(int(os.environ["RANK"]), dtype="fp32") as lab:
        values = compute(lab)
    counts: list[list[int]] = []
    with job.lab(int(os.environ["RANK"])) as lab, _noting_routes(lab, counts):
        records = job.steps(lab)
        states = [state for part in inside(lab).model.engine.live.optimizers for state in part.optimizer.state.values()]
        return OfRank(records, counts, values, 4 * sum(isinstance(state.get("step"), torch.Tensor) for state in states))


@contextmanager
def _noting_routes(lab: Lab, counts: list[list[int]]) -> Iterator[None]:
    from megatron.core.transformer.moe import token_dispatcher

    kind = getattr(token_dispatcher, _DISPATCHERS[lab.scenario.state.moe_token_dispatcher_type])
    preprocess = kind.dispatch_preprocess

    def noting(dispatcher: Any, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        with inside(lab).model.meter.paused():
            counts.append(routing_map.sum(dim=0).tolist())
        return preprocess(dispatcher, tokens, routing_map, probs)

    with patch.object(kind, "dispatch_preprocess", noting):
        yield


_DISPATCHERS = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}


def predict(job: Job, rank: int, live: list[OfRank]) -> list[StepRecord]:
    """Takes a rank's steps on fake tensors with the routes of the live ones, without an allocator's rounding."""
    layout = Layout(**job.sizes, rank=rank)
    sharing = layout.expert_model_parallel_size * layout.expert_tensor_size
    gathers = job.state.moe_token_dispatcher_type == "allgather"
    # A rank's own counts, and those of all that share the experts; among these are its own where it gathers all rows.
    per_call = sharing + (not gathers) if sharing > 1 else 1
    calls = 0

    def counts_of(routing: Any, num_tokens: int, num_experts: int, topk: int, of_rank: int, *draw: int) -> list[int]:
        nonlocal calls
        calls += 1
        return live[of_rank].tokens_per_expert[(calls - 1) // per_call]

    with (
        patch.object(memlab.lab.lab, "find_backend", lambda name: of_the_cpu_backend()),
        patch.object(simulated_routing, "_counts", counts_of),
        job.lab(rank) as lab,
    ):
        return job.steps(lab)


def compute(lab: Lab) -> Values:
    """Takes a step with weights that depend on their names in the whole model alone."""
    norms: list[float] = []
    optimizer = inside(lab).model.engine.live.optimizer
    take_step = optimizer.step

    def note_norm() -> Any:
        result = take_step()
        norms.append(float(result[1]))
        return result

    def fill() -> None:
        with inside(lab).model.meter.paused(), torch.no_grad():
            for chunk in inside(lab).model.engine.live.chunks:
                for name, parameter in chunk.module.named_parameters():
                    parameter.copy_(own_part(name, parameter, chunk.module, lab.scenario))
            for frozen in inside(lab).model.engine.live.reference:
                for name, parameter in frozen.named_parameters():
                    other = own_part(name, parameter, frozen, lab.scenario.teacher)
                    parameter.copy_(other if other.dim() == 1 else -other)
            optimizer.reload_model_params()

    inside(lab).worker.submit(fill).result()
    with patch.object(optimizer, "step", note_norm):
        record = lab.step(warm_up=False)
    return Values(record.loss, norms[0])


def own_part(name: str, parameter: torch.Tensor, model: Any, scenario: Scenario) -> torch.Tensor:
    """Returns this rank's part of a weight of the whole model."""
    architecture, layout = scenario.architecture, scenario.layout
    path = [each for each in name.split(".") if each != "to_wrap"]
    if "norm" in path[-2] or "layer_norm" in name:
        return torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
    if path[0] == "output_layer" and architecture.share_embeddings_and_output_weights:
        path = ["embedding", "word_embeddings", "weight"]  # the last stage's copy
    if path[0] == "decoder" and "layers" in path:
        path[2] = str(model.decoder.layers[int(path[2])].layer_number)
    ranks, rank = layout.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    if "adapter" in path:
        return own_part_of_adapter(path, parameter, scenario)
    if "experts" in path:
        ranks, rank = layout.expert_tensor_size, parallel_state.get_expert_tensor_parallel_rank()
        local = architecture.num_moe_experts // layout.expert_model_parallel_size
        first = local * parallel_state.get_expert_model_parallel_rank()
        path[-1] = f"weight{first + int(path[-1].removeprefix('weight'))}"
    rows, *columns = parameter.shape
    is_row_parallel = path[-2] in ("linear_proj", "linear_fc2")
    is_head = path[0] == "output_layer" and scenario.state.num_labels is not None
    is_whole = path[-2] in ("router", "position_embeddings") or path[-2].endswith("_down_proj")
    if is_head or is_whole or (is_row_parallel and not columns):
        ranks = 1
    whole = (rows, columns[0] * ranks) if is_row_parallel and columns else (rows * ranks, *columns)
    generator = torch.Generator().manual_seed(zlib.crc32(".".join(path).encode()))
    weight = 0.02 * torch.randn(whole, generator=generator)
    if ranks == 1:
        return weight
    if (
        path[-2] == "linear_fc1" and architecture.gated_linear_unit
    ):  # a gate and what it multiplies, one above the other
        return torch.cat([half.chunk(ranks)[rank] for half in weight.chunk(2)])
    return weight.chunk(ranks, dim=1 if is_row_parallel else 0)[rank]


def own_part_of_adapter(path: list[str], parameter: torch.Tensor, scenario: Scenario) -> torch.Tensor:
    """Returns this rank's part of an adapter's weight; the side that it has only a part of is the one that is split."""
    local = ".".join(path[3:] if path[0] == "decoder" else path)
    shape = next(one.shape for one in scenario.weights_of_adapters() if one.name == local)
    if parameter.dim() == 3:  # of all experts of the rank
        first = parallel_state.get_expert_model_parallel_rank() * len(parameter)
        names = (f"{local}.{first + number}" for number in range(len(parameter)))
        seeds = (torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in names)
        return torch.stack([0.1 * torch.randn(shape, generator=seed) for seed in seeds])
    generator = torch.Generator().manual_seed(zlib.crc32(".".join(path).encode()))
    weight, rank = 0.1 * torch.randn(shape, generator=generator), parallel_state.get_tensor_model_parallel_rank()
    for dim, (of_rank, whole) in enumerate(zip(parameter.shape, shape, strict=True)):
        if of_rank == whole:
            continue
        if path[-4] == "linear_fc1" and path[-2] == "linear_out":
            return torch.cat([half.chunk(whole // of_rank)[rank] for half in weight.chunk(2)])
        return weight.chunk(whole // of_rank, dim)[rank]
    return weight


def on_one_rank(job: Job) -> Values:
    """Computes the step of a job on one rank: as many micro-batches as all copies of the model have together."""
    copies = job.sizes.get("data_parallel_size", 1)

    def batches(scenario: Scenario) -> Iterator[training_step._Batch]:
        shape = (scenario.micro_batch_size, scenario.seq_length + (scenario.packed_sequences or 1))
        for copy in range(copies):
            generator = torch.Generator().manual_seed(scenario.seed + copy)
            for _ in range(job.num_microbatches):
                tokens = torch.randint(scenario.architecture.vocab_size, shape, generator=generator)
                yield training_step._Batch(tokens, None, None)

    num_microbatches = copies * job.num_microbatches
    workload: dict[str, Any] = {"num_layers": job.num_layers, "seq_length": 64, "num_microbatches": num_microbatches}
    workload |= {
        "packed_sequences": job.packed_sequences,
        "state": TrainingState(**{name: getattr(job.state, name) for name in _DECIDE_ON_VALUES}),
    }
    alone = Lab(job.architecture, dtype="fp32", backend="cpu", **workload)
    with patch.object(training_step, "_batches", batches), alone as lab:
        return compute(lab)


_DECIDE_ON_VALUES = (
    *("mtp_num_layers", "num_labels", "lora", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    *("loss", "reference_model", "teacher_model", "gkd_logits_topk"),
    "pad_packed_values",  # without it, newer versions refuse the packed rows
)
AWAY = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)
OF_MOE = (FULL, recompute("moe_act", "core_attn"), offload("expert_fc1", "core_attn"))
OF_DENSE = (FULL, recompute("mlp", "core_attn"), offload("qkv_linear", "core_attn"))
PLAIN = MemorySettings()
EXTRA = TrainingState(mtp_num_layers=1)
ONE_GROUP = {"num_attention_heads": 4, "num_query_groups": 1}

OF_EXPERTS = [each.name for each in fields(LATENT) if each.name.startswith("moe_")]
DENSE_LATENT = replace(LATENT, num_moe_experts=None, **{name: getattr(PHI, name) for name in OF_EXPERTS})
OF_FOUR_HEADS = replace(PHI, **ONE_GROUP)
OF_TWO_GROUPS = replace(OF_FOUR_HEADS, num_query_groups=2)
OF_ALL_LINEARS, OF_PARTS = (LoRA(rank=4, alpha=4, target_modules=targets) for targets in ((), CANONICAL))
OF_EACH_EXPERT = LoRA(rank=8, normalize_moe_lora=True, share_expert_adapters=False)
# Without sequence parallelism, Megatron-Core reduces no gradients of the keys' part that all heads share, which come
# from linear_kv_down_proj; with it, Megatron-Bridge's adapters of linears that each rank has whole mix tokens of ranks.
OF_LATENTS = LoRA(
    rank=4,
    alpha=4,
    target_modules=("linear_q_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"),
)
OF_ALL_LATENTS = LoRA(rank=3, alpha=3, target_modules=("*_proj",), library="mcore_bridge")
COMPARED = {"loss": "logits_kl", "reference_model": "copy"}
BY_LARGEST = TrainingState.of_options({"loss": "jsd", "reference_model": "copy", "gkd_logits_topk": 8})
OF_MS_SWIFT = LoRA(rank=3, alpha=3, library="mcore_bridge", enable_input_require_grads=True)

TWO = [
    Job({"tensor_model_parallel_size": 2}, (PLAIN, *OF_MOE, AWAY, PLAIN)),
    # More tensor parallel ranks than query groups: each has a part of a group's key and value.
    Job({"tensor_model_parallel_size": 2}, (PLAIN, OF_MOE[1]), replace(QWEN, **ONE_GROUP), is_rare=True),
    Job(
        {"tensor_model_parallel_size": 2},
        (PLAIN, OF_DENSE[2]),
        replace(PHI, **ONE_GROUP),
        state=TrainingState(apply_rope_fusion=True, gradient_accumulation_fusion=True, bias_activation_fusion=False),
    ),
    Job({"expert_model_parallel_size": 2, "data_parallel_size": 2}, (PLAIN, FULL, OF_MOE[2], AWAY)),
    # Each rank drops those of its own tokens that are too many for an expert.
    Job(
        {"expert_model_parallel_size": 2, "data_parallel_size": 2},
        (PLAIN, FULL),
        state=TrainingState(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position"),
    ),
    # Context parallelism splits activations; groups between the steps it shards as data parallelism does.
    Job({"context_parallel_size": 2}, (PLAIN, *OF_MOE[:2])),
    Job({"context_parallel_size": 2}, (PLAIN, recompute("mla_up_proj")), LATENT),
    Job(
        {"context_parallel_size": 2},
        (PLAIN, offload("expert_fc1", "core_attn")),
        LATENT,
        state=TrainingState(pad_packed_values=PADS_PACKED_VALUES),  # newer versions always pad them
        packed_sequences=4,
        is_rare=True,
    ),
    Job({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}, (PLAIN, FULL), state=EXTRA),
    Job({"tensor_model_parallel_size": 2}, (PLAIN, FULL), state=EXTRA, is_rare=True),
    Job({"context_parallel_size": 2}, state=EXTRA, is_rare=True),
    Job(
        {"context_parallel_size": 2},
        (PLAIN, *OF_DENSE),
        architecture=PHI,
        state=TrainingState(apply_rope_fusion=True, gradient_accumulation_fusion=True, bias_activation_fusion=False),
        packed_sequences=2,
    ),
    Job({"data_parallel_size": 2}, (PLAIN, AWAY), architecture=PHI, is_rare=True),
    Job(
        {"data_parallel_size": 2},
        (PLAIN, FULL, AWAY),
        state=TrainingState(
            overlap_param_gather=True, gradient_accumulation_fusion=True, calculate_per_token_loss=True
        ),
    ),
    Job({"tensor_model_parallel_size": 2}, (PLAIN,), OF_FOUR_HEADS, TrainingState(lora=OF_ALL_LINEARS)),
    Job({"tensor_model_parallel_size": 2}, (PLAIN,), OF_TWO_GROUPS, TrainingState(lora=OF_PARTS), is_rare=True),
    Job({"expert_model_parallel_size": 2, "data_parallel_size": 2}, (PLAIN,), state=TrainingState(lora=OF_EACH_EXPERT)),
    Job({"tensor_model_parallel_size": 2}, (PLAIN, FULL), OF_FOUR_HEADS, TrainingState(lora=OF_MS_SWIFT)),
    Job(
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        (PLAIN,),
        OF_FOUR_HEADS,
        TrainingState(lora=OF_MS_SWIFT),
        is_rare=True,
    ),
    Job(
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        (PLAIN, FULL),
        DENSE_LATENT,
        TrainingState(lora=OF_LATENTS),
    ),
    Job(
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        (PLAIN,),
        LATENT,
        TrainingState(lora=OF_ALL_LATENTS),
        is_rare=True,
    ),
    Job({"tensor_model_parallel_size": 2, "sequence_parallel": False}, (PLAIN, FULL, OF_DENSE[2]), GPT),
    Job({"tensor_model_parallel_size": 2}, architecture=GPT, is_rare=True),
    Job({"tensor_model_parallel_size": 2}, (PLAIN,), OF_FOUR_HEADS, TrainingState(num_labels=3)),
    Job({"pipeline_model_parallel_size": 2}, (PLAIN, FULL), GPT, TrainingState(use_distributed_optimizer=False)),
    Job(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        state=TrainingState(deallocate_pipeline_outputs=True, calculate_per_token_loss=True),
    ),
    # A frozen model has the same stages.
    Job({"pipeline_model_parallel_size": 2}, (PLAIN, FULL), PHI, TrainingState.of_options(COMPARED)),
    Job(
        {"pipeline_model_parallel_size": 2},
        (PLAIN, AWAY),
        find_architecture("qwen3-dense-tiny"),
        TrainingState.of_options(COMPARED | {"teacher_model": "qwen3-moe-tiny"}),
        is_rare=True,
    ),
    Job({"pipeline_model_parallel_size": 2}, (PLAIN, FULL), PHI, BY_LARGEST, is_rare=True),
    Job({"pipeline_model_parallel_size": 2}, (PLAIN,), PHI, TrainingState(reference_model="copy"), is_rare=True),
    Job(
        {"pipeline_model_parallel_size": 2},
        (PLAIN,),
        PHI,
        TrainingState(loss="jsd", reference_model="without_adapters", lora=LoRA(rank=4)),
        is_rare=True,
    ),
]
FOUR = [
    Job(
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        is_rare=True,
    ),
    Job(
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "data_parallel_size": 2},
        (PLAIN, FULL),
        state=TrainingState(moe_token_dispatcher_type="allgather"),
    ),
]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], list[OfRank]]:
    """What each rank did in a job. All jobs of as many ranks that are as rare share their processes."""

    @cache
    def take(ranks: int, is_rare: bool) -> tuple[list[Job], list[list[OfRank]]]:
        jobs = [job for job in (TWO if ranks == 2 else FOUR) if job.is_rare == is_rare]
        return jobs, once_a_run(
            tmp_path_factory,
            f"{ranks} ranks{', rare' * is_rare}",
            lambda folder: on_processes(ranks, take_steps, jobs, folder=folder),
        )

    def of(job: Job) -> list[OfRank]:
        jobs, found = take(Layout(**job.sizes).world_size, job.is_rare)
        return [of_rank[jobs.index(job)] for of_rank in found]

    return of


def name_of(job: Job) -> str:
    packed = "" if job.packed_sequences is None else f"-{job.packed_sequences} packed"
    groups = job.architecture.num_query_groups
    return f"{job.architecture.name}-{groups} groups-{Layout(**job.sizes)}{packed}-{job.state}"


@pytest.fixture(
    params=[
        pytest.param(job, id=name_of(job), marks=[pytest.mark.slow] if job.is_rare else []) for job in (*TWO, *FOUR)
    ]
)
def job(request: pytest.FixtureRequest) -> Job:
    found: Job = request.param
    return found


@pytest.fixture
def live(ranks_of: Callable[[Job], list[OfRank]], job: Job) -> list[OfRank]:
    return ranks_of(job)


def test_every_rank_s_bytes_are_those_predicted_for_it(job: Job, live: list[OfRank]) -> None:
    for rank, of_rank in enumerate(live):
        steps = of_rank.step_count_bytes
        for real, fake in zip(of_rank.records, predict(job, rank, live), strict=True):
            assert without_steps(real.peak_by_category, steps) == fake.peak_by_category, (rank, real.settings)
            assert without_steps(real.offloaded_bytes_by_group, steps) == fake.offloaded_bytes_by_group
            for name in ("residual_bytes", "recomputed_bytes", "offloaded_bytes_by_module", "without_effect"):
                assert getattr(real, name) == getattr(fake, name), (rank, name, real.settings)
            away = steps if real.settings.offload_optimizer else 0
            assert real.activation_peak_bytes - fake.activation_peak_bytes == away, (rank, real.settings)
            assert real.host_bytes - fake.host_bytes == away, (rank, real.settings)


def without_steps(sizes: dict[str, int], step_count_bytes: int) -> dict[str, int]:
    return {name: size - (step_count_bytes if name == "optimizer state" else 0) for name, size in sizes.items()}


def test_loss_and_gradients_are_those_of_one_rank(job: Job, live: list[OfRank]) -> None:
    alone = on_one_rank(job)
    losses = {of_rank.values.loss for of_rank in live} - {None}
    assert len(losses) == 1, "every rank that computes it has the same"
    assert losses.pop() == pytest.approx(alone.loss, rel=1e-6)
    for of_rank in live:
        # 2e-5 where Megatron averages experts' gradients over ranks with different parts of them (ETP2 without EP); on
        # the other layouts 1e-7.
        assert of_rank.values.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-4)


def test_memory_settings_change_no_loss(job: Job, live: list[OfRank]) -> None:
    for of_rank in live:
        assert len({record.loss for record in of_rank.records}) == 1


def test_when_a_rank_fails_the_others_are_ended(tmp_path: Path) -> None:
    job = "import os, time; assert os.environ['RANK'] == '0', 'this rank fails'; time.sleep(200)"
    with pytest.raises(AssertionError, match="this rank fails"):
        on_processes(2, exec, job, folder=tmp_path)
