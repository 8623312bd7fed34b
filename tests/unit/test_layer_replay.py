"""A prediction that replays has the events of one that steps everything, up to the order of frees in a row."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from memlab import Lab, Layout, MemorySettings, TrainingState
from memlab.backends.cuda_on_cpu import is_on_host
from memlab.backends.fake_cuda import FakeCuda
from memlab.config.architectures import find_architecture
from memlab.engines.megatron import megatron_config
from memlab.lab.progress import StepStopped
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS
from memlab.replay.passes import NotReplayableError
from memlab.replay.replayer import Replayer
from memlab.vocabulary import PHASES
from tests.unit.inside import inside
from tests.unit.replayed import Case, random_case, require_identical, take

_MLP = MemorySettings(recompute_granularity="selective", recompute_modules=("mlp",))
_MOE = MemorySettings(recompute_granularity="selective", recompute_modules=("moe",))
_ATTENTION = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn",))
_ATTENTION_MOE = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn", "moe"))
_ALL_THREE = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "moe"))
_MOE_LAYERNORM = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm", "moe"))
_LAYERNORM = MemorySettings(recompute_granularity="selective", recompute_modules=("layernorm",))
_FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
_GROUPS = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
_BLOCK = MemorySettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
_BLOCK_OF_7 = replace(_BLOCK, recompute_num_layers=7)
_OFFLOAD = MemorySettings(offload_modules=("expert_fc1",), min_offloaded_tensor_size=0)
_CORE = MemorySettings(offload_modules=("core_attn",), min_offloaded_tensor_size=0)
_CORE_QKV = MemorySettings(offload_modules=("core_attn", "qkv_linear"), min_offloaded_tensor_size=5000)
_EXPERTS = MemorySettings(offload_modules=("expert_fc1", "moe_act", "mlp_norm"), min_offloaded_tensor_size=0)
_ALL_ATTENTION = replace(_MLP, offload_modules=("core_attn", "attn_proj", "qkv_linear"), min_offloaded_tensor_size=0)
_BESIDE_BLOCK = MemorySettings(
    recompute_granularity="full",
    recompute_method="block",
    recompute_num_layers=6,
    offload_modules=("qkv_linear",),
    min_offloaded_tensor_size=0,
)
_STAGES = Layout(pipeline_model_parallel_size=2)
_MIDDLE = Layout(pipeline_model_parallel_size=3, rank=1)
_THIRD = Layout(pipeline_model_parallel_size=4, rank=2)
_CHUNKS = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
_BETWEEN = MemorySettings(offload_optimizer=True)
_EXCEPT_UPDATE = MemorySettings(offload_optimizer=True, offload_optimizer_except_update=True)

rarely = partial(pytest.param, marks=pytest.mark.slow)
"""A case of a rule that the other cases state too."""

_CASES = [
    (
        "phi-4-tiny",
        {"num_layers": 6, "seq_length": 64},
        [MemorySettings(), _FULL, _GROUPS, _BLOCK, _MLP, _BETWEEN, _EXCEPT_UPDATE],
        (True, False, True, False, False, True, False),
    ),
    rarely("phi-4-tiny", {"num_layers": 4, "seq_length": 64, "num_microbatches": 4}, [_LAYERNORM, _FULL], ()),
    # With sequence parallelism, checkpoints keep the random states that the embedding has left in Megatron's tracker.
    (
        "phi-4",
        {"num_layers": 4, "seq_length": 64, "num_microbatches": 3, "layout": Layout(tensor_model_parallel_size=2)},
        [_ATTENTION, _FULL],
        (),
    ),
    (
        "qwen3-moe-tiny",
        {"num_layers": 5, "seq_length": 64},
        [MemorySettings(), _MOE, _FULL, MemorySettings(), _BLOCK, _LAYERNORM, _OFFLOAD],
        (True, False, True, False, True, False, True),
    ),
    # What a dispatcher refers to keeps the random states of the checkpoints before it, or does not.
    rarely(
        "qwen3-moe-tiny", {"num_layers": 4, "seq_length": 64, "num_microbatches": 3}, [_ATTENTION, _MOE], (False, True)
    ),
    # The step under the first setting leaves as many tensors allocated as a step under the second one, but others.
    rarely(
        "qwen3-moe-tiny",
        {"num_layers": 4, "seq_length": 64},
        [_ATTENTION, _ATTENTION_MOE, _ATTENTION_MOE],
        (True, True, False),
    ),
    # Backward fills the storage of a norm's output again, and an MoE layer's graph keeps it.
    ("qwen3-moe-tiny", {"num_layers": 4, "seq_length": 64}, [MemorySettings(), _ALL_THREE], (False, True)),
    # Micro-batches are inserted: with several passes in flight on the first of two stages.
    rarely(
        "phi-4-tiny",
        {"num_layers": 8, "seq_length": 64, "num_microbatches": 8, "layout": _STAGES},
        [_LAYERNORM, _FULL],
        (),
    ),
    # The first layer of a later stage is always stepped. Of its passes in flight, recompute has emptied a storage.
    rarely(
        "qwen3-moe-tiny",
        {"num_layers": 3, "seq_length": 64, "num_microbatches": 10, "layout": _MIDDLE},
        [_LAYERNORM],
        (),
    ),
    rarely(
        "phi-4-tiny", {"num_layers": 12, "seq_length": 64, "num_microbatches": 4, "layout": _CHUNKS}, [_LAYERNORM], ()
    ),
    rarely(
        "qwen3-moe-tiny",
        {"num_layers": 2, "seq_length": 64, "num_microbatches": 6},
        [MemorySettings(), _FULL],
        (False, True),
    ),
    # On stages, a dispatcher's references pass from stepped passes to replayed ones and back, several passes in flight.
    (
        "qwen3-moe-tiny",
        {"num_layers": 6, "seq_length": 64, "num_microbatches": 5, "layout": _STAGES},
        [_ATTENTION, _LAYERNORM, _MOE],
        (True, False, False),
    ),
    rarely(
        "qwen3-moe-tiny",
        {"num_layers": 6, "seq_length": 64, "num_microbatches": 4, "layout": replace(_STAGES, rank=1)},
        [MemorySettings(), _LAYERNORM],
        (),
    ),
    rarely(
        "qwen3-moe-tiny",
        {"num_layers": 12, "seq_length": 64, "num_microbatches": 4, "layout": _CHUNKS},
        [_LAYERNORM],
        (),
    ),
]
"""With the fewest layers, micro-batches and warm-up steps that reach the same branches of the replay. A step without
a warm-up is the first one under its settings, and is compared too."""


@pytest.mark.parametrize(("architecture", "arguments", "settings", "warm_up"), _CASES)
def test_replayed_layers_have_the_events_of_stepped_ones(
    architecture: str, arguments: dict[str, Any], settings: list[MemorySettings], warm_up: tuple[bool, ...]
) -> None:
    case = Case(architecture=architecture, arguments=arguments, settings=settings, warm_up=warm_up)
    stepped, none = take(case, replay=False)
    replayed, count = take(case, replay=True)
    assert none == 0 < count
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(
    ("architecture", "arguments", "settings"),
    [
        ("phi-4-tiny", {"num_layers": 6}, [MemorySettings(), _CORE, _CORE_QKV]),
        rarely("phi-4-tiny", {"num_layers": 4, "num_microbatches": 3}, [_ALL_ATTENTION, _MLP]),
        rarely("phi-4-tiny", {"num_layers": 14}, [_BESIDE_BLOCK, _CORE]),
        # The recompute of a block's layers copies to the host too, and back at once.
        ("phi-4-tiny", {"num_layers": 9, "num_microbatches": 2}, [replace(_BESIDE_BLOCK, recompute_num_layers=9)]),
        rarely("qwen3-moe-tiny", {"num_layers": 14}, [replace(_EXPERTS, **_BLOCK_OF_7.changed())]),
        ("qwen3-moe-tiny", {"num_layers": 7}, [_EXPERTS, replace(_EXPERTS, **_LAYERNORM.changed())]),
        rarely("qwen3-moe-tiny", {"num_layers": 6, "num_microbatches": 2}, [_MOE, _CORE_QKV]),
    ],
)
def test_layers_that_offload_activations_are_replayed(
    architecture: str, arguments: dict[str, Any], settings: list[MemorySettings]
) -> None:
    """Megatron's offload manager learns its groups in the first step, and uses them in the second one."""
    records: dict[bool, list[StepRecord]] = {}
    for replay in (False, True):
        records[replay] = []
        with Lab(architecture, seq_length=64, **arguments, backend="simulated", replay=replay) as lab:
            for each in (one for one in settings for _ in range(2)):
                records[replay].append(lab.step(each, warm_up=False))
                model: Any = inside(lab).model
                assert bool(model.replay.num_replayed) == replay
    assert any(record.offloaded_bytes_by_module for record in records[True])
    for one, other in zip(records[False], records[True], strict=True):
        require_identical(one, other)


@pytest.mark.parametrize("architecture", [rarely("phi-4-tiny"), "qwen3-moe-tiny"])
def test_what_backward_frees_is_known_apart_for_passes_that_allocated_their_host_buffers(architecture: str) -> None:
    """A pass that finds the manager's pool empty allocates its buffers: they are further storages of that pass."""
    records: dict[bool, list[StepRecord]] = {}
    for replay in (False, True):
        with Lab(architecture, num_layers=6, seq_length=64, backend="simulated", replay=replay) as lab:
            session: Any = inside(lab)
            lab.step(_ALL_ATTENTION)
            session.run_exclusive(PipelineOffloadManager.get_instance().cpu_tensor_pool.clear)
            records[replay] = [lab.step(), lab.step()]
            assert bool(session.model.replay.num_replayed) == replay
    for one, other in zip(records[False], records[True], strict=True):
        require_identical(one, other)


def test_replayed_passes_leave_the_host_buffers_of_stepped_ones_and_show_no_copy_to_a_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function mode would be asked at each look at a tensor: several times for each copy that a layer makes."""
    serve, asked, buffers = FakeCuda.__torch_function__, list[Any](), {}
    for replay in (False, True):
        with Lab("phi-4-tiny", num_layers=6, seq_length=64, backend="simulated", replay=replay) as lab:
            layers: Any = getattr(inside(lab).model.replay, "_layers", None)

            def ask(mode: Any, func: Any, *args: Any, layers: Any = layers) -> Any:
                if layers is not None and layers._calls._repeated is not None:
                    asked.append(func)
                return serve(mode, func, *args)

            monkeypatch.setattr(FakeCuda, "__torch_function__", ask)
            lab.step(_ALL_ATTENTION)
            pool = PipelineOffloadManager.get_instance().cpu_tensor_pool
            buffers[replay] = (
                pool.device,
                pool.pin_memory,
                [
                    (key, len(each["free"]), [(is_on_host(tensor), tensor.device) for tensor in each["all"]])
                    for key, each in pool._pools.items()
                ],
            )
    assert buffers[True] == buffers[False]
    assert buffers[True][2]
    assert not asked


def test_gradients_are_finalized_once_as_in_a_first_step_and_once_as_in_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under sequence parallelism gradients of norms are summed then, in tensors that are freed at once."""
    finalize, calls, records = megatron_config.finalize_model_grads, list[bool](), {}
    layout = Layout(tensor_model_parallel_size=2, data_parallel_size=2)
    for replay in (False, True):

        def finalized(*args: Any, replay: bool = replay, **kwargs: Any) -> None:
            calls.append(replay)
            finalize(*args, **kwargs)

        monkeypatch.setattr(megatron_config, "finalize_model_grads", finalized)
        with Lab(
            "qwen3-moe-tiny", num_layers=2, layout=layout, seq_length=64, backend="simulated", replay=replay
        ) as lab:
            records[replay] = [lab.step(each) for each in (MemorySettings(), _CORE)]
            assert lab.start_over()
            records[replay] += [lab.step(each) for each in (_ATTENTION, MemorySettings())]
    assert (calls.count(False), calls.count(True)) == (8, 2)
    for one, other in zip(records[False], records[True], strict=True):
        require_identical(one, other)


@pytest.mark.parametrize("seed", [3, rarely(25)])
def test_random_scenarios_have_the_same_steps_with_and_without_replay(seed: int) -> None:
    """``python -m benchmarks.replay`` tries 200 of them."""
    case = random_case(random.Random(seed))
    stepped, _ = take(case, replay=False)
    replayed, _ = take(case, replay=True)
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(("before", "settings"), [(_MOE, _OFFLOAD), rarely(MemorySettings(), _BLOCK)])
def test_a_stepped_pass_frees_what_a_replayed_pass_left_where_it_would_free_its_own(
    before: MemorySettings, settings: MemorySettings
) -> None:
    """Behind the recomputed layers of a block, the first layer's pass is the first."""
    records = []
    for replay in (False, True):
        with Lab("qwen3-moe-tiny", num_layers=8, seq_length=64, backend="simulated", replay=replay) as lab:
            lab.step(before)
            records.append(lab.step(settings, warm_up=False))
    require_identical(*records)


@pytest.mark.parametrize(
    ("num_layers", "settings", "warm_up"),
    [
        (8, [replace(_FULL, recompute_num_layers=4), _LAYERNORM], (False, True)),
        rarely(
            6,
            [replace(_BLOCK, recompute_num_layers=1, checkpoint_input_remedy="release_storage"), _LAYERNORM],
            (False, True),
        ),
        # If the passes of the step between do not show what they leave, the last step begins again and finds other garbage.
        rarely(
            9,
            [replace(_BLOCK, recompute_num_layers=7), replace(_FULL, recompute_num_layers=3), _MOE],
            (True, False, True),
        ),
    ],
)
def test_what_full_recompute_left_in_moe_layers_is_freed_before_replay_begins_again(
    num_layers: int, settings: list[MemorySettings], warm_up: tuple[bool, ...]
) -> None:
    """A checkpoint of several layers, or one before layers that are not recomputed, is freed in another layer's pass."""
    arguments = {"num_layers": num_layers, "seq_length": 64}
    case = Case(architecture="qwen3-moe-tiny", arguments=arguments, settings=settings, warm_up=warm_up)
    stepped, _ = take(case, replay=False)
    replayed, count = take(case, replay=True)
    assert count > 0
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize("remedy", ["release_storage", rarely("detach"), rarely("clear_gradient")])
@pytest.mark.parametrize("num_microbatches", [2, rarely(6)])
def test_what_a_remedy_frees_repeats_over_layers_and_microbatches(remedy: Any, num_microbatches: int) -> None:
    """An emptied storage is freed where it is emptied, also in the last micro-batch, after which its dispatcher keeps it."""
    case = Case(
        architecture="qwen3-moe-tiny",
        arguments={"num_layers": 4, "seq_length": 64, "num_microbatches": num_microbatches},
        settings=[replace(_FULL, checkpoint_input_remedy=remedy)] * 2,
    )
    stepped, _ = take(case, replay=False)
    replayed, count = take(case, replay=True)
    assert count > 0
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(
    ("settings", "are_replayed", "workload", "warm_up"),
    [
        rarely(
            [_FULL, _GROUPS, MemorySettings(), _FULL, _LAYERNORM],
            [True, True, False, True, True],
            (12, 1),
            (False,) * 5,
        ),
        rarely(
            [MemorySettings(), _GROUPS, _FULL, _BLOCK, _GROUPS],
            [True, True, False, True, True],
            (12, 1),
            (False, True, False, True, True),
        ),
        rarely([_GROUPS, MemorySettings()], [True, False], (12, 1), (False, False)),
        ([_MOE, _FULL], [True, True], (6, 2), (False, True)),
    ],
)
def test_moe_layers_under_full_recompute_are_replayed(
    settings: list[MemorySettings], are_replayed: list[bool], workload: tuple[int, int], warm_up: tuple[bool, ...]
) -> None:
    """Not in the first step after it, if its groups are in several units then."""
    stepped, none = _steps_of_moe(settings, *workload, warm_up=warm_up, replay=False)
    replayed, found = _steps_of_moe(settings, *workload, warm_up=warm_up, replay=True)
    assert not any(none)
    assert found == are_replayed
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(
    ("layout", "num_layers", "num_microbatches", "settings"),
    [
        rarely(_STAGES, 14, 2, [_MOE, _MOE_LAYERNORM, _FULL, MemorySettings(), _ATTENTION_MOE]),
        (replace(_STAGES, rank=1), 14, 3, [_FULL, _MOE]),
        rarely(_MIDDLE, 21, 2, [_FULL, _MOE_LAYERNORM]),
        rarely(  # a micro-batch is inserted while a pass is in flight of which a recompute has freed a part
            replace(_STAGES, context_parallel_size=2, expert_model_parallel_size=2),
            14,
            7,
            [_MOE, _MOE],
        ),
    ],
)
def test_moe_layers_of_a_stage_that_are_recomputed_are_replayed(
    layout: Layout, num_layers: int, num_microbatches: int, settings: list[MemorySettings]
) -> None:
    """A recompute frees what another micro-batch's pass through the layer has left to its dispatcher."""
    records: dict[bool, list[StepRecord]] = {False: [], True: []}
    arguments: dict[str, Any] = {"num_layers": num_layers, "num_microbatches": num_microbatches, "layout": layout}
    for replay, taken in records.items():
        with Lab("qwen3-moe-tiny", seq_length=64, **arguments, backend="simulated", replay=replay) as lab:
            model: Any = inside(lab).model
            for each in settings:
                taken.append(lab.step(each, warm_up=False))
                assert (model.replay.is_on, model.replay.num_replayed > 0) == (replay, replay)
    for one, other in zip(*records.values(), strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(
    ("architecture", "settings"), [("phi-4-tiny", _FULL), rarely("phi-4-tiny", _ATTENTION), ("qwen3-moe-tiny", _MOE)]
)
def test_micro_batches_that_recompute_are_inserted_from_the_first_step_on(
    architecture: str, settings: MemorySettings
) -> None:
    """Which of a checkpoint's random states is freed first differs between stepped and replayed layers, and decides nothing."""
    records, num_passes = [], []
    for num_microbatches, replay in ((7, False), (7, True), (9, True)):
        arguments: dict[str, Any] = {"num_layers": 5, "seq_length": 64, "num_microbatches": num_microbatches}
        with Lab(architecture, **arguments, backend="simulated", replay=replay) as lab:
            records.append(lab.step(settings, warm_up=False))
            model: Any = inside(lab).model
            num_passes.append(model.replay.num_replayed)
    require_identical(*records[:2])
    assert num_passes[1] == num_passes[2] > 0


@pytest.mark.parametrize(
    ("architecture", "layout", "settings", "num_replayed"),
    [
        ("phi-4-tiny", _THIRD, MemorySettings(), 8),  # all passes of both layers but the first
        (
            "qwen3-moe-tiny",
            _THIRD,
            MemorySettings(),
            6,
        ),  # nor the first pass and the last one, whose graphs the dispatchers keep
        # Only the two layers between them: the first dispatcher keeps what was received too, in a recompute's graph.
        ("qwen3-moe-tiny", replace(_STAGES, rank=1), _FULL, 8),
    ],
)
def test_the_ends_of_a_stage_are_replayed_unless_a_recompute_keeps_what_it_has_received(
    architecture: str, layout: Layout, settings: MemorySettings, num_replayed: int
) -> None:
    records: dict[bool, StepRecord] = {}
    arguments: dict[str, Any] = {"num_layers": 8, "num_microbatches": 5, "layout": layout}
    for replay in (False, True):
        with Lab(architecture, seq_length=64, **arguments, backend="simulated", replay=replay) as lab:
            records[replay] = lab.step(settings)
            model: Any = inside(lab).model
            assert model.replay.num_replayed == (num_replayed if replay else 0)
    require_identical(records[False], records[True])


@pytest.mark.parametrize(
    ("arguments", "layers_per_checkpoint"),
    [
        ({"num_layers": 12}, (4, 12)),
        rarely({"num_layers": 12, "num_microbatches": 2}, (6, 3)),
        rarely({"num_layers": 16, "num_microbatches": 4, "layout": _STAGES}, (4, 8)),
    ],
)
def test_the_layers_of_large_checkpoints_are_replayed(
    arguments: dict[str, Any], layers_per_checkpoint: tuple[int, int]
) -> None:
    """Fewer than half of them are stepped, although there are too few checkpoints to replay one as a whole."""
    records: dict[bool, list[StepRecord]] = {False: [], True: []}
    for replay, taken in records.items():
        with Lab("phi-4-tiny", seq_length=64, **arguments, backend="simulated", replay=replay) as lab:
            model: Any = inside(lab).model
            num_passes = len(model.engine.layers) * lab.scenario.num_microbatches
            for size in layers_per_checkpoint:
                taken.append(lab.step(replace(_FULL, recompute_num_layers=size), warm_up=False))
                # In its forward pass, and in the recompute of its backward.
                assert (model.replay.num_replayed > num_passes) == replay
            taken.append(lab.step(_MLP, warm_up=False))
    for one, other in zip(*records.values(), strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(
    ("arguments", "layers_per_checkpoint"),
    [
        ({"num_layers": 12}, (4, 12)),
        rarely({"num_layers": 12, "num_microbatches": 3}, (6, 3, 12, 4, 1)),
        rarely(
            {
                "num_layers": 12,
                "num_microbatches": 2,
                "layout": Layout(expert_model_parallel_size=2, data_parallel_size=2),
                "state": TrainingState(overlap_grad_reduce=True, overlap_param_gather=True),
            },
            (6, 4),
        ),
        rarely({"num_layers": 12, "state": TrainingState(moe_token_dispatcher_type="allgather")}, (4, 3)),
    ],
)
def test_the_layers_of_large_checkpoints_are_replayed_where_dispatchers_keep_the_input_of_the_checkpoint(
    arguments: dict[str, Any], layers_per_checkpoint: tuple[int, ...]
) -> None:
    """The input and its gradient are freed by the next pass of the checkpoint's last layer, as where all is stepped."""
    records: dict[bool, list[StepRecord]] = {False: [], True: []}
    retained: dict[bool, list[Any]] = {False: [], True: []}
    for replay, taken in records.items():
        with Lab("qwen3-moe-tiny", seq_length=64, **arguments, backend="simulated", replay=replay) as lab:
            model: Any = inside(lab).model
            num_passes = len(model.engine.layers)
            for size in layers_per_checkpoint:
                assert lab.start_over()
                settings = replace(_FULL, recompute_num_layers=size)
                taken += [lab.step(settings, warm_up=False), lab.step(warm_up=False)]
                assert (model.replay.num_replayed > num_passes) == replay or size == 1
                retained[replay].append(lab.retained())
                assert size == 1 or len(retained[replay][-1]) == num_passes // size
                taken += [lab.step(MemorySettings(), warm_up=False), lab.step(settings, warm_up=False)]
    assert retained[True] == retained[False]
    for one, other in zip(*records.values(), strict=True):
        require_identical(one, other)


def test_checkpoints_of_another_size_have_the_passes_that_are_known() -> None:
    with Lab("qwen3-moe-tiny", num_layers=12, seq_length=64, backend="simulated") as lab:
        for size in (4, 3):
            assert lab.start_over()
            lab.step(replace(_FULL, recompute_num_layers=size), warm_up=False)
            lab.step(warm_up=False)
        model: Any = inside(lab).model
        assert model.replay.num_replayed == 2 * 12, "in a forward pass, and in a recompute"


@pytest.mark.parametrize("pattern", [(0, 0, 0, 1), rarely((1, 0))])
def test_dense_and_moe_layers_that_follow_a_pattern_are_replayed(pattern: tuple[int, ...]) -> None:
    """Of each kind between the same neighbours, four are stepped: in forward the first two, in backward the last."""
    num_layers = 4 * len(pattern) + 4
    freq = tuple(islice(cycle(pattern), num_layers))
    architecture = replace(find_architecture("qwen3-moe-tiny"), num_layers=num_layers, moe_layer_freq=freq)
    records: dict[bool, list[StepRecord]] = {}
    for replay in (False, True):
        with Lab(architecture, seq_length=32, backend="simulated", replay=replay) as lab:
            model: Any = inside(lab).model
            records[replay] = [lab.step(warm_up=False)]
            if replay:
                assert model.replay.num_replayed >= num_layers - 4 * len(pattern) - 2, "the first and the last layer"
            records[replay].append(lab.step(_LAYERNORM, warm_up=False))
    for one, other in zip(*records.values(), strict=True):
        require_identical(one, other)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_angles_of_latent_attention_are_made_once(num_microbatches: int) -> None:
    """The first pass through a layer makes them and keeps them: it has more roles than later ones."""
    model = replace(find_architecture("deepseek-tiny"), num_layers=6, moe_layer_freq=(0, 0, 0, 1, 1, 1))
    arguments = {"num_layers": 6, "seq_length": 64, "num_microbatches": num_microbatches}
    case = Case(architecture=model, arguments=arguments, settings=[MemorySettings()] * 2)
    (_, stepped), _ = take(case, replay=False)
    (_, replayed), _ = take(case, replay=True)
    require_identical(stepped, replayed)


def test_the_last_moe_layer_frees_the_random_states_of_the_dense_layers_before_it() -> None:
    model = replace(find_architecture("qwen3-moe-tiny"), num_layers=6, moe_layer_freq=(0, 1, 1, 1, 1, 1))
    arguments = {"num_layers": 6, "seq_length": 64}
    case = Case(architecture=model, arguments=arguments, settings=[_MLP, _MLP], warm_up=(False, False))
    (_, stepped), _ = take(case, replay=False)
    (_, replayed), _ = take(case, replay=True)
    require_identical(stepped, replayed)


def test_a_group_of_stepped_and_replayed_layers_frees_what_their_graphs_keep_where_each_dispatcher_lets_go() -> None:
    records = []
    for replay in (False, True):
        with Lab("qwen3-moe-tiny", num_layers=6, seq_length=64, backend="simulated", replay=replay) as lab:
            lab.step(_MOE, warm_up=False)
            model: Any = inside(lab).model
            assert 0 < model.replay.num_replayed < 3 if replay else not model.replay.num_replayed
            records.append(lab.step(replace(_FULL, recompute_num_layers=3), warm_up=False))
    require_identical(*records)


def test_a_step_that_was_stopped_while_it_was_replayed_can_be_taken_again() -> None:
    """What its passes would have freed is freed already."""
    with Lab("qwen3-moe-tiny", num_layers=12, seq_length=64, backend="simulated") as lab:
        lab.step(_ATTENTION)
        lab.apply(MemorySettings())
        model: Any = inside(lab).model

        def stop() -> None:
            labels = model.labels
            if PHASES[labels.phase] == "forward" and labels.modules[labels.module].startswith("decoder.layers.6"):
                raise StepStopped(labels.modules[labels.module])

        stopped: Any = inside(lab).run_exclusive(lambda: inside(lab).stepper.step(stop))
        assert stopped.status == "interrupted"
        assert lab.step(warm_up=False).status == lab.step(warm_up=False).status == "ok"


@pytest.mark.parametrize("settings", [rarely(_FULL), _MOE])
def test_what_dispatchers_retain_is_found_after_a_replayed_step_too(settings: MemorySettings) -> None:
    found = []
    for replay in (False, True):
        with Lab("qwen3-moe-tiny", num_layers=8, seq_length=64, backend="simulated", replay=replay) as lab:
            lab.step(settings)
            model: Any = inside(lab).model
            assert bool(model.replay.num_replayed) == replay
            lab.offload("parameters", "optimizer state")
            lab.device_memory_bytes = lab.records[-1].peak_allocated_bytes // 2
            device_bytes = model.meter.live_bytes("device")
            found.append(lab.retained())
            assert model.meter.live_bytes("device") == device_bytes, "each group stays where it was"
            assert lab.device_memory_bytes == lab.records[-1].peak_allocated_bytes // 2
            lab.device_memory_bytes = None
            found.append(lab.step(warm_up=False).step_index)
    stepped, step_index, replayed, replayed_index = found
    assert len(stepped) == 8
    assert (replayed, replayed_index) == (stepped, step_index)


@pytest.mark.parametrize("leaves_copies", [False, True])
def test_an_update_is_replayed_if_it_leaves_allocated_what_it_found(leaves_copies: bool) -> None:
    state = TrainingState(grad_reduce_in_bf16=leaves_copies)  # each update leaves fp32 copies of bf16 gradients
    with Lab("phi-4-tiny", num_layers=2, seq_length=32, state=state, backend="simulated") as lab:
        lab.step()
        optimizer: Any = inside(lab).model.engine.live.optimizer
        calls = []
        update = optimizer.step
        optimizer.step = lambda: (calls.append(1), update())[1]
        lab.step(_LAYERNORM)
    assert bool(calls) == leaves_copies


def test_a_replayed_step_runs_out_of_memory_where_a_stepped_one_does() -> None:
    arguments = {"num_layers": 8, "seq_length": 2048}
    case = Case(architecture="phi-4-tiny", arguments=arguments, settings=[MemorySettings()])
    plain, _ = take(case, replay=True)
    limit = (plain[0].peak_reserved_bytes or 0) - 40 * 1024**2
    tries = [MemorySettings(), _FULL, MemorySettings()]
    case = replace(case, settings=tries, limit_bytes=limit)
    stepped, _ = take(case, replay=False)
    replayed, count = take(case, replay=True)
    assert count > 0
    assert [record.status for record in stepped] == ["out_of_memory", "ok", "out_of_memory"]
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)
        assert (one.out_of_memory is None) == (other.out_of_memory is None)
        if one.out_of_memory is not None and other.out_of_memory is not None:
            first, second = one.out_of_memory.failed_allocation, other.out_of_memory.failed_allocation
            assert (first.phase, first.module, first.requested_bytes) == (
                second.phase,
                second.module,
                second.requested_bytes,
            )
            assert first.allocated_bytes == second.allocated_bytes


def test_what_is_allocated_when_memory_runs_out_includes_the_last_event_of_a_replayed_pass() -> None:
    arguments = {"num_layers": 8, "seq_length": 64, "dtype": "fp32", "layout": Layout(data_parallel_size=2)}
    case = Case(architecture="phi-4-tiny", arguments=arguments, settings=[MemorySettings()])
    (unlimited,), _ = take(case, replay=True)
    case = replace(case, limit_bytes=unlimited.peak_allocated_bytes * 9 // 10)
    (stepped,), _ = take(case, replay=False)
    (replayed,), _ = take(case, replay=True)
    assert stepped.out_of_memory is not None and replayed.out_of_memory is not None
    assert "decoder.layers.0" not in replayed.out_of_memory.failed_allocation.module
    assert replayed.out_of_memory.alive_by_category == stepped.out_of_memory.alive_by_category


def test_what_a_replayed_recompute_has_made_when_memory_runs_out_is_recomputed() -> None:
    settings = MemorySettings(recompute_granularity="selective", recompute_modules=["mlp"])
    records = []
    for replay in (False, True):
        with Lab("phi-4-tiny", num_layers=6, seq_length=64, backend="simulated", replay=replay) as lab:
            lab.device_memory_bytes = lab.step(settings, warm_up=False).peak_allocated_bytes * 8 // 10
            records.append(lab.step(settings, warm_up=False))
    stepped, replayed = records
    assert stepped.out_of_memory is not None and stepped.out_of_memory.failed_allocation.phase == "backward"
    assert stepped.peak_by_category["recomputed"] > 0
    require_identical(stepped, replayed)


@pytest.mark.parametrize(
    "settings", [replace(_FULL, recompute_num_layers=9), rarely(replace(_BLOCK, recompute_num_layers=5))]
)
def test_a_step_after_one_that_ran_out_of_memory_runs_out_alike(settings: MemorySettings) -> None:
    """A replayed pass may end where a fused kernel's result would leave the chip for the device."""
    arguments = {"num_layers": 9, "seq_length": 64}
    case = Case(architecture="phi-4-tiny", arguments=arguments, settings=[settings])
    (unlimited,), _ = take(case, replay=True)
    limit = int(unlimited.peak_allocated_bytes * 0.6)
    case = replace(case, settings=[settings, MemorySettings()], limit_bytes=limit)
    stepped, _ = take(case, replay=False)
    replayed, count = take(case, replay=True)
    assert count > 0
    assert {record.status for record in stepped} == {"out_of_memory"}
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


@pytest.mark.parametrize(("offloads_at_start", "only_steps"), [(False, True), (False, False), (True, False)])
def test_a_step_that_begins_again_is_taken_as_if_nothing_had_been_replayed(
    monkeypatch: pytest.MonkeyPatch, offloads_at_start: bool, only_steps: bool
) -> None:
    """A lab that has done anything else than steps cannot do it again: only its groups are where they were."""

    def fail(replayer: Replayer, *_: Any) -> Any:
        monkeypatch.undo()
        raise NotReplayableError("the first replayed backward pass of this test")

    away = MemorySettings(offload_parameters=True, offload_optimizer=True)
    until_update = MemorySettings(
        recompute_granularity="selective",
        recompute_modules=("core_attn",),
        offload_parameters=not offloads_at_start,
        offload_optimizer_except_update=True,
    )
    taken: dict[bool, list[StepRecord]] = {}
    for replay in (False, True):
        arguments: dict[str, Any] = {"num_layers": 3, "seq_length": 32, "num_microbatches": 3}
        with Lab("qwen3-moe-tiny", **arguments, backend="simulated", replay=replay) as lab:
            records = taken[replay] = [lab.step(warm_up=False)]
            if not offloads_at_start:
                records.append(lab.step(away, warm_up=False))
            if not only_steps:
                lab.retained()
            if replay:
                monkeypatch.setattr(Replayer, "gradient_of", fail)
            records += [lab.step(until_update, warm_up=warm_up) for warm_up in (False, True)]
    stepped, replayed = taken[False], taken[True]
    if only_steps:
        for one, other in zip(stepped, replayed, strict=True):
            require_identical(one, other)
    assert _groups_at_start(replayed[-2]) == _groups_at_start(stepped[-2])
    assert bool(_groups_at_start(stepped[-2])[2]) == offloads_at_start
    assert Replayer.gradient_of is not fail, "the step has begun again"


def test_a_lab_whose_step_is_stopped_while_it_begins_again_is_as_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(replayer: Replayer, *_: Any) -> Any:
        monkeypatch.undo()
        lab.stop()
        raise NotReplayableError("the first replayed backward pass of this test")

    def opened() -> Lab:
        return Lab("qwen3-moe-tiny", num_layers=3, seq_length=32, num_microbatches=3, backend="simulated")

    settings = MemorySettings(recompute_granularity="selective", recompute_modules=("core_attn",))
    with opened() as lab:
        lab.step()
        monkeypatch.setattr(Replayer, "gradient_of", fail)
        assert lab.step(settings).status == "interrupted"
        assert Replayer.gradient_of is not fail, "the step has begun again"
        assert lab.settings == settings
        after = lab.step()
    with opened() as lab:
        require_identical(lab.step(settings), after)


def test_what_a_step_that_begins_again_requests_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(replayer: Replayer, *_: Any) -> Any:
        monkeypatch.undo()
        raise NotReplayableError("the first replayed backward pass of this test")

    logged = []
    for replay in (False, True):
        arguments: dict[str, Any] = {"num_layers": 3, "seq_length": 512, "num_microbatches": 3}
        with Lab("qwen3-moe-tiny", **arguments, backend="simulated", replay=replay) as lab:
            if replay:
                monkeypatch.setattr(Replayer, "gradient_of", fail)
            with lab.logging_requests() as log:
                lab.step()
            assert log is not None
            logged.append((log._entries.tolist(), log._first_of_step))
    assert Replayer.gradient_of is not fail, "the step has begun again"
    assert logged[1] == logged[0]


def _groups_at_start(record: StepRecord) -> list[int]:
    timeline = record.timeline
    assert timeline is not None
    opening = timeline.breakdown(timeline.num_opening_events - 1)
    return [opening.get(group, 0) for group in GROUPS]


@pytest.mark.parametrize(
    ("architecture", "arguments", "settings"),
    [
        ("qwen3-moe-tiny", {"layout": Layout(data_parallel_size=2, expert_model_parallel_size=2)}, _FULL),
        ("phi-4-tiny", {"layout": Layout(data_parallel_size=2), "num_microbatches": 1, "num_layers": 7}, _LAYERNORM),
        (
            "phi-4-tiny",
            {"layout": Layout(pipeline_model_parallel_size=2, data_parallel_size=2), "num_layers": 8},
            MemorySettings(),
        ),
    ],
    ids=["experts", "one micro-batch", "stage"],
)
def test_replayed_passes_begin_the_communication_that_ddp_overlaps(
    architecture: str, arguments: dict[str, Any], settings: MemorySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP gathers parameters in the first forward pass of a layer, and reduces gradients in its last backward pass."""
    begun: list[tuple[str, int]] = []
    for name in ("start_param_sync", "start_grad_sync"):
        _note_calls(monkeypatch, name, begun)
    state = TrainingState(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=20_000)
    arguments = {"num_layers": 4, "seq_length": 64, "num_microbatches": 3, "state": state} | arguments
    records: dict[bool, list[Any]] = {False: [], True: []}
    for replay, taken in records.items():
        with Lab(architecture, **arguments, backend="simulated", replay=replay) as lab:
            model: Any = inside(lab).model
            for _ in range(2):
                begun.clear()
                record = lab.step(settings, warm_up=False)
                # In which order a layer's own gradients are ready is autograd's choice, and changes no byte.
                taken.append((record, lab.sent_bytes, sorted(begun)))
                assert model.replay.is_on == replay
                assert (model.replay.num_replayed > 0) == replay
    for (one, *communicated), (other, *communicated_again) in zip(*records.values(), strict=True):
        require_identical(one, other)
        assert communicated == communicated_again


def _note_calls(monkeypatch: pytest.MonkeyPatch, name: str, begun: list[tuple[str, int]]) -> None:
    """Notes each call of a method of DDP's buckets, with the size of the buckets."""
    original = getattr(_ParamAndGradBucketGroup, name)

    def noted(group: Any, *args: Any, **kwargs: Any) -> None:
        begun.append((name, sum(bucket.grad_data.numel() for bucket in group.buckets)))
        original(group, *args, **kwargs)

    monkeypatch.setattr(_ParamAndGradBucketGroup, name, noted)


def test_micro_batches_that_are_not_known_to_repeat_are_stepped_in_the_same_step() -> None:
    """A step that began again would find what its first attempt has reserved, and allocated for good."""
    records = {}
    for replay in (False, True):
        # Of a part of each sequence, Megatron computes rotary angles through pinned memory, once.
        layout = Layout(context_parallel_size=2)
        arguments: dict[str, Any] = {"num_layers": 2, "seq_length": 64, "num_microbatches": 6, "layout": layout}
        with Lab("qwen3-moe-tiny", **arguments, backend="simulated", replay=replay) as lab:
            records[replay] = lab.step(warm_up=False)
    require_identical(records[False], records[True])


def test_a_step_is_replayed_alike_after_steps_that_no_replay_knows() -> None:
    """They free what replayed passes retain."""
    stepped, replayed = (_between_other_steps(replay=replay) for replay in (False, True))
    for one, other in zip(stepped, replayed, strict=True):
        require_identical(one, other)


def test_what_a_tap_keeps_is_freed_again_in_the_steps_after_it() -> None:
    records = {}
    for replay in (False, True):
        arguments: dict[str, Any] = {"num_layers": 3, "seq_length": 32, "num_microbatches": 4}
        with Lab("phi-4-tiny", **arguments, backend="simulated", replay=replay) as lab:
            lab.step()
            with lab.tap(1, every=True):
                lab.step()
            records[replay] = lab.step()
    require_identical(records[False], records[True])


def _steps_of_moe(
    settings: list[MemorySettings], num_layers: int, num_microbatches: int, *, warm_up: tuple[bool, ...], replay: bool
) -> tuple[list[StepRecord], list[bool]]:
    records, are_replayed = [], []
    arguments: dict[str, Any] = {"num_layers": num_layers, "seq_length": 64, "num_microbatches": num_microbatches}
    with Lab("qwen3-moe-tiny", **arguments, backend="simulated", replay=replay) as lab:
        for each, warms_up in zip(settings, warm_up, strict=True):
            records.append(lab.step(each, warm_up=warms_up))
            model: Any = inside(lab).model
            are_replayed.append(model.replay.num_replayed > 0)
    return records, are_replayed


def _between_other_steps(*, replay: bool) -> list[StepRecord]:
    records = []
    arguments: dict[str, Any] = {"num_layers": 3, "seq_length": 32, "num_microbatches": 3}
    with Lab("qwen3-moe-tiny", **arguments, backend="simulated", replay=replay) as lab:
        records.append(lab.step())
        lab.groups_used()
        records.append(lab.step())
        lab.unmetered_step_seconds()
        records.append(lab.step(warm_up=False))
        records.append(lab.forward_only())
        records.append(lab.step())
        records.append(lab.step())
    return records
