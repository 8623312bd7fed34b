"""Audits as tables: where parameters, gradients, optimizer state and activations are, and what refers to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from memlab.record.device_bytes import DeviceBytes
from memlab.record.offload_audit import OffloadAudit
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import binary_unit, format_bytes
from memlab.views.text.columns import NAME_WIDTH, SETTING_WIDTH, Block, Table, ending, in_unit
from memlab.views.text.record import without_layer_numbers


def residency_blocks(audit: ResidencyAudit) -> list[Block]:
    """Describes where parameters, gradients and optimizer state are between two steps, and what is wrong with that.

    Returns:
        A table with one row per holder on the device and one per group on the host, and the complaints.
    """
    entries = [(f"device, {one.group}: {one.holder}", one.expected_bytes, one.device_bytes) for one in audit.holdings]
    entries += [("device, neither in a group nor workspace", 0, audit.unnamed_device_bytes)]
    entries += [(f"host, {one.group}", one.expected_bytes, one.host_bytes) for one in audit.host_copies]
    entries += [("host, at the peak of the last transfer", audit.move_host_bytes, audit.move_peak_host_bytes)]
    unit_bytes, unit = binary_unit(max(max(expected, found) for _, expected, found in entries))
    rows = [["allocated bytes", f"expected {unit}", f"found {unit}", "bytes found"]]
    rows += [
        [ending(name, NAME_WIDTH), in_unit(expected, unit_bytes), in_unit(found, unit_bytes), f"{found:,}"]
        for name, expected, found in entries
    ]
    return [Table(rows), audit.complaints or (str(audit),)]


def residency_moments_blocks(audits: Mapping[str, ResidencyAudit]) -> list[Block]:
    """Describes which bytes are on the device at several moments, one row per moment.

    Args:
        audits: What `Lab.audit_residency` returned, at least one, by the name of its moment.

    Returns:
        A table of the groups' device bytes and their sum, and the complaints, each after the name of its moment.
    """
    sizes = {name: [audit.device_bytes(group) for group in GROUPS] for name, audit in audits.items()}
    unit_bytes, unit = binary_unit(max(map(sum, sizes.values())))
    rows = [["on the device", *(f"{group} {unit}" for group in GROUPS), f"sum {unit}"]]
    rows += [
        [name, *(in_unit(size, unit_bytes) for size in (*of_groups, sum(of_groups)))]
        for name, of_groups in sizes.items()
    ]
    complaints = [f"{name}: {complaint}" for name, audit in audits.items() for complaint in audit.complaints]
    return [Table(rows), *([complaints] if complaints else [])]


def residency_lines_blocks(runs: Mapping[str, Mapping[str, ResidencyAudit]]) -> list[Block]:
    """Describes what is on the device in several versions of a program, one row per moment.

    Args:
        runs: Audits by the names of their moments, which all versions share, by the name of the version.

    Returns:
        A table of the bytes of all three tensor groups together, with a column per version.
    """
    sums = {
        name: {moment: sum(audit.device_bytes(group) for group in GROUPS) for moment, audit in audits.items()}
        for name, audits in runs.items()
    }
    unit_bytes, unit = binary_unit(max(max(sizes.values()) for sizes in sums.values()))
    rows = [["on the device", *(f"{name} {unit}" for name in sums)]]
    rows += [
        [moment, *(in_unit(sizes[moment], unit_bytes) for sizes in sums.values())]
        for moment in next(iter(sums.values()))
    ]
    return [Table(rows)]


def device_bytes_blocks(moments: Mapping[str, DeviceBytes]) -> list[Block]:
    """Describes how many bytes are allocated, active and reserved at several moments, one row per moment.

    Args:
        moments: The device's bytes by the name of the moment, at least one, such as `Lab.release_recipe` returns.

    Returns:
        A table. Its second column is what each moment has freed since the one before; counts that the device does not
        have are left out.
    """
    every = [(one.allocated_bytes, one.active_bytes, one.reserved_bytes) for one in moments.values()]
    unit_bytes, unit = binary_unit(max(count or 0 for counts in every for count in counts))
    known = [number for number in range(3) if every[0][number] is not None]
    rows = [["moment", f"freed {unit}", *(f"{('allocated', 'active', 'reserved')[number]} {unit}" for number in known)]]
    former = every[0][0]
    for name, counts in zip(moments, every, strict=True):
        rows.append(
            [name, *(in_unit(size or 0, unit_bytes) for size in (former - counts[0], *(counts[n] for n in known)))]
        )
        former = counts[0]
    return [Table(rows)]


def groups_used_blocks(used: Mapping[str, Sequence[str]]) -> list[Block]:
    """Describes which of parameters, gradients and optimizer state each phase uses, by `Lab.groups_used`."""
    rows = [["phase", *GROUPS]]
    rows += [[phase, *("yes" if group in groups else "-" for group in GROUPS)] for phase, groups in used.items()]
    return [Table(rows)]


def offload_blocks(*audits: OffloadAudit) -> list[Block]:
    """Describes where the bytes are that activation offload was expected to free, one row per audit.

    Args:
        *audits: What `Lab.audit_offload` returned, at least one.

    Returns:
        A table of the terms that add up to what was expected (terms that are 0 in every row are left out), and what
        refers to the bytes that are still on the device.
    """
    terms = [audit.terms() for audit in audits]
    names = [name for name in terms[0] if name == "saved" or any(row[name] for row in terms)]
    sizes = {
        ("", "transferred"): [audit.transferred_bytes for audit in audits],
        ("", "expected"): [audit.expected_bytes for audit in audits],
        **{_TERM_HEADS[name]: [row[name] for row in terms] for name in names},
    }
    unit_bytes, unit = binary_unit(max(max(column) for column in sizes.values()))
    columns = [
        ["", "setting", "", *(f"{audit.offloaded.settings}" for audit in audits)],
        *([*head, unit, *(in_unit(size, unit_bytes) for size in column)] for head, column in sizes.items()),
        ["", "R", "", *(f"{audit.saved_of_expected:.2f}" if audit.expected_bytes else "-" for audit in audits)],
    ]
    heads = [" ".join(filter(None, _TERM_HEADS[name])) for name in names]
    meaning = [
        f"expected, by Megatron's rules = {' + '.join(heads)}; R = saved / expected",
        "All bytes are counted at the moment at which the step without offload peaks.",
    ]
    table = Table([list(row) for row in zip(*columns, strict=True)], num_head_rows=3, first_width=SETTING_WIDTH)
    holders = list(_holder_sentences(audits))
    return [meaning, table, *([holders] if holders else [])]


_TERM_HEADS = {
    "never moved": ("never", "transferred"),
    "copied a second time": ("copied", "twice"),
    "still on the device": ("still", "resident"),
    "back on the device": ("already", "back"),
    "not due at that moment": ("not", "due"),
    "added by offload itself": ("added by", "offload"),
    "lost to a peak elsewhere": ("peak", "elsewhere"),
    "saved": ("", "saved"),
}


def _holder_sentences(audits: Iterable[OffloadAudit]) -> Iterable[str]:
    for audit in audits:
        if audit.plain_peak != audit.offloaded_peak:
            yield f"{audit.offloaded.settings}: peaks in {audit.offloaded_peak}, without offload in {audit.plain_peak}"
        for setting, reason in audit.offloaded.without_effect.items():
            yield f"{audit.offloaded.settings}: {setting.replace(':', ' ')} had no effect ({reason})"
        sizes: dict[tuple[str, str], list[int]] = {}
        for resident in audit.still_resident:
            holders = without_layer_numbers(", ".join(resident.holders)) or "a holder that was not found"
            sizes.setdefault((resident.name, holders), []).append(resident.num_bytes)
        for (name, holders), resident_bytes in sizes.items():
            count = f"{len(resident_bytes)} tensors" if len(resident_bytes) > 1 else "a tensor"
            size = f"{count} of {name}, {format_bytes(sum(resident_bytes))}"
            yield f"{audit.offloaded.settings}: {size}, still held by {holders}"


@runtime_checkable
class RetainedLeaf(Protocol):
    """What `Lab.retained` finds: a leaf of an autograd graph that an attribute of a module keeps allocated."""

    holder: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    input_bytes: int
    gradient_bytes: int


def retained_blocks(leaves: Iterable[RetainedLeaf]) -> list[Block]:
    """Describes what modules keep allocated between steps, by which path; equal paths of layers are one entry."""
    groups: dict[tuple[str, tuple[str, ...], tuple[int, ...]], list[RetainedLeaf]] = {}
    for leaf in leaves:
        groups.setdefault((without_layer_numbers(leaf.holder), leaf.path, leaf.shape), []).append(leaf)
    blocks: list[Block] = []
    for (holder, path, shape), group in groups.items():
        inputs, gradients = (sum(getattr(leaf, name) for leaf in group) for name in ("input_bytes", "gradient_bytes"))
        count = f"{len(group)} inputs of shape" if len(group) > 1 else "an input of shape"
        blocks.append(
            [
                f"{holder if len(group) > 1 else group[0].holder} keeps {count} {list(shape)}:",
                f"  {format_bytes(inputs)}, and {format_bytes(gradients)} of their gradients",
                f"  path from {holder.rpartition('.')[2]}: {' -> '.join([*path, 'the input'])}",
            ]
        )
    return blocks or [["No attribute of a module keeps a leaf of an autograd graph allocated."]]
