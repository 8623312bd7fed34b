"""Configurations are merged and resolved as OmegaConf 2.3 and Hydra 1.3 do; each value here was printed by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memlab.jobs.arguments import read_overrides
from memlab.jobs.entries import UNKNOWN, Entries
from memlab.jobs.formats import read_file
from memlab.jobs.interpolation import resolve
from memlab.jobs.yaml_tree import flat, read_yaml


def values_of(text: str, child: str = "", overrides: tuple[str, ...] = (), **variables: str) -> dict[str, Any]:
    entries = flat(read_yaml(text, "parent"), "parent")
    if child:
        entries.merge(flat(read_yaml(child, "child"), "child"))
    read_overrides([(word, 1) for word in overrides], entries)
    resolve(entries, variables)
    return {key: entry.value for key, entry in entries.by_key.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${oc.env:NNODES,4}", 4),
        ("${oc.env:NNODES,null}", None),
        ("${oc.env:NNODES,${b.tp}}", 2),
        ("${oc.env:NNODES}", UNKNOWN),
        ("${oc.decode:${oc.env:NNODES,4}}", 4),
        ("${oc.decode:'[1, 2]'}", [1, 2]),
        ("${oc.select:b.tp}", 2),
        ("${oc.select:b.none,3}", 3),
        ("${oc.select:b.none}", None),
        ("${oc.select:b.empty,3}", None),
        ("${oc.select:.sibling,3}", 5),
        ("${oc.select:.none,${b.tp}}", 2),
        ("${.sibling}", 5),
        ("${..b.tp}", 2),
        ("${...b.tp}", UNKNOWN),
        ("${b.list[1]}", 20),
        ("${b.list.2}", 30),
        ("${b.list}", [10, 20, 30]),
        ("${b.${name}}", 2),
        ("x${b.tp}-${.sibling}", "x2-5"),
        ("${mul:${b.tp},4}", 8),
        ("${add:${mul:2,3},1}", 7),
        ("${max:2,${.sibling}}", 5),
        ("${div:8,2}", 4.0),
        ("${div:8,0}", UNKNOWN),
        ("${mul:${oc.env:NNODES,4},2}", UNKNOWN),  # of a text: OmegaConf's result would be '44'
        ("${user:}", UNKNOWN),
        ("${their.own:1,2}", UNKNOWN),
        ("${a.key}", UNKNOWN),
        ("${a}", UNKNOWN),
        ("${missing.key}", UNKNOWN),
        ("${b.tp", "${b.tp"),
        ("\\${b.tp}", "${b.tp}"),
        ("???", UNKNOWN),
    ],
)
def test_an_interpolation_has_the_value_of_omegaconf_or_is_unknown(text: str, expected: Any) -> None:
    tree = f"name: tp\na: {{sibling: 5, key: '{text.replace(chr(39), chr(39) * 2)}'}}\nb: {{tp: 2, empty: null, list: [10, 20, 30]}}"
    assert values_of(tree)["a.key"] == expected


def test_a_variable_of_the_machine_can_be_given_and_a_default_for_it_is_named() -> None:
    entries = flat(read_yaml("trainer:\n  nnodes: ${oc.env:NNODES,4}", "x"), "x")
    resolve(entries)
    assert entries.warnings == [
        "line 2: trainer.nnodes is 4 unless the job's machine sets NNODES: if it does, give --set NNODES=VALUE"
    ]
    assert values_of("a: ${oc.env:NNODES,4}\nb: ${oc.env:NNODES}", NNODES="8") == {"a": 8, "b": 8}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("010", 8), ("08", "08"), ("0x1F", 31), ("0b11", 3), ("32_768", 32768), ("1_0.5", 10.5), ("1e-5", 1e-5), ("1e5", 1e5), (".5", 0.5), ("-3", -3),
        ("+4", 4), ("yes", True), ("Off", False), ("'010'", "010"), ("0o17", "0o17"), ("1.", 1.0), ("~", None), ("12e03", 12000.0), ("1_000_000", 1000000),
    ],
)  # fmt: skip
def test_a_scalar_is_that_of_yaml_1_1_with_the_floats_of_omegaconf(text: str, expected: Any) -> None:
    found = values_of(f"a: {text}")["a"]
    assert (found, type(found)) == (expected, type(expected))


MEGATRON = "m: {tp: 2, ep: 4, fp8: {is_on: true, kind: hybrid}}\n"


@pytest.mark.parametrize(
    ("child", "overrides", "expected"),
    [
        ("", ("m.fp8=null",), {"m.tp": 2, "m.ep": 4, "m.fp8": None}),
        ("", ("~m.fp8",), {"m.tp": 2, "m.ep": 4}),
        ("", ("~m",), {}),
        ("", ("~m.tp=2", "m.fp8={is_on: false}"), {"m.ep": 4, "m.fp8.is_on": False, "m.fp8.kind": "hybrid"}),
        ("", ("m.fp8={}", "m.tp=32_768"), {"m.tp": 32768, "m.ep": 4, "m.fp8.is_on": True, "m.fp8.kind": "hybrid"}),
        ("", ("++m.fp8=off_", "++m.fp8.is_on=true"), {"m.tp": 2, "m.ep": 4, "m.fp8.is_on": True}),
        ("m: {fp8: null}", (), {"m.tp": 2, "m.ep": 4, "m.fp8": None}),
        ("m: {fp8: {}}", (), {"m.tp": 2, "m.ep": 4, "m.fp8.is_on": True, "m.fp8.kind": "hybrid"}),
        ("n: {tp: 8}\nm: ${n}", (), {"n.tp": 8, "m.tp": 8}),
        ("n: {tp: 8, in: {x: '${..tp}'}}\nm: ${n}", ("m.ep=1",), {"n.tp": 8, "n.in.x": 8, "m.tp": 8, "m.in.x": 8, "m.ep": 1}),
        ("n: ${m}\no: ${n.fp8}", ("~m.ep",), {"m.tp": 2, "m.fp8.is_on": True, "m.fp8.kind": "hybrid", "n.tp": 2, "n.fp8.is_on": True, "n.fp8.kind": "hybrid", "o.is_on": True, "o.kind": "hybrid"}),
    ],
)  # fmt: skip
def test_mappings_are_merged_replaced_and_deleted_as_hydra_does(
    child: str, overrides: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert values_of(MEGATRON, child, overrides) == expected


def test_mappings_that_stand_for_each_other_end() -> None:
    assert UNKNOWN in values_of("a: {b: '${c}'}\nc: {d: '${a}'}").values()
    lines = ["a0: {x: 1, y: 2}", *(f"a{n}: {{p: '${{a{n - 1}}}', q: '${{a{n - 1}}}'}}" for n in range(1, 30))]
    with pytest.raises(ValueError, match="makes more than 20,000 keys"):
        values_of("\n".join(lines))


def read(folder: Path, name: str) -> Entries:
    return read_file(folder / name, {}, "verl")[1]


def test_a_list_of_defaults_is_composed_as_hydra_composes_it(tmp_path: Path) -> None:
    files = {
        "run.yaml": "defaults:\n  - base\n  - actor@m.actor: small\n  - optional data: none\n  - opt: [a, b]\n  - _self_\nm: {tp: 8}\n",
        "base.yaml": "m: {tp: 2, ep: 4}\n",
        "actor/small.yaml": "defaults:\n  - common\nsize: 1\nlr: 2\n",
        "actor/common.yaml": "size: 9\nkind: c\n",
        "opt/a.yaml": "x: 1\ny: 1\n",
        "opt/b.yaml": "# @package _global_\nopt: {y: 2}\n",
        "below.yaml": "defaults: [_self_, base]\nm: {tp: 8, pp: 1}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    entries = read(tmp_path, "run.yaml")
    assert {key: entry.value for key, entry in entries.by_key.items()} == {
        "m.tp": 8, "m.ep": 4, "m.actor.size": 1, "m.actor.kind": "c", "m.actor.lr": 2, "opt.x": 1, "opt.y": 2,
    }  # fmt: skip
    assert not entries.warnings
    assert {key: entry.value for key, entry in read(tmp_path, "below.yaml").by_key.items()} == {
        "m.tp": 2, "m.pp": 1, "m.ep": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("default", "key"),
    [
        ("actor: small", "q.r.tp"),
        ("actor/small", "q.r.tp"),
        ("actor@m.actor: small", "m.actor.tp"),
        ("actor/small@m.actor", "m.actor.tp"),
        ("actor@_global_: small", "tp"),
        ("actor/small@_global_", "tp"),
        ("actor/small@_here_", "tp"),
    ],
)
def test_the_package_that_a_list_names_stands_above_the_file_s_own(default: str, key: str, tmp_path: Path) -> None:
    """The keys are those that hydra-core 1.3.2 composes."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/small.yaml").write_text("# @package q.r\ntp: 4\n")
    (tmp_path / "run.yaml").write_text(f"defaults:\n  - {default}\n  - _self_\nm: {{ep: 8}}\n")
    assert {key: entry.value for key, entry in read(tmp_path, "run.yaml").by_key.items()} == {"m.ep": 8, key: 4}


@pytest.mark.parametrize(
    ("header", "default", "key"),
    [
        ("", "inner: x", "actor.inner.tp"),
        ("# @package _global_\n", "inner: x", "tp"),
        ("# @package q.r\n", "inner: x", "q.r.tp"),
        ("# @package _global_.k\n", "inner: x", "k.tp"),
        ("# @package _global_\n", "inner@p: x", "actor.p.tp"),
        ("", "inner@_global_.z: x", "z.tp"),
        ("", "inner@_here_: x", "actor.tp"),
        ("", "/inner@_global_: x", "tp"),
        ("", "/inner: x", "actor.inner.tp"),
    ],
)
def test_a_package_of_a_file_that_another_default_names_is_hydra_s(
    header: str, default: str, key: str, tmp_path: Path
) -> None:
    """The keys are those that hydra-core 1.3.2 composes."""
    files = {
        "run.yaml": "defaults: [{actor: small}, _self_]\nm: 1\n",
        "actor/small.yaml": f"defaults:\n  - {default}\n  - _self_\na: 2\n",
        "actor/inner/x.yaml": f"{header}tp: 4\n",
        "inner/x.yaml": f"{header}tp: 4\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    values = {name: entry.value for name, entry in read(tmp_path, "run.yaml").by_key.items()}
    assert values == {key: 4, "actor.a": 2, "m": 1}


@pytest.mark.parametrize(
    "default", ["missing", "group: missing", "group: ${which}", "override group: other", "{a: b, c: d}", "[1]"]
)
def test_defaults_that_are_not_there_are_named(default: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"defaults:\n  - {default}\nm: {{tp: 8}}\n")
    (warning,) = read(tmp_path, "run.yaml").warnings
    assert warning.startswith("line 2: the defaults ")


def test_a_mapping_of_nemo_rl_that_overrides_takes_the_place_of_its_parents(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {a: 1, deep: {b: 2}}\ncluster: {n: 1}\n")
    text = "defaults: base.yaml\npolicy: {_override_: true, c: 3}\ncluster: {deep: {_override_: true}, m: 2}\n"
    (tmp_path / "run.yaml").write_text(text)
    values = {key: entry.value for key, entry in read(tmp_path, "run.yaml").by_key.items()}
    # NeMo-RL looks at the mappings of the top only.
    assert values == {"policy.c": 3, "cluster.n": 1, "cluster.deep._override_": True, "cluster.m": 2}
