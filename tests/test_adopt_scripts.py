"""`meshloom adopt` of whole scripts: what is written is verified, and the script's own folder stays as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
TRAIN = """import sys
from engine.trainer import Trainer, read
lr = float(sys.argv[1])
Trainer(read("numbers.txt"), lr).fit()
"""
TRAINER = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read(path):
    numbers = torch.tensor([float(each) for each in open(path).read().split()])
    return TensorDataset(numbers.view(-1, 4), numbers.view(-1, 4).sin().sum(1, keepdim=True))


class Trainer:
    def __init__(self, data, lr):
        torch.manual_seed(0)
        self.loader, self.held_out = DataLoader(data, batch_size=6, shuffle=True), DataLoader(data, batch_size=5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)

    def fit(self):
        for x, y in self.loader:
            loss = nn.functional.mse_loss(self.model(x), y, reduction="sum")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            torch.save(self.model.state_dict(), "model.pt")
        with torch.no_grad():
            print(sum(float(nn.functional.l1_loss(self.model(x), y, reduction="sum")) for x, y in self.held_out))
"""
GRAPH = """import torch
from torch import nn
torch.manual_seed(0)
features, links, labels = torch.randn(9, 3), torch.softmax(torch.randn(9, 9), 1), torch.arange(9) % 2
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
    def forward(self, x, links):
        return self.last(links @ torch.relu(links @ self.first(x)))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(4):
    loss = nn.functional.cross_entropy(model(features, links), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def adopt(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "meshloom", "adopt", "train.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_script_of_two_files_whose_loss_is_a_sum(tmp_path: Path):
    (tmp_path / "engine").mkdir()
    files = {
        "train.py": TRAIN,
        "engine/__init__.py": "",
        "engine/trainer.py": TRAINER,
        "numbers.txt": " ".join(f"{0.7 * each % 3:.2f}" for each in range(96)),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, told = adopt(tmp_path, "--out", "new", "--", "0.01")
    assert code == 0 and "EQUAL: the script computes under dp=2" in told, told
    assert "+import meshloom as ml" in told and "Next: meshloom run new/train.py --plan dp=2 -- 0.01" in told
    trainer = (tmp_path / "new/engine/trainer.py").read_text()
    expected = TRAINER.replace(
        "DataLoader(data, batch_size=6, shuffle=True)",
        "ml.loader(DataLoader(data, batch_size=6, shuffle=True))",
    )
    expected = expected.replace("loss.backward()", "ml.sum(loss).backward()").replace(
        "torch.save(", "ml.save("
    )
    expected = expected.replace(
        "        self.optimizer = ", "        self.model = ml.parallel(self.model)\n        self.optimizer = "
    )
    assert trainer == "import meshloom as ml\n" + expected
    assert (tmp_path / "new/train.py").read_text() == "import meshloom as ml\n" + TRAIN
    kept = {
        path: path.read_text() for path in tmp_path.rglob("*") if path.is_file() and "new" not in path.parts
    }
    assert kept == {tmp_path / name: text for name, text in files.items()}


@pytest.mark.slow
def test_rows_that_depend_on_others_stay_whole(tmp_path: Path):
    (tmp_path / "train.py").write_text(GRAPH)
    code, told = adopt(tmp_path)
    assert code == 0 and "Each replica computes whole batches" in told and "EQUAL" in told, told
    model = "model = ml.parallel(model)\noptimizer = "
    assert (tmp_path / "adopted/train.py").read_text() == "import meshloom as ml\n" + GRAPH.replace(
        "optimizer = ", model
    )


def test_a_script_that_fails_or_does_not_train_is_shown(tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch\nprint('started')\nraise ValueError('no data')\n")
    code, told = adopt(tmp_path)
    assert code == 2 and "started" in told and "ValueError: no data" in told, told
    assert (
        "The script failed before it had trained (exit code 1)." in told
        and not (tmp_path / "adopted").exists()
    )
