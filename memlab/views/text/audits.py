"""Audits as plain text: where parameters, gradients, optimizer state and activations are, and who holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from memlab.record.offload_audit import OffloadAccount
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.transfer import GROUPS
from memlab.units import binary_unit, format_bytes
from memlab.views.text.layout import NAME_WIDTH, SETTING_WIDTH, aligned, ending, in_unit, wrapped


def residency_table(audit: ResidencyAudit) -> str:
    """Writes where parameters, gradients and optimizer state are between two steps, and what is wrong with that.

    Args:
        audit: What `Lab.audit_residency` returned.

    Returns:
        Lines of at most `LINE_WIDTH` characters: a row a holder on the device, a row a group on the host, complaints.
    """
    entries = [(f"device, {one.group}: {one.holder}", one.expected_bytes, one.device_bytes) for one in audit.holdings]
    entries += [("device, what no group names", 0, audit.unnamed_device_bytes)]
    entries += [(f"host, {one.group}", one.expected_bytes, one.host_bytes) for one in audit.host_copies]
    entries += [("host, at the peak of the last move", audit.move_host_bytes, audit.move_peak_host_bytes)]
    unit_bytes, unit = binary_unit(max(max(expected, there) for _, expected, there in entries))
    rows = [["allocated bytes", f"should be {unit}", f"is {unit}", "bytes"]]
    rows += [
        [ending(name, NAME_WIDTH), in_unit(expected, unit_bytes), in_unit(there, unit_bytes), f"{there:,}"]
        for name, expected, there in entries
    ]
    complaints = audit.complaints or (str(audit),)
    return "\n".join([*aligned(rows), "", *(line for complaint in complaints for line in wrapped(complaint))])


def groups_used_table(used: Mapping[str, Sequence[str]]) -> str:
    """Writes which of parameters, gradients and optimizer state each phase touches.

    Args:
        used: What `Lab.groups_used` returned: phase to groups.
    """
    rows = [["phase", *GROUPS]]
    rows += [[phase, *("yes" if group in groups else "-" for group in GROUPS)] for phase, groups in used.items()]
    return "\n".join(aligned(rows))


def audit_table(*accounts: OffloadAccount) -> str:
    """Writes where the bytes are that activation offload was expected to free, one row an account.

    Args:
        *accounts: What `Lab.audit_offload` returned, at least one.

    Returns:
        Lines of at most `LINE_WIDTH` characters: the terms that add up to what was expected (those that are 0 in every
        row are left out), and who holds what is still on the device.

    Raises:
        ValueError: If there is no account.
    """
    if not accounts:
        raise ValueError("audit_table got 0 accounts, must be at least 1: give it what lab.audit_offload() returned")
    terms = [account.terms() for account in accounts]
    names = [name for name in terms[0] if name == "saved" or any(row[name] for row in terms)]
    sizes = {
        ("", "moved"): [account.moved_bytes for account in accounts],
        ("", "expected"): [account.expected_bytes for account in accounts],
        **{_TERM_HEADS[name]: [row[name] for row in terms] for name in names},
    }
    unit_bytes, unit = binary_unit(max(max(column) for column in sizes.values()))
    columns = [
        ["", "setting", "", *(f"{account.offloaded.settings}" for account in accounts)],
        *([*head, unit, *(in_unit(size, unit_bytes) for size in column)] for head, column in sizes.items()),
        ["", "R", "", *(f"{account.saved_of_expected:.2f}" for account in accounts)],
    ]
    return "\n".join(
        [
            *wrapped(
                "expected to move, by Megatron's rules = the columns to its right, up to saved: where each byte is "
                "when the step without offload is fullest; R = saved / expected"
            ),
            "",
            *aligned([list(row) for row in zip(*columns, strict=True)], first_width=SETTING_WIDTH),
            *_holder_lines(accounts),
        ]
    )


_TERM_HEADS = {
    "never moved": ("never", "moved"),
    "copied a second time": ("copied", "twice"),
    "still on the device": ("still", "there"),
    "back on the device": ("back", "already"),
    "not due at that moment": ("not", "due"),
    "added by offload itself": ("added by", "offload"),
    "lost to a peak elsewhere": ("peak", "elsewhere"),
    "saved": ("", "saved"),
}


def _holder_lines(accounts: Iterable[OffloadAccount]) -> list[str]:
    lines = []
    for account in accounts:
        if account.plain_peak != account.offloaded_peak:
            moments = f"fullest in {account.offloaded_peak}, without offload in {account.plain_peak}"
            lines += wrapped(f"{account.offloaded.settings}: {moments}")
        sizes: dict[tuple[str, str], list[int]] = {}
        for held in account.held:
            holders = ", ".join(held.holders) or "nobody that was found"
            sizes.setdefault((held.name, re.sub(r"layers\.\d+", "layers.*", holders)), []).append(held.num_bytes)
        for (name, holders), held_bytes in sizes.items():
            size = f"{len(held_bytes)} of {name}, {format_bytes(sum(held_bytes))}"
            lines += wrapped(f"{account.offloaded.settings}: {size}, held by {holders}")
    return ["", *lines] if lines else []
