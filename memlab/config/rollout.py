"""What a job of reinforcement learning does between training steps, as far as it takes memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError

Sender = Literal["verl", "skyrl", "skyrl_broadcast", "nemo_rl", "nemo_rl_v1"]
"""Whose code gathers the weights of FSDP and sends them (`memlab.fitting.weight_sync`); SkyRL has another one for an
engine on other GPUs, and NeMo-RL for each version of its DTensor policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePass:
    """A frozen model with shards of its own, as under FSDP, in its pass for log-probabilities."""

    seq_length: int
    """Tokens of a row."""
    micro_batch_size: int = 1
    is_on_host: bool
    """Whether its shards are on the host, from where they come to the device unit by unit."""
    fp32_shards: bool
    reshards: bool = True
    """Whether its units are sharded again after forward."""
    policy_is_away: bool = False
    """Whether nothing of the trained model is on the device meanwhile, nor of the frozen one in other phases."""

    def of(self, scenario: Scenario) -> Scenario:
        """Returns the scenario of the pass of a job; FSDP1's shards are on the device there.

        Raises:
            ValueError: If memlab refuses it.
        """
        is_second, trained = scenario.state.fsdp_version == 2, scenario.state
        state = replace(
            trained,
            lora=None,
            fsdp_cpu_offload=self.is_on_host and is_second,
            fp32_sharded_params=self.fp32_shards and scenario.dtype != "fp32",
            reshard_after_forward="all" if self.reshards else "none",
            reshard_root_after_forward=self.reshards and is_second,
            fsdp2_forward_prefetch_depth=0,
        )
        return _with_rows(replace(scenario, state=state), self.seq_length, self.micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPass:
    """The forward passes of a teacher that is a model of its own, in processes of its own on the training's GPUs.

    Its weights are on the device in these passes alone, and it has no gradients and no optimizer
    (``distillation_train`` in nemo_rl/algorithms/distillation.py, NeMo-RL 7ea279ab).
    """

    scenario: Scenario
    """The teacher, with the workload of a pass."""
    num_microbatches: int | None
    """Those of a step on each copy of the teacher, of all of which the device keeps the logits that are sent; None
    where the job does not say it, and the scenario's are taken."""

    def __post_init__(self) -> None:
        impl = self.scenario.state.cuda_graph_impl
        if impl != "none":  # a graph has the addresses of the weights
            raise RuleError(
                f"cuda_graph_impl is {impl!r}, must be 'none' in the passes of a teacher, whose weights leave the "
                "device after them: choose 'none'",
                "cuda_graph_impl",
            )

    def on_rank(self, rank: int) -> Scenario:
        """Returns what one rank runs, with at most as many micro-batches as fill the pipeline twice.

        The others add what they keep alone (`kept_bytes`). Under FSDP2 the second finds what the first left gathered.
        """
        most = 2 if self.scenario.engine == "fsdp2" else 2 * self.scenario.layout.pipeline_model_parallel_size + 2
        number = min(most, self.num_microbatches or self.scenario.num_microbatches)
        return replace(self.scenario.on_rank(rank), num_microbatches=number)

    def kept_bytes(self, num_microbatches: int) -> int:
        """Returns what so many micro-batches keep: of each token k values in fp32 and places in int64."""
        scenario = self.scenario
        lengths = scenario.sequence_lengths
        tokens = len(lengths) * max(lengths) if lengths else scenario.micro_batch_size * scenario.seq_length
        return num_microbatches * tokens * scenario.state.topk_logits_k * (4 + 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Generation, log-probabilities and weight sync of a job, as its own file says."""

    is_colocated: bool
    """Whether the inference engine has the GPUs that the training has."""
    ranks_per_node: int
    seq_length: int
    """Tokens of a row in a forward-only pass, which computes log-probabilities."""
    micro_batch_size: int = 1
    """Rows of such a pass."""
    computes_log_probabilities: bool = True
    """False if neither the policy nor a reference model has such a pass between generation and training."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that the inference engine takes; None where only the engine knows."""
    engine_bytes: int | None = None
    """What Megatron's engine takes beside its weights, which leave the device while the model trains: NeMo-RL pauses
    them (``finish_generation`` in nemo_rl/models/generation/megatron/megatron_worker.py, August 2026) and copies the
    trained ones into them without a bucket. None for other engines, whose weights are in their share."""
    engine_has_own_weights: bool = True
    """False if it generates with the training's parameters, which are then on the device and need no weight sync."""
    engine_sleeps: bool = True
    """Whether the engine frees its memory while the model trains."""
    engine_ranks: int = 1
    """GPUs that share the weights of one engine, apart from its experts: tensor parallel x pipeline parallel."""
    engine_data_ranks: int = 1
    """Copies of these that share the experts: vLLM spreads them over its data parallel ranks too, with and without
    expert parallelism (``flatten_tp_across_dp_and_pcp`` in vllm/model_executor/layers/fused_moe/config.py)."""
    bucket_bytes: int | None = None
    """How much of the weights is gathered and sent at a time; None where the framework decides by the GPU's memory."""
    bucket_share: float | None = None
    """Then the share of the GPU's free memory that it takes for that; None where this is not known."""
    bucket_copies: int = 1
    """How often the weights of a bucket are on the device: gathered, and copied into one tensor to send."""
    bucket_overflows: bool = False
    """Whether a bucket is sent only once it is larger than its size, by at most one weight."""
    gathers_beside_bucket: bool = False
    """Whether a weight is gathered while the bucket is on the device: on several tensor parallel ranks first as their
    parts, and then whole."""
    sends_adapters: bool = False
    """Whether each weight sync sends the adapters alone, one weight after the other. Of jobs whose later syncs do so,
    the first one sends the whole model."""
    kept_buffer_bytes: int = 0
    """Of the weight sync's buffers that stay on the device in all phases. Where only one rank of each engine has them,
    every rank counts them, as the phases of one rank are judged."""

    has_reference_model: bool = False
    """Whether a frozen copy of the model in bf16 is on the device too, and leaves it where the parameters do."""
    offloads_for_generation_only: bool = False
    """Whether log-probabilities and weight sync find on the device what is offloaded for generation."""
    syncs_from_host: bool = False
    """Whether the weight sync reads the host's copy of what is offloaded, and nothing returns to the device for it."""
    reference_pass: ReferencePass | None = None
    """Of a frozen model with shards of its own; it takes its pass after the policy's or before it."""
    sender: Sender | None = None
    """None for Megatron's weights."""
    gathers_model_at_once: bool = False
    """Whether a weight sync of FSDP1 gathers the whole model before it sends a part of it."""
    entropy_bytes_of_logit: int = 0
    """Bytes of each logit, beside the logit itself, that the entropy takes in the policy's pass; 0 where it is not
    computed there, or by one compiled function."""
    entropy_tokens: int | None = None
    """Of how many tokens at a time; None is all of a micro-batch."""
    keeps_cache: bool = False
    """Whether torch's cache is emptied by the weight sync alone, so that a pass finds what those before have cached."""
    gathers_model_for_passes: bool = False
    """Whether the whole model is gathered before a forward-only pass begins."""
    host_copies_of_shards: int = 0
    """How often the host has the rank's shards beside what is offloaded, as for a reference model that trades places
    with the policy."""
    freed_for_log_probabilities: tuple[str, ...] = ()
    """Categories of bytes that leave the device before log-probabilities, although they stay for generation."""
    num_passes: int | None = None
    """Such passes of a step on each copy of the model, where that is known and not as many as it has micro-batches."""
    teacher: TeacherPass | None = None
    """The passes of a teacher between generation and training."""
    freed_for_teacher: tuple[str, ...] = ()
    """Categories of bytes that leave the device before these, although they stay for generation."""

    def of_log_probabilities(self, scenario: Scenario) -> Scenario:
        """Returns the scenario of a forward-only pass of this job.

        Raises:
            ValueError: If memlab refuses the pass's workload.
        """
        return _with_rows(scenario, self.seq_length, self.micro_batch_size)

    def num_weights_of_engine(self, scenario: Scenario) -> int:
        """Returns how many of the model's weights one GPU of an engine has."""
        model = scenario.architecture
        experts = model.num_parameters_of_experts
        outside = (model.num_parameters - experts) // self.engine_ranks
        return outside + experts // (self.engine_ranks * self.engine_data_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        teacher = self.teacher and asdict(self.teacher) | {"scenario": self.teacher.scenario.to_dict()}
        return asdict(self) | {"teacher": teacher}


def _with_rows(scenario: Scenario, seq_length: int, micro_batch_size: int) -> Scenario:
    """Returns the scenario with other rows: frameworks pad them to what the layout divides, up to their budget."""
    layout = scenario.layout
    unit = layout.ranks_of_a_sequence
    unit *= 2 if layout.context_parallel_size > 1 else 1
    if scenario.packed_sequences is not None:
        tokens = seq_length * micro_batch_size
        return scenario.with_tokens_of_a_row(max(1, tokens // unit) * unit)
    return replace(scenario, seq_length=max(1, seq_length // unit) * unit, micro_batch_size=micro_batch_size)
