"""Records, timelines and snapshots that are damaged: each is refused in one line, or what is read is whole."""

from __future__ import annotations

import json
import os
import pickle
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlab._version import __version__
from memlab.config.training_state import TrainingState
from memlab.record.file_format import FORMAT
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline
from tests.unit.builders import record_of, training_step
from tests.unit.caching_allocator import random_history
from tests.unit.corruption import Kind, corruptions
from tests.unit.refusal import refusal

DATA = Path(__file__).parent / "data" / "measured"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return record_of(training_step()).save(tmp_path / "saved")


@pytest.mark.parametrize(("name", "kind"), [("record.json", "json"), ("timeline.npz", "bytes")])
def test_a_damaged_record_is_refused_in_a_line_or_read(saved: Path, name: str, kind: Kind) -> None:
    refused = 0
    for damaged in corruptions((saved / name).read_bytes(), kind, seed=1):
        (saved / name).write_bytes(damaged)
        refused += bool(refusal(lambda: json.dumps(StepRecord.load(saved).to_dict())))
    assert refused > 100


def test_a_damaged_snapshot_is_refused_in_a_line_or_read(tmp_path: Path) -> None:
    path, refused = tmp_path / "x.pickle", 0
    whole = pickle.dumps(random_history(100).snapshot())
    for damaged in corruptions(whole, "bytes", seed=2):
        path.write_bytes(damaged)
        refused += bool(refusal(lambda: Timeline.from_snapshot(path)))
    assert refused > 50


def edited(saved: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((saved / "record.json").read_text())
    edit(values)
    (saved / "record.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda values: values.pop("scenario"), "has no scenario"),
        (lambda values: values.update(scenario=[]), "scenario is [], must be an object"),
        (lambda values: values["scenario"].update(layout=None), "layout is None, must be an object"),
        (lambda values: values.update(settings=[1]), "settings are [1], must be an object"),
        (lambda values: values.update(out_of_memory=[]), "out_of_memory is [], must be an object"),
        (lambda values: values.update(peak_allocated_bytes="many"), "peak_allocated_bytes is 'many', must be a whole"),
        (lambda values: values.update(peak_allocated_bytes=10**400), "a number of more than 100 digits, must be below"),
        (lambda values: values.update(peak_allocated_bytes=-1), "peak_allocated_bytes is -1, must be 0 or more"),
        (lambda values: values.update(peak_by_module=[1]), "peak_by_module is [1], must be an object"),
        (lambda values: values.update(peak_by_module={"a": None}), "peak_by_module of a is None, must be a whole"),
        (lambda values: values.update(status="fine"), "status is 'fine', must be one of ok, out_of_memory, inter"),
        (lambda values: values.update(more=1), "unknown fields ['more']"),
        (lambda values: values.update(message="\ud800"), "must be Unicode text"),
        (lambda values: values["scenario"].update(seq_length="long"), "seq_length is 'long', must be a whole number"),
    ],
)
def test_a_record_with_a_wrong_field_names_it(
    saved: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    edited(saved, edit)
    message = refusal(lambda: StepRecord.load(saved))
    assert message.startswith(f"{saved / 'record.json'} is not a whole record (")
    assert words in message
    assert message.endswith(": take the step again")


@pytest.mark.parametrize("text", ["[]", "null", "7", "", "{", "\u00ff", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_json_that_is_not_a_record_is_refused_in_a_line(saved: Path, text: str) -> None:
    (saved / "record.json").write_text(text, encoding="latin-1")
    assert refusal(lambda: StepRecord.load(saved))


@pytest.mark.parametrize("name", ["record.json", "timeline.npz"])
def test_a_pipe_or_a_folder_instead_of_a_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert "is not a file" in refusal(lambda: StepRecord.load(saved))
    (saved / name).unlink()
    (saved / name).mkdir()
    assert "is not a file" in refusal(lambda: StepRecord.load(saved))


def test_a_folder_whose_name_cannot_be_is_refused(tmp_path: Path) -> None:
    assert "cannot be read (file name too long)" in refusal(lambda: StepRecord.load(tmp_path / ("x" * 300)))
    assert "holds no record.json" in refusal(lambda: StepRecord.load(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_opening_events": None}, "the columns num_opening_events are missing"),
        ({"pool": np.zeros(1, np.uint8)}, "the column pool is uint8 of shape (1,)"),
        ({"nanoseconds": np.zeros((2, 2), np.int64)}, "of shape (2, 2)"),
        ({"num_opening_events": np.int64(-1)}, "num_opening_events is -1"),
        ({"num_opening_events": np.int64(10**9)}, "num_opening_events is 1000000000"),
        ({"modules": np.array([""])}, "the column module has values outside 0 to 0"),
        ({"nanoseconds": np.array(["x"])}, "the column nanoseconds is <U1"),
    ],
)
def test_a_timeline_with_a_wrong_column_names_it(saved: Path, change: dict[str, Any], words: str) -> None:
    with np.load(saved / "timeline.npz") as opened:
        arrays = dict(opened) | change
    np.savez_compressed(saved / "timeline.npz", **{name: array for name, array in arrays.items() if array is not None})
    message = refusal(lambda: StepRecord.load(saved))
    assert words in message
    assert message.startswith(f"{saved / 'timeline.npz'} is not a whole timeline (")


def test_a_timeline_of_petabytes_is_refused_before_it_is_unpacked(saved: Path) -> None:
    with zipfile.ZipFile(saved / "timeline.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("delta_bytes.npy", b"")
    content = bytearray((saved / "timeline.npz").read_bytes())
    at = content.index(b"PK\x01\x02") + 24  # the size of the member, unpacked, in the zip's directory
    content[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    (saved / "timeline.npz").write_bytes(bytes(content))
    large = bytes(content)
    (saved / "timeline.npz").write_bytes(large)
    assert refusal(lambda: StepRecord.load(saved))


# Formats


def test_a_saved_record_has_a_format_and_loads_as_it_was(saved: Path) -> None:
    assert json.loads((saved / "record.json").read_text())["format"] == FORMAT
    with np.load(saved / "timeline.npz") as opened:
        assert (int(opened["format"]), str(opened["memlab"])) == (FORMAT, __version__)
    record = StepRecord.load(saved)
    assert record == record_of(training_step())
    assert "format" not in record.to_dict()


def test_files_of_memlab_0_1_0_are_read() -> None:
    """They have no format number and no hardware."""
    folders = [path.parent for path in DATA.glob("*/record.json")]
    assert folders
    for folder in folders:
        record = StepRecord.load(folder)
        assert record.hardware == {}
        assert record.timeline is None or len(record.timeline)


def test_files_of_memlab_0_2_0_are_read(saved: Path) -> None:
    """They have format 1, and neither a training state nor a phase of the peak, and do not say that a step is steady."""

    def as_0_2_0_wrote_it(values: dict[str, Any]) -> None:
        del values["peak_phase"], values["is_steady"], values["scenario"]["state"], values["scenario"]["allocator"]
        del values["settings"]["offload_optimizer_except_update"]
        values["format"] = 1

    edited(saved, as_0_2_0_wrote_it)
    record = StepRecord.load(saved)
    assert (record.peak_phase, record.scenario.state, record.is_steady) == ("", TrainingState(), True)


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(saved: Path) -> None:
    edited(saved, lambda values: values.update(format=FORMAT + 1, versions={"memlab": "9.1.0"}))
    expected = (
        f"memlab '9.1.0' wrote it in format {FORMAT + 1}, and this memlab, {__version__}, reads up to format {FORMAT}: "
        "update memlab"
    )
    assert expected in refusal(lambda: StepRecord.load(saved))
    with np.load(saved / "timeline.npz") as opened:
        arrays = dict(opened) | {"format": np.int64(FORMAT + 2), "memlab": np.array("9.2.0")}
    np.savez_compressed(saved / "timeline.npz", **arrays)
    assert f"memlab 9.2.0 wrote it in format {FORMAT + 2}" in refusal(lambda: Timeline.load(saved / "timeline.npz"))


@pytest.mark.parametrize("number", [0, -1, True, "1", None, [], 1.5])
def test_what_is_not_a_format_number_is_refused(saved: Path, number: object) -> None:
    edited(saved, lambda values: values.update(format=number))
    assert "must be from 1 to 2" in refusal(lambda: StepRecord.load(saved))


def test_hardware_is_saved_with_the_record_and_is_not_a_metric(tmp_path: Path) -> None:
    record = record_of(training_step(), hardware={"gpu": "NVIDIA H200"})
    assert StepRecord.load(record.save(tmp_path / "x")).hardware == {"gpu": "NVIDIA H200"}


# Saving


def test_a_record_is_never_saved_over_another(saved: Path) -> None:
    before = (saved / "record.json").read_bytes()
    message = refusal(lambda: record_of(None).save(saved))
    assert "has a record, which is never overwritten: give a new folder" in message
    assert (saved / "record.json").read_bytes() == before
    assert StepRecord.load(saved).timeline is not None
    assert sorted(path.name for path in saved.iterdir()) == ["record.json", "timeline.npz"], "nothing is left behind"


def test_a_folder_with_other_files_can_take_a_record_and_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "ranks.html").write_text("")
    record_of(training_step()).save(tmp_path)
    assert StepRecord.load(tmp_path).timeline is not None
    assert (tmp_path / "ranks.html").exists()


def test_a_timeline_without_its_record_is_not_taken_for_another_s(saved: Path) -> None:
    """What a process leaves that is killed between the two files."""
    (saved / "record.json").unlink()
    assert "holds no record.json" in refusal(lambda: StepRecord.load(saved))
    record_of(None).save(saved)
    assert StepRecord.load(saved).timeline is None


def test_of_two_that_save_to_one_folder_at_once_one_is_refused_and_the_other_is_whole(tmp_path: Path) -> None:
    for number in range(10):
        folder, outcomes = tmp_path / str(number), []
        barrier = threading.Barrier(2)

        def save(peak: int, folder: Path = folder, outcomes: list[str] = outcomes, start: Any = barrier) -> None:
            record = record_of(training_step(), peak_allocated_bytes=peak)
            start.wait()
            outcomes.append(refusal(lambda: record.save(folder)))

        threads = [threading.Thread(target=save, args=(peak,)) for peak in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(bool, outcomes)) == [False, True]
        assert StepRecord.load(folder).timeline is not None


def test_what_cannot_be_written_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(lambda: record_of(None).save(tmp_path / "file"))
    assert refusal(lambda: record_of(None).save(tmp_path / "file" / "inside"))
    assert refusal(lambda: record_of(None).save(tmp_path / ("x" * 300)))
    assert (tmp_path / "file").read_text() == ""
