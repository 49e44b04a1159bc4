"""Errors are compared with their definition, on tensors small enough to do it by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.compared.compare import Comparer, Comparison
from meshloom.verify.reference.step_records import Cast, ChunkRecord, ModuleOutput
from meshloom.verify.tolerances.state_errors import StateErrors, update_tolerances
from tests.held import WholeRecord, compare_records

ZERO = torch.zeros(2, dtype=torch.float64)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def output(name: str, total: float) -> ModuleOutput:
    return ModuleOutput(name=name, call=0, total=total, square=total * total, count=1)


def chunk(index: int, **fields: Any) -> ChunkRecord:
    known = {
        "samples": 2,
        "weight": 2.0,
        "loss_sum": 4.0,
        "data": f"data {index}",
        "draws": True,
    }
    return ChunkRecord(
        index=index, modules=(output("first", 1.0), output("last", 2.0)), **{**known, **fields}
    )


def record(**fields: Any) -> WholeRecord:
    known: dict[str, Any] = {
        "step": 0,
        "loss": 2.0,
        "weight": 4.0,
        "gradient_norm": 5.0,
        "gradients": {"first.weight": tensor(3.0, 0.0), "last.weight": tensor(0.0, 4.0), "unused": None},
        "buffers": {"mean": tensor(1.0, 1.0), "count": torch.tensor(3)},
        "parameters": {
            "first.weight": tensor(1.0, 2.0),
            "last.weight": tensor(3.0, 4.0),
            "unused": tensor(5.0, 5.0),
        },
        "chunks": [chunk(0), chunk(1)],
    }
    return WholeRecord(**{**known, **fields})


def comparer(precision: torch.dtype = torch.float64) -> Comparer:
    return Comparer(plan=Plan(dp=2), precision=precision)


BEFORE = {"first.weight": ZERO, "last.weight": ZERO, "unused": tensor(5.0, 5.0)}


def compare(
    ours: WholeRecord, one: WholeRecord | None = None, before: Any = None, by: Comparer | None = None
) -> Comparison:
    return compare_records(by or comparer(), ours, one or record(), before or BEFORE)


def error_of(comparison: Comparison, name: str, kind: str) -> float:
    return next(error.error for error in comparison.errors if (error.name, error.kind) == (name, kind))


def with_gradient(name: str, value: Tensor | None) -> WholeRecord:
    return record(gradients={**record().gradients, name: value})


def test_equal_records_pass():
    comparison = compare(record())
    assert comparison.passed and comparison.first_module is None
    assert all(error.error == 0 for error in comparison.errors)


def test_the_error_is_relative_to_one_devices_norm():
    assert error_of(
        compare(with_gradient("first.weight", tensor(3.0, 0.3))), "first.weight", "gradient"
    ) == pytest.approx(0.1)


def test_what_is_small_beside_the_largest_gradient_is_measured_by_itself():
    one = with_gradient("first.weight", tensor(1e-9, 0.0))
    comparison = compare(with_gradient("first.weight", tensor(3e-9, 0.0)), one)
    assert error_of(comparison, "first.weight", "gradient") == pytest.approx(2.0)
    assert comparison.failed("gradient") == ["first.weight"]


@pytest.mark.parametrize(("ours", "one"), [(ZERO, None), (None, ZERO)])
def test_none_is_not_zero(ours, one):
    comparison = compare(with_gradient("unused", ours), with_gradient("unused", one))
    assert error_of(comparison, "unused", "gradient") == math.inf
    assert not comparison.passed


def test_a_gradient_that_one_side_does_not_have_is_an_error():
    fewer = {name: each for name, each in record().gradients.items() if name != "unused"}
    assert not compare(record(gradients=fewer)).passed
    assert not compare(record(), record(gradients=fewer)).passed


def test_nan_is_never_equal():
    broken = with_gradient("first.weight", tensor(math.nan, 0.0))
    assert not compare(broken).passed
    assert not compare(broken, broken).passed


MASK = torch.full((3, 3), -math.inf, dtype=torch.float64).triu(1)


def test_a_mask_of_infinities_is_equal_to_itself():
    """The story: every model with a causal mask of -inf in a buffer was told that it differs, by -inf - -inf
    = NaN, and its other buffers, too."""
    odd = tensor(math.inf, -math.inf, math.nan, 2.0)
    turned = torch.complex(odd, tensor(1.0, math.nan, 3.0, -math.inf))
    one = record(buffers={"mask": MASK, "odd": odd, "turned": turned, "mean": tensor(1.0, 1.0)})
    ours = record(
        buffers={"mask": MASK.clone(), "odd": odd.clone(), "turned": turned.clone(), "mean": tensor(1.0, 1.0)}
    )
    assert compare(ours, one).passed
    ours = record(
        buffers={**one.buffers, "odd": tensor(math.inf, -math.inf, math.nan, 2.002), "mean": tensor(1.0, 1.1)}
    )
    comparison = compare(ours, one)
    assert comparison.failed("buffer") == ["odd", "mean"]
    assert error_of(comparison, "odd", "buffer") == pytest.approx(0.001)  # of what is finite in it


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1e300])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "complex buffer"])
def test_what_is_infinite_on_one_side_only_differs(kind, value):
    right, wrong = tensor(-math.inf, 1.0), tensor(value, 1.0)
    if kind == "complex buffer":
        right, wrong = torch.complex(tensor(0.0, 1.0), right), torch.complex(tensor(0.0, 1.0), wrong)
    where = "parameters" if kind == "parameter" else "buffers"
    name = "unused" if kind == "parameter" else "mask"

    def made(value: Tensor) -> WholeRecord:
        return record(**{where: {**getattr(record(), where), name: value}})

    assert not compare(made(wrong), made(right)).passed
    assert not compare(made(right), made(wrong)).passed
    moved = made(right.flip(0))
    assert not compare(moved, made(right)).passed


def test_a_frozen_parameter_of_infinities_widens_no_tolerance():
    """Its norm would be infinite, and with it the rounding that an update is allowed."""
    before = {"mask": MASK, "weight": tensor(1.0, 2.0)}
    one = record(parameters={"mask": MASK, "weight": tensor(1.5, 2.0)})
    found = compare(one, one, before)
    assert found.passed
    wrong = record(parameters={"mask": MASK, "weight": tensor(1.6, 2.0)})
    found = compare(wrong, one, before)
    assert [(error.name, error.kind) for error in found.errors if not error.passed] == [
        ("weight", "parameter"),
        ("weight", "update"),
    ]


def test_a_module_whose_output_is_a_mask_is_not_named_as_the_first_that_differs():
    mask = ModuleOutput(name="first", call=0, total=-math.inf, square=math.inf, count=1)
    one = record(chunks=[replace(chunk(0), modules=(mask, output("last", 2.0)))])
    ours = replace(one, chunks=[replace(chunk(0), modules=(mask, output("last", 3.0)))], loss=3.0)
    assert compare(ours, one).first_module == "last"


def test_another_shape_is_an_error():
    assert not compare(with_gradient("first.weight", torch.ones(1, 2))).passed


def test_integer_buffers_must_be_equal():
    assert not compare(record(buffers={**record().buffers, "count": torch.tensor(4)})).passed
    assert error_of(compare(record(buffers={"mean": tensor(1.0, 1.0)})), "count", "buffer") == math.inf


def test_a_wrong_update_shows_although_the_parameters_hardly_differ():
    initial = {"weight": torch.full((2,), 100.0)}
    gradients = {"weight": torch.ones(2)}
    one = record(gradients=gradients, parameters={"weight": initial["weight"] + 1e-3}, buffers={})
    ours = record(gradients=gradients, parameters={"weight": initial["weight"] + 2e-3}, buffers={})
    comparison = compare(ours, one, initial, comparer(torch.float32))
    assert [error.kind for error in comparison.errors if not error.passed] == ["update"]


def test_the_rounding_of_a_parameter_is_no_wrong_update():
    initial = {"weight": torch.full((2,), 100.0)}
    gradients = {"weight": torch.ones(2)}
    one = record(gradients=gradients, parameters={"weight": torch.full((2,), 100.001)}, buffers={})
    ours = record(
        gradients=gradients,
        parameters={"weight": torch.nextafter(torch.full((2,), 100.001), torch.tensor(200.0))},
        buffers={},
    )
    assert compare(ours, one, initial, comparer(torch.float32)).passed


def test_an_update_is_measured_from_the_step_before():
    moved = {**record().parameters, "first.weight": tensor(1.5, 2.0)}
    other = {**record().parameters, "first.weight": tensor(2.0, 2.0)}
    comparison = compare(record(parameters=moved), record(parameters=other), record().parameters)
    assert error_of(comparison, "first.weight", "update") == pytest.approx(0.5)


def test_the_gradient_norm_is_compared_where_there_is_one():
    assert not compare(record(gradient_norm=5.1)).passed
    assert compare(record(gradient_norm=None)).passed


def test_a_loss_near_zero_is_measured_by_its_chunks():
    chunks = [chunk(0, loss_sum=4.0), chunk(1, loss_sum=-4.0)]
    assert error_of(
        compare(record(loss=1e-13), record(loss=0.0, chunks=chunks)), "loss", "loss"
    ) == pytest.approx(1e-13 / 2)


def test_tolerances_follow_precision():
    assert comparer().values == 32 * 2**-52
    assert comparer(torch.float32).values == 32 * 2**-23


def test_a_cast_in_the_model_widens_nothing_where_operators_run_on_whole_chunks():
    one = record(casts=[Cast(place="first", dtype="float32", in_optimizer=False)])
    both = comparer()
    assert not compare(with_gradient("first.weight", tensor(3.00001, 0.0)), one, by=both).passed
    assert [cast.place for cast in both.casts] == ["first"] and both.values == 32 * 2**-52
    divided = Comparer(plan=Plan(tp=2), precision=torch.float64)
    divided.note(one.casts)
    assert divided.partial == torch.float32 and divided.values == 1e-4  # of a loss: one number


def test_casts_of_gradients_that_a_loss_takes_itself_widen_it_where_a_program_adds_them_up():
    for plan, expected in (
        (Plan(pp=2), 5e-2),
        (Plan(dp=2), 32 * 2**-23),
        (Plan(dp=2, precision="bf16-mixed"), 32 * 2**-23),
    ):
        both = Comparer(plan=plan, precision=torch.float32, autocast=torch.bfloat16)
        both.note([Cast(place="first", dtype="bfloat16", in_optimizer=False)])
        assert both.values == 32 * 2**-23
        both.note([Cast(place="first", dtype="bfloat16", in_optimizer=False, in_gradients=True)])
        assert both.values == expected and not both.casts


def test_a_cast_in_an_optimizer_widens_what_it_updates_alone():
    one = record(casts=[Cast(place="Muon", dtype="bfloat16", in_optimizer=True)])
    assert not compare(with_gradient("first.weight", tensor(3.00001, 0.0)), one).passed
    weights = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("muon.weight", "adam.weight")}
    muon, adam = torch.optim.Muon([weights["muon.weight"]]), torch.optim.AdamW([weights["adam.weight"]])
    names = {id(each): name for name, each in weights.items()}
    found = update_tolerances([muon, adam], one.casts, names, torch.float32)
    assert found == {"muon.weight": 5e-2, "adam.weight": 128 * 2**-23}


def test_a_huge_mask_hides_no_wrong_buffer_and_one_that_no_step_changes_must_stay_so():
    """The story: a mask of -1e9 beside it allowed a running mean to be off by 100."""
    mask = torch.full((3, 3), -1e9)
    one = {"mask": mask, "norm.mean": torch.tensor([1e-6, 0.0]), "norm.var": torch.ones(2)}
    state = StateErrors(
        {}, {}, one, changed={"norm.mean": 1e-6, "norm.var": 1e-7}, step=0, updates={}
    )  # fmt: skip
    for name, value, passes in (
        ("norm.mean", one["norm.mean"] + 2e-9, True),  # rounding of what has a variance of 1
        ("norm.mean", one["norm.mean"] + 1e-4, False),
        ("norm.var", one["norm.var"] * (1 + 5e-5), False),
        ("mask", mask.clone(), True),
        ("mask", mask * (1 - 1e-4), False),
    ):
        (error,) = state.compare(name, value)
        assert error.passed == passes, (name, error)


def test_a_buffer_that_is_rounding_alone_may_be_off_by_some_roundings():
    """The story: a mean that is 0 but for rounding, of what has a variance of 0.02, was off by twice what rounding does to it: 1.1e-4 of
    a thousandth of the variance, and no more than 1e-4 was put down to rounding."""
    one = {"norm.mean": torch.tensor([2e-9, 1e-9]), "norm.var": torch.tensor([0.02, 0.02])}
    size = 1e-3 * float(one["norm.var"].norm())
    state = StateErrors(
        {}, {}, one, changed={"norm.mean": 6e-5, "norm.var": 6e-5}, step=0, updates={}
    )  # fmt: skip
    for name, by, passes in (
        ("norm.mean", 1.1e-4, True),
        ("norm.mean", 6e-4, False),
        ("norm.var", 1.1e-4, False),
    ):
        off = one[name] + by * (size if name == "norm.mean" else float(one[name].norm())) / 2**0.5
        (error,) = state.compare(name, off)
        assert error.error == pytest.approx(by, rel=0.01) and error.passed == passes, (name, by, error)


def test_a_parameter_that_the_loss_writes_is_judged_as_the_buffers_are():
    """The story: a teacher's first average, of values that are its student's, moved it by roundings, and six chunks' averages
    put together in another order by other ones."""
    before = torch.linspace(0.5, 1, 5, dtype=torch.float64)
    eps = torch.finfo(torch.float64).eps
    for steps, by, passes in ((False, 8, True), (True, 8, False), (False, 1024, False)):
        state = StateErrors(
            {"teacher.weight": before * (1 + eps)}, {"teacher.weight": before}, {}, changed={}, step=0,
            updates={"teacher.weight": 32 * eps} if steps else {},
        )  # fmt: skip
        found = state.compare("teacher.weight", before * (1 + by * eps))
        assert all(error.passed for error in found) == passes, (steps, by, found)


def test_the_first_module_whose_output_differs_is_named():
    chunks = [chunk(0), replace(chunk(1), modules=(output("first", 1.0), output("last", 2.1)))]
    assert compare(replace(with_gradient("first.weight", ZERO), chunks=chunks)).first_module == "last"


def test_when_outputs_agree_backward_tells_the_module():
    wrong = {**record().gradients, "first.weight": ZERO, "last.weight": ZERO}
    assert compare(record(gradients=wrong)).first_module == "last"
    assert compare(with_gradient("first.weight", ZERO)).first_module == "first"


def test_a_module_that_is_not_called_is_told_if_no_other_is():
    """Its weight may be used anywhere: a table of positions was said to be where backward begins."""
    right = {**record().gradients, "table.weight": tensor(1.0, 2.0)}

    def told(*wrong: str) -> str | None:
        ours = record(gradients={**right, **dict.fromkeys(wrong, ZERO)})
        return compare(ours, record(gradients=right)).first_module

    assert told("table.weight", "first.weight") == "first"
    assert told("table.weight") == "table"


def test_rows_of_a_shared_chunk_add_up():
    plan = Plan(dp=2, sync_batch_norm=True)
    half = (
        replace(chunk(0), modules=(output("first", 1.0),)),
        replace(chunk(1), modules=(output("first", 3.0),)),
    )
    whole = (
        replace(chunk(0), modules=(ModuleOutput(name="first", call=0, total=4.0, square=10.0, count=2),)),
        replace(chunk(1), modules=()),
    )
    both = Comparer(plan=plan, precision=torch.float64)
    assert (
        compare(
            replace(with_gradient("last.weight", ZERO), chunks=half), record(chunks=whole), by=both
        ).first_module
        == "last"
    )


def test_different_data_is_a_fact_even_where_numbers_agree():
    assert compare(record(chunks=[chunk(0), chunk(1, data="other")])).facts == [
        "Chunk 1 has other data than on one device."
    ]
    assert not compare(record(chunks=[chunk(0)])).passed


def test_replicas_that_differ_are_a_fact():
    assert "Replicas 0 and 2" in compare(record(replicas=["a", "a", "b"])).facts[0]
