"""A program that was packed and unpacked is the same program: text, hash, and the bits of what it
computes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from captured import described
from program_jobs import OWN, batches_of, job_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError
from meshloom.core.random import seed_everything
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.ir.contexts import Autocast, Context
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, Variable
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.run.execute import run_program
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
ROOT = Path(__file__).parents[1]


def ran(program: Program, model: nn.Module, batch: Any) -> list[Tensor]:
    """Outputs, gradients and buffers of one run."""
    parameters = {
        name: each.detach().clone().requires_grad_(each.requires_grad)
        for name, each in model.named_parameters()
    }
    buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
    seed_everything(5)
    outputs = [
        torch.as_tensor(each) for each in tree_leaves(run_program(program, parameters, buffers, batch))
    ]
    outputs[0].sum().backward()
    gradients = [each.grad for each in parameters.values() if each.grad is not None]
    return [*(each.detach() for each in outputs), *gradients, *buffers.values()]


FIELDS = (
    "nodes", "out_spec", "outputs", "parameters", "buffers", "inputs", "updates", "in_place", "device", "training", "precision",
)  # fmt: skip


def same(one: Program, other: Program) -> None:
    assert described(one) == described(other) and one.digest() == other.digest()
    for name in FIELDS:
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.constants) == list(other.constants)
    for name, constant in one.constants.items():
        assert (
            torch.equal(constant, other.constants[name])
            and constant.stride() == other.constants[name].stride()
        )


@pytest.mark.covering("in_place", "slice_writes", "checkpointed", "tied", "rotary", "precisions")
@pytest.mark.parametrize("name", OWN)
def test_what_arrives_is_the_program_and_computes_the_same_bits(name: str):
    job, (batch, other) = job_of(*OWN[name][:2]), batches_of(OWN[name])
    seed_everything(0)
    model = job.model()
    program = capture(job, (batch, other))
    received = unpack(pack(program))
    same(received, program)
    assert all(
        torch.equal(one, two)
        for one, two in zip(ran(received, model, other), ran(program, model, other), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in {*NOT_READ, "bloom", "recurrent_gemma"}]
)
def test_what_arrives_of_a_family_is_the_program(name: str):
    job = FAMILIES[name].make_job(True)
    data = job.data()
    batches = [default_collate([data[each] for each in part]) for part in (range(3), range(3, 6))]
    program = capture(job, (batches[0], batches[1]))
    same(unpack(pack(program)), program)


def test_a_program_by_shapes_travels_too():
    program = capture_shapes(
        job_of(*OWN["slice_writes"][:2]),
        batches_of(OWN["slice_writes"])[0],
        dtype=torch.float64,
        device="cuda:0",
    )
    received = unpack(pack(program))
    assert (
        received.by_shapes
        and received.device == torch.device("cuda:0")
        and received.precision == torch.float64
    )
    assert described(received) == described(program) and received.digest() == program.digest()


def small_program(**changes: Any) -> Program:
    meta = Meta(shape=(2, 3), dtype=torch.float32, stride=(3, 1), requires_grad=True)
    node = Node(
        name="scaled", target=torch.ops.aten.mul.Tensor, args=(Ref("x"), Ref("c")), kwargs={}, context=Context(), path="", line=None, draw=None,
        num_draws=0, outputs=(meta,),
    )  # fmt: skip
    settings: dict[str, Any] = {
        "parameters": {"w": Variable(value="p_w", name="w", meta=meta)}, "buffers": {}, "constants": {"c": torch.arange(6.0).view(3, 2).t()},
        "inputs": (Input(value="x", name="x", meta=meta),), "nodes": (node,), "outputs": (Ref("scaled"),),
        "out_spec": torch.utils._pytree.tree_flatten((0,))[1], "updates": {}, "in_place": frozenset(), "device": torch.device("cpu"), "training": True,
    }  # fmt: skip
    return Program(**{**settings, **changes})


def with_node(**changes: Any) -> Program:
    return small_program(nodes=(replace(small_program().nodes[0], **changes),))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.int8,
        torch.int64,
    ],
    ids=str,
)
def test_constants_keep_bits_strides_and_dtype(dtype: torch.dtype):
    bits = torch.randint(0, 2, (60 * dtype.itemsize,), dtype=torch.uint8)
    constant = bits.view(dtype).view(3, 4, 5).permute(2, 0, 1)
    program = small_program(
        constants={
            "c": constant,
            "empty": torch.empty(0, 3, dtype=dtype),
            "number": torch.ones((), dtype=dtype),
        }
    )
    received = unpack(pack(program))
    assert received.digest() == program.digest()
    for name, sent in program.constants.items():
        found = received.constants[name]
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape) and (
            found.stride() == sent.stride() or not sent.numel()
        )
        assert not sent.numel() or torch.equal(
            found.contiguous().view(-1).view(torch.uint8), sent.contiguous().view(-1).view(torch.uint8)
        )


def test_every_kind_of_argument_arrives_as_it_was():
    values = (
        None, True, 1, 1.0, -0.1, 1e300, float("inf"), float("-inf"), "text", 1 + 2j, complex(0, float("inf")), (), ((1, (Ref("x"), 2.5)), None),
        torch.float32, torch.complex64, torch.device("cuda:3"), torch.device("meta"), torch.strided, torch.channels_last,
        torch.ops.aten.relu_.default, 2**70,
    )  # fmt: skip
    found = unpack(pack(with_node(args=values, kwargs={"a": values}))).nodes[0]
    assert (found.args, found.kwargs) == (values, {"a": values}) and list(map(type, found.args)) == list(
        map(type, values)
    )


# Each fact on which what a program computes depends.
REGION = Autocast(number=0, device="cpu", dtype=torch.bfloat16, enabled=True, cache=True)
META = small_program().inputs[0].meta
CHANGES: dict[str, Program] = {
    "alias": small_program(parameters={"w": Variable(value="p_w", name="w", meta=META, aliases=("v",))}),
    "gradient of a parameter": small_program(
        parameters={"w": Variable(value="p_w", name="w", meta=replace(META, requires_grad=False))}
    ),
    "no_grad": with_node(context=Context(grad=False)),
    "autocast": with_node(context=Context(autocast=(REGION,))),
    "autocast on another device": with_node(context=Context(autocast=(replace(REGION, device="cuda"),))),
    "autocast without a cache": with_node(context=Context(autocast=(replace(REGION, cache=False),))),
    "draw": with_node(draw=0),
    "draws": with_node(num_draws=1),
    "strides": with_node(outputs=(replace(META, stride=(1, 2)),)),
    "gradient": with_node(outputs=(replace(META, requires_grad=False),)),
    "module": with_node(path="a"),
    "argument": with_node(args=(Ref("x"), 1)),
    "kind of argument": with_node(args=(Ref("x"), 1.0)),
    "text": with_node(args=(Ref("x"), "1")),
    "operator": with_node(target=torch.ops.aten.add.Tensor),
    "device": small_program(device=torch.device("cuda:0")),
    "mode": small_program(training=False),
    "precision": small_program(precision=torch.float32),
    "in_place": small_program(in_place=frozenset({"w"})),
    "update": small_program(updates={"w": Ref("scaled")}),
    "arrangement": small_program(out_spec=torch.utils._pytree.tree_flatten([0])[1]),
    "output": small_program(outputs=(Ref("x"),)),
    "constant": small_program(constants={"c": torch.arange(6.0).view(3, 2).t() + 1}),
    "constant's strides": small_program(constants={"c": torch.arange(6.0).view(3, 2).t().contiguous()}),
    "constant's name": small_program(constants={"d": torch.arange(6.0).view(3, 2).t()}),
}


def test_every_fact_is_in_the_hash_and_travels():
    found = {name: program.digest() for name, program in {"none": small_program(), **CHANGES}.items()}
    assert len(set(found.values())) == len(CHANGES) + 1, found
    assert {name: unpack(pack(program)).digest() for name, program in CHANGES.items()} == {
        name: found[name] for name in CHANGES
    }


def print_hashes() -> None:
    """Hashes of programs read in this process, and of their bytes."""
    seed_everything(0)
    programs = [
        capture(job_of(*OWN[name][:2]), (*batches_of(OWN[name]),))
        for name in ("parametrised", "slice_writes", "autocast")
    ]
    print(json.dumps([[each.digest(), hashlib.sha256(pack(each)).hexdigest()] for each in programs]))


@pytest.mark.slow
@pytest.mark.processes
def test_the_hash_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]):
    print_hashes()
    here = json.loads(capsys.readouterr().out)
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path[:0] = ['tests', '.']; import test_transfer; test_transfer.print_hashes()",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "23"},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == here


def test_damaged_bytes_are_refused():
    data = pack(small_program())
    for wrong in (
        b"",
        data[:10],
        data[:-1],
        data + b"x",
        b"other" + data,
        *(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 37)),
    ):
        with pytest.raises(CaptureError, match=rf"These {len(wrong)} bytes are no program, or a damaged one"):
            unpack(wrong)


def test_an_operator_that_is_not_registered_here_is_named():
    with torch.library._scoped_library("sender", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        data = pack(with_node(target=torch.ops.sender.twice.default, args=(Ref("x"),)))
    with pytest.raises(
        CaptureError, match=r"calls sender::twice, which is not registered here .* Import what registers it"
    ):
        unpack(data)


class Pair(NamedTuple):
    loss: Tensor
    weight: int


def test_what_cannot_be_sent_is_refused_by_the_sender():
    program = capture_module(
        nn.Linear(3, 2),
        lambda model, batch: Pair(model(batch).sum(), 2),
        (torch.ones(4, 3), torch.zeros(4, 3)),
    )
    with pytest.raises(
        CaptureError,
        match="The loss returns .*Pair.* cannot be sent to another rank. Return tensors, numbers, and tuples",
    ):
        pack(program)
    with pytest.raises(
        CaptureError,
        match=r"mul.Tensor at a line that could not be found: The program holds a Generator, which cannot be sent",
    ):
        pack(with_node(args=(torch.Generator(),)))
    with pytest.raises(CaptureError, match="has no name by which it can be sent to another rank"):
        pack(with_node(target=print_hashes))
    with pytest.raises(
        CaptureError,
        match="Constant c of the program is a Tensor of layout torch._mkldnn, which cannot be sent",
    ):
        pack(small_program(constants={"c": torch.eye(3).to_mkldnn()}))
