"""Phases of reinforcement learning under FSDP: what weight syncs gather, and the passes of two models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.parameters import trained_of_rank
from memlab.config.rollout import ReferencePass, Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.transformers_linears import state_dict_sizes
from memlab.fitting.weight_sync import bytes_of_sync
from memlab.jobs.job import Job
from memlab.lab.job_phases import _beside_a_pass, predict_phases
from memlab.lab.lab import Lab
from memlab.meter.stream_order import StreamOrder
from memlab.units import GIB, MIB
from memlab.views.text.job_phases import phases_table

RANKS = 8
AWAY = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)


def scenario(name: str = "qwen3-8b", *, num_layers: int = 4, ranks: int = RANKS, **state: Any) -> Scenario:
    given: dict[str, Any] = {"fp32_sharded_params": True, "reshard_after_forward": "all"} | state
    layout = Layout(data_parallel_size=ranks)
    return Scenario.of(name, num_layers=num_layers, engine="fsdp2", layout=layout, state=TrainingState(**given))


class Counted:
    """Bytes that are there as long as Python has a name for them."""

    now: ClassVar[int] = 0
    peak: ClassVar[int] = 0

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        Counted.now += num_bytes
        Counted.peak = max(Counted.peak, Counted.now)

    def __del__(self) -> None:
        Counted.now -= self.num_bytes


def gather(elements: int) -> Counted:
    return Counted(4 * elements)


def sent_by_verl(bucket: int, weights: list[tuple[str, int]]) -> None:
    buffer = Counted(bucket)
    for weight in (gather(elements) for _, elements in weights):
        assert weight.num_bytes and buffer.num_bytes


def sent_by_nemo_rl(bucket: int, weights: list[tuple[str, int]], version: int) -> None:
    def generate() -> Iterator[Counted]:
        for _, elements in weights:
            whole = gather(elements)
            yield Counted(2 * elements)
            if version == 2:
                del whole

    buffer = None
    for tensor in generate():
        buffer = buffer or Counted(bucket)
        assert tensor.num_bytes


def sent_by_skyrl(threshold: int, weights: list[tuple[str, int]]) -> None:
    def generate() -> Iterator[list[Counted]]:
        batch: list[Counted] = []
        modules = dict.fromkeys(name.rpartition(".")[0] for name, _ in weights)
        for module in modules:
            own = []
            for name, elements in weights:
                if name.rpartition(".")[0] == module:
                    whole = gather(elements)
                    own.append(Counted(2 * elements))
                    del whole
            if batch and sum(one.num_bytes for one in (*batch, *own)) > threshold:
                yield batch
                batch = []
            batch += own
            own = []
        yield batch

    for chunk in generate():
        packed = Counted(sum(one.num_bytes for one in chunk))
        assert packed.num_bytes


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2.5-0.5b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("sender", ["verl", "nemo_rl", "nemo_rl_v1", "skyrl", "skyrl_broadcast"])
def test_a_sync_has_what_the_names_of_a_sender_keep(name: str, sender: Any) -> None:
    job, bucket = scenario(name), 96 * MIB
    weights, of_sync = [*state_dict_sizes(job.architecture, 4)], 0 if sender == "skyrl_broadcast" else bucket
    Counted.peak = Counted.now = 0
    if sender == "verl":
        sent_by_verl(bucket, weights)
    elif sender == "skyrl":
        sent_by_skyrl(bucket, weights)
    else:
        sent_by_nemo_rl(of_sync, weights, version=1 if sender == "nemo_rl_v1" else 2)
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=bucket, sender=sender)
    found = bytes_of_sync(job, rollout, of_sync)
    # The first weight of NeMo-RL is gathered before its buffers are there, which changes nothing but for one weight.
    assert found == pytest.approx(Counted.peak, rel=0, abs=0)


def test_weights_come_from_the_host_with_their_shards() -> None:
    job, bucket = scenario(), 2 * GIB
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=bucket, sender="verl")
    on_device, from_host = (
        bytes_of_sync(job, replace(rollout, syncs_from_host=is_away), bucket) for is_away in (False, True)
    )
    # The names of the embedding and of the first matrix live together; of the output layer there is the shard.
    embedding, first = (4 * elements for _, elements in [*state_dict_sizes(job.architecture, 1)][:2])
    norm = 4 * job.architecture.hidden_size
    assert on_device - bucket == embedding + first
    assert from_host - bucket == embedding + embedding // RANKS + norm
    assert bytes_of_sync(scenario(ranks=1), rollout, bucket) == bucket, "a rank that has all gathers nothing"


def test_fsdp1_gathers_and_copies_a_model_for_its_adapters() -> None:
    """6,412,390,400 bytes of an H200 (h200_verl_phases.jsonl): two norms are not copied yet while the last MLP is cut."""
    job = replace(scenario("llama-3.1-8b", fsdp_version=1, lora=LoRA(rank=16, fsdp2_library="peft")), num_layers=2)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=0, sender="verl", sends_adapters=True,
        gathers_model_at_once=True,
    )  # fmt: skip
    norms = 2 * job.architecture.hidden_size
    assert bytes_of_sync(job, rollout, 0) == 6_412_390_400 + 4 * norms // RANKS
    model = job.architecture
    embeddings = 4 * (2 * model.vocab_size * model.hidden_size + model.hidden_size)
    assert bytes_of_sync(job, replace(rollout, gathers_model_at_once=False), 0) == embeddings, "the root, unit by unit"
    alone = replace(job, layout=Layout())
    adapters = 4 * sum(trained_of_rank(alone))
    assert bytes_of_sync(alone, rollout, 0) == 4 * model.with_layers(2).num_parameters - embeddings + adapters
    second = replace(job, state=replace(job.state, fsdp_version=2))
    assert bytes_of_sync(second, rollout, 0) == 0


def test_fsdp1_s_state_dict_copies_the_shards_beside_what_it_gathers() -> None:
    """By hand, of Qwen3-8B's first four layers in fp32: a layer is smaller than the embedding, which is cut last."""
    embedding, hidden = 151_936 * 4096, 4096
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12_288 * 4096 + 2 * 4096 + 2 * 128
    outside = 2 * embedding + hidden
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=0, sender="verl")
    found = bytes_of_sync(scenario(fsdp_version=1), rollout, 0)
    assert found == 4 * (4 * layer + outside) // RANKS + 4 * (outside + embedding)


@pytest.mark.parametrize(("tokens", "at_once"), [(None, 4096), (512, 512)])
def test_an_entropy_has_its_logits_and_bytes_of_those_that_are_computed_at_once(
    tokens: int | None, at_once: int
) -> None:
    job = replace(scenario(), seq_length=4096)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=8, seq_length=4096, bucket_bytes=0, entropy_bytes_of_logit=12,
        entropy_tokens=tokens,
    )  # fmt: skip
    assert _beside_a_pass(job, rollout) == 151_936 * (2 * 4096 + 12 * at_once)
    whole = replace(rollout, entropy_bytes_of_logit=0, gathers_model_for_passes=True)
    assert _beside_a_pass(job, whole) == 2 * job.architecture.with_layers(4).num_parameters


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_passes_add_what_they_cache_until_it_is_emptied(keeps_cache: bool) -> None:
    """In the allocator of a GPU: each pass has what those before have cached, and what is allocated between once.

    An offloaded policy empties it after its own passes, so that only the reference model's stays for one more.
    """
    job = replace(scenario("qwen3-dense-tiny", num_layers=2, ranks=2, fsdp_version=1), seq_length=64)
    own = ReferencePass(seq_length=64, is_on_host=True, fp32_shards=True)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=2, seq_length=64, bucket_bytes=MIB, sender="verl", reference_pass=own,
        keeps_cache=keeps_cache,
    )  # fmt: skip
    found = predict_phases(job, MemorySettings(), rollout)
    most = {phase.name: phase.most_reserved_bytes for phase in found.phases}
    alone = {phase.name: phase.reserved_bytes for phase in found.phases}
    assert most["generation"] is most["weight sync"] is None
    passes = ("log-probabilities", "reference model", "training step")
    whole = {phase.name: phase.training_bytes for phase in found.phases}
    between, step = whole["generation"], whole["training step"] + found.late_free_bytes
    if not keeps_cache:
        assert (most["log-probabilities"] or 0) >= (alone["log-probabilities"] or 0)
        assert most["training step"] == step + (alone["reference model"] or 0) - between and not most["reference model"]
        return
    held = [most[name] or 0 for name in passes]
    assert all((most[name] or 0) >= (alone[name] or 0) for name in passes) and held == sorted(held)
    assert held[2] == held[1] + step - between
    assert "what other passes have cached: log-probabilities" in phases_table(found)


def test_blocks_of_a_reference_model_that_wait_for_other_streams_count_in_what_torch_may_hold() -> None:
    job = replace(scenario(num_layers=2, ranks=2, fsdp_version=1), seq_length=64)
    own = ReferencePass(seq_length=64, is_on_host=True, fp32_shards=True)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=2, seq_length=64, bucket_bytes=MIB, sender="verl", reference_pass=own,
        keeps_cache=True,
    )  # fmt: skip
    added = []
    for has_ended in (True, False):
        with patch.object(StreamOrder, "has_ended", return_value=has_ended):
            _, log_probabilities, reference, *_ = predict_phases(job, MemorySettings(), rollout).phases
        added.append((reference.most_reserved_bytes or 0) - (log_probabilities.most_reserved_bytes or 0))
    assert added[1] > added[0] > 0


START = "actor_rollout_ref"
VERL = (
    f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {START}.model.path=Qwen/Qwen3-8B "
    f"{START}.actor.ppo_mini_batch_size=64 {START}.actor.ppo_micro_batch_size_per_gpu=1 data.max_prompt_length=1024 "
    f"data.max_response_length=3072 {START}.rollout.log_prob_micro_batch_size_per_gpu=2 "
)
KL, ON_HOST = f"{START}.actor.use_kl_loss=true ", f"{START}.actor.fsdp_config.param_offload=true "
OF_REFERENCE = ReferencePass(seq_length=4096, is_on_host=True, fp32_shards=True)
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-8B "
NEMO_RL = """grpo: {num_prompts_per_step: 8}
policy:
  model_name: Qwen/Qwen3-8B
  dtensor_cfg: {enabled: true, _v2: VERSION_2}
  max_total_sequence_length: 4096
  train_micro_batch_size: 1
  logprob_batch_size: 2
  sequence_packing: {enabled: false}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
OF_SKYRL = ReferencePass(seq_length=1536, is_on_host=False, fp32_shards=False, policy_is_away=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VERL, {"sender": "verl", "seq_length": 8192, "reference_pass": None, "syncs_from_host": False,
                "bucket_bytes": 2 * GIB, "entropy_bytes_of_logit": 0, "has_reference_model": False, "keeps_cache": True}),
        (VERL + KL, {"reference_pass": OF_REFERENCE}),
        (VERL + KL + f"{START}.ref.fsdp_config.model_dtype=bf16 {START}.ref.log_prob_micro_batch_size_per_gpu=3",
         {"reference_pass": replace(OF_REFERENCE, seq_length=3 * 4096, fp32_shards=False)}),
        (VERL + KL + f"{START}.ref.fsdp_config.param_offload=false {START}.ref.fsdp_config.reshard_after_forward=false",
         {"reference_pass": replace(OF_REFERENCE, reshards=False)}),
        (VERL + KL + f"{START}.model.lora_rank=8",
         {"reference_pass": None, "sends_adapters": True, "gathers_model_at_once": True}),
        (VERL + f"{START}.model.lora_rank=8 {START}.rollout.layered_summon=true", {"gathers_model_at_once": False}),
        (VERL + ON_HOST + f"{START}.rollout.checkpoint_engine.backend=nccl",
         {"syncs_from_host": True, "bucket_copies": 2, "keeps_cache": False}),
        (VERL + f"{START}.actor.fsdp_config.use_torch_compile=false",
         {"entropy_bytes_of_logit": 12, "entropy_tokens": None}),
        (VERL + f"{START}.actor.fsdp_config.use_torch_compile=false "
         f"{START}.actor.entropy_from_logits_with_chunking=true {START}.actor.entropy_from_logits_chunk_size=512",
         {"entropy_bytes_of_logit": 12, "entropy_tokens": 512}),
        (SKYRL, {"sender": "skyrl", "bucket_bytes": GIB, "reference_pass": OF_SKYRL, "is_colocated": True}),
        (SKYRL + "trainer.algorithm.use_kl_loss=false", {"reference_pass": None}),
        (SKYRL + "trainer.ref.fsdp_config.cpu_offload=true", {"reference_pass": replace(OF_SKYRL, is_on_host=True)}),
        (SKYRL + "trainer.placement.colocate_all=false trainer.placement.colocate_policy_ref=false",
         {"sender": "skyrl_broadcast", "bucket_bytes": 0, "reference_pass": None}),
        (NEMO_RL.replace("VERSION_2", "true"),
         {"sender": "nemo_rl", "bucket_share": 0.3, "seq_length": 4096, "micro_batch_size": 2,
          "gathers_model_for_passes": False, "host_copies_of_shards": 2, "reference_pass": None}),
        (NEMO_RL.replace("VERSION_2", "false"), {"sender": "nemo_rl_v1", "gathers_model_for_passes": True}),
    ],
)  # fmt: skip
def test_what_a_job_does_between_its_steps_is_read(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / ("config.yaml" if text.startswith("grpo") else "run.sh")
    path.write_text(text)
    job = Job.read(path, world_size=8)
    assert job.rollout is not None, job.not_supported
    assert {name: getattr(job.rollout, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (VERL + KL + f"{START}.ref.ulysses_sequence_parallel_size=1 {START}.ref.strategy=fsdp", []),
        (VERL + KL + f"{START}.ref.ulysses_sequence_parallel_size=2", [f"{START}.ref.ulysses_sequence_parallel_size"]),
        (VERL + f"{START}.ref.ulysses_sequence_parallel_size=2", []),
        (VERL + KL + f"{START}.ref.strategy=fsdp2", [f"{START}.ref.strategy"]),
        (SKYRL + "trainer.ref.model.path=Qwen/Qwen3-8B", []),
        (SKYRL + "trainer.ref.model.path=Qwen/Qwen3-14B", ["trainer.ref.model.path"]),
        (SKYRL + "trainer.policy.sequence_parallel_size=2", ["trainer.ref.sequence_parallel_size"]),
        (SKYRL + "trainer.policy.sequence_parallel_size=2 trainer.ref.sequence_parallel_size=2", []),
        (SKYRL + "trainer.policy.fsdp_config.fsdp_size=4", ["trainer.ref.fsdp_config.fsdp_size"]),
    ],
)
def test_a_reference_model_that_is_unlike_the_policy_is_named(text: str, named: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    assert [one.key for one in Job.read(path, world_size=8).not_modelled if ".ref." in one.key] == named


OF_TINY = ReferencePass(seq_length=96, is_on_host=True, fp32_shards=True)


@pytest.mark.parametrize(
    ("version", "settings", "own", "policy"),
    [
        (2, MemorySettings(), OF_TINY, False),
        (2, AWAY, OF_TINY, False),
        (1, AWAY, OF_TINY, False),
        (2, AWAY, replace(OF_TINY, is_on_host=False, fp32_shards=False, policy_is_away=True), False),
        (2, MemorySettings(), OF_TINY, True),  # no shard is ever on the device
    ],
)
def test_a_reference_model_takes_a_pass_of_its_own(
    version: int, settings: MemorySettings, own: ReferencePass, policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = of_the_cpu_backend()
    monkeypatch.setattr("memlab.backends.simulated.backend", lambda _: on_cpu)
    job = scenario("qwen3-dense-tiny", num_layers=2, ranks=1, fsdp_version=version, fsdp_cpu_offload=policy)
    job = replace(job, seq_length=64)
    rollout = Rollout(
        is_colocated=True, ranks_per_node=1, seq_length=128, bucket_bytes=MIB, sender="verl", reference_pass=own
    )
    found = {phase.name: phase.training_bytes for phase in predict_phases(job, settings, rollout).phases}
    with Lab(job, backend="cpu") as lab:
        step, passed = lab.step(settings), lab.forward_only(seq_length=128, warm_up=True)
    with Lab(own.of(job), backend="cpu") as lab:
        frozen = lab.forward_only(warm_up=True)
    shards = frozen.peak_by_category.get("parameters", 0)
    removed, workspace = shards if version == 1 else 0, frozen.peak_by_category["workspace"]
    # Whoever moves FSDP2's parameters frees what is gathered of them.
    after = step if settings == AWAY and version == 2 else passed
    stays = step.peak_by_category["workspace"] if own.policy_is_away else after.static_bytes - workspace
    kept = workspace if own.policy_is_away else frozen.static_bytes - removed - workspace
    expected = {
        "generation": step.static_bytes + kept,
        "log-probabilities": passed.peak_allocated_bytes + kept,
        "reference model": frozen.peak_allocated_bytes - removed + stays,
        "training step": step.peak_allocated_bytes + kept,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0, abs=4096)
    assert list(found) == ["generation", "log-probabilities", "reference model", "training step", "weight sync"]
