"""`compile=true` computes what one device computes that compiles nothing, and says what was compiled."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode, has_torch_function

from meshloom.core.compiling import MOST_VARIANTS, Compiled
from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.exchange.units.compiled_units import CompiledUnits
from meshloom.exchange.units.find_units import find_units
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.program.capture.capture import capture
from meshloom.program.recompute.recompute import with_recomputation
from meshloom.program.run import regions
from meshloom.program.run.compiler import Compiler
from meshloom.program.run.recomputed_casts import RecomputedCasts
from meshloom.program.run.runner import compile_program
from meshloom.program.trace.precision import default_precision
from meshloom.telemetry.progress import Listener
from meshloom.telemetry.summary import Summary
from meshloom.train.trainer import Trainer
from tests.covering import in_turn
from tests.jobs import Samples, make_job
from tests.program_jobs import Recurrent
from tests.test_recompute import SLOW_COMPUTING, differences, family
from tests.verified import equals_one_device, report_on
from tests.zero_three_jobs import Again, Blocks, Recomputed, RecomputedReentrant, Shuffled, unit_job

# torch's own, of itself as it compiles
pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PLANS = [
    "dp=2", "dp=2,microbatches=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,sync_batch_norm=true", "tp=2", "pp=2,microbatches=2", "pp=2,microbatches=2,schedule=gpipe",
    "pp=2,microbatches=2,schedule=interleaved", "pp=2,microbatches=2,schedule=zb-h1", "pp=2,microbatches=2,schedule=zb-v", "dp=2,pp=2,tp=2,microbatches=2",
    "dp=2,recompute=full", "tp=2,recompute=selective", "dp=2,exchange=server", "dp=2,zero=3", "dp=2,zero=3,microbatches=2",
]  # fmt: skip


@pytest.fixture
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of two operators are compiled, too: those of tiny models."""
    monkeypatch.setattr(regions, "LEAST_OPERATORS", 2)


class Experts(nn.Module):
    """[batch, 3, 7] -> [batch, 3]: two of four experts read each row, by looking up its matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(7, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *sizes) * 0.3) for sizes in ((5, 7), (7, 5)))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.router(x).softmax(-1).topk(2, -1)
        rows, chosen = x.flatten(0, 1).repeat_interleave(2, 0), ids.flatten()
        hidden = torch.relu(torch.bmm(self.up[chosen], rows[..., None]).squeeze(-1))
        outputs = torch.bmm(self.down[chosen], hidden[..., None]).squeeze(-1) * best.flatten()[:, None]
        return self.head(x + outputs.view(*x.shape[:2], 2, -1).sum(2)).mean(1)


def sequences() -> Samples:
    """x [3, 7] normal, y a class of 3."""
    generator = torch.Generator().manual_seed(4)
    return Samples(
        x=torch.randn(30, 3, 7, generator=generator), y=torch.randint(3, (30,), generator=generator)
    )


def sequence_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"])
    return F.cross_entropy(output.mean(1) if output.ndim == 3 else output, batch["y"])


def job_of(model: str) -> Job:
    if model in ("lstm", "experts"):
        build = Recurrent if model == "lstm" else Experts
        return replace(make_job("mlp", "adamw"), model=build, loss=sequence_loss, data=sequences)
    return make_job(model, "adamw")


def check_equal(model: str, plan: str, steps: int) -> None:
    """3 steps have a short batch: other shapes."""
    report = report_on(job_of(model), f"{plan},compile=true", steps=steps)
    wrong = [f"{e.kind} {e.name} {e.error}" for s in report.steps for e in s.errors if not e.passed]
    assert all(step.passed for step in report.steps), wrong


@pytest.mark.slow
@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_an_mlp_is_that_of_one_device(plan: str):
    check_equal("mlp", plan, 1)


# An LSTM draws its dropout by time steps first, of which replicas that join their chunks hold no rows, compiled or not.
@pytest.mark.slow
@pytest.mark.usefixtures("small_regions")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (model, plan)
        for model in ("mlp", "cnn", "gpt", "lstm", "experts")
        for plan in PLANS
        if model != "lstm" or "sync_batch_norm" not in plan
    ],
)
def test_a_plan_is_that_of_one_device(model: str, plan: str):
    check_equal(model, plan, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", [Blocks, Recomputed, RecomputedReentrant, Again, Shuffled])
def test_units_that_are_used_in_other_ways_are_those_of_one_device(model: Callable[[], nn.Module]):
    equals_one_device(replace(make_job("mlp", "adamw"), model=model), "dp=2,zero=3,compile=true", steps=3)


@pytest.mark.slow
def test_compiled_units_are_compiled_once_and_send_what_they_send_as_written():
    torch.compiler.reset()  # what a test before has compiled of `Blocks` is not compiled again
    job = replace(make_job("mlp", "adamw"), model=Blocks)
    found: list[Summary] = []
    for plan in ("dp=2,zero=3", "dp=2,zero=3,compile=true"):
        with Trainer(job, Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64) as trainer:
            found.append(trainer.fit())
    written, compiled = found
    assert compiled.counted == compiled.predicted == written.counted
    assert compiled.last_loss == pytest.approx(written.last_loss, rel=1e-10)
    assert compiled.compiled is not None and compiled.compiled.functions == 1  # of four blocks
    assert (
        compiled.compiled.graphs in (2, 3) and compiled.compiled.breaks == 0
    )  # the short batch has other sizes


def test_casts_of_parameters_are_marked_with_their_views_and_no_others():
    def joint(primals_1: Tensor, primals_2: Tensor, primals_3: Tensor) -> tuple[Tensor, ...]:
        weight, x = primals_1.bfloat16(), primals_2.bfloat16()
        return x @ weight.t(), weight + 1, primals_3.bfloat16()

    inputs = nn.Parameter(torch.ones(3, 2)), torch.ones(5, 2), nn.Parameter(torch.ones(2))
    traced = make_fx(joint, tracing_mode="fake")(
        inputs[0].detach(), inputs[1], torch.ones(3)
    )  # the third is another now
    for number, node in enumerate(traced.graph.find_nodes(op="placeholder"), 1):
        node.name = f"primals_{number}"
    RecomputedCasts(inputs)(traced.graph)
    marked = [node for node in traced.graph.nodes if "recompute" in node.meta]
    assert [node.target for node in marked] == [
        torch.ops.aten._to_copy.default,
        torch.ops.aten.t.default,
    ]
    assert marked[0].args[0].name == "primals_1" and marked[1].args[0] is marked[0]
    assert RecomputedCasts(inputs).uuid() != RecomputedCasts(inputs[:2]).uuid()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["blocks", "adapted"])
def test_compiled_units_cast_their_parameters_anew_in_backward(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The story: compiled, every rank kept the whole model in bfloat16 until backward, with zero=3 as without."""
    kept: list[Any] = []
    pack = UnitAccess.pack

    def packed(access: UnitAccess, tensor: Tensor) -> Any:
        kept.append(pack(access, tensor))
        return kept[-1]

    monkeypatch.setattr(UnitAccess, "pack", packed)
    plan = Plan.parse("dp=2,zero=3,compile=true,precision=bf16-mixed")
    equals_one_device(unit_job(kind), plan, transport="gloo", dtype=None)
    assert not [each for each in kept if isinstance(each, Tensor) and each.numel() == 6 * 11]  # of a weight
    assert [each for each in kept if not isinstance(each, Tensor) and each._layout[0].numel() == 6 * 11]


class Uncompiled:
    """A stand-in for the compiler that leaves functions as they are, and counts them."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self.given: list[bool | None] = []

    def function(
        self, function: Callable[..., Any], *, dynamic: bool | None = None, recasts: bool = False
    ) -> Callable[..., Any]:
        self.given.append(dynamic)
        return function


class UnwatchedCalls(Uncompiled):
    """Also notes at every call whether a torch function mode would be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[bool] = []

    def function(
        self, function: Callable[..., Any], *, dynamic: bool | None = None, recasts: bool = False
    ) -> Callable[..., Any]:
        given = super().function(function, dynamic=dynamic)

        def called(*args: Any) -> Any:
            self.watched.append(has_torch_function((None,)))
            return given(*args)

        return called


def test_units_of_a_class_share_code_that_runs_in_chunks_alone_and_unwatched():
    model, compiler = Blocks(), UnwatchedCalls()
    expected = model(torch.ones(2, 7))
    found = find_units(model, large_bytes=2**30)
    units: Any = [SimpleNamespace(module=each.module) for each in found]
    compiled = CompiledUnits(units, compiler)
    assert len(compiled) == 4 and not CompiledUnits(units[:1], compiler)
    with compiled.connect():
        assert torch.equal(model(torch.ones(2, 7)), expected) and not compiler.watched
        with compiled.computing(), BaseTorchFunctionMode():
            assert torch.equal(model(torch.ones(2, 7)), expected)
    assert compiler.watched == [False] * 4 and len(compiler.given) == 1
    assert not any("forward" in vars(each) for each in model.modules())


def test_a_unit_with_a_unit_in_it_runs_as_written():
    model = Blocks()
    units: Any = [SimpleNamespace(module=each) for each in (model.blocks[0], model.blocks[0].up, model.head)]
    assert len(CompiledUnits(units, Uncompiled())) == 2


FAMILIES = ("gpt2", "conv2d", "mixtral", "recommendation")


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize(("name", "how"), in_turn(FAMILIES, ("none", "full", "selective")))
@pytest.mark.slow
def test_regions_are_the_operators_in_them_bit_for_bit(name: str, how: str):
    program, build, batches = family(name)
    compiler = Uncompiled()
    with default_precision(torch.float64):
        in_regions = replace(with_recomputation(program, how, rates=SLOW_COMPUTING), compiler=compiler)
        assert not differences(program, in_regions, build, batches)
    assert compiler.given


@pytest.mark.parametrize(("count", "is_compiled"), [(5, False), (6, True)])
@pytest.mark.long
def test_a_region_of_few_operators_is_left_as_it_is(count: int, is_compiled: bool):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = model(batch["x"]).view(-1)  # a view does not count
        for _ in range(count - 2):
            x = x.sin()
        return x.sum()

    job = replace(make_job("mlp", "sgd"), model=lambda: nn.Linear(7, 3), loss=loss)
    compiler = Uncompiled()
    program = capture(job, first_batches(job, 2))
    compile_program(replace(program, compiler=compiler), torch.device("cpu"), None)
    assert len(compiler.given) == is_compiled


@pytest.mark.usefixtures("small_regions")
@pytest.mark.long
def test_alike_regions_share_code_and_other_sizes_share_one_more():
    program, _, _ = family("gpt2")
    compiler, device = Uncompiled(), torch.device("cpu")
    compile_program(replace(program, compiler=compiler), device, None)
    first = len(compiler.given)
    assert compiler.given == [None] * first
    compile_program(replace(program, compiler=compiler), device, None)
    assert len(compiler.given) == first


def test_the_setting_is_a_word_and_python_may_give_a_bool():
    given: Any = True
    assert Plan.parse("dp=2,compile=true") == Plan(dp=2, compile=given)
    assert Plan.from_json('{"dp": 2, "compile": true}') == Plan(dp=2, compile="true")
    assert str(Plan(dp=2, compile="true")) == "dp=2,compile=true"
    assert str(Plan.from_json('{"compile": false}')) == str(Plan(compile="none")) == "dp=1"


@pytest.mark.on_cpu  # Triton needs none
def test_without_a_compiler_it_is_refused_before_the_first_step():
    import torch._inductor.config as inductor

    job, plan = make_job("mlp", "sgd"), Plan(compile="true")
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(DeviceError, match=r"needs a C\+\+ compiler.*or use compile=none"),
    ):
        Trainer(job, plan, devices="cpu").__enter__()


@pytest.mark.slow
def test_what_was_compiled_is_said():
    said: list[str] = []
    job = make_job("gpt", "adamw")
    with Trainer(job, Plan(compile="true"), devices="cpu", listener=Listener(note=said.append)) as trainer:
        compiled = trainer.fit().compiled
    assert compiled is not None and compiled.functions == 1 and compiled.breaks == 0
    assert compiled.graphs in (2, 3) and compiled.seconds > 0  # the short batch has other sizes
    assert any(each.startswith("torch.compile: 1 graph of 1 function in") for each in said)


def counting_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"])
    print(end="")  # breaks the graph
    return F.cross_entropy(output, batch["y"])


@pytest.mark.slow
def test_a_loss_that_breaks_the_graph_trains_and_the_break_is_told():
    job, losses = replace(make_job("mlp", "sgd"), loss=counting_loss), list[float]()
    for plan in ("dp=1", "dp=1,compile=true"):
        with Trainer(job, Plan.parse(plan), devices="cpu") as trainer:
            summary = trainer.fit()
        losses.append(summary.last_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32: sums in another order
    assert summary.compiled is not None and summary.compiled.breaks >= 1 and summary.compiled.reasons


@pytest.mark.slow
def test_what_keeps_units_values_is_not_compiled_and_no_break(monkeypatch: pytest.MonkeyPatch):
    """The story: an LSTM, which is not compiled, was saving tensors, and what finds their units was compiled in its place:
    of 14 breaks 13 were ours, and places that were made of a unit without one failed when they were let go of."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
    torch.compiler.reset()  # other tests met the break
    found: list[Compiled | None] = []
    for plan in ("dp=2,compile=true", "dp=2,zero=3,compile=true"):
        with Trainer(job_of("lstm"), Plan.parse(plan), devices="simulated", steps=2) as trainer:
            found.append(trainer.fit().compiled)
        torch.compiler.reset()
        gc.collect()  # an object that fails as it is let go of fails this test
    replicated, sliced = found
    assert replicated is not None and sliced is not None and replicated.breaks > 0
    assert (sliced.breaks, sliced.reasons) == (replicated.breaks, replicated.reasons)


@pytest.mark.slow
def test_shapes_without_end_are_compiled_a_few_times():
    compiler = Compiler(torch.device("cpu"))
    run = compiler.function(lambda x: torch.tanh(x).sum() + 1)
    for size in range(2, 40):
        x = torch.randn(size)
        assert torch.allclose(run(x), torch.tanh(x).sum() + 1)
    assert compiler.report.graphs == 2  # one of fixed sizes, one of any
    for dims in range(2, 20):
        x = torch.randn([2] * dims)
        assert torch.allclose(run(x), torch.tanh(x).sum() + 1, rtol=1e-4)
    assert compiler.report.graphs <= MOST_VARIANTS and compiler.report.uncompiled == 1


def test_a_report_is_a_sentence():
    said = str(_COMPILED)
    assert said == (
        "torch.compile: 3 graphs of 2 functions in 4.2 s, 1 graph break; 2 of 6 found in /tmp/kept; breaks: print(); 1 function met 8 kinds of inputs "
        "(shapes, dtypes), the most that are compiled: further kinds run uncompiled."
    )


_COMPILED = Compiled(
    functions=2, graphs=3, breaks=1, reasons=("print()",), hits=2, misses=4, seconds=4.21, uncompiled=1, directory="/tmp/kept"
)  # fmt: skip
