"""A recorded construction gives the bits of the real one, whatever the constructor does, and holds no more
memory than what is asked for."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.comm.pieces import Pieces
from meshloom.core.random import seed_everything
from meshloom.parameters.construction.draw_stream import PIECE, STATES_AT_ONCE
from meshloom.parameters.construction.recording import RecordedTensors, record
from meshloom.parameters.construction.tape import NotRecordableError
from meshloom.parameters.initial_values import HeldTensor, Recorded
from tests.families import FAMILIES, Family

SEED = 5
SAMPLE = ("lstm", "u_net", "diffusion")
COVERING = (
    "gpt2",
    "mamba",
    "mixtral",
    "swin",
    "wav2vec2",
    "t5",
)  # of transformers, whose import takes seconds


def marks_of(family: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if family in SAMPLE else (pytest.mark.long,) if family in COVERING else (pytest.mark.slow,)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    seed_everything(SEED)
    return build()


def drawn_later() -> list[object]:
    """What is drawn after a construction."""
    return [torch.rand(3).tolist(), torch.randn(3).tolist(), random.random(), float(numpy.random.rand())]


def filled(
    build: Callable[[], nn.Module], wanted: Callable[[str], bool] = lambda _: True
) -> tuple[nn.Module, RecordedTensors]:
    """The model, recorded, with values in those of its tensors whose name is `wanted`."""
    model, recorded = record(lambda: seeded(build))
    held: list[HeldTensor] = []
    for name, each in {id(each): (name, each) for name, each in tensors_of(model).items()}.values():
        if not wanted(name) or name not in recorded.places:
            continue
        storage = each.untyped_storage()
        if not storage.nbytes():
            storage.resize_(recorded.tape.num_bytes[recorded.places[name].storage])
        held.append(HeldTensor(names=(name,), shape=tuple(each.shape), tensor=each))
    Recorded(recorded).fill(held)
    recorded.replay.finish()
    return model, recorded


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_equal(build: Callable[[], nn.Module]) -> tuple[nn.Module, RecordedTensors]:
    """Recorded and real constructions of a model are equal."""
    real = seeded(build)
    later = drawn_later()
    model, recorded = filled(build)
    assert drawn_later() == later
    expected, found = tensors_of(real), tensors_of(model)
    assert list(found) == list(expected)
    for name, each in found.items():
        like = expected[name]
        assert (type(each), each.dtype, each.stride(), each.requires_grad) == (type(like), like.dtype, like.stride(), like.requires_grad), name  # fmt: skip
        assert torch.equal(bits(each), bits(like)), name
    ties = [[id(each) == id(other) for other in found.values()] for each in found.values()]
    assert ties == [[id(each) == id(other) for other in expected.values()] for each in expected.values()]
    return model, recorded


def module(**tensors: Tensor) -> nn.Module:
    """A module with these parameters, and buffers where they are no parameters."""
    made = nn.Module()
    for name, each in tensors.items():
        if isinstance(each, nn.Parameter):
            made.register_parameter(name, each)
        else:
            made.register_buffer(name, each)
    return made


def padded() -> nn.Module:
    made = nn.Embedding(7, 5, padding_idx=3)
    with torch.no_grad():
        made.weight[1:3] = 2.0
        made.weight[5].copy_(torch.arange(5))
        made.weight.data[6, 1:] += 1
    return made


def rewritten() -> nn.Module:
    made = nn.Linear(17, 5)
    made.weight.data = torch.randn(5, 17) * 0.02
    made.bias.data.fill_(0.5)
    made.weight.data.mul_(3)
    return made


def tied() -> nn.Module:
    made = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
    made[1].weight = made[0].weight
    nn.init.xavier_normal_(made[1].weight)
    return made


def one_storage() -> nn.Module:
    flat = torch.randn(30)
    return module(
        whole=nn.Parameter(flat), first=nn.Parameter(flat[:12].view(3, 4)), second=flat[12:].view(6, 3).t()
    )


def rotary() -> nn.Module:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    made = nn.Linear(3, 3)
    made.register_buffer("cos", torch.outer(torch.arange(9), frequencies).cos(), persistent=False)
    made.table = torch.tril(torch.ones(5, 5))
    made.noise = torch.randn(4)
    return made


def initialised() -> nn.Module:
    made = nn.ModuleList([nn.Linear(9, 7) for _ in range(6)])
    nn.init.trunc_normal_(made[0].weight, std=0.7, a=-1, b=1)
    nn.init.orthogonal_(made[1].weight)
    nn.init.sparse_(made[2].weight, 0.3)
    nn.init.eye_(made[3].weight)
    nn.init.kaiming_normal_(made[4].weight)
    nn.init.trunc_normal_(made[4].bias, mean=2.5, a=-1, b=1)
    nn.init.dirac_(nn.Conv1d(3, 3, 3).weight)
    return made


def constants() -> nn.Module:
    table = numpy.arange(12.0).reshape(3, 4)
    kept = torch.from_numpy(numpy.random.rand(5, 2))
    return module(
        array=nn.Parameter(torch.from_numpy(table).float()),
        kept=kept,
        listed=torch.tensor([[1, 2], [3, 4]]),
        scaled=nn.Parameter(torch.as_tensor(table) * 2 + torch.randn(4)),
        python=nn.Parameter(torch.tensor([random.random() for _ in range(3)])),
        legacy=nn.Parameter(torch.FloatTensor(4, 5).normal_()),
        older=nn.Parameter(torch.Tensor(3, 20).uniform_(-2, 2)),
    )


def double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        made = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    finally:
        torch.set_default_dtype(torch.float32)
    return nn.Sequential(
        made, nn.Linear(3, 3).half(), nn.Linear(3, 40).to(torch.bfloat16), nn.Linear(2, 2).double()
    )


def loaded() -> nn.Module:
    made = nn.Linear(3, 2)
    made.load_state_dict({"weight": torch.full((2, 3), 0.25), "bias": torch.tensor([1.0, 2.0])})
    other = nn.Linear(3, 2)
    other.load_state_dict(nn.Linear(3, 2).state_dict())
    return nn.Sequential(made, other)


def copied() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    layer.register_buffer("mask", torch.randn(4)[::2])
    return nn.ModuleList([layer, copy.deepcopy(layer), nn.TransformerEncoder(layer, 2)])


def parametrised() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 5, 3)),
        torch.nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
    )


def recurrent() -> nn.Module:
    return nn.ModuleList([nn.LSTM(5, 6, 2, bidirectional=True), nn.GRU(4, 3), nn.BatchNorm2d(4)])


def asks() -> nn.Module:
    made = nn.Linear(20, 30)
    rates = [each.item() for each in torch.linspace(0, 0.1, 3)]
    if made.weight.sum() > 0:
        nn.init.normal_(made.bias, std=rates[1])
    made.weight.data[made.weight > 0.1] = 7.0
    made.scale = float(made.weight.detach().numpy().std()) + len(made.bias.tolist())
    nn.init.normal_(made.weight[:3], std=made.scale)
    return made


def seeded_again() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(30, generator=generator)
    second = torch.randn(7, generator=generator)
    generator.manual_seed(3)
    third = torch.randn(30, generator=generator)
    own = torch.rand(40)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inner = torch.rand(50)
    state = torch.get_rng_state()
    after = torch.randn(17)
    torch.set_rng_state(state)
    return module(first=first, second=second, third=third, own=own, inner=inner, after=after, repeated=nn.Parameter(torch.randn(17)))  # fmt: skip


def drawn() -> nn.Module:
    weights = torch.rand(6)
    return module(
        permuted=torch.randperm(9),
        whole=torch.randint(3, 9, (4, 5)),
        normal=torch.normal(torch.zeros(5), torch.ones(5)),
        chosen=torch.multinomial(weights, 3),
        flipped=torch.bernoulli(weights),
        counted=torch.poisson(weights * 30),
        like=torch.randn_like(weights),
        strided=torch.empty(6, 5).t().normal_(),
        short=torch.empty(7).normal_(),
        dropped=nn.functional.dropout(torch.ones(30), 0.5),
        last=nn.Parameter(torch.randn(1000)),
    )


def frozen() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    made[1].weight.requires_grad_(True)
    with torch.no_grad():
        made[0].weight /= made[0].weight.norm(dim=1, keepdim=True)
    return made


def run_once() -> nn.Module:
    made = nn.Sequential(nn.LazyLinear(5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    made(torch.randn(6, 4))
    return made


TRAPS = (
    padded, rewritten, tied, one_storage, rotary, initialised, constants, double, loaded, copied, parametrised, recurrent, asks, seeded_again, drawn,
    frozen, run_once,
)  # fmt: skip


@pytest.mark.parametrize("build", TRAPS, ids=lambda build: build.__name__)
def test_a_recorded_construction_has_the_bits_of_the_real_one(build: Callable[[], nn.Module]):
    assert_equal(build)


@pytest.mark.covering(
    "padded",
    "rewritten",
    "tied",
    "one_storage",
    "rotary",
    "constants",
    "double",
    "loaded",
    "asks",
    "seeded_again",
    "frozen",
    "run_once",
)
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(each, marks=pytest.mark.long if each in (copied, parametrised, recurrent) else ())
        for each in TRAPS
    ],
    ids=lambda build: build.__name__,
)
@pytest.mark.long
def test_each_tensor_has_them_alone(build: Callable[[], nn.Module]):
    real = tensors_of(seeded(build))
    for name, expected in real.items():
        model, _ = filled(build, name.__eq__)
        each = tensors_of(model)[name]
        if each.untyped_storage().nbytes():  # else it is tied to an earlier one
            assert torch.equal(bits(each), bits(expected)), name


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=marks_of(name), id=name) for name, each in FAMILIES.items()],
)
@pytest.mark.long
def test_families_are_built_without_memory(family: Family):
    build = family.make_job(True).model
    _, recorded = assert_equal(build)
    assert (
        not recorded.tape.constants
        or sum(each.nbytes() for each in recorded.tape.constants.values()) < 70_000
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.long
def test_draws_that_nobody_wants_leave_the_generator_as_it_would_be(dtype: torch.dtype):
    def build() -> nn.Module:
        made: dict[str, Tensor] = {}
        for size in (1, 7, 15, 16, 17, 32, 1000, PIECE, PIECE + 5, 2 * PIECE + 16):
            torch.empty(size, dtype=dtype).normal_()
            torch.empty(size, dtype=dtype).uniform_(1, 2)
            torch.empty(size, 2, dtype=dtype).t().normal_()
            torch.empty(2, size, dtype=dtype)[:, : size // 2 + 1].uniform_()
            torch.randn(size, dtype=dtype), torch.rand(size, dtype=dtype), torch.normal(1.0, 2.0, (size,))
            made[f"after_{size}"] = nn.Parameter(torch.rand(3))
        return module(**made)

    assert_equal(build)


def deep() -> nn.Module:
    """Matrices of 1 MiB, drawn as layers draw them, drawn again and scaled at the end."""
    made = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    for each in made:
        nn.init.normal_(each.weight)
    with torch.no_grad():
        for each in made:
            each.weight.mul_(0.5)
    return made


class RealBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators use, as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {each.cdata for each, _ in self._alive}
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in known:
                self._alive.append((StorageWeakRef(storage), storage.nbytes()))
                known.add(storage._cdata)
        self._alive = [each for each in self._alive if not each[0].expired()]
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive))
        return result


@pytest.mark.parametrize("kind", ["tensors", "shards", "slices"])
def test_half_of_a_model_takes_half_of_its_memory(kind: str):
    """Besides what is held there is one matrix of 1 MiB, a piece of a draw that is thrown away, and states of the generator."""
    expected = tensors_of(seeded(deep))
    model, recorded = record(lambda: seeded(deep))
    held: list[HeldTensor] = []
    for number, (name, each) in enumerate(tensors_of(model).items()):
        assert each.untyped_storage().nbytes() == 0
        if kind == "slices":
            held.append(HeldTensor(names=(name,), shape=(512, 512), tensor=torch.empty(1 << 17), span=(1 << 17, 1 << 18)))  # fmt: skip
        elif kind == "shards":
            pieces = Pieces((512, 512), ((((0, 256),), None), (((256, 512),), None)))
            held.append(HeldTensor(names=(name,), shape=(512, 512), tensor=torch.empty(256, 512), pieces=pieces, rank=1))  # fmt: skip
        elif number % 2:
            each.untyped_storage().resize_(1 << 20)
            held.append(HeldTensor(names=(name,), shape=(512, 512), tensor=each))
    with RealBytes() as counted:
        Recorded(recorded).fill(held)
    for each in held:
        whole = expected[each.names[0]]
        assert torch.equal(each.tensor.view(-1, 512), whole if kind == "tensors" else whole[256:])
    assert counted.peak <= (4 << 20) + (1 << 20) + 4 * PIECE + 5056 * STATES_AT_ONCE + (64 << 10)


@pytest.mark.long
def test_equal_constructions_have_equal_digests():
    def digest(build: Callable[[], nn.Module], seed: int = SEED) -> str:
        def started() -> nn.Module:
            seed_everything(seed)
            return build()

        return Recorded(record(started)[1]).digest()

    for build in (initialised, constants, seeded_again):
        assert digest(build) == digest(build) != digest(build, seed=6)
    assert digest(lambda: nn.Linear(3, 4)) != digest(lambda: nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: copy.deepcopy(module(weight=nn.Linear(3, 3).weight * 2)), "computed with gradients"),
        (lambda: module(weight=torch.randn(3).resize_(20)), "size of a tensor"),
    ],
)
def test_what_a_tape_cannot_say_is_named(build: Callable[[], nn.Module], why: str):
    with pytest.raises(NotRecordableError, match=why):
        record(build)


def test_a_draw_from_which_the_generator_has_gone_on_is_made_again():
    """From a state that was kept on the way."""
    build = lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(5)))  # noqa: E731
    expected = tensors_of(seeded(build))
    _, recorded = record(lambda: seeded(build))
    for name in ("4.weight", "2.weight", "3.bias", "0.weight", "2.weight"):
        values = recorded.replay.values(recorded.places[name].storage)
        assert torch.equal(recorded.places[name].within(values), expected[name].detach()), name


def test_a_construction_that_traces_is_built_as_usual() -> None:
    """`torch.export` in a model function ended the process: the error was raised inside of the tracer."""
    linear = nn.Linear(3, 5)
    with pytest.raises(NotRecordableError, match="traces"):
        record(lambda: torch.export.export(linear, (torch.ones(2, 3),)).module())
    exported = torch.export.export(linear, (torch.ones(2, 3),)).module()
    assert torch.equal(exported(torch.ones(2, 3)), linear(torch.ones(2, 3)))
