"""Attention, packed sequences and selective checkpoints of the engine fsdp2: transformers' own losses, bytes by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memlab import Lab, MemorySettings, TrainingState
from memlab.backends import find_backend
from memlab.backends.simulated import predicting
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.validation import RuleError
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.meter.observers import ObserveResults
from tests.unit.measured import assert_fsdp2_predicted, measured_by_name
from tests.unit.of_old_torch import MEASURED_WITH_OLD_TORCH
from tests.unit.saved import saved_tensors, storage_bytes

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SIZES: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "dtype": "bf16", "engine": "fsdp2"}


def own_loss(scenario: Scenario, attention: str) -> float:
    """Returns the loss of transformers' model as a user of it would compute it."""
    from memlab.engines.fsdp2.hugging_face import build_model

    torch.manual_seed(scenario.seed)
    model = build_model(scenario, torch.bfloat16, attention=attention)
    generator = torch.Generator().manual_seed(scenario.seed)
    tokens = torch.randint(scenario.architecture.vocab_size, (1, scenario.seq_length), generator=generator)
    positions = torch.cat([torch.arange(length) for length in scenario.sequence_lengths or (64,)]).unsqueeze(0)
    loss: float = model(input_ids=tokens, labels=tokens, position_ids=positions).loss.item()
    return loss


@pytest.mark.parametrize(
    ("architecture", "attention", "packed", "settings"),
    [
        ("llama-3-tiny", "sdpa", 3, {"selective_ac": True}),
        ("phi-4-tiny", "flash_attention_2", 2, {"selective_ac": True}),
        pytest.param("qwen3-dense-tiny", "eager", 2, {"checkpoint_every": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_step_has_transformers_loss_and_is_predicted(
    architecture: str, attention: Any, packed: int, settings: dict[str, Any]
) -> None:
    state = TrainingState(attn_implementation=attention)
    scenario = Scenario.of(architecture, **SIZES, packed_sequences=packed, state=state)
    found = []
    for backend in (find_backend("cpu"), predicting("cpu")):
        with Lab(scenario, backend=backend) as lab:
            plain, changed = lab.step(), lab.step(MemorySettings(**FULL, **settings))
        found.append(
            [(each.static_bytes, each.peak_allocated_bytes, each.peak_by_category) for each in (plain, changed)]
        )
        if not backend.kind.is_prediction:
            assert plain.loss == changed.loss == pytest.approx(own_loss(scenario, "sdpa"), rel=1e-3)
            assert changed.recomputed_bytes > 0
    assert found[0] == found[1]


def test_a_mask_is_kept_by_each_layer_in_bf16_with_keys_of_all_heads() -> None:
    from memlab.engines.fsdp2.attention import _sdpa

    tokens, heads, groups, channels = 48, 4, 2, 16
    query = torch.randn(1, heads, tokens, channels, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(1, groups, tokens, channels, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().view(1, 1, tokens, tokens)
    with saved_tensors() as saved:
        output, _ = _sdpa(None, query, key, value, mask, scaling=channels**-0.5)
    of_heads, log_sums = 2 * heads * tokens * channels, 4 * heads * tokens
    assert sorted(storage_bytes(saved).values()) == sorted([of_heads] * 4 + [2 * tokens**2, log_sums, 2 * 8])
    truth = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(output, truth.transpose(1, 2), rtol=0.02, atol=0.02)
    of_output = torch.randn_like(output)
    own = torch.autograd.grad(output, (query, key, value), of_output)
    expected = torch.autograd.grad(truth.transpose(1, 2), (query, key, value), of_output)
    torch.testing.assert_close(own, expected, rtol=0.05, atol=0.05)


class _Made:
    """The results of operations that have so many values, one of each storage.

    It refers to them, so that no two have one address.
    """

    def __init__(self, num_values: int) -> None:
        self._num_values, self._storages = num_values, list[Any]()
        self.dtypes: list[torch.dtype] = []

    def __call__(self, result: Any, _: Any) -> None:
        if isinstance(result, torch.Tensor) and result.numel() == self._num_values:
            storage = result.untyped_storage()
            if all(storage._cdata != each._cdata for each in self._storages):
                self._storages.append(storage)
                self.dtypes.append(result.dtype)


@pytest.mark.parametrize(("lengths", "masks"), [((20, 28), 4), (None, 0)])
def test_masks_are_made_between_embedding_and_first_layer(lengths: tuple[int, ...] | None, masks: int) -> None:
    """As in an H200's history of Llama 3.1 8B with four sequences (torch 2.11); nothing asks for values."""
    from memlab.engines.fsdp2.attention import telling_sequences
    from memlab.engines.fsdp2.hugging_face import build_model

    scenario, tokens, found = Scenario.of("llama-3-tiny", **(SIZES | {"seq_length": 48})), 48, list[int]()
    made = _Made(tokens**2)
    with torch.device("meta"), telling_sequences():
        model = build_model(scenario, torch.bfloat16, attention="memlab_sdpa")
        numbers = torch.arange(tokens).unsqueeze(0)
        model.model.embed_tokens.register_forward_hook(lambda *_: found.append(len(made.dtypes)))
        model.model.layers[0].register_forward_pre_hook(lambda *_: found.append(len(made.dtypes)))
        with ObserveResults(made):
            model(input_ids=numbers, position_ids=numbers, packed_lengths=lengths)
    assert found == [0, masks]


def test_unfused_attention_is_torchs_own_and_copies_no_scores() -> None:
    from memlab.engines.fsdp2.attention import _unfused

    tokens, heads, groups, channels = 24, 4, 2, 8
    query = torch.randn(1, heads, tokens, channels, requires_grad=True)
    key, value = (torch.randn(1, groups, tokens, channels, requires_grad=True) for _ in range(2))
    made = _Made(heads * tokens**2)
    with ObserveResults(made):
        output, _ = _unfused(None, query, key, value, None, scaling=channels**-0.5)
    assert made.dtypes == [torch.float32, torch.float32, torch.bool]
    truth = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, truth.transpose(1, 2))
    of_output = torch.randn_like(output)
    own = torch.autograd.grad(output, (query, key, value), of_output)
    torch.testing.assert_close(own, torch.autograd.grad(truth.transpose(1, 2), (query, key, value), of_output))


def test_a_selective_checkpoint_keeps_attention_and_every_second_product() -> None:
    from memlab.engines.fsdp2 import selective_checkpoint
    from memlab.engines.fsdp2.hugging_face import build_model

    scenario = Scenario.of("llama-3-tiny", **(SIZES | {"num_layers": 1}))
    sizes = scenario.architecture
    model = build_model(scenario, torch.bfloat16, attention="memlab_sdpa")
    tokens, kept, found = torch.arange(64).unsqueeze(0), [], []

    def contexts() -> Any:
        forward, again = selective_checkpoint.contexts(nullcontext())
        kept.append(forward.storage)
        return forward, again

    layer = model.model.layers[0]
    forward = layer.forward
    for is_selective in (False, True):
        if is_selective:
            layer.forward = lambda *args, **named: checkpoint(
                forward, *args, use_reentrant=False, context_fn=contexts, **named
            )
        loss = model(input_ids=tokens, labels=tokens).loss
        if is_selective:
            (storage,) = kept
            of_attention = [tuple(each.shape) for each in storage[selective_checkpoint._KEPT][0]]
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    heads, channels = sizes.num_attention_heads, sizes.kv_channels
    assert of_attention == [(1, 64, heads, channels), (1, heads, 64), (2,)]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    # Of q, k, v, o, gate, up and down, backward computes k, o and up again.
    groups = sizes.num_query_groups * channels
    per_token = 2 * (sizes.hidden_size * groups + heads * channels * sizes.hidden_size)
    per_token += 2 * sizes.hidden_size * sizes.ffn_hidden_size
    assert recomputed_operations(MemorySettings(**FULL, selective_ac=True), scenario) == per_token
    # Scores and their product with the values: a query sees half of the 64 tokens in the mean.
    with_flash = replace(scenario, state=TrainingState(attn_implementation="flash_attention_2"))
    found_with_flash = recomputed_operations(MemorySettings(**FULL, selective_ac=True), with_flash)
    assert found_with_flash - per_token == 2 * 2 * heads * channels * 64 / 2


def test_a_mask_in_fp32_is_refused_as_cudnn_has_no_kernel_for_it() -> None:
    for attention in ("sdpa", "eager"):
        state = TrainingState(attn_implementation=attention)
        in_fp32 = {**SIZES, "dtype": "fp32", "state": state, "packed_sequences": 2}
        with pytest.raises(RuleError, match="packed_sequences") if attention == "sdpa" else nullcontext():
            Scenario.of("llama-3-tiny", **in_fp32)


@pytest.mark.parametrize(
    ("method", "number", "every", "is_refused"),
    [("uniform", 1, 2, False), ("uniform", 1, 3, True), ("block", 1, 2, True), ("block", 2, 2, False)],
)
def test_a_checkpoint_of_every_nth_layer_has_such_a_layer(
    method: Any, number: int, every: int, is_refused: bool
) -> None:
    settings = MemorySettings(**FULL | {"recompute_method": method, "recompute_num_layers": number},
                              checkpoint_every=every)  # fmt: skip
    with pytest.raises(RuleError, match="checkpoint_every") if is_refused else nullcontext():
        check_on_model(settings, Scenario.of("llama-3-tiny", **SIZES))


MEASURED = measured_by_name(
    *("h200_plain_fsdp_options", "h200x2_plain_fsdp_options", "h200_plain_fsdp_combined", "h200x2_plain_fsdp_ulysses")
)
OF_LLAMA = "model=llama-3.1-8b num_layers=4 seq_length=4096 num_ranks=2 "
ULYSSES = next(name for name, row in MEASURED.items() if row["job"].get("cp_comm_type") == "a2a")
OF_EIGHT = "model=llama-3.1-8b num_layers=8 seq_length=8192 num_ranks=8 "


@pytest.mark.parametrize(
    "name",
    [
        OF_LLAMA + "fp32_sharded_params fsdp_version=1",
        pytest.param(ULYSSES, marks=MEASURED_WITH_OLD_TORCH),
        pytest.param(OF_LLAMA + "context_parallel_size=2", marks=[pytest.mark.slow, MEASURED_WITH_OLD_TORCH]),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "model=phi-4 num_layers=8 seq_length=4096 packed_sequences=3",
                "model=llama-3.1-8b num_layers=8 seq_length=4096 selective_ac",
                "model=llama-3.1-8b num_layers=8 seq_length=4096 packed_sequences=8 attn_implementation=flash_attention_2",
                OF_LLAMA + "tensor_model_parallel_size=2 sequence_parallel",
                OF_EIGHT + "checkpointing one_process fp32_sharded_params dp_replicate_size=2 fsdp_version=1",
            )
        ),
    ],
)
def test_predictions_are_what_an_h200_needed_without_memlab(name: str) -> None:
    reserved = {} if "selective_ac" in name else {"reserved": 5e-3}
    assert_fsdp2_predicted(MEASURED[name], start=2e-4, peak=2e-4, **reserved)
