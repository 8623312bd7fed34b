"""What a search keeps on disk: it is found again only where nothing has changed that a predicted step depends on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memlab.cli import main
from memlab.commands import search as search_command
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.layouts import Step
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.fitting.prediction import Prediction, Seen
from memlab.jobs.frameworks.framework import NotModelled
from memlab.lab import kept_predictions, search_workers
from memlab.lab.kept_predictions import FOLDER_VARIABLE, KeptPredictions, NotedAnswers, canonical
from memlab.lab.search_steps import Predictor
from memlab.record.step_record import StepRecord
from memlab.units import GIB, MIB
from tests.unit.live import FULL, offload, recompute

from .builders import AnsweredSteps, record_of, training_step

TINY = ["phi-4-tiny", "--num-layers", "1", "--seq-length", "64", "--engines", "1"]
FITS = f"--gpu-memory={estimate_outside_torch(Layout()).total_bytes + GIB}B"
UNKNOWN = (NotModelled("model.something", {"a": [1, 2.5, None]}, "more", "it is new", bound_bytes=7),)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptPredictions:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "predictions"))
    return now()


def taken_again(settings: MemorySettings) -> StepRecord:
    return pytest.fail("no step is needed")


def now() -> KeptPredictions:
    found = KeptPredictions.here(pytest.fail)
    assert found is not None
    return found


def seen(**changes: Any) -> Seen:
    values = {
        "peak_allocated_bytes": 50 * MIB,
        "peak_reserved_bytes": 60 * MIB,
        "step_index": 1,
        "peak_by_category": {},
    }
    record: StepRecord = record_of(training_step(scale=1024), **(values | changes))
    return Seen.of(record, UNKNOWN, communicated_bytes={"all_gather": 3, "all_reduce": 1})


def of(kept: KeptPredictions, one: Seen, limit_bytes: int = GIB, **asked: Any) -> Prediction | None:
    values: dict[str, Any] = {"not_modelled": UNKNOWN, "scenario": one.record.scenario, "settings": one.record.settings}
    return kept.prediction(limit_bytes=limit_bytes, **(values | asked))


def parts(value: Any) -> Iterator[tuple[Any, str]]:
    """Yields each dataclass inside a value, however deep, with each of its fields."""
    if is_dataclass(value):
        for each in fields(value):
            yield value, each.name
            yield from parts(getattr(value, each.name))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from parts(one)


def test_a_later_search_takes_no_step_and_finds_the_same(
    kept: KeptPredictions, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["search", *TINY, FITS, "--max-steps", "2", "--json"]
    assert main([*command, "--anew"]) == 0
    anew = capfd.readouterr().out
    assert not kept.folder.exists(), "--anew keeps nothing"
    assert main([*command, "--no-replay"]) == 0 and capfd.readouterr().out == anew and not kept.folder.exists()
    assert main(command) == 0
    first = capfd.readouterr()
    assert first.out == anew and "earlier searches" not in first.err
    monkeypatch.setattr(search_workers, "Predictor", lambda: pytest.fail("a step is predicted again"))
    assert main(command) == 0
    second = capfd.readouterr()
    num_points = len(list(kept.folder.iterdir()))
    assert second.out == anew and f"{num_points} of these steps are those of earlier searches" in second.err
    with pytest.raises(pytest.fail.Exception):
        main([*command, "--anew"])


def test_what_is_kept_of_a_real_step_is_the_prediction_at_this_limit_and_at_others(kept: KeptPredictions) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", num_layers=1, seq_length=64)
    shrinks = (NotModelled("freeze_moe_router", True, "less", "it is new", bound_bytes=5),)
    offloads = replace(offload("qkv_linear", "core_attn"), min_offloaded_tensor_size=0)
    predictor, tried = Predictor(), 0
    try:
        for settings in (MemorySettings(), offloads):
            for not_modelled in ((), shrinks):
                limit, *others = 8 * MIB, 20 * MIB, GIB
                asked = scenario, settings, limit
                assert kept.prediction(*asked, not_modelled) is None
                predicted = predictor.predict(*asked, True, "simulated", not_modelled, kept)
                assert kept.prediction(*asked, not_modelled) == predicted
                for other in others:
                    found = kept.prediction(scenario, settings, other, not_modelled)
                    if found is not None:
                        tried += 1
                        assert found == predictor.predict(scenario, settings, other, True, "simulated", not_modelled)
    finally:
        predictor.close()
    assert tried, "some other limits need no step"


def test_a_limit_below_what_the_step_reserves_needs_an_answer_which_is_kept_too(kept: KeptPredictions) -> None:
    sizes = {"peak_allocated_bytes": 50 * MIB, "peak_reserved_bytes": 60 * MIB, "step_index": 1}
    record = record_of(None, scenario=Scenario.of("phi-4-tiny"), **sizes)
    one = Seen.of(record, communicated_bytes={})

    def found(limit_bytes: int) -> Prediction | None:
        return kept.prediction(record.scenario, record.settings, limit_bytes)

    kept.keep(one, (), {})
    within, between, below = 61 * MIB, 55 * MIB, 49 * MIB
    for limit, verdict in ((within, "fits"), (below, "does not fit")):
        prediction = found(limit)
        assert prediction is not None and prediction.verdict == verdict
        assert prediction == Prediction.judged(
            one, AnsweredSteps(taken_again, lambda _, limit: limit > 60 * MIB), limit
        )
    assert found(between) is None
    for is_served, verdict in ((True, "fits"), (False, "does not fit")):
        noted = NotedAnswers(AnsweredSteps(taken_again, lambda _, __, answer=is_served: answer))
        predicted = Prediction.judged(one, noted, between)
        assert predicted.verdict == verdict and noted.answers
        kept.keep(one, (), noted.answers)
        assert found(between) == predicted and found(between - 1) is None
    kept.keep(one, (), {})
    assert found(between) is not None, "answers that were kept before stay"


def test_each_field_of_what_is_asked_for_decides(kept: KeptPredictions) -> None:
    scenario = Scenario.of("qwen3-moe-tiny", layout=Layout(data_parallel_size=2), state=TrainingState(lora=LoRA()))
    one = seen(scenario=scenario, settings=FULL)
    kept.keep(one, UNKNOWN, {})
    assert of(kept, one) is not None
    tried = 0
    for name, value in (("scenario", scenario), ("settings", FULL), ("not_modelled", UNKNOWN)):
        for place, (_, field) in enumerate(parts(value)):
            other = deepcopy(value)
            inside, _ = list(parts(other))[place]
            object.__setattr__(inside, field, "another value")
            assert of(kept, one, **{name: other}) is None, f"{field} of {name}"
            tried += 1
    assert tried > 150
    assert of(kept, one, not_modelled=()) is None and of(kept, one, not_modelled=UNKNOWN * 2) is None


def test_values_of_different_types_differ_and_unknown_types_are_not_kept(kept: KeptPredictions) -> None:
    values = [1, True, 1.0, "1", "", None, (), [], {}, (1,), [1], (1, 2), (12,), ("1,2",), ("1", "2"), {"a": 1}, b"1"]
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical({"b", "a"}) == canonical({"a", "b"})
    with pytest.raises(TypeError):
        canonical(Path("a"))
    strange = (replace(UNKNOWN[0], value=object()),)
    kept.keep(seen(), strange, {})
    assert not kept.folder.exists() and of(kept, seen(), not_modelled=strange) is None


def test_another_version_of_the_code_finds_nothing(
    kept: KeptPredictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "of_a_job" / "inner"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(kept_predictions, "_PACKAGES", ("of_a_job", "is_not.installed", "a_stand_in"))
    monkeypatch.setattr(kept_predictions, "_CHANGING", ("is_not.installed",))
    monkeypatch.setitem(sys.modules, "a_stand_in", ModuleType("a_stand_in"))  # it has no specification

    def write(name: str, text: str, seconds: int = 1) -> None:
        (package / name).write_text(text)
        os.utime(package / name, (seconds, seconds))

    monkeypatch.setattr(kept_predictions, "MEMLAB_IMPORTED_NS", time.time_ns() + 10**15)
    write("code.py", "a = 1")
    environments = [now().environment]
    write("notes.txt", "of nobody")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert now().environment == environments[0], "that changes no step"

    def is_another() -> bool:
        environments.append(now().environment)
        return environments[-1] not in environments[:-1]

    write("code.py", "a = 22")
    assert is_another()
    write("code.py", "a = 22", seconds=2)
    assert is_another()
    write("more.py", "")
    assert is_another()
    (tmp_path / "site" / "other-1.0.dist-info").mkdir()
    assert is_another()
    for variable in ("NVTE_FLASH_ATTN", "TRANSFORMERS_SDPA_FORCE_GQA", "USE_HUB_KERNELS"):
        monkeypatch.setenv(variable, "0")
        assert is_another(), variable
    with monkeypatch.context() as patch:
        without_asserts = SimpleNamespace(version=sys.version, flags=SimpleNamespace(optimize=1), path=sys.path)
        patch.setattr(kept_predictions, "sys", without_asserts)
        assert is_another()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (package / "linked").symlink_to(elsewhere)
    (package / "around").symlink_to(package)
    assert not is_another()
    (elsewhere / "code.py").write_text("")
    assert is_another()
    (package / ".#code.py").symlink_to("user@host.1:2")  # as Emacs does
    assert not is_another()
    monkeypatch.setattr(kept_predictions, "_CHANGING", ("of_a_job",))
    assert is_another()
    write("code.py", "a = 23", seconds=2)
    assert is_another(), "neither its size nor its time has changed"
    one, changed = seen(), now()
    changed.keep(one, UNKNOWN, {})
    assert of(changed, one) is not None and of(kept, one) is None
    monkeypatch.setattr(kept_predictions, "MEMLAB_IMPORTED_NS", time.time_ns() - 10**9)
    assert KeptPredictions.here([].append) is None, "this process may have loaded the former one, however old this is"


def test_a_source_that_is_newer_than_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(kept_predictions, "MEMLAB_IMPORTED_NS", 0)
    said: list[str] = []
    assert KeptPredictions.here(said.append) is None
    (line,) = said
    path = line.partition("kept: ")[2].partition(" is newer")[0]
    assert Path(path).is_file()


def test_nothing_is_kept_once_the_sources_have_changed_since_the_search_began(kept: KeptPredictions) -> None:
    replace(kept, changing="of other sources").keep(seen(), UNKNOWN, {})
    assert not kept.folder.exists()


def test_the_memlab_that_runs_is_among_the_sources() -> None:
    names = {name for name, *_ in kept_predictions._sources(kept_predictions._CHANGING)}
    assert kept_predictions.__file__ in names
    assert any(name.endswith("megatron/core/tensor_parallel/random.py") for name in names)


def test_a_step_that_did_not_finish_is_not_kept(kept: KeptPredictions) -> None:
    for status in ("out_of_memory", "interrupted"):
        kept.keep(seen(status=status), UNKNOWN, {})
    assert not kept.folder.exists()


def test_a_damaged_file_counts_as_none_and_is_replaced(kept: KeptPredictions) -> None:
    one = seen()
    kept.keep(one, UNKNOWN, {})
    (path,) = kept.folder.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b" ", whole.replace(b"52428800", b"52428801")):
        assert damaged != whole
        path.write_bytes(damaged)
        assert of(kept, one) is None
        kept.keep(one, UNKNOWN, {})
        assert path.read_bytes() == whole


def test_a_file_under_another_name_counts_as_none(kept: KeptPredictions) -> None:
    one, other = seen(), seen(settings=FULL)
    kept.keep(one, UNKNOWN, {})
    (path,) = kept.folder.iterdir()
    kept.keep(other, UNKNOWN, {})
    (path_of_other,) = set(kept.folder.iterdir()) - {path}
    path.replace(path_of_other)
    assert of(kept, one) is None and of(kept, other) is None


def test_a_folder_that_takes_no_file_keeps_nothing_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        found = now()
        found.keep(seen(), UNKNOWN, {})
        found.shorten()
        assert of(found, seen()) is None
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert KeptPredictions.here(pytest.fail) is None
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert now().folder == tmp_path / "memlab" / "predictions"
    monkeypatch.setenv("XDG_CACHE_HOME", "no/absolute/path")
    assert KeptPredictions.here(pytest.fail) is None


def test_the_files_that_were_asked_for_last_stay(kept: KeptPredictions, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [seen(settings=recompute(*names)) for names in (("mlp",), ("core_attn",), ("layernorm",), ("moe_act",))]
    for age, one in enumerate(steps):
        kept.keep(one, UNKNOWN, {})
        for path in kept.folder.iterdir():
            state = path.stat()
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns - 10**9 * (age + 1)))
    monkeypatch.setattr(kept_predictions, "_MOST_FILES", 4)
    kept.shorten()
    assert len(list(kept.folder.iterdir())) == 4
    assert of(kept, steps[0]) is not None  # the oldest one is asked for
    kept.keep(seen(settings=FULL), UNKNOWN, {})
    kept.shorten()
    assert [of(kept, one) is not None for one in steps] == [True, False, False, True]


def test_only_kept_steps_are_removed_however_many_other_files_there_are(
    kept: KeptPredictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.folder.mkdir()
    others = {kept.folder / name for name in ("thesis.tex", "a.json", f"{'a' * 64}.txt", f"{'A' * 64}.json", ".memlab")}
    for path in others:
        path.touch()
    kept.keep(seen(), UNKNOWN, {})
    (kept.folder / ".memlab-0123abcd.json").touch()  # of a process that was killed
    monkeypatch.setattr(kept_predictions, "_MOST_FILES", 1)
    kept.shorten()
    assert set(kept.folder.iterdir()) == others


def test_an_interrupted_search_removes_too_many_files_too(
    kept: KeptPredictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened: list[Path] = []
    monkeypatch.setattr(KeptPredictions, "shorten", lambda one: shortened.append(one.folder))
    with pytest.raises(KeyboardInterrupt), search_command._workers(1, replay=True, anew=False):
        raise KeyboardInterrupt
    assert shortened == [kept.folder]


def test_steps_that_a_search_only_expects_to_ask_for_do_not_count(kept: KeptPredictions) -> None:
    first, following = seen(), seen(settings=FULL)
    kept.keep(following, UNKNOWN, {})
    scenario = first.record.scenario
    prediction = of(kept, following)
    assert prediction is not None

    class TwoProcesses(search_workers._ThisProcess):
        def __len__(self) -> int:
            return 2

        def wait(self) -> None:
            (future, *_) = self._waiting.pop()
            future.set_result(prediction)

    workers = search_workers.Workers(TwoProcesses(), not_modelled=UNKNOWN, kept=kept)
    likely = Step(scenario, FULL, GIB)
    workers.predict(scenario, first.record.settings, GIB, lambda: iter((likely,)))
    assert workers.known(*likely) == prediction and workers.num_kept == 0
    workers.predict(*likely)
    assert workers.num_kept == 1
