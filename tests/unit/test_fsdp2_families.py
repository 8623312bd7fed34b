"""Further families of transformers under the engine fsdp2: the loss is transformers' own, and a step is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import Lab, TrainingState
from memlab.backends import find_backend
from memlab.backends.simulated import predicting
from memlab.config.architectures import ARCHITECTURES, HUGGING_FACE_NAMES, Architecture, find_architecture
from memlab.config.families import FAMILIES
from memlab.config.hugging_face import architecture_fields
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
SIZES: dict[str, Any] = {"num_layers": 1, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}


def tiny(name: str) -> Architecture:
    model = ARCHITECTURES[name]
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4,
                             "num_query_groups": 4 if model.family in ("olmo2", "phi") else 2, "kv_channels": 16,
                             "vocab_size": 512}  # fmt: skip
    if isinstance(model.window_attn_skip_freq, tuple):
        sizes |= {"window_attn_skip_freq": model.window_attn_skip_freq[-2:]}
    sizes |= {"window_size": (15, 0)} if model.window_size is not None else {}
    sizes |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128} if model.routes else {}
    return replace(model, name=f"{name}-tiny", **sizes)


@pytest.mark.parametrize(
    "name",
    [
        *("granite-3.3-2b", "mistral-7b-v0.1", "mixtral-8x7b"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("olmo-2-1b", "glm-4-9b", "gemma-7b", "phi-3-mini-4k"),
                *("command-r7b", "phi-2", "seed-oss-36b"),
            )
        ),
    ],
)
def test_a_step_has_transformers_loss_and_is_predicted(name: str) -> None:
    from memlab.engines.fsdp2.hugging_face import build_model

    model = tiny(name)
    # A CPU keeps mean and deviation of LayerNorm in the type of its inputs, a GPU in fp32.
    dtype = "fp32" if model.normalization == "LayerNorm" else "bf16"
    scenario = Scenario.of(model, **SIZES | {"dtype": dtype})
    with Lab(scenario, backend=find_backend("cpu")) as lab:
        live = lab.step()
    with Lab(scenario, backend=predicting("cpu")) as lab:
        predicted = lab.step()
    assert (live.static_bytes, live.peak_by_category) == (predicted.static_bytes, predicted.peak_by_category)
    torch.manual_seed(scenario.seed)
    built = build_model(scenario, getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]), attention="eager")
    tokens = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(scenario.seed))
    own = built(input_ids=tokens, labels=tokens, position_ids=torch.arange(64).unsqueeze(0)).loss.item()
    # Each of the two drops other values.
    assert live.loss == pytest.approx(own, rel=1e-2 if FAMILIES[model.family].dropout else 1e-3)


def test_granite_is_named_after_the_model_whose_sizes_it_has() -> None:
    """The instruct model's ``config.json``, from which the row is, has 49,159 tokens."""
    assert HUGGING_FACE_NAMES["granite-3.3-2b"] == "ibm-granite/granite-3.3-2b-instruct"
    assert find_architecture("ibm-granite/granite-3.3-2b-instruct").vocab_size == 49159


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("granite-3.3-2b", "multipliers"),
        ("gemma-7b", "GELU gates"),
        ("olmo-2-1b", "norms"),
        ("command-r7b", "attention and MLP side"),
        ("seed-oss-36b", "dropout"),
    ],
)
def test_megatron_does_not_build_them(name: str, what: str) -> None:
    with pytest.raises(RuleError, match=f"whose {what}.* transformers' model only: choose engine 'fsdp2'"):
        Scenario.of(name)


@pytest.mark.parametrize(
    ("given", "longest", "window"),
    [
        ({"sliding_window": 4096}, 32768, (4095, 0)),
        ({"sliding_window": 4096}, 4096, None),
        ({}, 32768, (4095, 0)),  # as MistralConfig of transformers 5.24 has it
        ({"sliding_window": None}, 32768, None),
    ],
)
def test_a_window_of_a_config_counts_below_the_longest_sequence(
    given: dict[str, int | None], longest: int, window: tuple[int, int] | None
) -> None:
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    values = dict.fromkeys(sizes, 32) | {
        "head_dim": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }
    fields = architecture_fields({"model_type": "mistral", "max_position_embeddings": longest} | values | given)
    assert Architecture(name="a", **fields).window_size == window


@pytest.mark.parametrize("given", [{}, {"attention_bias": True}, {"attention_bias": False}])
def test_the_biases_of_a_glm_are_those_of_transformers(given: dict[str, bool]) -> None:
    from transformers import GlmConfig

    config = GlmConfig(**given).to_dict()
    config = {name: value for name, value in config.items() if name != "attention_bias"} | given
    assert architecture_fields(config)["add_qkv_bias"] == GlmConfig(**given).attention_bias


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("phi", {"resid_pdrop": 0.0}, "resid_pdrop 0.0 is not modelled: memlab models 0.1"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True is not modelled: memlab models False"),
        ("seed_oss", {"residual_dropout": 0.2}, "residual_dropout 0.2 is not modelled: memlab models 0.1"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias True is not modelled"),
    ],
)
def test_dropout_and_biases_are_those_of_published_models(family: str, values: dict[str, Any], words: str) -> None:
    from transformers import AutoConfig

    own = {"resid_pdrop": 0.1} if family == "phi" else {}
    assert architecture_fields(AutoConfig.for_model(family, **own).to_dict())["family"] == family
    with pytest.raises(ValueError, match=words):
        architecture_fields(AutoConfig.for_model(family, **own | values).to_dict())


def test_a_phi_without_a_word_on_dropout_has_none_as_in_transformers() -> None:
    from transformers import PhiConfig

    config = PhiConfig().to_dict()
    assert config.pop("resid_pdrop") == 0.0
    with pytest.raises(ValueError, match=r"resid_pdrop 0\.0 is not modelled: memlab models 0\.1"):
        architecture_fields(config)


def test_backward_of_eager_attention_has_a_temporary_as_large_as_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Phi-2 on an H200 it is what the peak was 0.32 % above the prediction without it."""
    from memlab.engines.fsdp2 import attention

    sizes = SIZES | {"seq_length": 512, "state": TrainingState(attn_implementation="eager")}
    peaks = []
    for _ in range(2):
        with Lab(Scenario.of(tiny("phi-2"), **sizes), backend="simulated") as lab:
            peaks.append(lab.step().peak_allocated_bytes)
        monkeypatch.setattr(attention, "_hold_temporary_of_softmax", lambda backward: None)
    heads, bytes_of_fp32 = 4, 4
    assert peaks[0] - peaks[1] == bytes_of_fp32 * heads * 512 * 512


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"state": TrainingState(attn_implementation="eager")}, "choose sdpa"),
        ({"dtype": "fp32"}, "choose bf16"),
    ],
)
def test_dropout_of_attention_is_refused_with_whole_matrices_of_scores(values: dict[str, Any], remedy: str) -> None:
    """In fp32 with fewer heads of keys than of queries, torch's sdpa has no kernel that keeps less."""
    with pytest.raises(RuleError, match=f"drops probabilities of attention.*{remedy}"):
        Scenario.of(tiny("seed-oss-36b"), **SIZES | values)


def test_a_layer_whose_parts_share_a_norm_has_one() -> None:
    """Against transformers' own classes, whose output layer may have a bias."""
    from transformers import AutoModelForCausalLM

    from memlab.engines.fsdp2.hugging_face import config_of

    for name in ("command-r7b", "phi-2", "seed-oss-36b"):
        model = tiny(name)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config_of(model, 2, 64))
        assert built.num_parameters() == model.num_parameters
