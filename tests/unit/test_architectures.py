"""The architectures against what is published of them, and against the live Megatron models."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.package_info import MINOR
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.config.architectures import ARCHITECTURES, Architecture, find_architecture
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from tests.unit.corruption import corruptions
from tests.unit.refusal import refusal

# "Model size" of the safetensors on each model's Hugging Face page.
PUBLISHED_PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
}
# What transformers 5.24 counts of its own models with the sizes of their config.json files, on the meta device
# (`benchmarks.against_transformers`).
COUNTED_PARAMETERS = {
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-text-0.8b": 752_393_024,
    "qwen3.5-text-2b": 1_881_825_088,
    "qwen3.5-text-4b": 4_205_751_296,
    "qwen3.5-text-9b": 8_953_803_264,
    "qwen3.5-text-27b": 26_895_998_464,
    "qwen3.5-text-35b-a3b": 34_660_610_688,
    "qwen3.5-text-122b-a10b": 122_111_526_912,
    "qwen3.5-text-397b-a17b": 396_346_350_336,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "gpt3-6.7b": 50304 * 4096 + 2048 * 4096 + 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096,
    "llama-2-70b": 68_976_648_192,
    "phi-3-mini-4k": 3_821_079_552,
    "seed-coder-8b": 8_250_462_208,
    "falcon3-7b": 7_455_550_464,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-4b-text": 3_880_263_168,  # google/gemma-3-4b-it has 4,300,079,472 with tower and projector
    "gemma-3-1b": 999_885_952,
    "granite-3.3-2b": 2_533_539_840,
    "olmo-2-1b": 1_484_916_736,
    "glm-4-9b": 9_399_951_360,
    "command-r7b": 8_028_033_024,
    "phi-2": 2_779_683_840,
    "seed-oss-36b": 36_151_104_512,
    "nemotron-mini-4b": 4_190_509_056,
    "minitron-8b": 8_271_699_968,
    "nemotron-4-15b": 15_628_775_424,
    "nemotron-4-340b": 341_029_195_776,
    "nemotron-h-4b": 4_489_223_040,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-h-47b": 46_791_554_816,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-nano-v2-9b": 8_888_227_328,
    "nemotron-nano-v2-12b": 12_310_001_152,
    "nemotron-3-nano-4b": 3_973_556_832,
    "nemotron-3-nano-30b": 31_577_937_344,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "deepseek-llm-7b": 6_910_365_696,
    # 2 V h + h + 36 (h (4,096 + 2 x 1,024 + 4,096) + 4,096 + 2 x 1,024 + 3 h f + 2 h), V 151,680, h 4,096, f 11,008.
    "mimo-7b": 7_622_619_136,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "minimax-m2": 228_689_748_992,
    "olmoe-1b-7b": 6_919_161_856,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "moonlight-16b-a3b": 15_960_108_544,
    # By hand: 2 V h + h + 47 a + 46 m + 3 h 10,240; V 154,880, h 2,048, attention a with both norms
    # 768 h + 768 + 768 * 20 * 256 + 576 h + 512 + 512 * 20 * 448 + 20 * 256 h + 2 h, m 64 h + 65 * 3 h 1,536.
    "glm-4.7-flash": 29_943_390_976,
    "kimi-k2": 1_026_408_209_408,
}


@pytest.fixture(scope="module")
def megatron() -> object:
    """A CPU that stands in for CUDA, with Megatron's process group of one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from memlab.backends import cpu
        from memlab.engines import process_group
        from memlab.engines.megatron import build
    with cpu.cuda_replaced():
        process_group.join_alone(Layout())
        build.initialize_megatron(Layout())
        build.seed_megatron(1)
    yield cpu.cuda_replaced
    build.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def num_parameters_of_live_model(architecture: Architecture, megatron: object) -> int:
    """Counts the parameters of Megatron's model up to the first and the second of the layers that all others equal."""
    from memlab.engines.megatron.build import gpt_model
    from memlab.engines.megatron.layers.torch_layers import TorchProvider
    from memlab.engines.megatron.megatron_config import transformer_config

    def num_parameters(num_layers: int) -> int:
        scenario = Scenario.of(architecture, num_layers=num_layers)
        with megatron(), FakeTensorMode():  # type: ignore[operator]
            config = transformer_config(scenario, MemorySettings())
            config.perform_initialization = False
            model = gpt_model(scenario, config, TorchProvider)
        return sum(parameter.numel() for parameter in model.parameters())

    first = (architecture.moe_layer_freq or (1,)).index(1) + 1
    period = architecture.linear_attention_freq or 1
    assert isinstance(period, int), "each published model repeats its layers"
    first = max(first, period)
    one, two = num_parameters(first), num_parameters(first + period)
    return one + (architecture.num_layers - first) // period * (two - one)


OTHERS = [
    name
    for name, model in ARCHITECTURES.items()
    if model.only_in_transformers or (model.hybrid_override_pattern and not name.endswith("-tiny"))
]
"""Models that only transformers has here, or whose layers are not all but the first equal."""
LARGE = ("gpt-oss-120b", "kimi-k2", *(name for name in COUNTED_PARAMETERS if "qwen3.5" in name or "next" in name))
"""Models whose layers have the same parts as another one's, and many experts."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE))
        for name, model in ARCHITECTURES.items()
        if not name.endswith("-tiny") and name not in OTHERS
    ],
)
def test_the_live_model_has_the_published_number_of_parameters(name: str, megatron: object) -> None:
    architecture = find_architecture(name)
    if architecture.hybrid_override_pattern is not None and MINOR >= 17:
        pytest.skip("memlab has layers of Mamba of megatron-core 0.16")
    if architecture.experimental_attention_variant is not None and MINOR >= 18:
        pytest.skip("memlab has gated delta net of megatron-core 0.16 and 0.17")
    published = (PUBLISHED_PARAMETERS | COUNTED_PARAMETERS)[name]
    # megatron-core 0.19 normalizes the input of linear_q_proj once more (QKNormConfigResolver, mla_qk_norm_config.py).
    is_latent = architecture.multi_latent_attention and architecture.q_lora_rank is None
    further = architecture.num_layers * architecture.hidden_size * (MINOR >= 19 and is_latent)
    assert num_parameters_of_live_model(architecture, megatron) == published + further
    assert architecture.num_parameters == published


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_has_the_published_number_of_parameters(name: str) -> None:
    assert find_architecture(name).num_parameters == COUNTED_PARAMETERS[name]


def qwen_config() -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def phi_config() -> dict[str, object]:
    return {
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
    }


def newer(config: dict[str, object], *of_rope: str) -> dict[str, object]:
    """The config as newer versions of transformers write it."""
    rope = {name: config[name] for name in of_rope}
    return {name: value for name, value in config.items() if name not in of_rope} | {"rope_parameters": rope}


def renamed_experts() -> dict[str, object]:
    """The config as transformers 5.1 to 5.24 write it."""
    config = newer(qwen_config(), "rope_theta")
    return {"num_local_experts" if name == "num_experts" else name: value for name, value in config.items()}


def deepseek_config() -> dict[str, object]:
    """Returns the fields of DeepSeek-V3's own config.json that decide sizes or meaning."""
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "aux_loss_alpha": 0.001,
    }


MOONLIGHT = {
    "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "num_attention_heads": 16,
    "vocab_size": 163840, "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "q_lora_rank": None, "rope_scaling": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
    "num_attention_heads": 16, "vocab_size": 102400, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
}  # fmt: skip


def without(config: dict[str, object], *names: str) -> dict[str, object]:
    """Returns a config that leaves fields to the defaults of transformers' class."""
    return {name: value for name, value in config.items() if name not in names}


def given(config: dict[str, object]) -> dict[str, object]:
    """Returns a config without the fields of another one that its own family has not."""
    return {name: value for name, value in config.items() if value is not None}


GLM = {
    "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12288,
    "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 151552, "rms_norm_eps": 1e-5,
    "num_experts": None, "n_routed_experts": 160, "n_shared_experts": 1, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "attention_bias": True,
    "use_qk_norm": True,
}  # fmt: skip
AIR = GLM | {
    "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944, "n_routed_experts": 128,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
GLM_FLASH: dict[str, object] = {
    "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "intermediate_size": 10240,
    "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880, "rms_norm_eps": 1e-5,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_theta": 1000000,
    "mlp_layer_types": ["dense"] + ["sparse"] * 46, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "num_experts": None, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": None,
    "norm_topk_prob": None, "router_aux_loss_coef": 0.02,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5,
    "num_experts": None, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": None,
    "norm_topk_prob": None, "router_aux_loss_coef": 0.9, "rope_theta": 150000, "attention_bias": True,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "swiglu_limit": 7.0,
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072, "intermediate_size": 1536,
    "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 200064, "rope_theta": 5000000,
    "rotary_dim": 64, "num_experts": None, "num_local_experts": 256, "scoring_func": "sigmoid",
    "moe_intermediate_size": None, "norm_topk_prob": None, "use_routing_bias": True, "use_qk_norm": True,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None, "vocab_size": 50304, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": None,
    "norm_topk_prob": False, "router_aux_loss_coef": 0.01, "clip_qkv": None,
}  # fmt: skip
QWEN1_5_MOE = {
    "model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None, "vocab_size": 151936, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (deepseek_config(), "deepseek-v3"),
        (deepseek_config() | {"scoring_func": None, "topk_method": None}, "deepseek-v3"),  # as transformers writes it
        (deepseek_config() | MOONLIGHT, "moonlight-16b-a3b"),
        (deepseek_config() | DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (qwen_config() | QWEN1_5_MOE, "qwen1.5-moe-a2.7b"),
        (given(qwen_config() | GLM), "glm-4.5"),
        (given(qwen_config() | AIR), "glm-4.5-air"),
        (GLM_FLASH, "glm-4.7-flash"),
        (
            without(GLM_FLASH, "mlp_layer_types", "n_shared_experts", "n_group", "routed_scaling_factor"),
            "glm-4.7-flash",
        ),
        (given(qwen_config() | MIXTRAL), "mixtral-8x7b"),
        (without(given(qwen_config() | AIR), "n_shared_experts", "n_group", "topk_group"), "glm-4.5-air"),
        (without(given(qwen_config() | AIR), "first_k_dense_replace", "routed_scaling_factor"), "glm-4.5-air"),
        (without(deepseek_config(), "first_k_dense_replace", "n_shared_experts", "n_group"), "deepseek-v3"),
        (without(deepseek_config(), "topk_group", "routed_scaling_factor"), "deepseek-v3"),
        (given(qwen_config() | MINIMAX), "minimax-m2"),
        (given(qwen_config() | OLMOE), "olmoe-1b-7b"),
        (given(qwen_config() | OLMOE | {"norm_topk_prob": None}), "olmoe-1b-7b"),
        (given(qwen_config() | GPT_OSS), "gpt-oss-20b"),
        (given(qwen_config() | GPT_OSS | {"layer_types": None, "head_dim": None}), "gpt-oss-20b"),  # the class's own
        (qwen_config(), "qwen3-30b-a3b"),
        (phi_config(), "phi-4-mini"),
        (newer(qwen_config(), "rope_theta"), "qwen3-30b-a3b"),
        (newer(phi_config(), "rope_theta", "partial_rotary_factor"), "phi-4-mini"),
        (phi_config() | {"sliding_window": 262144, "max_position_embeddings": 131072}, "phi-4-mini"),
        (qwen_config() | {"sliding_window": 4096, "use_sliding_window": False}, "qwen3-30b-a3b"),
        # Qwen3-MoE has no shared experts, whatever a field of Qwen2-MoE says.
        (qwen_config() | {"qkv_bias": False, "shared_expert_intermediate_size": 768}, "qwen3-30b-a3b"),
        (renamed_experts(), "qwen3-30b-a3b"),
        (renamed_experts() | {"num_experts": 128}, "qwen3-30b-a3b"),
    ],
)
def test_a_hugging_face_config_gives_the_same_architecture(
    config: dict[str, object], name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert find_architecture(folder) == ARCHITECTURES[name]
    assert find_architecture(folder / "config.json") == ARCHITECTURES[name]


_DENSE = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
_OF_OTHER_TYPES: list[tuple[dict[str, object], int]] = [
    # The defaults of transformers' classes, and a model with tied embeddings.
    ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None, "vocab_size": 32000}, 6_738_415_616),
    ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 28}, 596_049_920),
    ({"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 151936}, 12_049_461_248),
    ({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "sliding_window": None}, 7_241_732_096),
    ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, 46_702_792_704),
]  # fmt: skip
"""Each config with the number of parameters that transformers 5.24 counts of its own model on the meta device."""


@pytest.mark.parametrize(("config", "num_parameters"), _OF_OTHER_TYPES, ids=lambda one: str(one)[:24])
def test_models_with_the_same_parts_have_transformers_number_of_parameters(
    config: dict[str, object], num_parameters: int, megatron: object, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_DENSE | config))
    architecture = find_architecture(tmp_path)
    assert architecture.num_parameters == num_parameters
    assert num_parameters_of_live_model(architecture, megatron) == num_parameters
    assert (
        architecture.family,
        architecture.qk_layernorm,
        architecture.routes,
        architecture.moe_router_pre_softmax,
    ) == (
        config["model_type"],
        config["model_type"] == "qwen3",
        config["model_type"] == "mixtral",
        False,
    )


@pytest.mark.parametrize(
    "path",
    [
        "models--Qwen--Qwen3-30B-A3B/snapshots/ad44e777bcd18fa416d9da3bd8f70d33ebb85d39",
        "Qwen/Qwen3-30B-A3B/snapshots/ad44e777bcd18fa416d9da3bd8f70d33ebb85d39",
        "Qwen/Qwen3-30B-A3B",
    ],
)
def test_a_model_in_a_cache_has_its_own_name(path: str, tmp_path: Path) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(qwen_config()))
    assert find_architecture(folder).name == find_architecture(folder / "config.json").name == "Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported: memlab reads llama, mistral, phi3, qwen2"),
        ({"mlp_only_layers": [0, "1"]}, r"mlp_only_layers is \[0, '1'\], must be a list of numbers of layers"),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"model_type": "deepseek_v3", "topk_method": "best"}, "v_head_dim"),
        ({"topk_method": "best"}, "topk_method 'best' is not modelled: memlab has greedy"),
        ({"scoring_func": "tanh"}, "moe_router_score_function is 'tanh', must be softmax or sigmoid"),
        ({"first_k_dense_replace": 1.5}, "first_k_dense_replace is 1.5, must be a number of layers"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not modelled: memlab has 1 only"),
        ({"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 1}, "must divide the 128 experts"),
        ({"topk_method": "group_limited_greedy", "n_group": 64, "topk_group": 2}, "must hold 8 experts"),
        ({"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4}, "must have sigmoid by a rule of Megatron-Core"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias true is not supported"),
        ({"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not modelled"),
        (given(GPT_OSS | {"swiglu_alpha": 1.5, "num_local_experts": 128}), "swiglu_alpha 1.5 is not modelled"),
        (given(GPT_OSS | {"attention_bias": False, "num_local_experts": 128}), "attention_bias false is not modelled"),
        (
            given(GPT_OSS | {"layer_types": ["chunked_attention"] * 24, "num_local_experts": 128}),
            "'chunked_attention', which is not modelled",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "has 'sliding_attention'"),
        ({"model_type": "mixtral", "sliding_window": 4096, "max_position_embeddings": 32768}, "sliding_window 4096"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "at least max_position_embeddings, None"),
        ({"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096 is not"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not modelled"),
        ({"qkv_bias": True}, "qkv_bias true is not supported"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5.5},
            "shared_expert_intermediate_size is 5.5, must be a whole number",
        ),
        ({"model_type": "qwen2_moe"}, "field 'shared_expert_intermediate_size' is missing"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (deepseek_config() | {"q_lora_rank": None}, "field 'q_lora_rank' is missing"),
        ({"num_local_experts": 64}, "it has num_experts 128 and num_local_experts 64, two names for the same number"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, "moe_router_topk is 1 without moe_router_pre_softmax"),
        ({"hidden_size": None}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not modelled"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"hidden_size": "2048"}, "hidden_size is '2048', must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, must be a whole number"),
        ({"num_attention_heads": 10**30}, "num_attention_heads is 1000"),
        ({"num_hidden_layers": 10**6}, "num_layers is 1000000, must be at most 10,000"),
        ({"num_experts": 10**12}, "must be at most 16,384"),
        (
            {"hidden_size": 2**20, "intermediate_size": 2**22, "moe_intermediate_size": 2**22},
            "parameters, must have at most",
        ),
        ({"head_dim": 33}, "must be an even number"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', must be true or false"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob is 'no', must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1, must be true or false"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, must be a number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rms_norm_eps": 0}, "layernorm_epsilon is 0.0, must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps is "),
        ({"rope_theta": -5}, "rope_theta is -5"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 10**400}, "rope_theta is a number of more than 100 digits"),
        ({"rope_parameters": [1]}, "rope_parameters is "),
        ({"rope_parameters": {"full_attention": "x"}}, "rope_parameters is "),
        ({"router_aux_loss_coef": float("inf")}, "router_aux_loss_coef is inf"),
        ({"router_aux_loss_coef": "x"}, "router_aux_loss_coef is 'x'"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32, must be a multiple"),
        ({"num_experts_per_tok": 129}, "moe_router_topk is 129, must be at most"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_a_config_that_memlab_cannot_model_is_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    config = qwen_config() | change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        find_architecture(tmp_path)


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'qwen4' is neither.*qwen3-30b-a3b, phi-4, .*mixtral-8x7b, "):
        find_architecture("qwen4")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rope_theta", None, ""),
        ("hidden_size", [1], "whole number"),
        ("partial_rotary_factor", 5, "at most 1"),
        ("partial_rotary_factor", -1, "at least 0"),
    ],
)
def test_a_field_of_another_kind_is_taken_as_left_out_or_refused(
    field: str, value: object, words: str, tmp_path: Path
) -> None:
    config = {"model_type": "phi3", "num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 2}
    config |= {"intermediate_size": 256, "vocab_size": 256, "rms_norm_eps": 1e-5, field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if words:
        with pytest.raises(ValueError, match=words):
            find_architecture(tmp_path / "config.json")
    else:
        assert find_architecture(tmp_path / "config.json").rotary_base == 10000


def test_what_a_config_of_another_age_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "rope_parameters": {"rope_theta": 1e6},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_architecture(tmp_path / "config.json")
    assert (found.num_query_groups, found.rotary_base) == (4, 1e6)
    assert (found.moe_router_pre_softmax, found.moe_aux_loss_coeff) == (True, 0.001)


@pytest.mark.parametrize("field", ["num_experts", "num_attention_heads", "hidden_size", "rms_norm_eps"])
def test_null_is_refused_where_a_field_is_needed(field: str, tmp_path: Path) -> None:
    """A qwen3_moe with null experts must not become a dense model."""
    (tmp_path / "config.json").write_text(json.dumps(qwen_config() | {field: None}))
    with pytest.raises(ValueError, match=f"{field} is None, must be a"):
        find_architecture(tmp_path)


def saved_and_loaded(scenario: Scenario) -> None:
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario


@pytest.mark.parametrize("config", [qwen_config(), phi_config()], ids=["qwen3_moe", "phi3"])
def test_a_damaged_config_is_refused_in_a_line_or_read(config: dict[str, object], tmp_path: Path) -> None:
    refused, path = 0, tmp_path / "config.json"
    for damaged in corruptions(json.dumps(config, indent=1).encode(), "json", seed=3):
        path.write_bytes(damaged)
        refused += bool(refusal(lambda: saved_and_loaded(Scenario.of(path))))
    assert refused > 100


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "a\nb", "y" * 5000])
def test_a_path_that_cannot_be_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(ValueError, match="choose from qwen3-30b-a3b") as refused:
        find_architecture(name)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_length": 10**15}, "seq_length is 1000000000000000, must be at most 16,777,216"),
        ({"seq_length": 2**62}, "must be at most"),
        ({"micro_batch_size": 10**9}, "micro_batch_size is 1000000000, must be at most 65,536"),
        ({"micro_batch_size": 2**62}, "must be at most"),
        ({"micro_batch_size": 2**16, "seq_length": 4096}, "is 268,435,456 tokens, must be at most 67,108,864"),
        ({"num_microbatches": 10**18}, "must be at most 16,384"),
        ({"num_layers": 10**18}, "must be at most 10,000"),
        ({"num_layers": 10**400}, "num_layers is a number of more than 100 digits, must be at most 10,000"),
    ],
)
def test_sizes_beyond_any_real_job_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario.of("phi-4-tiny", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 10**9, "expert_model_parallel_size": 3},
        {"data_parallel_size": 10**20},
        {"data_parallel_size": 1000, "tensor_model_parallel_size": 1000},
    ],
)
def test_layouts_beyond_any_real_job_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must (be|have) at most 131,072 \(more than any real job has\)"):
        Layout(**sizes)


def test_an_activation_of_more_elements_than_any_real_one_is_refused() -> None:
    sizes = {"num_moe_experts": 2**14, "moe_router_topk": 2**14, "moe_ffn_hidden_size": 2**10}
    wide = replace(ARCHITECTURES["qwen3-moe-tiny"], **sizes)
    most = {"seq_length": 2**24, "micro_batch_size": 4}
    assert Scenario.of(wide, **most).architecture.largest_row == 2**24
    with pytest.raises(ValueError, match="the largest activation has 67,108,864 tokens x 16,793,600 elements, must be"):
        Scenario.of(replace(wide, moe_ffn_hidden_size=2**10 + 1), **most)


def test_large_real_jobs_are_accepted() -> None:
    assert Scenario.of("phi-4-tiny", seq_length=1_048_576, num_layers=1000).num_layers == 1000
    assert Scenario.of("phi-4-tiny", seq_length=10_485_760).seq_length == 10_485_760
    assert Scenario.of("phi-4-tiny", micro_batch_size=4096, num_microbatches=4096).tokens_per_step == 2**34
    job = Layout(data_parallel_size=12_500, tensor_model_parallel_size=1, pipeline_model_parallel_size=8)
    assert Scenario.of("phi-4", layout=job).layout.world_size == 100_000


@pytest.mark.parametrize("name", ["num_layers", "seq_length", "architecture"])
def test_a_scenario_holds_what_its_types_say(name: str) -> None:
    values = {"architecture": ARCHITECTURES["phi-4-tiny"], "num_layers": 1, "seq_length": 8} | {name: None}
    with pytest.raises(ValueError, match=f"{name} is None"):
        Scenario(**values)  # type: ignore[arg-type]


def test_a_path_that_does_not_exist_is_no_published_model(tmp_path: Path) -> None:
    """A mistyped path of a changed model would otherwise predict another one."""
    for name in (tmp_path / "Qwen3-8B", "./Qwen3-8B", "../Qwen3-8B", "runs/mine/Qwen3-8B"):
        with pytest.raises(ValueError, match="is neither a known name nor"):
            find_architecture(name)
    for name in ("Qwen/Qwen3-8B", "Qwen3-8B", "/cache/hub/models--Qwen--Qwen3-8B/snapshots/1"):
        assert find_architecture(name) == ARCHITECTURES["qwen3-8b"]
