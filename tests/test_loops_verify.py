"""`meshloom verify` of a script: what its steps are compared by, and what it says of scripts that are right and that are not."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshloom.cli.main import main
from meshloom.core.jobfile import is_script
from meshloom.core.plan import Plan
from meshloom.loops.parallel import _taken  # pyright: ignore[reportPrivateUsage]
from meshloom.verify.scripts.draws_of_forwards import ForwardNotes, no_draws_within, without_draws
from meshloom.verify.scripts.recorder import (
    EnoughStepsError,
    RecordedStep,
    ScriptRecorder,
    recorded_steps,
    with_hooks,
)
from meshloom.verify.scripts.script_comparison import compare_scripts
from meshloom.verify.scripts.script_verdict import verdict, why_no_copies

TOLERANCE = 1e-10  # of_precision.most_tolerated(float64)


def step(seed: int = 0, *, times: float = 1.0) -> RecordedStep:
    """Of two parameters, a buffer and a report. times: of its gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gradients = {"a.weight": times * draw(3, 2), "a.bias": times * draw(3)}
    parameters = {"a.weight": draw(3, 2), "a.bias": draw(3)}
    return RecordedStep(0, gradients, parameters, {"norm.mean": draw(3)}, [draw()])


def test_equal_steps_are_equal_and_all_of_their_tensors_are_counted():
    found = compare_scripts([step(0), step(1)], [step(0), step(1)], TOLERANCE)
    assert (found.equal, found.steps, found.tensors, found.worst) == (True, 2, 12, 0.0)


def test_nothing_compared_is_not_equal():
    assert not compare_scripts([], [], TOLERANCE).equal


@pytest.mark.parametrize("kind", ["gradients", "parameters", "buffers"])
def test_the_first_tensor_that_differs_is_named_with_its_step(kind: str):
    wrong = step(1)
    name, tensor = next(iter(getattr(wrong, kind).items()))
    tensor[0] *= 1 + 1e-8  # a hundred times what may be rounding
    found = compare_scripts([step(0), wrong], [step(0), step(1)], TOLERANCE).first
    assert found and (found.step, found.kind, found.name) == (1, kind.removesuffix("s"), name)
    assert TOLERANCE < found.error <= 1e-8 and found.factor is None


def test_a_report_that_differs_is_named():
    wrong = step(0)._replace(reports=[torch.zeros((), dtype=torch.float64)])
    found = compare_scripts([wrong], [step(0)], TOLERANCE).first
    assert found and (found.kind, found.error) == ("report", 1.0)


def test_a_gradient_comes_before_a_parameter():
    wrong = step(0, times=3.0)._replace(parameters=step(5).parameters)
    found = compare_scripts([wrong], [step(0)], TOLERANCE).first
    assert found and found.kind == "gradient" and found.factor == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize(("times", "said"), [(1 / 2, "1/dp: the loss is a sum"), (2.0, "2 times the whole batch's, dp"), (3.0, "is 3 times")])  # fmt: skip
def test_an_exact_factor_is_named(times: float, said: str):
    found = compare_scripts([step(0, times=times)], [step(0)], TOLERANCE)
    text = "\n".join(verdict(Plan(dp=2), found, "not here", drew=True, draws=False, batch_norms=[]))
    assert text.startswith("DIFFERS") and said in text


def test_a_factor_that_clipping_hides_is_not_named():
    found = compare_scripts([step(0, times=1 + 1e-7)], [step(0)], TOLERANCE).first
    assert found and found.kind == "gradient" and found.factor is None


def test_a_run_of_fewer_steps_differs():
    found = compare_scripts([step(0)], [step(0), step(1)], TOLERANCE)
    assert found.first and (found.first.kind, found.first.step) == ("step", 1)


def test_a_gradient_on_one_side_alone_differs():
    wrong = step(0)
    assert isinstance(wrong.gradients, dict)
    wrong.gradients["a.bias"] = None
    found = compare_scripts([wrong], [step(0)], TOLERANCE).first
    assert found and (found.kind, found.name) == ("gradient", "a.bias")


def test_steps_that_rounding_makes_of_gradients_that_are_zero_are_left_out():
    """Adam divides by a gradient's size: of 1e-17 and -1e-17 it makes steps of full length, in opposite directions."""
    ours, theirs = step(0), step(0)
    for each, sign in ((ours, 1.0), (theirs, -1.0)):
        gradient = each.gradients["a.bias"]
        assert gradient is not None
        gradient[1] = sign * 1e-17
        each.parameters["a.bias"][1] += sign * 0.1
    found = compare_scripts([ours], [theirs], TOLERANCE)
    assert found.equal and found.left_out == 1


def test_optimizers_of_recorded_steps_find_zero_where_a_gradient_is_rounding(tmp_path: Path):
    """Adam's eps is in reach of a bias before a batch norm, whose gradient is 1e-16: its steps would go into the running mean."""
    norm = nn.BatchNorm1d(5).double()
    model = nn.Sequential(nn.Linear(3, 5).double(), norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in model[0].parameters()]

    def train() -> None:
        while True:
            optimizer.zero_grad()
            (1e4 * model(torch.randn(7, 3, dtype=torch.float64)).sigmoid().square().mean()).backward()
            optimizer.step()

    with ScriptRecorder(tmp_path, 3, {model: None}), pytest.raises(EnoughStepsError):
        train()
    noted = [each.gradients["0.bias"] for each in recorded_steps(tmp_path)]
    assert all(each is not None and 0 < each.abs().max() < 1e-9 for each in noted)
    weight, bias = model[0].parameters()
    assert torch.equal(bias, before[1]) and not torch.equal(weight, before[0])


@pytest.mark.parametrize(("equal", "said"), [(True, "does what dp=2 plain copies do"), (False, "the mistake is in meshloom")])  # fmt: skip
def test_plain_copies_tell_a_loss_over_shares_from_a_mistake(equal: bool, said: str):
    whole = compare_scripts([step(1)], [step(0)], TOLERANCE)
    copies = compare_scripts([step(1)], [step(1 if equal else 2)], TOLERANCE)
    assert said in "\n".join(verdict(Plan(dp=2), whole, copies, drew=True, draws=False, batch_norms=[]))


def test_batch_statistics_of_microbatches_are_named_in_place_of_a_mistake():
    plan, norms = Plan.parse("dp=2,pp=2,microbatches=2"), ["1"]
    why = why_no_copies(plan, draws=False, weighs=False, batch_norms=norms)
    assert why == "1 normalizes by the statistics of microbatches, and they have none"
    assert why_no_copies(Plan(dp=2), draws=False, weighs=False, batch_norms=norms) is None
    assert why_no_copies(plan, draws=False, weighs=False, batch_norms=[]) is None
    by_rows = why_no_copies(Plan(dp=2), draws=False, weighs=True, batch_norms=[])
    assert by_rows == "its calls count by parallel(weight=...), and theirs by rows"
    whole = compare_scripts([step(1)], [step(0)], TOLERANCE)
    text = "\n".join(verdict(plan, whole, why, drew=True, draws=False, batch_norms=norms))
    assert "1: batch normalization by the statistics of shares" in text and "mistake" not in text


def test_where_the_one_replica_has_the_whole_batch_nothing_excuses_a_difference():
    whole = compare_scripts([step(1)], [step(0)], TOLERANCE)
    assert (
        "the mistake is in meshloom"
        in verdict(Plan(tp=2), whole, None, drew=True, draws=False, batch_norms=[])[-1]
    )


def test_a_recorder_ends_a_script_that_catches_exceptions(tmp_path: Path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    taken: list[int] = []

    def train() -> None:
        while True:
            try:
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
            except Exception:
                pytest.fail("a script's own handler took it")
            recorder.report([torch.tensor(0.5), 7])
            taken.append(1)

    with ScriptRecorder(tmp_path, 2, {model: None}) as recorder, pytest.raises(EnoughStepsError):
        train()
    first, second = recorded_steps(tmp_path)
    assert taken == [1] and first.gradients["weight"] is not None and not first.reports
    assert torch.equal(first.parameters["weight"], before - 0.5 * first.gradients["weight"])
    assert [float(each) for each in second.reports] == [0.5, 7.0]
    optimizer.step()  # nobody listens any more


def test_dropout_is_left_out_of_modules_functions_and_attention():
    x = torch.randn(4, 6)
    attention = nn.MultiheadAttention(6, 2, dropout=0.5)
    with without_draws():
        recurrent = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
        assert torch.equal(nn.Dropout(0.5)(x), x) and torch.equal(functional.dropout(x), x)
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        assert torch.equal(recurrent(x)[0], recurrent(x)[0])
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x, None, 0.9), functional.scaled_dot_product_attention(x, x, x))  # fmt: skip
    assert not torch.equal(nn.Dropout(0.5)(x), x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.mean(x)
        drawn = torch.distributions.Normal(mean, torch.ones_like(mean)).rsample()
        mask = torch.bernoulli(torch.full_like(mean, 0.9)) * torch.rand(mean.shape).round()
        noise = torch.from_numpy(
            numpy.random.normal(0, 1, (len(x), 2)) + numpy.random.rand(len(x), 1)
        ).float()
        return drawn + mean * mask + torch.randn_like(mean) + functional.gumbel_softmax(mean) + noise


def test_what_forwards_draw_is_the_same_for_each_row():
    module, x = Noisy(), torch.randn(6, 3)
    no_draws_within(module)
    with without_draws():
        whole = module(x)
        torch.testing.assert_close(torch.cat([module(x[:2]), module(x[2:])]), whole)
        assert not torch.equal(torch.randn(4), torch.randn(4))  # the script's own
        assert numpy.random.normal() != numpy.random.normal()
    assert not torch.equal(module(x), module(x))


def test_a_watched_module_is_saved_and_copied(tmp_path: Path):
    module, notes = nn.Linear(2, 1), ForwardNotes()
    notes.watch(module, torch.float32)
    no_draws_within(module)
    torch.save(module, tmp_path / "model.pt")
    copied = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(copied(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_a_forward_says_what_makes_shares_another_batch():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    notes = ForwardNotes()
    notes.watch(module, torch.float64)
    module.eval()(torch.ones(2, 3).double())
    assert notes == ForwardNotes()
    module.train()(torch.ones(2, 3).double())
    assert (notes.draws, notes.batch_norms, notes.lowered) == (True, ["0"], [])


SCRIPTS = {
    "import meshloom as ml\nml.parallel(model)\n": True,
    "from meshloom import parallel\nif __name__ == '__main__':\n    main()\n": True,
    "import torch\n": False,
    "import meshloom\njob = meshloom.Job()\n": False,
    "import meshloom\nother = meshloom.Job()\n": False,
    "import meshloom\ndef job(): ...\n": False,
    "import meshloom\nfrom jobs import *\n": False,
    "import meshloom\nfrom models import *\nmeshloom.parallel(Net())\n": True,
    "import meshloom\ndef main():\n    job = 3\n": True,
    "import meshloom\n)\n": False,
}


@pytest.mark.parametrize("source", SCRIPTS)
def test_a_script_is_known_by_its_source(source: str, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(source)
    assert is_script(str(path)) == SCRIPTS[source] and not is_script(f"{path}:main")


LOOP = """
import sys
import torch
import meshloom as ml
from torch import nn
from meshloom.loops.gradient_mean import GradientMean

kind, out = sys.argv[1:]
if kind == "wrong average":
    average = GradientMean._end
    def averaged(self):
        average(self)
        model[0].bias.grad *= 1.5
    GradientMean._end = averaged
norm = nn.BatchNorm1d(7) if kind == "statistics" else nn.ReLU()
model = ml.parallel(nn.Sequential(nn.Linear(5, 7), norm, nn.Dropout(0.2), nn.Linear(7, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
while True:
    size = 9 if kind == "mean" else 8
    x, y = ml.share((torch.randn(size, 5, dtype=torch.float32), torch.randn(size, 3)))
    each = (model(x) - y).square().mean(1)
    if kind == "noise":
        each = each * torch.rand(len(each))
    loss = each.sum() if kind == "sum" else each.mean()
    if kind == "by hand":
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ml.mean(loss)
    with open(out, "a") as file:
        file.write("a line")
"""


def verified(tmp_path: Path, kind: str) -> int:
    source = LOOP.replace("optimizer = torch", "# torch") if kind == "by hand" else LOOP
    script = tmp_path / "train.py"
    script.write_text(source)
    return main(["verify", str(script), "--plan", "dp=2", "--devices", "cpu", "--", kind, str(tmp_path / "log")])  # fmt: skip


@pytest.mark.processes
@pytest.mark.slow
def test_a_mean_of_uneven_shares_is_equal_without_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert verified(tmp_path, "mean") == 0
    text = capfd.readouterr().out
    assert text.startswith(
        "EQUAL: the script computes under dp=2 what it computes by itself on whole batches"
    )
    assert "3 steps of an optimizer, 26 tensors, without draws of forwards" in text
    assert f"Written or removed by several ranks: {tmp_path / 'log'} ({tmp_path / 'train.py'}:" in text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sum", "Every gradient is 1/2 of the whole batch, 1/dp"),
        pytest.param(
            "statistics",
            "1: batch normalization by the statistics of shares (sync_batch_norm=true in the plan takes them over the whole batch).\n"
            "The plan does what dp=2 plain copies do",
            marks=pytest.mark.slow,
        ),
        pytest.param("noise", "The plan does what dp=2 plain copies do", marks=pytest.mark.slow),
        pytest.param("wrong average", "It differs from dp=2 plain copies, too", marks=pytest.mark.slow),
    ],
)
def test_what_differs_is_explained(kind: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert verified(tmp_path, kind) == 1
    text = capfd.readouterr().out
    assert text.startswith("DIFFERS") and "First in step 1: the gradient of 0." in text and said in text


@pytest.mark.slow
@pytest.mark.processes
def test_a_loop_without_an_optimizer_is_compared_at_its_backwards(tmp_path: Path, capfd: pytest.CaptureFixture[str]):  # fmt: skip
    assert verified(tmp_path, "by hand") == 0
    assert "3 backwards, 24 tensors" in capfd.readouterr().out


@pytest.mark.processes
@pytest.mark.slow
def test_a_script_that_fails_or_trains_nothing_is_not_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]):  # fmt: skip
    script = tmp_path / "train.py"
    for source, said in (
        ("import meshloom\n1 / 0\n", "ZeroDivisionError"),
        ("import meshloom\n", "NOTHING WAS COMPARED"),
    ):
        script.write_text(source)
        assert main(["verify", str(script), "--plan", "dp=2", "--devices", "cpu"]) == 2
        assert said in capfd.readouterr().out


class Stepping(nn.Module):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def test_a_method_that_trains_is_asked_for_its_arguments_behind_one_wrapper():
    module = Stepping()
    with_hooks(module, ["training_step"])
    made = _taken(type(module), "training_step")
    assert inspect.getfullargspec(made.__wrapped__).args == ["self", "batch"]  # pyright: ignore[reportFunctionMemberAccess]
