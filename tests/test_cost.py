"""What operators cost, against torch's own counter and autograd's own hooks over the eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_jobs import OWN
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from meshloom.core.random import seed_everything
from meshloom.program.capture.capture import capture_module
from meshloom.program.cost.cost import Cost, SavedTensor, costs
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

COVERING = {"gpt2", "resnet", "lstm"}
AS_EAGER = COVERING | {"llama", "bert", "mamba", "mixtral", "clip", "u_net"}  # to the last byte and operation
# bytes that real operators keep and torch's fakes of them do not: sizes of bags
FAKES_LACK = {"embedding_bag": 24}
aten = torch.ops.aten

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def kept_bytes(program: Program, found: dict[str, Cost]) -> int:
    """Bytes of the activations that its nodes keep, each memory once."""
    state = (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    given = {each.value for each in state} | set(program.constants)
    kept = {each.memory: each.num_bytes for cost in found.values() for each in cost.kept}
    return sum(num_bytes for memory, num_bytes in kept.items() if memory not in given)


def products(a: Any, b: Any) -> int:
    """Multiply-adds of a recurrent layer, twice: x [length, batch, features], weights [gates, features] and
    [gates, hidden]."""
    return 2 * a[0] * a[1] * b


def opened(shape: Any, places: Any) -> torch.Size:
    """A shape with dims of 1 put in."""
    made = torch.empty(shape, device="meta")
    for place in places:
        made = made.unsqueeze(place)
    return made.shape


# What torch counts as nothing: bilinear layers everywhere, and on CPUs, where attention and recurrent layers
# are other operators than on GPUs.
CPU_OPERATORS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
    aten._trilinear: lambda a, b, c, i, j, k, *_, **__: (
        3 * torch.broadcast_shapes(opened(a, i), opened(b, j), opened(c, k)).numel()
    ),
    aten.mkldnn_rnn_layer: lambda x, wx, wh, *_, **__: products(x, wx[0] * (wx[1] + wh[1])),
    aten.mkldnn_rnn_layer_backward: lambda x, wx, wh, *_, **__: 2 * products(x, wx[0] * (wx[1] + wh[1])),
}


class Saved:
    """Distinct memories that autograd holds while a block runs, and after it those that the loss reaches:
    address -> bytes."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def of(self, root: Any) -> dict[int, int]:
        """Those that autograd nodes under `root` hold."""
        found: dict[int, int] = {}
        waiting, seen = [root], {root}
        while waiting:
            node = waiting.pop()
            for name in dir(node):
                if name.startswith("_raw_saved"):
                    raw = getattr(node, name)
                    for each in raw if isinstance(raw, tuple | list) else [raw]:
                        self._add(each, found)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return found

    def _add(self, raw: Any, found: dict[int, int]) -> None:
        before = len(self.tensors)
        try:
            raw.register_hooks(self.pack, lambda tensor: tensor)  # packing shows what is saved
        except RuntimeError as error:
            if "None is forbidden" not in str(error):
                raise
        for tensor in self.tensors[before:]:
            if tensor.ndim == 0 and tensor.dtype in (torch.float64, torch.int64, torch.bool):
                continue  # a Python number that a tensor was multiplied by
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()


def eager_step(forward: Callable[[], Any], given: Any) -> tuple[int, int, int]:
    """FLOPs of the forward and of the backward, and bytes of distinct activations that the loss's graph holds
    when the forward is done.

    given: all that is there before.
    """
    seed_everything(0)
    there = {each.untyped_storage().data_ptr() for each in tree_leaves(given) if isinstance(each, Tensor)}
    with FlopCounterMode(display=False, custom_mapping=CPU_OPERATORS) as first:
        value = forward()
        value = value[0] if isinstance(value, tuple) else value
    saved = {address: size for address, size in Saved().of(value.grad_fn).items() if address not in there}
    with FlopCounterMode(display=False, custom_mapping=CPU_OPERATORS) as second:
        value.sum().backward()
    return first.get_total_flops(), second.get_total_flops(), sum(saved.values())


def eager_module_step(model: nn.Module, loss: Callable[..., Any], batch: Any) -> tuple[int, int, int]:
    return eager_step(lambda: loss(model, batch), [list(model.parameters()), list(model.buffers()), batch])


def predicted_step(program: Program) -> tuple[int, int, int]:
    found = costs(program)
    assert list(found) == [node.name for node in program.nodes]
    return (
        sum(each.flops for each in found.values()),
        sum(each.backward_flops for each in found.values()),
        kept_bytes(program, found),
    )


def own_model(name: str) -> tuple[nn.Module, Callable[..., Any], Any, Program]:
    build, loss, make_batch = OWN[name]
    generator = torch.Generator().manual_seed(0)
    model, batches = build(), (make_batch(generator), make_batch(generator))
    return model, loss, batches[0], capture_module(model, loss, batches)


def program_of(model: nn.Module, batch: Tensor) -> Program:
    return capture_module(model, lambda model, batch: model(batch).sum(), (batch, batch + 1))


@pytest.mark.covering("in_place", "autocast", "no_grad", "tied", "rotary", "noise", "precisions")
@pytest.mark.parametrize(
    "name", [name for name in OWN if name not in ("slice_writes", "average", "checkpointed")]
)
def test_cost_of_own_models_is_that_of_the_eager_step(name: str):
    model, loss, batch, program = own_model(name)
    assert predicted_step(program) == eager_module_step(model, loss, batch)


@pytest.mark.parametrize("name", ["slice_writes", "average", "checkpointed"])
def test_cost_is_the_programs_own_where_eager_writes_in_place_or_recomputes(name: str):
    model, _, batch, program = own_model(name)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    constants = list(program.constants.values())
    run = eager_step(
        lambda: run_program(program, parameters, buffers, batch), [parameters, buffers, batch, constants]
    )
    # The oracle cannot tell a count of steps that is kept from the numbers that it leaves out: 8 bytes.
    assert predicted_step(program) == (*run[:2], run[2] + (8 if name == "average" else 0))


@pytest.mark.covering("lstm")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in COVERING else pytest.mark.slow)
        for each in FAMILIES
        if each not in NOT_READ
    ],
)
def test_cost_of_families_is_that_of_their_programs_and_eager_steps(name: str):
    job = FAMILIES[name].make_job(False)
    seed_everything(0)
    model, data = job.model().train(), job.data()
    batches = [default_collate([data[index] for index in indices]) for indices in ((0, 1, 2), (3, 4, 5))]
    program = capture_module(model, job.loss, (batches[0], batches[1]))
    predicted = predicted_step(program)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    run = eager_step(
        lambda: run_program(program, parameters, buffers, batches[0]),
        [parameters, buffers, batches[0], list(program.constants.values())],
    )
    assert predicted == (*run[:2], pytest.approx(run[2], abs=FAKES_LACK.get(name, 0)))
    eager = eager_module_step(model, job.loss, batches[0])
    if name in AS_EAGER:
        assert predicted == eager
    # Elsewhere modules compute what no loss needs (poolers, gradients of inputs), and transformers runs other
    # kernels while it is read.
    assert predicted == pytest.approx(eager, rel=0.2)


def test_a_node_costs_what_can_be_counted_by_hand():
    # 6 x 3 times 3 x 5; float32. Backward: two products, and the bias's sum; reads the gradient, x, w, and
    # the gradient for the bias.
    model = nn.Linear(3, 5)
    program = program_of(nn.Sequential(nn.Linear(4, 3), model), torch.ones(6, 4))
    cost = costs(program)["linear_1"]
    assert (cost.flops, cost.backward_flops) == (2 * 6 * 3 * 5, 2 * 2 * 6 * 3 * 5)
    assert (cost.read_bytes, cost.written_bytes) == (4 * (6 * 3 + 3 * 5 + 5), 4 * 6 * 5)
    assert cost.backward_written_bytes == 4 * (6 * 3 + 3 * 5 + 5)
    assert cost.kept == (
        SavedTensor(memory="linear", num_bytes=4 * 6 * 3),
        SavedTensor(memory="p_1_weight", num_bytes=4 * 3 * 5),
    )


def test_a_kept_view_is_the_memory_of_its_owner():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return (y[:, :2].t().exp() * y.sum().expand(2, 5)).tanh()

    program = program_of(Views(), torch.ones(5, 4))
    found = costs(program)
    kept = {each.memory: each.num_bytes for name in found for each in found[name].kept}
    # the sum is expanded to ten elements and lies in one
    assert kept == {"leaves_0": 80, "exp": 40, "sum": 4, "tanh": 40}
    views = [found[name] for name in ("slice", "t", "expand")]
    assert not any(each.flops or each.read_bytes or each.written_bytes or each.kept for each in views)


def test_what_the_loss_does_not_reach_is_not_kept():
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.no_grad():
                scale = y.exp().sum()
            self.first(y.detach()).tanh().exp()  # nobody uses it
            return y * scale

    program = program_of(Aside(), torch.ones(5, 4))
    found = costs(program)
    kept = {each.memory for cost in found.values() for each in cost.kept}
    assert {node.name for node in program.nodes if node.name in kept} == {
        node.name for node in program.nodes if node.operator == "sum" and not node.context.grad
    }


def test_casts_of_parameters_under_autocast_are_kept_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.first(self.first(self.first(x))).float()

    program = program_of(Twice(), torch.ones(5, 8))
    found = costs(program)
    # the first needs no gradient of x, so no weight
    _, two, three = (cost for name, cost in found.items() if name.startswith("linear"))
    cast = {each for each in two.kept if each.num_bytes == 2 * 8 * 8}
    assert len(cast) == 1 and cast <= set(three.kept)
    # the cast, x and two results in bfloat16
    assert kept_bytes(program, found) == 2 * (8 * 8 + 3 * 5 * 8)


def test_a_program_without_gradient_keeps_nothing():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).exp()

    found = costs(program_of(Frozen(), torch.ones(3, 4)))
    assert all(cost.kept == () and cost.backward_flops == 0 for cost in found.values())
    assert found["linear"].flops == 2 * 3 * 4 * 4


def test_a_search_for_nan_in_backwards_changes_no_cost():
    """It reads values, of which there are none."""
    program = program_of(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)), torch.ones(6, 4))
    with torch.autograd.set_detect_anomaly(True):
        searched = costs(program)
        assert torch.is_anomaly_enabled()
    assert searched == costs(program)
