"""How many micro-batches fill a budget of tokens, and which version of verl a checkout has."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from memlab.jobs.frameworks.budgets import Counting, Step, by_first_fit, by_tokens
from memlab.jobs.job import Job
from memlab.views.text.record import without_state
from tests.unit.job_files import read_job


def _first_fit(lengths: list[int], budget: int) -> int:
    bins: list[int] = []
    for length in lengths:
        for number, filled in enumerate(bins):
            if filled + length <= budget:
                bins[number] += length
                break
        else:
            bins.append(length)
    return len(bins)


def _emptiest_first(lengths: list[int], budget: int) -> int:
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        if bins and min(bins) + length <= budget:
            bins[bins.index(min(bins))] += length
        else:
            bins.append(length)
    return len(bins)


def _padded(lengths: list[int], budget: int) -> int:
    rows, number = 0, 1
    for length in sorted(lengths):
        if rows and (rows + 1) * length > budget:
            rows, number = 0, number + 1
        rows += 1
    return number


def _balanced(lengths: list[int], budget: int) -> int:
    return min(len(lengths), math.ceil(sum(lengths) / budget))


def _shared_by_work(lengths: list[int], rows: int) -> list[int]:
    """Returns the tokens of rows that the largest differencing method balances by verl's measure of work."""
    states = [[(24576 * each + each**2, each)] + [(0, 0)] * (rows - 1) for each in lengths]
    while len(states) > 1:
        states.sort(key=lambda state: state[0][0] - state[-1][0])
        one, other = states.pop(), states.pop()
        states.append(
            sorted(((a + b, s + t) for (a, s), (b, t) in zip(one, reversed(other), strict=True)), reverse=True)
        )
    return [tokens for _, tokens in states[0]]


def _balanced_within(lengths: list[int], budget: int) -> int:
    first = _balanced(lengths, budget)
    return next(rows for rows in range(first, len(lengths) + 1) if max(_shared_by_work(lengths, rows)) <= budget)


@pytest.mark.parametrize(
    ("counted", "packed"),
    [
        (by_first_fit, _first_fit),
        (by_first_fit, _emptiest_first),
        (by_first_fit, _padded),
        (by_first_fit, _balanced_within),
        (by_tokens, _balanced),
    ],
)
def test_no_data_fill_more_micro_batches_and_the_longest_sequences_fill_as_many(
    counted: Counting, packed: Callable[[list[int], int], int]
) -> None:
    draw = random.Random(1)
    for _ in range(300):
        longest, sequences = draw.randint(1, 90), draw.randint(1, 20)
        step = Step(sequences, draw.randint(longest, 300), longest)
        assert packed([longest] * sequences, step.budget) == counted(step)
        assert packed([draw.randint(1, longest) for _ in range(sequences)], step.budget) <= counted(step)


_VERL = (
    "python3 -m verl.trainer.main_ppo model_engine={} actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 "
    "data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.actor.ppo_mini_batch_size=16 "
    "actor_rollout_ref.rollout.n=3 trainer.nnodes=1 trainer.n_gpus_per_node=8 "
)
_CHUNKS = (
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2"
)
_SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint Qwen/Qwen3-8B "
    "--use-dynamic-batch-size --global-batch-size 48 --rollout-max-context-len 3072 --max-tokens-per-gpu "
)
_SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.strategy=fsdp2 trainer.policy.model.path=Qwen/Qwen3-8B "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.policy_mini_batch_size=16 generator.n_samples_per_prompt=3 "
    "trainer.max_prompt_length=1024 generator.sampling_params.max_generate_length=2048 "
    "trainer.micro_train_batch_size_per_gpu=1 trainer.micro_forward_batch_size_per_gpu=1 "
    "trainer.train_batch_size=16 trainer.max_tokens_per_microbatch="
)
_STEPS = "generator.step_wise_trajectories=true"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (_VERL.format("dp"), (1, 5)),  # before 0.9.1: 6 sequences of 3,072 tokens on each rank: 18,432 tokens, by 4,096
        (_VERL.format("megatron"), (1, 5)),
        (f"{_VERL.format('megatron')} {_CHUNKS}", (2, 10)),  # 12 sequences: 9 micro-batches, by two stages in turn
        (f"{_SLIME} 4096", (1, 6)),
        (f"{_SLIME} 4096 --context-parallel-size 2", (1, 6)),  # 12 sequences, two of them in 8,192 tokens
        (f"{_SLIME} 2048", (1, 6)),  # a longer sequence is a micro-batch of its own
        (f"{_SLIME} 65536", (1, 1)),
        (f"{_SKYRL}4096", (1, 6)),
        (f"{_SKYRL}6200", (1, 3)),
        (f"{_SKYRL}-1 {_STEPS} generator.max_turns=4", (6, 24)),
    ],
)
def test_a_job_says_how_many_micro_batches_the_data_can_fill(
    script: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    job = read_job(script, tmp_path, version="2026-08-20" if "verl" in script else None)
    assert job.micro_batches == expected
    said = f", {expected[0]} to {expected[1]} in a step, depend"
    assert (said in " ".join(job.warnings)) is (expected != (1, 1))


@pytest.mark.parametrize(
    ("version", "most", "is_warned"), [("0.9.1", 6, False), ("2026-08-20", 5, True), ("before-2026-08-20", 5, True)]
)
@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_a_row_of_verl_can_hold_more_than_its_budget_before_0_9_1(
    engine: str, version: str, most: int, is_warned: bool, tmp_path: Path
) -> None:
    """Six sequences of 3,072 tokens need five rows of 4,096 on average, of which one then holds two sequences."""
    assert max(_shared_by_work([3072] * 6, 5)) == 6144
    (tmp_path / "run.sh").write_text(_VERL.format(engine))
    job = Job.read(tmp_path / "run.sh", version=version)
    assert job.micro_batches == (1, most)
    said = [one for one in job.warnings if "more than the budget, such as 6,144 tokens" in one]
    assert bool(said) is is_warned
    if is_warned:
        fuller = Job.read(tmp_path / "run.sh", version=version, overrides=[said[0].rpartition("--set ")[2].split()[0]])
        assert fuller.required()[0].seq_length == 6144


@pytest.mark.parametrize(
    ("flag", "tokens", "most", "said"),
    [
        ("", 4096, 6, None),
        ("--balance-by-flops", 4096, 5, "more than the budget, such as 6,144 tokens"),
        ("--balance-by-flops", 6144, 3, "more than the budget, which memlab predicts"),
        ("--balance-by-flops", 262144, 1, None),
    ],
)
def test_slime_balances_rows_above_the_budget_if_the_job_asks_for_it(
    flag: str, tokens: int, most: int, said: str | None, tmp_path: Path
) -> None:
    script = _SLIME.replace("--global-batch-size 48", "--global-batch-size 6").replace("per-node 8", "per-node 1")
    (tmp_path / "run.sh").write_text(f"{script} {tokens} {flag}")
    job = Job.read(tmp_path / "run.sh")
    assert job.micro_batches == (1, most)
    assert any((said or "balance_by_flops") in one for one in job.warnings) is (said is not None)


def test_steps_of_an_agent_have_no_known_number(tmp_path: Path) -> None:
    script = f"{_SKYRL}-1 {_STEPS} generator.max_turns=4 trainer.algorithm.max_seq_len=8192"
    job = read_job(script.replace("skyrl.train.entrypoints.main_base", "harbor.main_harbor"), tmp_path)
    assert job.micro_batches is None and "so the number of micro-batches depends on the data" in " ".join(job.warnings)


@pytest.mark.parametrize(("turns", "expected"), [("generator.max_turns=$TURNS", None), ("", (6, 6))])
def test_steps_of_an_agent_are_as_many_as_the_job_says(
    turns: str, expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    job = read_job(f"{_SKYRL}-1 {_STEPS} {turns}", tmp_path)
    assert job.micro_batches == expected
    assert any("step_wise_trajectories: " in one for one in job.warnings) is (not expected)


@pytest.mark.parametrize(("kind", "expected"), [("sequence_packing", (1, 4)), ("dynamic_batching", (1, 4))])
def test_a_job_of_nemo_rl_says_it_too(kind: str, expected: tuple[int, int], tmp_path: Path) -> None:
    other = {"sequence_packing": "dynamic_batching"}.get(kind, "sequence_packing")
    (tmp_path / "grpo.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 64\n  train_micro_batch_size: 4\n"
        "  max_total_sequence_length: 4096\n  dtensor_cfg:\n    enabled: true\n"
        f"  {kind}:\n    enabled: true\n    train_mb_tokens: 8192\n    logprob_mb_tokens: 8192\n"
        f"  {other}:\n    enabled: false\ncluster:\n  gpus_per_node: 8\n  num_nodes: 1\ngrpo: {{}}\n"
    )
    assert Job.read(tmp_path / "grpo.yaml").micro_batches == expected


_SYNC = "    def _gradient_sync_context(self):\n"
_KEY = '        "use_no_sync_for_gradient_accumulation"\n'
_FP32 = "    def _resolve_override_ddp_config(self):\n"


@pytest.mark.parametrize(
    ("fsdp", "megatron", "defers", "reduces_in_bf16"),
    [
        (_SYNC + _KEY, _FP32, False, False),  # 0.9.1
        (_SYNC, _FP32, True, False),  # 0.9.0, and main of August 2026
        ("", "", False, True),  # 0.8.0
        ("", _FP32, False, None),  # between them: the job asks
    ],
)
def test_the_checkout_around_a_job_s_file_decides_verl_s_version(
    fsdp: str, megatron: str, defers: bool, reduces_in_bf16: bool | None, tmp_path: Path
) -> None:
    for engine, source in (("fsdp", fsdp), ("megatron", megatron)):
        folder = tmp_path / "verl" / "workers" / "engine" / engine
        folder.mkdir(parents=True)
        (folder / "transformer_impl.py").write_text(source)
    script = tmp_path / "examples" / "grpo" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(_VERL.format("dp"))
    job = Job.read(script)
    assert job.required()[0].state.defer_fsdp_grad_sync is defers
    assert any(str(tmp_path) in one for one in job.warnings) is (reduces_in_bf16 is not None)
    assert Job.read(script, version="0.9.1").required()[0].state.defer_fsdp_grad_sync is False
    script.write_text(_VERL.format("megatron"))
    job = Job.read(script)
    assert bool(job.questions) is (reduces_in_bf16 is None)
    if reduces_in_bf16 is not None:
        assert job.required()[0].state.grad_reduce_in_bf16 is reduces_in_bf16


@pytest.mark.parametrize(
    ("text", "defers"),
    [("TAG=v0.8.0\n", False), ("MODE=pinned_tag\nTAG=v0.9.0\n", True), ("TAG=v0.9.1", False), ("COMMIT=abc\n", None)],
)
def test_the_release_that_a_recipe_asks_for_decides_verl_s_version(
    text: str, defers: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "retool" / "run").mkdir(parents=True)
    (tmp_path / "retool" / "REQUIRED_VERL.txt").write_text(text)
    job = read_job(_VERL.format("dp"), tmp_path / "retool" / "run")
    assert any("asks for verl v0." in one for one in job.warnings) is (defers is not None)
    named = [one.key for one in job.not_modelled]
    assert any("use_no_sync" in key for key in named) is (defers is None)
    if defers is not None:
        assert job.required()[0].state.defer_fsdp_grad_sync is defers


_DECORATOR = '@hydra.main(config_path="config", config_name="{}", version_base=None)\ndef main(config): ...\n'


@pytest.mark.parametrize(
    ("folder", "name", "entropy", "told"),
    [
        ("prime", "prime_trainer", 0.001, "memlab looks only at its configuration, prime_trainer"),
        ("prime/run", "prime_trainer", 0.001, "memlab looks only at its configuration, prime_trainer"),
        ("prime", "lost_trainer", 0, "memlab looks only at its configuration, lost_trainer"),
        ("prime", "ppo_trainer", 0, "memlab looks only at its configuration, ppo_trainer"),
        ("other", "prime_trainer", 0, "memlab takes verl's defaults for what"),
    ],
)
def test_the_configuration_that_a_program_of_the_job_s_own_names_is_read(
    folder: str, name: str, entropy: float, told: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "prime" / "config").mkdir(parents=True, exist_ok=True)
    (tmp_path / ("prime" if folder != "other" else "none")).mkdir(exist_ok=True)
    (tmp_path / ("prime" if folder != "other" else "none") / "main_prime.py").write_text(_DECORATOR.format(name))
    configuration = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {entropy_coeff: 0.001}}\n"
    (tmp_path / "prime" / "config" / "prime_trainer.yaml").write_text(configuration)
    job = read_job(_VERL.format("dp").replace("verl.trainer.main_ppo", "recipe.prime.main_prime"), tmp_path / folder)
    assert [one.value for one in job.not_modelled if one.key.endswith("entropy_coeff")] == [entropy] * bool(entropy)
    assert [told in one for one in job.warnings if "no program of verl's own" in one] == [True]
    assert any("lost_trainer, which main_prime.py names, is not in" in one for one in job.warnings) == ("lost" in name)


@pytest.mark.parametrize(("program", "is_found"), [("prime.main_prime", True), ("other.main_other", False)])
def test_a_configuration_that_a_command_names_lies_where_its_program_says(
    program: str, is_found: bool, tmp_path: Path
) -> None:
    """Hydra looks in the folder that the decorator names, unless ``--config-path`` gives another."""
    (tmp_path / "config").mkdir()
    (tmp_path / "main_prime.py").write_text(_DECORATOR.format("prime_trainer"))
    (tmp_path / "config" / "small.yaml").write_text("actor_rollout_ref: {actor: {entropy_coeff: 0.001}}\n")
    command = _VERL.format("dp").replace("verl.trainer.main_ppo", f"{program.split('.')[1]} --config-name small")
    job = read_job(command, tmp_path)
    assert any(one.key.endswith("entropy_coeff") for one in job.not_modelled) is is_found
    assert any("is not beside the script" in one for one in job.warnings) is not is_found


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(
    ("section", "keys", "is_said"),
    [
        ("rollout", "", True),
        ("rollout", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", False),
        ("ref", "actor_rollout_ref.actor.use_kl_loss=True", True),
        ("ref", "", False),
    ],
)
def test_rows_of_all_ranks_of_a_pass_without_backward_are_said(
    engine: str, section: str, keys: str, is_said: bool, tmp_path: Path
) -> None:
    key = f"actor_rollout_ref.{section}.log_prob_micro_batch_size"
    rows = "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    job = read_job(f"{_VERL.format(engine)} {rows} {keys} {key}=64", tmp_path, version="0.9.1")
    assert (key in {one.key for one in job.not_modelled}) is is_said
    assert (key in job.without_effect) is not is_said


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(
    ("prompts", "is_dynamic", "program", "stops", "is_told"),
    [
        (8, False, "verl.trainer.main_ppo", True, False),
        (8, False, "recipe.atropos.main_atropos", False, True),
        (16, False, "verl.trainer.main_ppo", False, False),
        (8, True, "verl.trainer.main_ppo", False, True),
        (0, False, "verl.trainer.main_ppo", False, False),
        ("$PROMPTS", False, "verl.trainer.main_ppo", False, False),
    ],
)
def test_a_mini_batch_of_verl_has_no_more_prompts_than_a_step(
    engine: str, prompts: int | str, is_dynamic: bool, program: str, stops: bool, is_told: bool, tmp_path: Path
) -> None:
    """``ActorConfig.validate`` (verl/workers/config/actor.py); 0 are those of fully asynchronous jobs."""
    is_known = isinstance(prompts, int)
    command = _VERL.format(engine).replace("verl.trainer.main_ppo", program)
    keys = f"data.train_batch_size={prompts} actor_rollout_ref.actor.ppo_mini_batch_size={16 if is_known else 2048}"
    job = read_job(f"{command} {keys} actor_rollout_ref.actor.use_dynamic_bsz={is_dynamic}", tmp_path, version="0.9.1")
    assert ("more than the" in str(job.cannot_start)) is stops
    assert any("more than the 8 prompts" in one for one in job.warnings) is is_told


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(
    ("keys", "is_colocated", "is_told"),
    [
        ("rollout.n_gpus_per_node=8", False, True),
        ("rollout.nnodes=1 actor_rollout_ref.hybrid_engine=False", False, False),
        ("+async_training.partial_rollout=True", True, False),
    ],
)
def test_a_fully_asynchronous_job_of_verl_generates_on_gpus_of_its_own(
    engine: str, keys: str, is_colocated: bool, is_told: bool, tmp_path: Path
) -> None:
    job = read_job(f"{_VERL.format(engine)} {keys}", tmp_path, version="0.9.1")
    assert job.rollout is not None and job.rollout.is_colocated is is_colocated
    assert any("asserts that actor_rollout_ref.hybrid_engine" in one for one in job.warnings) is is_told


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize("program", ["main_generation_server", "main_eval"])
def test_a_program_of_verl_that_trains_nothing_is_refused(engine: str, program: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_VERL.format(engine).replace("main_ppo", program))
    assert "does not train" in str(Job.read(tmp_path / "run.sh", version="0.9.1").not_supported)


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "memlab takes verl's defaults"),
        ("--config-name=dapo_trainer ", "looks only at its configuration, dapo_trainer"),
    ],
)
def test_a_program_that_is_not_verl_s_own_may_have_other_defaults(
    engine: str, words: str, told: str, tmp_path: Path
) -> None:
    script = _VERL.format(engine).replace("verl.trainer.main_ppo ", f"recipe.dapo.main_dapo {words}")
    warnings = read_job(script, tmp_path, version="0.9.1").warnings
    assert [told in one for one in warnings if "recipe.dapo.main_dapo is no program of verl's own" in one] == [True]


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(("key", "is_refused"), [("policy_loss.tau_pos", True), ("tau_pos", False)])
def test_the_policy_s_loss_has_no_numbers_of_sapo(engine: str, key: str, is_refused: bool, tmp_path: Path) -> None:
    job = read_job(f"{_VERL.format(engine)} +actor_rollout_ref.actor.{key}=1.0", tmp_path, version="0.9.1")
    assert ("PolicyLossConfig" in str(job.cannot_start)) is is_refused
    assert not [one for one in job.not_modelled if one.effect == "unknown"]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("run.sh", _VERL.format("dp"), "trainer.val_only"),
        ("run.sh", _VERL.format("megatron"), "trainer.val_only"),
        (
            "run.sh",
            (
                "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 "
                "--max-position-embeddings 64 --micro-batch-size 1 --padded-vocab-size 128"
            ),
            "skip_train",
        ),
        *(
            ("run_config.yaml", "model:\n  hf_model_id: Qwen/Qwen3-8B\ntrain:\n  micro_batch_size: 1\nddp: {}\n", key)
            for key in ("train.skip_train", "validation.skip_train")
        ),
    ],
)
def test_a_job_that_only_evaluates_is_refused(name: str, text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    told = [
        str(
            Job.read(
                tmp_path / name, overrides=[f"{key}={on}"], version="0.9.1" if "verl" in text else None
            ).not_supported
        )
        for on in ("true", "false")
    ]
    assert "does not train" in told[0] and "does not train" not in told[1]


@pytest.mark.parametrize("engine", ["dp", "megatron"])
@pytest.mark.parametrize(
    ("prompts", "tokens", "rows"),
    [(8, 8 * 3072 // 4, (1, 1)), (64, 16384, (1, 4))],
)
def test_a_step_of_verl_fills_no_more_of_a_budget_than_its_sequences_have(
    engine: str, prompts: int, tokens: int, rows: tuple[int, int], tmp_path: Path
) -> None:
    """``rearrange_micro_batches`` in verl/utils/seqlen_balancing.py (0.9.1) has the sequences of one copy alone."""
    keys = (
        f"actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 "
        f"data.train_batch_size={prompts} actor_rollout_ref.actor.ppo_mini_batch_size={prompts} trainer.n_gpus_per_node=4 "
        "data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.rollout.n=1 trainer.nnodes=1"
    )
    job = read_job(f"{_VERL.format(engine)} {keys}", tmp_path, version="0.9.1")
    scenario, _ = job.required()
    assert scenario.seq_length == tokens
    assert scenario.packed_sequences == math.ceil(tokens / 3072)
    assert job.micro_batches == rows


_FEW_OF_NEMO_RL = """policy:
  model_name: Qwen/Qwen3-8B
  max_total_sequence_length: 512
  train_global_batch_size: 8
  megatron_cfg: {{enabled: true}}
  sequence_packing: {{enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192}}
cluster: {{num_nodes: 1, gpus_per_node: 4}}
grpo: {{num_prompts_per_step: {0}, num_generations_per_prompt: 2}}
"""
_FEW_OF_VERL = (
    f"{_VERL.format('{0}')} data.train_batch_size={{1}} actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=40960"
)
_FEW_OF_SKYRL = _SKYRL.replace("batch_size=16", "batch_size=8").replace("=fsdp2", "={0}") + "65536 "


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # Each of eight copies has 6 sequences of 3,072 tokens of 16 prompts, and 15 of 40.
        *((_FEW_OF_VERL.format(engine, 16), 6 * 3072) for engine in ("dp", "megatron")),
        *((_FEW_OF_VERL.format(engine, 40), 40960) for engine in ("dp", "megatron")),
        *((_FEW_OF_SKYRL.format(engine), 3 * 3072) for engine in ("fsdp2", "megatron")),
        (_FEW_OF_SKYRL.format("megatron") + "trainer.train_batch_size=16", 6 * 3072),
        (
            _FEW_OF_SKYRL.format("megatron")
            + "trainer.train_batch_size=16 trainer.recompute_old_logprobs_per_minibatch=true",
            3 * 3072,
        ),
        (_FEW_OF_SKYRL.format("megatron") + _STEPS, 65536),
        (_FEW_OF_NEMO_RL.format(4), 8 * 512),  # a row may have any of them
        (_FEW_OF_NEMO_RL.format(64), 8192),
        # slime has no other micro-batches than those of the training: 48 sequences, and one that is too long.
        (f"{_SLIME} 196608 --log-probs-max-tokens-per-gpu 262144", 48 * 3072),
        (f"{_SLIME} 8192 --log-probs-max-tokens-per-gpu 262144", 8192),
        (f"{_SLIME} 2048", 3072),
    ],
)
def test_a_pass_without_backward_fills_no_more_of_a_budget_than_its_sequences_have(
    text: str, tokens: int, tmp_path: Path
) -> None:
    path = tmp_path / ("job.yaml" if text.startswith("policy") else "run.sh")
    path.write_text(text)
    rollout = Job.read(path, version="0.9.1" if "verl" in text else None).rollout
    assert rollout is not None and (rollout.seq_length, rollout.micro_batch_size) == (tokens, 1)


def test_a_row_of_nemo_rl_may_hold_any_sequence_of_a_step_and_no_more(tmp_path: Path) -> None:
    """``shard_by_batch_size`` in nemo_rl/distributed/batched_data_dict.py (7ea279ab) packs before it shares."""
    text = (
        "policy: {{model_name: Qwen/Qwen3-0.6B, max_total_sequence_length: 512, train_global_batch_size: {0}, "
        "sequence_packing: {{enabled: true, train_mb_tokens: 8192}}, megatron_cfg: {{enabled: true}}}}\n"
        "cluster: {{num_nodes: 1, gpus_per_node: 4}}\ngrpo: {{num_prompts_per_step: 4}}\n"
    )
    for sequences, tokens in ((8, 8 * 512), (64, 8192)):
        assert read_job(text.format(sequences), tmp_path, "job.yaml").required()[0].seq_length == tokens


@pytest.mark.parametrize("version", [1, 2])
def test_a_job_whose_ranks_exchange_heads_is_shown(version: int, tmp_path: Path) -> None:
    """A table names the job without its state, which such ranks need."""
    keys = f"actor_rollout_ref.actor.strategy=fsdp{'2' * (version > 1)} "
    keys += "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    scenario, _ = read_job(f"{_VERL.format('dp')} {keys}", tmp_path, version="0.9.1").required()
    assert (scenario.layout.context_parallel_size, scenario.state.fsdp_version) == (2, version)
    assert scenario.packed_sequences is not None
    assert without_state(scenario).startswith("qwen3-8b")
