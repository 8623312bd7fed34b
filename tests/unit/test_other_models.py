"""Models that memlab lacks: their fields are named, and a language model beside towers is predicted, with the gap said."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memlab.cli import main
from memlab.config.architectures import ARCHITECTURES
from memlab.config.option import options_of
from memlab.config.training_state import TrainingState
from memlab.jobs.any_model import OfAnyModel, of_any_model
from memlab.jobs.job import Job
from memlab.jobs.other_models import _models, of_config, other_model

SWIFT = "NPROC_PER_NODE=8 megatron sft --model {model} --max_length 4096 --global_batch_size 16 --padding_free false\n"
NEMO_RL = """
policy:
  model_name: {model}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  logprob_batch_size: 2
  max_total_sequence_length: 4096
  sequence_packing: {{enabled: false}}
  megatron_cfg: {{enabled: true, apply_rope_fusion: true, pipeline_model_parallel_size: 2}}
  generation: {{backend: vllm, colocated: {{enabled: true}}}}
cluster: {{num_nodes: 1, gpus_per_node: 8}}
grpo: {{num_prompts_per_step: 8, num_generations_per_prompt: 8}}
"""
BRIDGE = "model: {{hf_model_id: {model}}}\ndataset: {{seq_length: 4096}}\ntrain: {{micro_batch_size: 1, global_batch_size: 8}}\n"
FP16 = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 1024 --num-attention-heads 16
 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 64 --vocab-size 50257
 --tensor-model-parallel-size 2 --fp16
""".replace("\n ", " ")
Read = Callable[..., Job]


def _fields(read: Read) -> OfAnyModel:
    common = of_any_model(read(), lambda model: read(architecture=model, fields_only=True))
    assert common is not None
    return common


def _job(tmp_path: Path, text: str, name: str, model: str = "", **how: Any) -> Read:
    (path := tmp_path / name).write_text(text.format(model=model) if model else text)
    return lambda **more: Job.read(path, **how, **more)


@pytest.mark.parametrize("model", {id(one): one for one in _models().values()}.values(), ids=lambda model: model.name)
def test_a_row_is_whole(model: Any) -> None:
    assert model.source and model.lacks
    pattern = model.fields.get("hybrid_layer_pattern", "-" * model.all_fields().get("num_layers", 0))
    assert len(pattern) == model.all_fields().get("num_layers", 0) and set(pattern) <= set("M*-E")
    assert model.provider.keys() <= {*options_of(TrainingState), "apply_rope_fusion"}
    assert ("E" in pattern or "hybrid_layer_pattern" not in model.fields) or "num_moe_experts" not in model.fields
    for stand_in in model.stand_ins():
        known = {name: value for name, value in model.fields.items() if name in ("num_layers", "hidden_size")}
        assert all(getattr(stand_in, name) == value for name, value in known.items())
        assert stand_in.routes == ("num_moe_experts" in model.all_fields()) or "hidden_size" not in model.fields


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2.5-vl-72b", "qwen2_5_vl.Qwen2_5_VLTextConfig"),
        ("qwen3.5-9b", "qwen3_5.Qwen3_5TextConfig"),
        ("qwen3.6-35b-a3b", "qwen3_5_moe.Qwen3_5MoeTextConfig"),
        ("qwen2.5-omni-7b", "qwen2_5_omni.Qwen2_5OmniTextConfig"),
    ],
)
def test_sizes_are_the_defaults_of_the_family_s_class(name: str, config: str) -> None:
    """These rows come from scripts and from memlab's own models; transformers' classes default to the same models."""
    module, _, kind = config.partition(".")
    try:
        found = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    except ModuleNotFoundError:
        pytest.skip("an older transformers")
    model, sizes = other_model(name), getattr(found, kind)()
    assert model is not None
    ours = model.all_fields()
    theirs = {"num_layers": "num_hidden_layers", "num_query_groups": "num_key_value_heads"}
    theirs |= {"num_moe_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
    theirs |= {"moe_ffn_hidden_size": "moe_intermediate_size", "kv_channels": "head_dim"}
    for field in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size", *theirs):
        if hasattr(sizes, theirs.get(field, field)):
            assert ours.get(field) == getattr(sizes, theirs.get(field, field)), field


@pytest.mark.parametrize("name", ["zai-org/GLM-5", "/data/GLM-5"])
def test_a_model_that_memlab_lacks_is_named_with_its_fields(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = _job(tmp_path, NEMO_RL, "job.yaml", name)
    job, common = read(), _fields(read)
    assert job.scenario is None and "sparse attention" in (job.not_supported or "") and "indexer" in job.lacks[0]
    assert common.models == ("glm-5",)
    assert common.model["fields"]["num_layers"] == 78
    assert common.values["layout"]["data_parallel_size"] == 4 and not common.depends_on_model
    assert main(["job", str(tmp_path / "job.yaml")]) == 1
    said = capsys.readouterr().out
    assert "of the model glm-5, of which memlab does not have: sparse attention" in said
    assert "num_moe_experts 256" in said and "glm5-744B-A40B.sh" in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            {"moe_shared_expert_overlap": True, "moe_router_dtype": "fp32"},
        ),
        ("tencent/Hy3", {"moe_shared_expert_overlap": False, "moe_router_load_balancing_type": "none"}),
    ],
)
def test_what_the_provider_of_a_model_sets_is_told(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    common = _fields(_job(tmp_path, BRIDGE, "job.yaml", name, format_name="bridge", world_size=8))
    assert expected.items() <= common.values["state"].items()


def test_sizes_without_a_source_decide_nothing(tmp_path: Path) -> None:
    common = _fields(_job(tmp_path, SWIFT, "run.sh", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"))
    assert "num_layers" not in common.model["fields"] and common.values["workload"]["num_microbatches"] == 2


@pytest.mark.parametrize("text", [SWIFT, NEMO_RL], ids=["ms-swift", "nemo-rl"])
@pytest.mark.parametrize(
    ("model", "language_model"),
    [
        ("Qwen2.5-VL-7B-Instruct", "qwen2.5-7b"),
        ("Qwen3-VL-8B-Instruct", "qwen3-8b"),
        ("Qwen3.5-9B", "qwen3.5-text-9b"),
    ],
)
def test_the_language_model_beside_a_tower_is_predicted_and_the_tower_is_named(
    model: str, language_model: str, text: str, tmp_path: Path
) -> None:
    name = "run.sh" if text is SWIFT else "job.yaml"
    job = _job(tmp_path, text, name, f"Qwen/{model}")()
    scenario = job.required()[0]
    alone = _job(tmp_path, text, name, language_model)().required()[0]
    assert scenario.architecture.parts == ARCHITECTURES[language_model].parts
    assert scenario.layout == alone.layout and scenario.architecture.name == model.lower().removesuffix("-instruct")
    assert [one.effect for one in job.not_modelled if "a vision tower" in one.reason] == ["more"]
    assert not scenario.state.apply_rope_fusion
    assert any("Megatron-Bridge switches it off or refuses it" in one for one in job.warnings) is (text is NEMO_RL)


def test_a_language_model_that_megatron_bridge_freezes_is_not_predicted_as_trained(tmp_path: Path) -> None:
    name = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    job = _job(tmp_path, NEMO_RL, "job.yaml", name)()
    assert job.scenario is None and "freezes its language model" in (job.not_supported or "")
    assert _job(tmp_path, SWIFT, "run.sh", name)().required()[0].architecture.num_moe_experts == 128
    text = f"""world_size: 8
model: {{hf_model_id: {name}, seq_length: 4096, freeze_language_model: %s}}
train: {{micro_batch_size: 1, global_batch_size: 8}}
"""
    for frozen in ("false", "true"):
        (path := tmp_path / "run_config.yaml").write_text(text % frozen)
        assert (Job.read(path, format_name="bridge").scenario is None) is (frozen == "true")


def test_the_language_model_of_an_omni_model_has_no_fused_rope_under_nemo_rl(tmp_path: Path) -> None:
    """``Qwen3VLSelfAttention`` refuses it, which both of Megatron-Bridge's Omni models have."""
    job = _job(tmp_path, NEMO_RL, "job.yaml", "Qwen/Qwen2.5-Omni-7B")()
    assert not job.required()[0].state.apply_rope_fusion
    assert any("Megatron-Bridge switches it off or refuses it" in one for one in job.warnings)


def test_a_config_with_latents_has_latent_attention(tmp_path: Path) -> None:
    (tmp_path / "Newest-9B").mkdir()
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = {"model_type": "newest", "num_hidden_layers": 34, "hidden_size": 512, **sizes}
    (tmp_path / "Newest-9B" / "config.json").write_text(json.dumps(config))
    common = _fields(_job(tmp_path, NEMO_RL, "job.yaml", "Newest-9B"))
    assert common.model["fields"]["multi_latent_attention"] is True
    found = of_config("Newest-9B", tmp_path)
    assert found is not None
    assert {(one.kv_lora_rank, one.qk_head_dim, one.v_head_dim) for one in found.stand_ins()} == {(32, 16, 16)}
    assert all(one.multi_latent_attention for one in found.stand_ins())


def test_a_config_of_an_unknown_family_names_its_sizes(tmp_path: Path) -> None:
    (tmp_path / "Newest-9B").mkdir()
    config = {"model_type": "newest", "text_config": {"num_hidden_layers": 34, "hidden_size": 512, "num_experts": 0}}
    (tmp_path / "Newest-9B" / "config.json").write_text(json.dumps(config))
    common = _fields(_job(tmp_path, NEMO_RL, "job.yaml", "Newest-9B"))
    assert common.model["fields"] == {"num_layers": 34, "hidden_size": 512}
    assert common.model["lacks"] == "layers of the kind 'newest'" and common.values["layout"]["data_parallel_size"] == 4


def test_sizes_of_a_file_take_the_place_of_layers_that_memlab_lacks(tmp_path: Path) -> None:
    common = _fields(
        _job(tmp_path, FP16.replace("--fp16", "--bf16 --heterogeneous-layers-config-path layers.json"), "run.sh")
    )
    assert common.models == ("run",) and common.values["layout"]["data_parallel_size"] == 4
    assert not [name for name in common.model["fields"] if name.startswith(("kv_lora", "v_head", "moe_"))]


def test_a_model_that_is_given_takes_the_job_s_place_in_another_type_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job(tmp_path, FP16, "run.sh")
    assert main(["job", str(tmp_path / "run.sh"), "--architecture", "llama-3.1-8b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["of_any_model"]["models"] == ["llama-3.1-8b"]


def test_a_job_in_fp16_has_its_fields_and_no_prediction(tmp_path: Path) -> None:
    read = _job(tmp_path, FP16, "run.sh")
    job, common = read(), _fields(read)
    assert job.scenario is None and "fp16" in job.precision
    assert common.values["workload"]["dtype"] == "fp16" and common.values["layout"]["data_parallel_size"] == 4
    assert "grad_reduce_in_bf16" not in common.values["state"]
    assert common.values["workload"]["num_microbatches"] == 4 and common.model["fields"]["hidden_size"] == 1024
