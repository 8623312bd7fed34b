"""Layers of Mamba: their values against the recurrence and against transformers, and what they keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memlab.analysis.kept import kept_by_module
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.layout import Layout
from memlab.config.parts.mamba import Mamba
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import Versions
from memlab.engines.megatron.layers.scan import GroupedNorm, Sizes, SplitConvScan, scan
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from tests.unit.of_old_core import skip_if_newer_core_changed

TINY = ARCHITECTURES["nemotron-h-tiny"]
SIZES = Sizes(heads=4, channels=6, groups=2, states=5, chunk=8)


def _inputs(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    columns = SIZES.width + SIZES.convolved + SIZES.heads
    shapes = (
        (2, tokens, columns),
        (SIZES.convolved, 4),
        (SIZES.convolved,),
        (SIZES.heads,),
        (SIZES.heads,),
        (SIZES.heads,),
    )
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[4] = -inputs[4].exp()
    return inputs


def _token_by_token(
    projected: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """Returns what a layer returns before its norm: the state of each head, carried from token to token."""
    time_bias, decay, skip = others
    batch, tokens, _ = projected.shape
    heads, channels, groups, states, _ = SIZES
    output = []
    state = [torch.zeros(batch, channels, states) for _ in range(heads)]
    for token in range(tokens):
        convolved = bias.clone().expand(batch, -1)
        for before in range(min(4, token + 1)):
            row = projected[:, token - before, SIZES.width : SIZES.width + SIZES.convolved]
            convolved = convolved + kernel[:, 3 - before] * row
        convolved = convolved * torch.sigmoid(convolved)
        values = convolved[:, : SIZES.width].view(batch, heads, channels)
        written, read = convolved[:, SIZES.width :].view(batch, 2, groups, states).unbind(1)
        for head in range(heads):
            step = torch.log1p(torch.exp(projected[:, token, -heads + head] + time_bias[head]))
            group = head // (heads // groups)
            added = step[:, None, None] * values[:, head, :, None] * written[:, group, None, :]
            state[head] = torch.exp(step * decay[head])[:, None, None] * state[head] + added
        of_heads = [
            (state[head] @ read[:, head // (heads // groups), :, None]).squeeze(-1) + skip[head] * values[:, head]
            for head in range(heads)
        ]
        gate = projected[:, token, : SIZES.width]
        output.append(torch.cat(of_heads, dim=-1) * gate * torch.sigmoid(gate))
    return torch.stack(output, dim=1)


def test_the_scan_and_its_gradients_are_those_of_the_recurrence() -> None:
    inputs = [each.requires_grad_() for each in _inputs(11)]
    copies = [each.detach().clone().requires_grad_() for each in inputs]
    output = SplitConvScan.apply(*inputs, SIZES)
    expected = _token_by_token(*copies)
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    output.backward(weight)
    expected.backward(weight)
    for own, other in zip(inputs, copies, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_later_tokens_change_nothing_before_them() -> None:
    inputs = _inputs(11)
    before, _ = scan(SIZES, *inputs)
    inputs[0][:, 7:] += 1
    after, _ = scan(SIZES, *inputs)
    torch.testing.assert_close(before[:, :7], after[:, :7])


def test_the_norm_and_its_gradients_are_those_of_each_group() -> None:
    torch.manual_seed(0)
    rows, weight, grad = (
        torch.randn(5, 2, 12, requires_grad=True),
        torch.randn(12, requires_grad=True),
        torch.randn(5, 2, 12),
    )
    GroupedNorm.apply(rows, weight, 1e-5, 3).backward(grad)
    own = rows.grad, weight.grad
    rows.grad = weight.grad = None
    groups = [torch.nn.functional.rms_norm(part, (4,), eps=1e-5) for part in rows.split(4, dim=-1)]
    (torch.cat(groups, dim=-1) * weight).backward(grad)
    torch.testing.assert_close(own, (rows.grad, weight.grad))


@pytest.mark.parametrize("tokens", [64, 256])
def test_a_layer_keeps_what_its_formula_says(tokens: int) -> None:
    skip_if_newer_core_changed(TINY)
    model = TINY.with_layers(1)
    with Lab(model, num_layers=1, seq_length=tokens, backend="simulated") as lab:
        kept = sum(kept_by_module(lab.step()).values())
    assert kept == Mamba.of(model).kept_bytes(tokens, "none")


@pytest.mark.parametrize(
    ("fields", "layout", "words"),
    [
        ({"hybrid_override_pattern": "MM-*M"}, {}, "for each of 6 layers"),
        ({"hybrid_override_pattern": "MM-*ME"}, {}, "only in a model with experts"),
        ({"mamba_num_groups": 3}, {}, "must be a multiple of mamba_num_groups"),
        ({}, {"tensor_model_parallel_size": 4}, "groups of Mamba"),
        ({}, {"context_parallel_size": 2}, "does not predict of nemotron-h-tiny"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, str], layout: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lab(replace(TINY, **fields), seq_length=64, layout=Layout(**layout), backend="simulated")


def test_fp8_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="fp8_format is set, which memlab does not predict of nemotron-h-8b"):
        Scenario.of("nemotron-h-8b", state=TrainingState(fp8_format="hybrid"))


def test_a_newer_megatron_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.engines.megatron.megatron_versions.HAS_FORMER_HYBRID_MODELS", False)
    with pytest.raises(ValueError, match="layers of Mamba, which memlab builds with Megatron-Core"):
        Lab(TINY, seq_length=64, backend="simulated")


def test_full_recompute_does_what_the_version_of_megatron_core_does() -> None:
    skip_if_newer_core_changed(TINY)
    full = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    peaks = {}
    for core in ("0.16", "0.19"):
        with Lab(TINY, seq_length=256, backend="simulated", versions=Versions(megatron_core=core)) as lab:
            none, all_layers = lab.step(), lab.step(full)
        peaks[core] = none.activation_peak_bytes, all_layers.activation_peak_bytes
        assert ("recompute_granularity" in all_layers.without_effect) == (core == "0.16")
    assert peaks["0.16"][0] == peaks["0.16"][1] == peaks["0.19"][0] > peaks["0.19"][1]


def test_an_architecture_is_equal_to_itself_read_again() -> None:
    assert isinstance(TINY, Architecture) and TINY.parts_of(0) == (Mamba.of(TINY),)
    assert [type(part).__name__ for part in TINY.parts] == ["Mamba", "GroupedQueryAttention", "Dense"]


def test_packed_rows_of_a_job_are_predicted_as_one_sequence_and_named(tmp_path: Path) -> None:
    text = "grpo: {num_prompts_per_step: 8}\nloss_fn: {ratio_clip_min: 0.2}\npolicy:\n  model_name: nvidia/NVIDIA-Nemotron-Nano-9B-v2\n  train_micro_batch_size: 1\n  train_global_batch_size: 8\n  max_total_sequence_length: 4096\n  megatron_cfg: {enabled: true}\n  sequence_packing: {enabled: true, train_mb_tokens: 4096}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n"
    (tmp_path / "grpo.yaml").write_text(text)
    job = Job.read(tmp_path / "grpo.yaml")
    scenario, _ = job.required()
    assert scenario.packed_sequences is None and scenario.architecture.name == "nemotron-nano-v2-9b"
    assert scenario.versions.megatron_core == "0.19"
    assert any("layers are Mamba" in one.reason for one in job.not_modelled)


def test_a_script_without_positions_says_so_by_a_word(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc-per-node 8 pretrain_hybrid.py --hybrid-override-pattern 'M*-M' --num-layers 4 --bf16 "
        "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --vocab-size "
        "50304 --micro-batch-size 1 --position-embedding-type none"
    )
    job = Job.read(tmp_path / "run.sh")
    scenario, _ = job.required()
    assert "pretrain_hybrid.py" not in str(job.warnings)
    assert scenario.architecture.position_embedding_type == "none"
    assert scenario.architecture.hybrid_override_pattern == "M*-M"
    assert "as of megatron-core 0.19, since no version is given" in str(job.warnings)


def _script(folder: Path, flags: str) -> Job:
    (folder / "run.sh").write_text(
        f"torchrun --nproc-per-node 8 pretrain_hybrid.py {flags} --bf16 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 50304 --micro-batch-size 1"
    )
    return Job.read(folder / "run.sh")


def test_a_pattern_overrides_the_number_of_layers_with_a_word(tmp_path: Path) -> None:
    job = _script(tmp_path, "--hybrid-override-pattern 'M*-M' --num-layers 8")
    assert job.required()[0].num_layers == 4
    assert "num_layers 8 is ignored" in str(job.warnings)


def test_a_pattern_in_a_variable_without_quotes_is_no_pattern_of_files(tmp_path: Path) -> None:
    _script(tmp_path, "--hybrid-override-pattern $KINDS --num-layers 6")
    (tmp_path / "run.sh").write_text("KINDS=M-M*-M\n" + (tmp_path / "run.sh").read_text())
    job = Job.read(tmp_path / "run.sh")
    assert job.required()[0].architecture.hybrid_override_pattern == "M-M*-M"


def test_chunks_that_do_not_divide_into_stages_are_refused(tmp_path: Path) -> None:
    job = _script(tmp_path, "--hybrid-layer-pattern 'MM|MM|MM' --pipeline-model-parallel-size 2")
    assert job.scenario is None
    assert "3 chunks, must have a multiple of the 2 pipeline stages" in str(job.not_supported)


def test_a_share_of_layers_that_is_no_number_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: hybrid_attention_ratio is 'a lot', must be a share of the layers"):
        _script(tmp_path, "--hybrid-attention-ratio 'a lot' --num-layers 8")


def test_the_first_layers_of_a_model_may_have_no_mamba() -> None:
    skip_if_newer_core_changed(TINY)
    model = replace(TINY, hybrid_override_pattern="*-MM-M").with_layers(2)
    with Lab(model, num_layers=2, seq_length=64, backend="simulated") as lab:
        kept = sum(kept_by_module(lab.step()).values())
    assert kept == model.parts[0].kept_bytes(64, "none")  # of the first layer, which has attention


@pytest.mark.parametrize(("pattern", "stages"), [("MM-*M-", 1), ("MM-|*M-", 2)])
def test_a_configuration_of_megatron_bridge_says_which_layers_are_mamba(
    pattern: str, stages: int, tmp_path: Path
) -> None:
    (tmp_path / "run_config.yaml").write_text(
        f"model: {{hybrid_layer_pattern: '{pattern}', pipeline_model_parallel_size: {stages}, "
        "hidden_size: 128, ffn_hidden_size: 256, "
        "num_attention_heads: 4, num_query_groups: 2, kv_channels: 32, mamba_num_heads: 8, mamba_head_dim: 32, "
        "mamba_state_dim: 16, mamba_num_groups: 2, seq_length: 1024, make_vocab_size_divisible_by: 128, "
        "activation_func: {_target_: megatron.core.activations.squared_relu, _call_: false}}\n"
        "train: {micro_batch_size: 1, global_batch_size: 8}\nddp: {grad_reduce_in_fp32: true}\n"
        "tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 200}\nworld_size: 2\n"
    )
    job = Job.read(tmp_path / "run_config.yaml")
    scenario, _ = job.required()
    assert scenario.architecture == TINY  # whose vocabulary is 200 padded to 256
    assert not job.not_modelled
