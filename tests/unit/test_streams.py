"""CUDA streams in a prediction: which stream is current, and that memory never moves from one stream to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlab.backends.simulated import of_labs_before_0_4, on_fake_tensors
from memlab.config.settings import MemorySettings
from memlab.lab.lab import Lab
from memlab.meter.labels import Labels, labelled_by, record_stream
from memlab.meter.storage_meter import simulated_meter
from memlab.meter.stream_order import SENDING
from memlab.units import MIB
from tests.unit.inside import inside

pytestmark = pytest.mark.versions

NARROW = MemorySettings(offload_modules=("core_attn", "attn_proj"))
WIDE = MemorySettings(offload_modules=("qkv_linear", "core_attn", "attn_proj", "mlp_norm"))
BOTH = MemorySettings(
    recompute_granularity="selective",
    recompute_modules=("layernorm", "mlp"),
    offload_modules=("core_attn", "attn_proj"),
)


def device_tensor(num_mib: int) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")


def test_the_innermost_stream_is_current_and_none_changes_nothing() -> None:
    with on_fake_tensors(), labelled_by(Labels()):
        default, one, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        assert default == torch.cuda.default_stream()
        assert one != other
        with torch.cuda.stream(one):
            with torch.cuda.stream(other), torch.cuda.stream(None):
                assert torch.cuda.current_stream() == other
            assert torch.cuda.current_stream() == one
            with pytest.raises(RuntimeError, match="inside"), torch.cuda.stream(other):
                raise RuntimeError("inside")
            assert torch.cuda.current_stream() == one
        assert torch.cuda.current_stream() == default


def test_a_process_has_32_streams_and_then_takes_the_first_again() -> None:
    with on_fake_tensors():
        streams = [torch.cuda.Stream() for _ in range(33)]
        assert torch.cuda.default_stream() not in streams
    assert len(set(streams)) == 32
    assert streams[0] == streams[-1]


def test_what_a_stream_freed_is_reserved_for_that_stream() -> None:
    meter = simulated_meter(labels := Labels())
    with on_fake_tensors(), labelled_by(labels), meter.watching():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            device_tensor(64)
        assert meter.device_bytes().allocated_bytes == 0
        device_tensor(64)
        assert meter.device_bytes().reserved_bytes == 128 * MIB
        with torch.cuda.stream(stream):
            kept = device_tensor(64)
        assert meter.device_bytes().reserved_bytes == 128 * MIB
        meter.device_memory_bytes = 128 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            device_tensor(128)
        with torch.cuda.stream(stream):
            kept.untyped_storage().resize_(0)
        assert kept.numel()
        device_tensor(128)  # the limit makes torch return what the other stream caches


def test_what_was_sent_is_free_again_when_the_process_has_waited_for_the_device() -> None:
    meter = simulated_meter(labels := Labels())
    with on_fake_tensors(), labelled_by(labels), meter.watching():
        for sent in (device_tensor(64), device_tensor(32)):
            record_stream(sent, SENDING)
        del sent
        assert meter.device_bytes().allocated_bytes == 0
        again = device_tensor(64)
        assert meter.device_bytes().reserved_bytes == 160 * MIB, "both wait"
        torch.cuda.synchronize()
        kept = device_tensor(64), device_tensor(32)
        assert meter.device_bytes().reserved_bytes == 160 * MIB
        record_stream(again, SENDING)
        del again
        meter.device_memory_bytes = 160 * MIB
        assert device_tensor(64).numel() and kept, "at a limit, torch waits for the device before it gives up"


def test_events_on_another_stream_are_not_replayed() -> None:
    meter = simulated_meter(labels := Labels())
    repeater: Any = meter.repeater
    with on_fake_tensors(), labelled_by(labels), meter.watching():
        replayable = []
        for stream in (None, torch.cuda.Stream()):
            meter.start({})
            position = repeater.position()
            with torch.cuda.stream(stream):
                device_tensor(2)
            replayable.append(repeater.record(position, repeater.position(), {}, (0, labels.span), {}) is not None)
            meter.finish()
            replayable.append(repeater.repeat_step() is not None)
    assert replayable == [True, True, False, False]


def test_reserved_peaks_of_activation_offload_are_those_of_an_h200() -> None:
    """Megatron reloads activations on a stream of its own. The steps were taken in this order, on torch 2.11."""
    measured = {MemorySettings(): 47766831104, WIDE: 54259613696, NARROW: 54427385856, BOTH: 45753565184}
    of_reloads = {MemorySettings(): 0, WIDE: 880, NARROW: 560, BOTH: 560}
    with Lab("phi-4", num_layers=2, seq_length=16384, backend=of_labs_before_0_4()) as lab:
        for settings, reserved_bytes in measured.items():
            record = lab.step(settings)
            assert record.peak_reserved_bytes == pytest.approx(reserved_bytes, rel=0.004), settings
            allocator = inside(lab).model.meter.storages.memory.allocator.in_python()  # type: ignore[attr-defined]
            of_streams = sum(pool.reserved_bytes for number, pool in allocator.pools.items() if number > 1)
            assert of_streams == of_reloads[settings] * MIB, "as the H200's snapshot has them"
