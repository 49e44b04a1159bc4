"""`meshloom adopt` of whole scripts: what is written is verified, and the script's own folder stays as it is."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
DIFFUSION = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Diffusion:
    def sample_timesteps(self, n):
        return torch.randint(low=1, high=40, size=(n,))
    def noise_images(self, x, t):
        noise = torch.randn_like(x)
        return x + 0.1 * t[:, None] * noise, noise
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.time, self.last = nn.Linear(6, 16), nn.Embedding(40, 16), nn.Linear(16, 6)
    def loss(self, x, t, noise):
        return nn.functional.mse_loss(self.last(torch.relu(self.first(x) + self.time(t))), noise)
loader = DataLoader(TensorDataset(torch.randn(44, 6)), batch_size=11, shuffle=True)
model, diffusion = Net(), Diffusion()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for (images,) in loader:
    t = diffusion.sample_timesteps(images.shape[0])
    noisy, noise = diffusion.noise_images(images, t)
    optimizer.zero_grad()
    model.loss(noisy, t, noise).backward()
    optimizer.step()
"""
NAMES = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(9, 6), nn.GRU(6, 5, batch_first=True), nn.Linear(5, 9)
    def forward(self, seen, labels=None):
        scores = self.head(self.rnn(self.emb(seen))[0])
        if labels is None:
            return scores, None
        return scores, nn.functional.cross_entropy(scores.view(-1, 9), labels.view(-1), ignore_index=-1)
size = 6
tokens = torch.randint(9, (42, 8))
labels = tokens.roll(-1, 1).masked_fill(torch.arange(8) >= torch.arange(1, 43)[:, None] % 7 + 1, -1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for seen, wanted in DataLoader(TensorDataset(tokens, labels), batch_size=size, shuffle=True):
    scores, loss = model(seen.view(size, -1), wanted)
    optimizer.zero_grad()
    (loss + 0.1 * nn.CrossEntropyLoss(ignore_index=-1)(scores[:, 2], wanted[:, 2])).backward()
    optimizer.step()
"""
LIBRARIES = {
    "lightning": (
        """import torch
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, _):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
def main():
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=4, strategy="ddp", logger=False, enable_checkpointing=False
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 3)), 4))
main()
""",
        'max_epochs=1, accelerator="cpu", devices=1, strategy=ml.lightning.Strategy(), logger=False, enable_checkpointing=False',
    ),
    "lightning without a strategy": (
        """import torch
from lightning.pytorch import LightningModule, Trainer
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, _):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 3)), 4)
Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Net(), loader)
""",
        'Trainer(strategy=ml.lightning.Strategy(), max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Net(), loader)',
    ),
    "transformers": (
        """import torch
from torch import nn
from transformers import Trainer, TrainingArguments
class Mine(Trainer):
    def compute_loss(self, model, inputs, **_):
        return model(inputs["x"]).pow(2).mean()
data = [{"x": torch.randn(3)} for _ in range(12)]
arguments = TrainingArguments("out", max_steps=2, remove_unused_columns=False, use_cpu=True, report_to=[])
trainer = Mine(nn.Linear(3, 1), arguments, train_dataset=data)
trainer.train()
""",
        "class ParallelMine(ml.transformers.Parallel, Mine): pass\ntrainer = ParallelMine(nn.Linear(3, 1), arguments, train_dataset=data)",
    ),
    "accelerate": (
        """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, loader = nn.Linear(3, 1), DataLoader(TensorDataset(torch.randn(12, 3)), 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    noise = torch.randn_like(x)
    accelerator.backward(model(x + noise).pow(2).mean())
    optimizer.step()
""",
        "accelerator = ml.accelerate.Accelerator(cpu=True)\nnoise = ml.share(torch.randn_like(ml.gather(x)))",
    ),
}
OTHER_NAME = """import torch
import pytorch_lightning as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, _):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 3)), 4)
pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Net(), loader)
"""


def watched(text: str, folder: Path) -> dict[str, Any]:
    """What becomes of a script, which is not verified."""
    (folder / "train.py").write_text(text)
    words = [folder / "told.json", "120", folder / "train.py"]
    command = [sys.executable, "-m", "meshloom.cli.verb_adopt", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "told.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_gets_its_adapter_and_nothing_else(name: str, tmp_path: Path):
    text, expected = LIBRARIES[name]
    told = watched(text, tmp_path)
    ((before, after, _),) = told["texts"][0]
    added = [each for each in difflib.ndiff(before.splitlines(), after.splitlines()) if each.startswith("+ ")]
    assert [each[2:].strip() for each in added] == ["import meshloom as ml", *expected.split("\n")]
    assert told["modules"] == 1 and not told["notes"]


@pytest.mark.slow
def test_a_library_whose_trainer_takes_no_adapter_is_said(tmp_path: Path):
    told = watched(OTHER_NAME, tmp_path)
    assert (
        told["modules"] == 0 and "Write lightning.pytorch in place of pytorch_lightning" in told["notes"][0]
    )


@pytest.mark.slow
def test_a_method_that_trains_and_draws_for_counts_of_a_share(tmp_path: Path):
    (tmp_path / "train.py").write_text(DIFFUSION)
    code, told = adopt(tmp_path)
    assert code == 0 and "EQUAL" in told, told
    text = (tmp_path / "adopted/train.py").read_text()
    assert "model = ml.parallel(model, methods=['loss'])" in text
    assert "return ml.share(torch.randint(low=1, high=40, size=(int(ml.sum(n)),)))" in text
    assert "noise = ml.share(torch.randn_like(ml.gather(x)))" in text


@pytest.mark.slow
def test_columns_of_a_text_are_shared_along_their_dim(tmp_path: Path):
    text = (Path(__file__).parent / "loop_scripts/word_language_model.py").read_text()
    written = "train_data = ml.share(batchify(corpus, 10), dim=1)\nmodel = ml.parallel(RNNModel())\n"
    plain = text.replace(written, "train_data = batchify(corpus, 10)\nmodel = RNNModel()\n")
    plain = plain.replace("import meshloom as ml\n", "").replace("ml.mean(loss.detach())", "loss.detach()")
    (tmp_path / "train.py").write_text(plain.replace("init_hidden(train_data.size(1))", "init_hidden(10)"))
    code, told = adopt(tmp_path)
    assert code == 0 and "EQUAL" in told and "Each replica computes whole batches" not in told, told
    text = (tmp_path / "adopted/train.py").read_text()
    assert "model = ml.parallel(model, batch={'x': 1, 'hidden': 1})\n" in text
    assert "train_data, hidden = ml.share((train_data, hidden), dim=1)\nfor i" in text


def adopt(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "meshloom", "adopt", "train.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
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
def test_labels_that_losses_ignore_and_rows_are_counted(tmp_path: Path):
    (tmp_path / "train.py").write_text(NAMES)
    code, told = adopt(tmp_path)
    assert code == 0 and "EQUAL" in told, told
    text = (tmp_path / "adopted/train.py").read_text()
    weight = "lambda seen, labels=None: None if labels is None else (labels != -1).sum()"
    assert f"model = ml.parallel(model, weight={weight})\n" in text
    assert "model(seen.view(len(seen), -1), wanted)" in text and "(wanted[:, 2] != -1).sum()" in text


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
