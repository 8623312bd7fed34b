"""The formulas of lab 01 and of the labs' cheat sheet, compared with what memlab meters and with steps of an H200."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from memlab import Lab, MemorySettings, StepRecord, TrainingState, kept_by_module
from memlab.config.architectures import Architecture
from tests.unit.live import FULL, recompute

LABS = Path(__file__).parents[2] / "labs"
PLAIN = MemorySettings()
NUM_SEQUENCES = 2  # of a micro-batch: the cosines and sines exist once for both


def formulas() -> dict[str, dict[str, str]]:
    """Returns the tables that have a column of formulas, by heading: name of the row to formula."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^##+ ", (LABS / "CHEATSHEET.md").read_text(), flags=re.MULTILINE):
        rows = re.findall(r"^\| (.+?) \| `([^`]+)` \| .+ \|$", section, flags=re.MULTILINE)
        if "| formula |" in section:
            found[section.splitlines()[0]] = {name.replace("`", ""): formula for name, formula in rows}
    return found


def letters(model: Architecture, num_layers: int, seq_length: int, micro_batch_size: int = 1) -> dict[str, int]:
    return {
        "s": seq_length,
        "t": seq_length * micro_batch_size,
        "h": model.hidden_size,
        "f": model.ffn_hidden_size,
        "a": model.num_attention_heads,
        "g": model.num_query_groups,
        "d": model.kv_channels,
        "E": model.num_moe_experts or 0,
        "k": model.moe_router_topk,
        "m": model.moe_ffn_hidden_size,
        "V": model.vocab_size,
        "L": num_layers,
    }


def metered() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """Takes the steps; returns the bytes by heading and row of the cheat sheet, and the letters by heading."""
    with Lab("phi-4-tiny", num_layers=2, seq_length=64, micro_batch_size=NUM_SEQUENCES) as lab:
        dense = {name: lab.step(each) for name, each in [("", PLAIN), ("full recompute", FULL)]}
        dense |= {f"recompute {name}": lab.step(recompute(name)) for name in ("mlp", "core_attn")}
    with Lab("qwen3-moe-tiny", num_layers=2, seq_length=64, micro_batch_size=NUM_SEQUENCES) as lab:
        moe = {"": lab.step(), "full recompute": lab.step(FULL)}
    left = {f"{kind}, {name}": each for kind, all_ in (("dense", dense), ("MoE", moe)) for name, each in all_.items()}
    num_parameters = {
        kind: replace(all_[""].scenario.architecture, num_layers=2).num_parameters
        for kind, all_ in (("dense", dense), ("MoE", moe))
    }
    plain = dense[""].peak_by_category
    of_dense, of_moe = (letters(all_[""].scenario.architecture, 2, 64, NUM_SEQUENCES) for all_ in (dense, moe))
    bytes_of = {
        "Dense layer (phi-4's kind)": kept_by_module(dense[""])
        | {"dense layer": sum(kept_by_module(dense[""]).values())},
        "MoE layer (Qwen3's kind)": kept_by_module(moe[""]),
        "What a layer keeps under a setting": {
            name: sum(kept_by_module(each).values()) for name, each in left.items() if not name.endswith(", ")
        },
        "The rest of a step": {
            # Megatron pads its buffers, and Adam counts the steps of each parameter tensor.
            name: size - (size - each * num_parameters["dense"]) % 1024
            for name, size, each in (
                ("parameters, bf16", plain["parameters"], 2),
                ("gradients, fp32", plain["gradients"], 4),
                ("optimizer state, fp32", plain["optimizer state"], 12),
            )
        }
        | {
            "P of a dense model": num_parameters["dense"],
            "P of an MoE model": num_parameters["MoE"],
        },
    }
    return bytes_of, {"dense": of_dense | {"P": num_parameters["dense"]}, "MoE": of_moe}


def test_each_formula_of_the_cheat_sheet_gives_the_metered_bytes() -> None:
    bytes_of, of_kind = metered()
    by_hand = {
        heading: {
            name: eval(formula, {}, of_kind["MoE" if "MoE" in heading + name else "dense"])  # noqa: S307
            for name, formula in rows.items()
        }
        for heading, rows in formulas().items()
    }
    assert by_hand == bytes_of


def test_lab_01_quotes_what_an_h200_measured() -> None:
    """Half of the difference between four and two layers, for each pair of records that differ in nothing else."""
    records = [StepRecord.from_dict(json.loads(line)) for line in (LABS / "results" / "h200_steps.jsonl").open()]

    def bytes_of_two_layers(architecture: str, settings: MemorySettings, tensor: int) -> set[int]:
        kept: dict[int, set[int]] = {2: set(), 4: set()}
        for record in records:
            scenario, layout = record.scenario, record.scenario.layout
            if (
                (scenario.architecture.name, scenario.seq_length, scenario.micro_batch_size) == (architecture, 4096, 1)
                and (layout.tensor_model_parallel_size, layout.world_size) == (tensor, tensor)
                and (record.settings, scenario.state, record.status) == (settings, TrainingState(), "ok")
                and not record.forward_only
                and "activations" in record.peak_by_category
            ):
                parts = record.peak_by_category
                kept.setdefault(scenario.num_layers, set()).add(parts["activations"] + parts["workspace"])
        return {four - two for four in kept[4] for two in kept[2]}

    text = "\n".join(cell.source for cell in nbformat.read(LABS / "01_one_layer.ipynb", as_version=4).cells)
    table = re.findall(r"^\| (.+) \| (\d+,[\d,]+) \| (\d+,[\d,]+)(?: to ([\d,]+))? \| ", text, flags=re.MULTILINE)
    assert len(table) == 5
    for name, formula, least, most in table:
        model, _, rest = name.partition(", ")
        settings, tensor = (FULL if rest == "full recompute" else PLAIN), (2 if rest == "TP2" else 1)
        found = bytes_of_two_layers(model.lower(), settings, tensor)
        quoted = [int(number.replace(",", "")) for number in (least, most or least)]
        assert [min(found) / 2, max(found) / 2] == quoted, name
        assert int(formula.replace(",", "")) <= quoted[0] <= quoted[1] <= int(formula.replace(",", "")) * 1.0015


def test_what_is_not_a_step_with_a_backward_pass_is_refused() -> None:
    with Lab("phi-4-tiny", num_layers=1, seq_length=16, backend="simulated") as lab:
        record = lab.step()
        with pytest.raises(ValueError, match="layer 7 keeps nothing in this step, must be a layer of this rank"):
            kept_by_module(record, layer=7)
        with pytest.raises(ValueError, match="without a backward pass"):
            kept_by_module(lab.forward_only())
