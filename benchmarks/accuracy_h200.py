"""How near predictions come to the H200 baselines of the nightly: every steady step of every lab, predicted again.

python benchmarks/accuracy_h200.py     no GPU needed; the measured side is papermill_runs/baselines/h200/
"""

from __future__ import annotations

import json
import statistics
import warnings
from pathlib import Path
from typing import Any

from memlab import Lab, MemorySettings

BASELINES = Path(__file__).parents[1] / "papermill_runs" / "baselines" / "h200"
PLANTED = ("held", "again", "tapped", "unguarded", "log-probabilities")
"""Records of labs that are no plain training step: errors made on purpose, a tap, a pass without backward."""

Measured = dict[str, Any]


def measured_steps() -> dict[tuple[str, int, int], dict[str, Measured]]:
    """Returns (architecture, layers, sequence) to settings, as JSON, to the metrics that were measured."""
    labs: dict[tuple[str, int, int], dict[str, Measured]] = {}
    for path in sorted(BASELINES.glob("*.json")):
        for name, record in json.loads(path.read_text())["measured"]["records"].items():
            scenario, metrics = record.get("scenario"), record["metrics"]
            if scenario and metrics["status"] == "ok" and name not in PLANTED:
                lab = scenario["architecture"], scenario["num_layers"], scenario["seq_length"]
                labs.setdefault(lab, {}).setdefault(json.dumps(record["settings"], sort_keys=True), metrics)
    return labs


def main() -> None:
    """Prints a row a step, and the errors over all."""
    errors: dict[str, list[float]] = {"peak_allocated_bytes": [], "activation_peak_bytes": []}
    under = 0
    print(f"{'':60}{'measured':>16}{'allocated peak':>16}{'activation peak':>17}{'residual':>10}")
    for (architecture, num_layers, seq_length), steps in measured_steps().items():
        with Lab(architecture, num_layers=num_layers, seq_length=seq_length, backend="simulated") as lab:
            for settings, metrics in steps.items():
                record = lab.step(MemorySettings.from_dict(json.loads(settings)))
                off = {name: getattr(record, name) / metrics[name] - 1 for name in errors}
                for name, error in off.items():
                    errors[name].append(abs(error))
                under += record.peak_allocated_bytes < metrics["peak_allocated_bytes"]
                label = f"{architecture} {seq_length}, {record.settings}"
                peak, activation = (f"{error:+.4%}" for error in off.values())
                residual = record.residual_bytes - metrics["residual_bytes"]
                print(f"{label:60.60}{metrics['peak_allocated_bytes']:16,}{peak:>16}{activation:>17}{residual:10,}")
    for name, values in errors.items():
        print(f"{name}: {len(values)} steps, error median {statistics.median(values):.4%}, worst {max(values):.4%}")
    print(f"under-estimated: {under / len(errors['peak_allocated_bytes']):.0%}")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
