"""Gemma 2 and 3 from a config.json under the engine fsdp2: norms on both sides, windows, soft caps, tied embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.plain_fsdp2 import Job
from memlab import Lab, MemorySettings, TrainingState
from memlab.backends import find_backend
from memlab.backends.simulated import predicting
from memlab.config.architectures import Architecture
from memlab.config.families import FAMILIES
from memlab.config.hugging_face import architecture_fields
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError
from memlab.meter.caching_memory import CachingMemory
from memlab.meter.observers import ObserveResults
from tests.unit.measured import assert_fsdp2_predicted, measured_rows

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
SIZES: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def gemma(model_type: str, **values: Any) -> Architecture:
    tiny = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "sliding_window": 16,
            "rms_norm_eps": 1e-6}  # fmt: skip
    caps = CAPS if model_type == "gemma2" else {}
    return Architecture(name=model_type, **architecture_fields({"model_type": model_type} | caps | tiny | values))


@pytest.mark.parametrize(
    ("model_type", "published", "sizes"),
    [
        ("gemma2", 9_241_705_984, (42, 3584, 14336, 16, 8, 256, 256_000)),
        ("gemma2", 2_614_341_888, (26, 2304, 9216, 8, 4, 256, 256_000)),
        ("gemma3_text", 999_885_952, (26, 1152, 6912, 4, 1, 256, 262_144)),
    ],
)
def test_its_parameters_are_the_published_ones(model_type: str, published: int, sizes: tuple[int, ...]) -> None:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    values = dict(zip((*names, "head_dim", "vocab_size"), sizes, strict=True))
    assert gemma(model_type, **values).num_parameters == published


@pytest.mark.parametrize(
    ("model_type", "packed"),
    [
        ("gemma2", None),
        ("gemma3_text", 3),
        pytest.param("gemma2", 2, marks=pytest.mark.slow),
        pytest.param("gemma3_text", None, marks=pytest.mark.slow),
    ],
)
def test_a_step_has_transformers_loss_and_is_predicted(model_type: str, packed: int | None) -> None:
    from memlab.engines.fsdp2.hugging_face import build_model

    pattern = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    scenario = Scenario.of(gemma(model_type, **pattern), **SIZES, packed_sequences=packed)
    found = []
    for backend in (find_backend("cpu"), predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            records = [lab.step(), lab.step(FULL)]
        found.append([(each.static_bytes, each.peak_allocated_bytes, each.peak_by_category) for each in records])
        if not backend.kind.is_prediction:
            torch.manual_seed(scenario.seed)
            model = build_model(scenario, torch.bfloat16, attention="eager")
            generator = torch.Generator().manual_seed(scenario.seed)
            tokens = torch.randint(512, (1, 64), generator=generator)
            positions = torch.cat([torch.arange(length) for length in scenario.sequence_lengths or (64,)]).unsqueeze(0)
            own = model(input_ids=tokens, labels=tokens, position_ids=positions).loss.item()
            assert records[0].loss == records[1].loss == pytest.approx(own, rel=1e-3)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "megatron"}, "is of the family gemma2, whose norms behind attention"),
        ({"state": TrainingState(attn_implementation="flash_attention_2")}, "has windows or soft caps"),
    ],
)
def test_what_gemma_lacks_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario.of(gemma("gemma2"), **(SIZES | given))


@pytest.mark.parametrize(
    "values", [{"final_logit_softcapping": None}, {"hidden_activation": "silu"}, {"use_bidirectional_attention": True}]
)
def test_other_parts_than_gemmas_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} .* is not modelled"):
        gemma("gemma2", **values)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma-3-12b", "gemma-2-9b"])
def test_predictions_are_what_an_h200_needed_without_memlab(model: str) -> None:
    for row in measured_rows("h200_plain_fsdp_options"):
        job = Job(**row["job"])
        if job.model == model and job.attn_implementation == "sdpa":
            assert_fsdp2_predicted(row, start=1e-4, peak=1e-4, reserved=0.01)


def test_its_windows_are_refused_where_no_kernel_has_them() -> None:
    model = gemma("gemma3_text")
    with pytest.raises(RuleError, match="torch's context_parallel has no windows"):
        Scenario(architecture=model, **SIZES, layout=Layout(context_parallel_size=2))
    with pytest.raises(RuleError, match="windows of gemma3_text"):
        Scenario(architecture=model, **SIZES | {"dtype": "fp32"})


def test_the_rotary_base_of_layers_with_windows_is_transformers_default_or_refused() -> None:
    """Another one was dropped in silence; the newer form of a ``config.json`` gives each kind of layer its own."""
    of_both = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 10000.0}}
    for freq in (10000, None):  # null counts as left out
        assert gemma("gemma3_text", rope_local_base_freq=freq).rotary_base == 1e6
    assert gemma("gemma3_text", rope_parameters=of_both).rotary_base == 5e5
    of_both["sliding_attention"]["rope_theta"] = 2e4
    for values in ({"rope_local_base_freq": 20000}, {"rope_parameters": of_both}):
        with pytest.raises(ValueError, match=r"base of layers with windows is 20000.*, must be 10000"):
            gemma("gemma3_text", **values)


def test_what_a_file_does_not_give_is_transformers_own() -> None:
    """Rotary bases of three families were taken for 10000, and DeepSeek-V3's and GLM's probabilities not to add up."""
    from transformers import AutoConfig

    for name, row in FAMILIES.items():
        if name in ("kimi_k2", "gpt2"):  # transformers does not have the first
            continue
        theirs = AutoConfig.for_model(name)
        if name != "nemotron_h":  # without positions
            rope = theirs.rope_parameters
            assert row.rotary_base == rope.get("full_attention", rope)["rope_theta"], name
        if hasattr(theirs, "norm_topk_prob"):
            assert row.normalizes_topk == theirs.norm_topk_prob, name


def test_shards_get_memory_in_the_order_of_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied matrix gets it twice, the second time behind the layers."""
    from memlab.engines.fsdp2.hugging_face import build_model

    scenario, taken, made = Scenario.of(gemma("gemma3_text"), **SIZES), list[int](), list[int]()
    take = CachingMemory.take

    def noted(memory: Any, allocation: Any, num_bytes: int) -> int:
        taken.append(num_bytes)
        return take(memory, allocation, num_bytes)

    monkeypatch.setattr(CachingMemory, "take", noted)
    with Lab(scenario, backend="simulated"):
        pass
    with torch.device("meta"):
        model = build_model(scenario, torch.bfloat16, attention="sdpa")
    sizes = {each.nbytes for each in model.parameters()} - {each.nbytes for each in model.buffers()}
    with ObserveResults(lambda result, _: made.append(result.nbytes)):
        model.to_empty(device="cpu")
    expected = [num_bytes for num_bytes in made if num_bytes in sizes]
    assert expected.count(model.lm_head.weight.nbytes) == 2
    assert [num_bytes for num_bytes in taken if num_bytes in sizes][: len(expected)] == expected


def test_a_tied_matrix_is_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.of(gemma("gemma3_text"), **SIZES, state=TrainingState(fsdp_cpu_offload=True))
    pinned, pin = list[int](), CachingMemory.pin

    def noted(memory: Any, allocation: Any, num_bytes: int) -> None:
        pinned.append(num_bytes)
        pin(memory, allocation, num_bytes)

    monkeypatch.setattr(CachingMemory, "pin", noted)
    with Lab(scenario, backend="simulated"):
        pass
    model = scenario.architecture
    assert pinned.count(2 * model.vocab_size * model.hidden_size) == 1
