"""`meshloom adopt` writes the lines of a loop of one's own where a script's first steps show that they belong, and nothing else."""

from __future__ import annotations

import ast
import difflib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from meshloom.adopt.adopted_lines import AdoptedLines
from meshloom.adopt.source_lines import SourceLines
from meshloom.adopt.watched_loop import Watch
from meshloom.cli import verb_adopt
from meshloom.cli.arguments import parse
from meshloom.cli.main import main
from meshloom.core.plan import Plan
from meshloom.verify.scripts.recorder import EnoughStepsError

SCRIPTS = Path(__file__).parent / "loop_scripts"
START = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(24, 3), torch.randn(24, 1)
data = TensorDataset(x, y)
loss_of = nn.functional.mse_loss
def make_model():
    return nn.Linear(3, 1)
"""
LOOP = """for a, b in loader:
    loss_of(model(a), b).backward()
    optimizer.step()
"""


def adopted(script: Path, *, dim: int | None = 0, **kwargs: bool) -> AdoptedLines:
    watch = Watch()
    with suppress(EnoughStepsError), watch:
        exec(compile(script.read_bytes(), str(script), "exec"), {"__name__": "__main__"})  # noqa: S102
    return AdoptedLines(watch, [script], dim=dim, **kwargs)


def added(before: str, after: str) -> list[str]:
    """The lines that are new, and those that went, which begin with -."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [each[2:].strip() for each in lines if each.startswith("+ ")]


def lines_of(text: str, folder: Path, *, dim: int | None = 0, **kwargs: bool) -> list[str]:
    script = folder / "train.py"
    script.write_text(text)
    (source,) = adopted(script, dim=dim, **kwargs).sources.values()
    found = added(*source.texts())
    assert found[0].startswith("import meshloom")
    return found[1:]


def without_words(text: str, folder: Path) -> str:
    """A script without what it says of meshloom."""
    script = folder / "stripped.py"
    script.write_text(text)
    while True:
        source = SourceLines(script)
        words = [
            each
            for each in source.nodes
            if isinstance(each, ast.Call) and ast.unparse(each.func).startswith("ml.")
        ]
        if not words:
            break
        call = words[0]
        if ast.unparse(call.func) == "ml.save":
            source.replace(call.func, "torch.save")
        else:
            source.replace(call, ast.get_source_segment(script.read_text(), call.args[0]) or "")
        script.write_text(source.texts()[1])
    return script.read_text().replace("import meshloom as ml\n", "").replace("if ml.main:", "if True:")


OF_SCRIPTS = {
    "adversarial": [
        "dataloader = ml.loader(DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=14, shuffle=True))",
        "net_d = ml.parallel(net_d)",
        "net_g = ml.parallel(net_g)",
        "fake = net_g(ml.share(torch.randn(int(ml.sum(int(data.size(0)))), nz)))",
    ],
    "digits": [
        "train_loader = ml.loader(DataLoader(Digits(True), batch_size=37, shuffle=True))",
        "model = ml.parallel(model)",
        "ml.save(model.state_dict(), sys.argv[1])",
    ],
    "episodes": ["model = ml.parallel(model)", "state = ml.share(state)"],
    "fine_tuning": [
        "train_dataloader = ml.loader(DataLoader(samples, shuffle=True, collate_fn=collate, batch_size=9))",
        "model = ml.parallel(model)",
    ],
    "small_gpt": [
        "model = ml.parallel(model)",
        "ml.save(",
        "X, Y = ml.share((X, Y))",
    ],
    "variational": [
        "train_loader = ml.loader(DataLoader(TensorDataset(torch.rand(50, 20)), batch_size=12, shuffle=True))",
        "model = ml.parallel(model)",
        "recon, mu, logvar = model(data, ml.share(torch.randn(int(ml.sum(rows)), 4)))",
    ],
    "waves": ["seq = ml.parallel(seq)", "inputs, target = ml.share((inputs, target))"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow if each in ("digits", "fine_tuning") else ())
        for each in OF_SCRIPTS
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_scripts_get_their_lines_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "out")])
    text = without_words((SCRIPTS / f"{name}.py").read_text(), tmp_path)
    assert "meshloom" not in text and "ml." not in text
    assert lines_of(text, tmp_path) == OF_SCRIPTS[name]


PLACES = {
    "one function makes loaders of training and of evaluation": (
        """def make(train):
    return DataLoader(data, batch_size=4, shuffle=train)
loader, other = make(True), make(False)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
        + LOOP,
        ["loader = ml.loader(loader)", "model = ml.parallel(model)"],
    ),
    "one expression does, for a dict": (
        """loaders = {each: DataLoader(data, batch_size=4) for each in ("train", "val")}  # both
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = loaders["train"]
"""
        + LOOP,
        ["loaders['train'] = ml.loader(loaders['train'])", "model = ml.parallel(model)"],
    ),
    "evaluation first, in grad mode": (
        """held_out, loader = DataLoader(data), DataLoader(data, batch_size=4)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for a, b in held_out:
    model(a)
"""
        + LOOP,
        [
            "held_out, loader = DataLoader(data), ml.loader(DataLoader(data, batch_size=4))",
            "model = ml.parallel(model)",
        ],
    ),
    "an optimizer of each epoch": (
        """loader = DataLoader(data, batch_size=4)
model = make_model()
for epoch in range(2):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for a, b in loader:
        loss_of(model(a), b).backward()
        optimizer.step()
""",
        ["loader = ml.loader(DataLoader(data, batch_size=4))", "model = ml.parallel(model)"],
    ),
    "in a function, of a global, and of a local in one line": (
        """model, part = make_model(), make_model()
def begin(other):
    if other: optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    return optimizer
optimizer, loader = begin(part), DataLoader(data, batch_size=4)
for a, b in loader:
    loss_of(model(a) + part(a), b).backward()
    optimizer.step()
""",
        [
            "if other: ml.parallel(model); other = ml.parallel(other); optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)",
            "optimizer, loader = begin(part), ml.loader(DataLoader(data, batch_size=4))",
        ],
    ),
    "a model that makes its optimizer, an attribute, a frozen teacher, torch.compile": (
        """class Net(nn.Linear):
    def optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
class Trainer:
    def __init__(self):
        self.net, self.teacher = torch.compile(Net(3, 1)), make_model().requires_grad_(False)
        self.optimizer = self.net.optimizers()
trainer = Trainer()
for a, b in DataLoader(data, batch_size=4):
    loss_of(trainer.net(a), trainer.teacher(a)).backward()
    trainer.optimizer.step()
""",
        ["self.net = ml.parallel(self.net)", "for a, b in ml.loader(DataLoader(data, batch_size=4)):"],
    ),
    "batches by arguments, by index, and from a generator": (
        """def step(model, inputs, wanted):
    loss_of(model(inputs), wanted).backward()
def batches():
    yield x[:8], y[:8]
model, other, third = make_model(), make_model(), make_model()
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters(), *third.parameters()], 0.1)
a, b = x * 2, y * 2
step(model, a, wanted=b)
for _ in range(1):
    e: torch.Tensor = x * 2
    loss_of(model(e), b).backward()
chosen = torch.randperm(24)[:6]
loss_of(other(x[chosen]), y[chosen]).backward()
for c, d in batches():
    loss_of(third(c), d).backward()
optimizer.step()
""",
        [
            "model = ml.parallel(model)",
            "other = ml.parallel(other)",
            "third = ml.parallel(third)",
            "a, b = ml.share((a, b))",
            "e = ml.share(e)",
            "loss_of(other(ml.share(x[chosen])), ml.share(y[chosen])).backward()",
            "c, d = ml.share((c, d))",
        ],
    ),
    "draws for the rows of a batch, and others": (
        """loader, model = DataLoader(data, batch_size=4), make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
fixed = torch.randn(7, 3)
for a, b in loader:
    rows = a.shape[0]
    noise, scale = torch.randn_like(a), torch.rand((rows, 1))
    model(fixed), torch.randn(2)
    loss_of(model(a + scale * noise + torch.randn(a.shape)), b).backward()
    optimizer.step()
""",
        [
            "loader, model = ml.loader(DataLoader(data, batch_size=4)), make_model()",
            "model = ml.parallel(model)",
            "noise, scale = ml.share(torch.randn_like(ml.gather(a))), ml.share(torch.rand((int(ml.sum(rows)), 1)))",
            "loss_of(model(a + scale * noise + ml.share(torch.randn(ml.gather(a).shape))), b).backward()",
        ],
    ),
    "a method that trains, and one that steps": (
        """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
    def training_loss(self, batch, wanted):
        noise = torch.randn_like(batch)
        return loss_of(self.last(self.first(batch + noise)), wanted)
class Loop(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
    def step(self, batch, wanted):
        self.net.training_loss(batch, wanted).backward()
        self.optimizer.step()
loop = Loop(Net())
for a, b in DataLoader(data, batch_size=4):
    loop.step(a, b)
""",
        [
            "net = ml.parallel(net, methods=['training_loss'])",
            "for a, b in ml.loader(DataLoader(data, batch_size=4)):",
        ],
    ),
    "a method that is called without gradients, too": (
        """class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 1)
    def act(self, seen):
        return self.actor(seen)
agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), 0.1)
with torch.no_grad():
    agent.act(x[:1])
loss_of(agent.act(x[:6]), y[:6]).backward()
optimizer.step()
""",
        [
            "agent.actor = ml.parallel(agent.actor)",
            "loss_of(agent.act(ml.share(x[:6])), ml.share(y[:6])).backward()",
        ],
    ),
    "counts of a share, given to a function that draws": (
        """def sample_steps(n, most=9):
    return torch.randint(low=1, high=most, size=(n, 1))
def noisy(of, steps):
    noise = torch.randn_like(of)
    return of + steps * noise, noise
loader, model = DataLoader(data, batch_size=4), make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for a, b in loader:
    steps = sample_steps(a.shape[0])
    c, noise = noisy(a, steps)
    loss_of(model(c), b).backward()
    optimizer.step()
sample_steps(1)
""",
        [
            "return ml.share(torch.randint(low=1, high=most, size=(int(ml.sum(n)), 1)))",
            "noise = ml.share(torch.randn_like(ml.gather(of)))",
            "loader, model = ml.loader(DataLoader(data, batch_size=4)), make_model()",
            "model = ml.parallel(model)",
        ],
    ),
    "the same of batches that come from a function": (
        """def get_batch(n):
    at = torch.randint(len(x) - 3, (n,))
    return x[at], y[at]
def steps_of(n):
    return torch.randint(1, 9, (n, 1))
def zeros(n):
    return torch.zeros(n, 3)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
a, b = get_batch(8)
base = zeros(a.shape[0])
other = zeros(8)
c = a * steps_of(len(a)) + torch.randn_like(a)
loss_of(model(c + base + other), b).backward()
optimizer.step()
""",
        [
            "model = ml.parallel(model)",
            "c, base, other, b = ml.share((c, base, other, b))",
        ],
    ),
    "states of recurrent layers beside rows of a text": (
        """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 1)
    def forward(self, seen, states):
        output, states = self.rnn(seen, states)
        return self.head(output), states
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
series = torch.randn(6, 24, 3)
for epoch in range(2):
    states = torch.zeros(1, 6, 5), torch.zeros(1, 6, 5)
    for i in range(0, 16, 8):
        seen, wanted = series[:, i:i + 8], series[:, i + 1:i + 9, :1]
        states = [each.detach() for each in states]
        output, states = model(seen, states)
        loss_of(output, wanted).backward()
        optimizer.step()
""",
        [
            "model = ml.parallel(model, batch={'states': 1})",
            "states = ml.share(states, dim=1)",
            "seen, wanted = ml.share((seen, wanted))",
        ],
    ),
    "no optimizer, a name that is taken": (
        """ml, loader, model = 0.1, DataLoader(data, batch_size=4), make_model()
def train():
    for a, b in loader:
        loss_of(model(a), b).backward()
        model.weight.data -= ml * model.weight.grad
for epoch in range(2):
    train()
""",
        [
            "ml, loader, model = 0.1, meshloom.loader(DataLoader(data, batch_size=4)), make_model()",
            "model = meshloom.parallel(model)",
        ],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_line_stands_where_it_belongs(name: str, tmp_path: Path):
    text, expected = PLACES[name]
    assert lines_of(START + text, tmp_path) == expected


TIME_FIRST = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 3), nn.Linear(3, 2)
    def forward(self, input, hidden=None):
        output, hidden = self.rnn(input, hidden)
        return self.head(output).view(-1, 2), hidden
    def start(self, n):
        return torch.zeros(1, n, 3), torch.zeros(1, n, 3)
def columns(of, n):
    return of[:len(of) // n * n].view(n, -1, 2).transpose(0, 1).contiguous()
def piece(of, i):
    return of[i:i + 4], of[i + 1:i + 5].reshape(-1, 2)
series, held_out = columns(torch.randn(66, 2), 5), columns(torch.randn(20, 2), 2)
net = Net()
def train():
    hidden = net.start(5)
    for i in range(0, 8, 4):
        seen, wanted = piece(series, i)
        hidden = tuple(each.detach() for each in hidden)
        output, hidden = net(seen, hidden)
        loss_of(output, wanted).backward()
        for each in net.parameters():
            each.data.add_(each.grad, alpha=-0.1)
train()
"""


def test_batches_along_another_dim_are_shared_at_their_source(tmp_path: Path):
    assert lines_of(START + TIME_FIRST, tmp_path, dim=1) == [
        "hidden = ml.share(hidden, dim=1)",
        "net = ml.parallel(net, batch={'input': 1, 'hidden': 1})",
        "series = ml.share(series, dim=1)",
    ]


def test_a_sum_and_shares_are_written_where_they_are_asked_for(tmp_path: Path):
    text = START + "model = make_model()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    text += "loss = loss_of(model(x), y)\ntorch.autograd.backward(loss)\noptimizer.step()\ntorch.save(model, 'm.pt')\n"
    always = ["model = ml.parallel(model)", "ml.save(model, 'm.pt')"]
    assert lines_of(text, tmp_path, dim=None) == always
    assert lines_of(text, tmp_path, dim=None, total=True) == [
        always[0],
        "torch.autograd.backward(ml.sum(loss))",
        always[1],
    ]


MASKED = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, tokens, labels=None):
        found = self.head(self.emb(tokens))
        if labels is not None:
            return nn.functional.cross_entropy(found.view(-1, 9), labels.view(-1), ignore_index=0)
        return found
model, size = Net(), 8
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tokens = torch.arange(160).view(16, 10) % 9
criterion = nn.CrossEntropyLoss(ignore_index=0)
for (seen,) in DataLoader(TensorDataset(tokens), batch_size=size):
    noise = torch.randn(size, 10)
    flat = seen.flip(1).reshape(size * 10)
    loss = model(seen, flat) + criterion(model(seen).view(-1, 9), flat)
    (loss + model.head(noise[:, :4]).mean()).backward()
    optimizer.step()
"""


def test_rows_and_labels_are_counted_as_those_of_shares(tmp_path: Path):
    plain = [
        "model = ml.parallel(model)",
        "for (seen,) in ml.loader(DataLoader(TensorDataset(tokens), batch_size=size)):",
        "noise = ml.share(torch.randn(size, 10))",
    ]
    assert lines_of(START + MASKED, tmp_path) == plain
    assert lines_of(START + MASKED, tmp_path, counted=True) == [
        "model = ml.parallel(model, weight=lambda tokens, labels=None: None if labels is None else (labels != 0).sum())",
        *plain[1:],
        "flat = seen.flip(1).reshape(len(seen) * 10)",
        "loss = model(seen, flat) + ml.mean(criterion(model(seen).view(-1, 9), flat) * (flat != 0).sum(), (flat != 0).sum())",
    ]


def test_what_was_not_found_is_said(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        START
        + """class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)
spare = torch.optim.SGD(make_model().parameters(), 0.1)
def train(net):
    loss_of(net(torch.ones(4, 3)), torch.ones(4, 1)).backward()
    net.optimizer.step()
train(Net())
"""
    )
    found = adopted(script)
    assert found.modules == 0
    assert "Net is trained, and has no name where its optimizer is made" in found.notes[0]
    assert found.notes[-1] == "1 of 2 optimizers made no step meanwhile."


def test_a_forward_that_is_called_by_itself_is_said(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        START
        + """model = make_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_of(model.forward(x), y).backward()
optimizer.step()
"""
    )
    found = adopted(script)
    assert found.modules == 0 and "layer(x), not layer.forward(x)" in found.notes[0]


def test_lines_are_written_beside_comments_and_semicolons(tmp_path: Path):
    script = tmp_path / "a.py"
    script.write_text(
        '"""Text."""\nfrom __future__ import annotations\nimport os\nif 1:\n\ta = 1; b = (2, 3)  # é\n'
    )
    source = SourceLines(script)
    first, second = source.tree.body[3].body  # pyright: ignore[reportAttributeAccessIssue]
    source.write_line(first, "c = 0")
    source.write_line(second, "d = 5", after=True)
    source.wrap(second.value, "share")
    source.write_import()
    after = '"""Text."""\nfrom __future__ import annotations\nimport meshloom as ml\nimport os\n'
    after += "if 1:\n\tc = 0\n\ta = 1; b = ml.share((2, 3)); d = 5  # é\n"
    assert source.texts()[1] == after


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("adopt {0}/train.py --out {0}", "exists. Remove it, or give another folder as --out DIR."),
        ("adopt {0}/train.py --plan dp=2,zero=3,tp=2", "A loop of one's own has zero=3 with dp alone"),
    ],
)
def test_what_cannot_be_adopted_is_refused(
    command: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text(START)
    assert main(command.format(tmp_path).split()) == 2
    assert sentence in capsys.readouterr().err


def test_what_runs_is_a_copy_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository, root = tmp_path / "repository", tmp_path / "copies"
    for each in (repository / ".git", repository / "inner", root):
        each.mkdir(parents=True)
    (repository / "data.txt").write_text("1")
    (repository / "inner/train.py").write_text("")
    monkeypatch.chdir(repository / "inner")
    runs = cast(Any, verb_adopt)._Runs(parse(["adopt", "train.py"]), Plan(dp=2), root)
    assert (runs.there / "../data.txt").read_text() == "1"
    assert runs.script.exists() and not (runs.there / "../.git").exists()
