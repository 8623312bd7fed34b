"""An option's row agrees with its field, with the other options, and with Megatron's own configs."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, dataclass, field
from typing import Any

import pytest

from memlab.cli import build_parser
from memlab.commands.shared.option_flags import add_option_flags
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.layout import Layout
from memlab.config.option import Option, check_options, option, options_of, unread
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError

pytestmark = pytest.mark.versions

CLASSES: tuple[type, ...] = (Scenario, Layout, TrainingState, AllocatorSettings, MemorySettings)
OPTIONS = {name: one for cls in CLASSES for name, one in options_of(cls).items()}


def example(one: Option) -> tuple[list[str], Any]:
    """The words of a command line that give an option a value, and the value."""
    flag = f"--{one.name.replace('_', '-')}"
    if one.kind == "switch":
        is_on = one.default is not True
        return [flag if is_on else flag.replace("--", "--no-", 1)], is_on
    texts = {
        "choice": one.choices[-1:],
        "modules": one.choices[:2] or ("linear_qkv",),
        "whole": ("7",),
        "number": ("0.5",),
        "name": ("phi-4-tiny",),
    }[one.kind]
    values = {"choice": texts[0], "modules": list(texts), "whole": 7, "number": 0.5, "name": texts[0]}
    return [flag, ",".join(texts)], values[one.kind]


def test_an_option_s_name_is_that_of_one_class() -> None:
    assert len(OPTIONS) == sum(len(options_of(cls)) for cls in CLASSES) > 60


def test_each_option_has_a_flag() -> None:
    parser = build_parser(["predict"])
    without = parser.parse_args(["predict", "phi-4-tiny"])
    for name, one in OPTIONS.items():
        words, value = example(one)
        assert getattr(parser.parse_args(["predict", "phi-4-tiny", *words]), name) == value
        assert getattr(without, name) is None, "the class has the default"


@pytest.mark.parametrize("cls", CLASSES)
def test_what_an_option_needs_is_an_option_of_its_class(cls: type) -> None:
    for one in options_of(cls).values():
        if one.needs:
            needed = options_of(cls)[one.needs]
            assert not one.needs_value or one.needs_value in needed.choices
        assert set(re.findall(r"`(\w+)`", one.help)) <= OPTIONS.keys()


@pytest.mark.parametrize("one", OPTIONS.values(), ids=OPTIONS)
def test_the_default_that_a_text_names_is_the_field_s(one: Option) -> None:
    for said in re.findall(r"\(default ([\w.]+)", one.help):
        assert said == (f"{one.default:g}" if one.kind == "number" else str(one.default))
    if one.default in (None, MISSING):
        assert not re.search(r"\(default [\w.]", one.help)


def test_megatron_s_configs_have_the_names_of_the_rows() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = {"model": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    for one in OPTIONS.values():
        assert {place.partition(".")[0] for place in one.megatron.split()} <= configs.keys()
        for name, cls in configs.items():
            theirs = one.name_in(name)
            assert theirs is None or one.since is not None or theirs in cls.__dataclass_fields__


@pytest.mark.parametrize("cls", [TrainingState, AllocatorSettings, MemorySettings])
def test_a_value_of_another_type_is_refused_with_its_option(cls: type) -> None:
    for name in options_of(cls):
        with pytest.raises(RuleError) as refusal:
            (TrainingState.of_options if cls is TrainingState else lambda values: cls(**values))({name: object()})
        assert refusal.value.fields[0] == name
        assert str(refusal.value).startswith(f"{name} is ")
        assert "\n" not in str(refusal.value)


def test_what_nothing_reads_is_named_by_its_rule() -> None:
    assert unread(MemorySettings, {"recompute_granularity": "full", "offload_modules": ("core_attn",)}) == {
        "recompute_modules": "only recompute_granularity 'selective' reads it"
    }
    reasons = unread(TrainingState, TrainingState(optimizer_cpu_offload=True, fp8_format="e4m3").options())
    of_adapters = [name for name in options_of(TrainingState) if name.startswith("lora_") and name != "lora_rank"]
    of_overlap = [name for name in options_of(TrainingState) if name.startswith("tp_comm_") and name[8:] != "overlap"]
    assert reasons == {
        "cross_entropy_fusion_impl": "only cross_entropy_loss_fusion reads it",
        "cuda_graph_modules": "only cuda_graph_impl 'transformer_engine' reads it",
        "mtp_detach_heads": "only mtp_num_layers reads it",
        **dict.fromkeys(
            ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"), "only moe_expert_capacity_factor reads it"
        ),
        **dict.fromkeys(("master_weights", "store_param_remainders"), "only adam_implementation 'te_fused' reads it"),
        **dict.fromkeys(of_adapters, "only lora_rank reads it"),
        "topk_logits_k": "only loss 'topk_logits' reads it",
        "gkd_logits_topk": "only loss 'jsd' reads it",
        "logit_kl_topk": "only loss 'logits_kl' reads it",
        "entropy_chunk_size": "only loss 'vocab_parallel_cross_entropy' reads it",
        "reuse_grad_buf_for_mxfp8_param_ag": "only fp8_param_gather reads it",
        "overlap_param_gather_with_optimizer_step": "only overlap_param_gather reads it",
        "moe_deepep_num_sms": "only moe_flex_dispatcher_backend 'deepep' reads it",
        "moe_flex_dispatcher_backend": "only moe_token_dispatcher_type 'flex' reads it",
        "teacher_model": "only reference_model 'copy' reads it",
        **dict.fromkeys(
            ("freeze_vision_tower", "images_per_sequence", "patches_per_image"), "only vision_tower reads it"
        ),
        **dict.fromkeys(of_overlap, "only tp_comm_overlap reads it"),
    }


def test_a_row_is_enough_for_a_new_option() -> None:
    @dataclass(kw_only=True)
    class Made:
        plain: int = field(default=1)
        width: int = option(4, "how wide; with `depth` 2 it is halved", at_least=2, at_most=9, advice="give 4")
        depth: int | None = option(None, "how deep", needs="width")

    assert [*options_of(Made)] == ["width", "depth"]
    parser = argparse.ArgumentParser()
    add_option_flags(parser.add_argument_group(), Made)
    text = " ".join(parser.format_help().split())
    assert "--width N how wide; with --depth 2 it is halved --depth N with --width: how deep" in text
    check_options(Made(width=9))
    with pytest.raises(RuleError, match=r"width is 10, must be at most 9 .*: give 4"):
        check_options(Made(width=10))
