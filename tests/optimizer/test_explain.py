"""Conflicts are minimal and in words, relaxations are verified, and the memory arithmetic is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from paraplan.optimizer.explain import States, _without_limits, conflict, least_devices, legal, memory_statement, training_states
from paraplan.search_spaces.constraints import PeakTable
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LayerKind, MoeMlp
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem
from paraplan.search_spaces.limits import LENDING
from paraplan.search_spaces.model import ModelSpec
from paraplan.search_spaces.rules import rules_for


def spec(mlp: DenseMlp | MoeMlp, layers: int = 32, heads: int = 24, hidden_size: int = 3072) -> ModelSpec:
    kind = LayerKind(mixer=Attention(heads=heads, kv_heads=8, head_dim=128), mlp=mlp)
    return ModelSpec(
        name="tiny",
        hidden_size=hidden_size,
        vocab_size=32000,
        max_position_embeddings=8192,
        kinds={"k": kind},
        layers=(f"{layers}*k",),
    )


DENSE = spec(DenseMlp(width=12288))
MOE = spec(MoeMlp(experts=64, top_k=4, width=1024))


def problem(
    model: ModelSpec = DENSE, devices: int = 64, batch: int = 64, seq_len: int = 4096, cluster: str = "hgx-h100", **limits: object
) -> Problem:
    return build_problem(model, cluster, devices, batch, seq_len, "megatron-lm", **limits)  # type: ignore[arg-type]


def without(given: Problem, rule_id: str) -> Problem:
    """The problem without one limit of the user's."""
    kind, _, rest = rule_id.partition(" ")
    workload = given.workload
    if kind == "fix":
        changed: dict[str, object] = {"fix": {name: values for name, values in workload.fix.items() if name != rest}}
    elif kind == "forbid":
        changed = {"forbid": tuple(text for text in workload.forbid if text != rest)}
    else:
        changed = {"inside": {}}
    return given.model_copy(update={"workload": workload.model_copy(update=changed)})


@pytest.mark.parametrize(
    ("given", "clash"),
    [
        (problem(fix="tp=5"), {"C020", "fix tp"}),
        (problem(fix="tp=5,pp=4,recompute=full", forbid="cp>2"), {"C020", "fix tp"}),
        (problem(fix="pp=35"), {"C140", "fix pp"}),  # 32 layers, and the embedding and the loss alone
        (problem(fix="pp=1,vpp=2"), {"C064a", "fix pp", "fix vpp"}),
        (problem(fix="dp=3"), {"C029", "fix dp"}),
        (problem(MOE, fix="ep=48"), {"C080c", "fix ep"}),
        (problem(MOE, forbid="ep<16", inside="server:ep"), {"C002", "forbid ep<16", "inside server ep"}),
        (problem(fix="sequence_parallel=true", forbid="tp>1"), {"C040", "fix sequence_parallel", "forbid tp>1"}),
        (problem(fix="optimizer_sharding=zero3"), {"fix optimizer_sharding", "stack sharding"}),
    ],
)
def test_conflicts_hold_the_clashing_rules_and_no_others(given: Problem, clash: set[str]) -> None:
    found = conflict(given)
    assert {rule.rule for rule in found.rules} == clash
    assert found.minimal and not found.memory
    assert not legal(given)


@pytest.mark.parametrize(
    "limits", [{"fix": "tp=5"}, {"fix": "tp=8,pp=16,dp=4"}, {"fix": "pp=1,vpp=2"}, {"fix": "dp=3", "forbid": "tp>4"}]
)
def test_every_suggested_change_leads_to_a_layout(limits: dict[str, str]) -> None:
    found = conflict(problem(**limits))
    assert found.relaxations
    assert all(legal(relaxation.problem) for relaxation in found.relaxations)


@pytest.mark.parametrize("limits", [{"fix": "tp=8,pp=16,dp=4"}, {"fix": "pp=1,vpp=2"}, {"fix": "dp=3,tp=5"}])
def test_a_user_limit_in_a_conflict_is_needed_for_it(limits: dict[str, str]) -> None:
    given = problem(**limits)
    found = conflict(given)
    core = {rule.rule for rule in found.rules}
    others = [rule.id for rule in rules_for(given) if rule.scope == "user" and rule.id not in core]
    for rule_id in others:
        given = without(given, rule_id)
    for rule_id in (rule_id for rule_id in core if rule_id.startswith(("fix", "forbid", "inside"))):
        assert legal(without(given, rule_id))


def test_a_grid_too_large_names_the_devices_that_it_needs() -> None:
    found = conflict(problem(fix="tp=8,pp=16,dp=4"))
    assert "512 devices" in [relaxation.sentence for relaxation in found.relaxations]
    assert "tp is fixed to 8" in found.summary and "the 64 devices" in found.summary


def test_a_batch_that_does_not_divide_names_the_next_one() -> None:
    found = conflict(problem(batch=6, fix="dp=4"))
    assert "global_batch 8" in [relaxation.sentence for relaxation in found.relaxations]


def test_a_sequence_that_does_not_divide_names_the_next_one() -> None:
    found = conflict(problem(seq_len=4100, fix="tp=4,cp=2,sequence_parallel=true"))
    assert "seq_len 4104" in [relaxation.sentence for relaxation in found.relaxations]


def test_reasons_are_sentences_of_an_infeasible_error() -> None:
    error = conflict(problem(fix="tp=5")).error()
    assert isinstance(error, Infeasible)
    assert error.summary == "No layout is legal: tp is fixed to 5, but the rules ask that tp divides the 24 attention heads."
    assert error.reasons[0].startswith(
        "C020: tp divides the 24 attention heads: a TP rank holds whole attention heads (Megatron-LM"
    )
    assert error.reasons[-1].startswith("Any one of these helps: tp other than 5")
    assert all(reason.endswith(".") for reason in error.reasons)


# Memory

TEN_TRILLION = 10e12
BYTES_PER_PARAMETER = 16.0


@pytest.mark.parametrize(("capacity_gb", "devices"), [(288, 618), (144, 1235), (128, 1389), (64, 2778)])
def test_least_devices_that_hold_a_dense_ten_trillion_model(capacity_gb: int, devices: int) -> None:
    assert least_devices(TEN_TRILLION * BYTES_PER_PARAMETER, 0.9 * capacity_gb * 1e9) == devices


def test_activations_come_off_what_a_device_may_fill() -> None:
    assert least_devices(100.0, 10.0) == 10 and least_devices(100.0, 10.0, 5.0) == 20
    with pytest.raises(ValueError, match="do not fit"):
        least_devices(100.0, 10.0, 10.0)


def ten_trillion(**limits: object) -> Problem:
    wide = spec(DenseMlp(width=98304), layers=128, heads=256, hidden_size=32768)
    return problem(wide, devices=512, batch=512, cluster="atlas-950-superpod", **limits)


def test_a_dense_ten_trillion_model_on_512_devices() -> None:
    given = ten_trillion(fix="tp=8,pp=16,dp=4")
    states = States(TEN_TRILLION * BYTES_PER_PARAMETER, weight_bytes=2 * TEN_TRILLION)
    total, weights = memory_statement(given, states)
    assert "need 160.0 TB" in total and "512 devices" in total and "at least" in total
    assert "tp·pp = 8·16 = 128 leaves 156 GB of weights on every device, more than" in weights


def test_activations_that_alone_do_not_fit() -> None:
    (sentence,) = memory_statement(ten_trillion(), States(1e12, least_activation_bytes=1e12))
    assert "activations" in sentence and "more than" in sentence


def test_training_states_follow_the_stack() -> None:
    given = problem(fix="offload=none")
    parameters = given.model.parameters(mtp=True)
    assert training_states(given).state_bytes == (2 + given.stack.gradient_bytes + given.stack.optimizer_bytes) * parameters
    assert training_states(problem()).state_bytes == (2 + given.stack.gradient_bytes) * parameters  # the optimizer may be offloaded


def fits_from(devices: int) -> Callable[[Problem], bool]:
    return lambda changed: changed.devices >= devices


def test_device_counts_are_suggested_only_where_a_search_confirms_them() -> None:
    given = ten_trillion()
    states = States(TEN_TRILLION * BYTES_PER_PARAMETER)
    found = conflict(given, states=states, fits=fits_from(2000))
    assert not found.rules and found.memory
    (suggested,) = (relaxation for relaxation in found.relaxations if relaxation.sentence.endswith("devices"))
    assert suggested.problem.devices >= 2000
    assert not conflict(given, states=states, fits=lambda _: False).relaxations
    assert not conflict(given, states=states).relaxations  # nothing to verify with


def test_limits_are_lifted_one_by_one_where_memory_is_short() -> None:
    given = ten_trillion(fix="pp=1,tp=8")
    found = conflict(given, states=States(1e12), fits=lambda changed: "pp" not in changed.workload.fix)
    assert [relaxation.sentence for relaxation in found.relaxations] == ["pp other than 1"]


def test_a_peak_table_puts_memory_into_the_conflict() -> None:
    given = problem(fix="tp=2")
    layouts = [Layout(tp=tp, num_microbatches=64) for tp in (1, 2, 4, 8)]
    table = LayoutTable.from_layouts(layouts)
    peaks = PeakTable.least(given, table, np.array([400e9, 200e9, 100e9, 50e9]), ("tp",))
    found = conflict(given, peaks=peaks, states=States(1e12))
    assert {rule.rule for rule in found.rules} == {"P010", "fix tp"}
    assert found.memory and found.summary.startswith("No layout fits.")
    roomy = problem(fix="tp=8")
    assert not conflict(roomy, peaks=peaks, fits=lambda _: False).rules


@pytest.mark.parametrize(
    ("limit", "said", "helps"),
    [
        ({"constraint": "tp>=16"}, "tp>=16 is demanded", "leaving tp>=16 out"),
        ({"forbid": "tp<16"}, "tp<16 is forbidden", "allowing tp<16"),
    ],
)
def test_a_limit_is_worded_as_it_was_written(limit: dict[str, str], said: str, helps: str) -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 16, 4096, **limit)
    error = conflict(problem, fits=lambda changed: Space(changed).legal > 0)
    text = " ".join((error.summary, *error.reasons))
    assert said in text and helps in text


def test_every_limit_of_the_user_has_a_change_that_lifts_it() -> None:
    """Each kind of them: without it the rule binds no more."""
    fixed = "offload=activations:1,pp=2"
    given = build_problem(
        "llama-3.1-8b",
        "hgx-h100",
        16,
        64,
        4096,
        fix=fixed,
        forbid="tp>4",
        constraint="cp<8",
        inside="server:tp",
        offload_to="peers",
    )
    limits = [rule for rule in rules_for(given) if rule.scope == "user"]
    assert {rule.id.partition(" ")[0] for rule in limits} == {"fix", "forbid", "constraint", "inside", *LENDING}
    for rule in limits:
        ((_, lifted),) = _without_limits(given, [rule])
        assert rule.id not in {other.id for other in rules_for(lifted)}
