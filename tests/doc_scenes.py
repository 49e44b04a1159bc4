"""What the Python of a document stands in: code that runs before it, and code that runs after it and says what must then be
true."""

from __future__ import annotations

TORCH = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import meshloom as ml
from dataclasses import replace

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        x = torch.sin(torch.arange(6.0) * (index + 1))
        return {"x": x, "y": index % 3}

job = ml.Job(
    model=lambda: nn.Linear(6, 3),
    loss=lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    data=Rows,
    batch_size=8,
    steps=2,
)

def trained(job, plan="dp=2"):
    with ml.Trainer(job, plan) as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]
"""
TINY_GPT2 = """
import torch, meshloom as ml
from dataclasses import replace
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging
logging.disable_progress_bar()
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
GPT2LMHeadModel(config).save_pretrained("runs/gpt2")
texts = [torch.arange(8) + index for index in range(16)]
job = ml.Job(
    model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch).mean(),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: torch.ones(4, 2), batch_size=4, steps=1,
)
"""
FINE_TUNES = "with ml.Trainer(job, 'dp=2') as trainer:\n    assert [trainer.step(batch) for batch in trainer.batches()]"
LANGUAGE_MODEL = """
import torch
class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
    def forward(self, tokens):
        return self.head(self.token(tokens))
class Bytes(torch.utils.data.Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, index):
        return {"x": (torch.arange(5) + index) % 11, "y": (torch.arange(5) + index + 1) % 11}
"""

# document -> what runs before its code, and after it
SCENES = {
    "docs/guide.md": (LANGUAGE_MODEL, "assert loss > 0"),
    "docs/asynchronous.md": (TORCH, "assert job.steps == 2"),
    "docs/loops.md": (
        TORCH
        + """
from meshloom.loops.loader import shared_loader
from meshloom.loops.share import Sharer
loader = shared_loader(torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True), Sharer(0, 1), seed=0)
model = ml.parallel(nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
    break
""",
        """
from meshloom.loops.ranks import leave_ranks
assert torch.equal(state["model"]["weight"], model.weight) and len(list(loader)) == 2  # the rest of the epoch
leave_ranks(well=True)
""",
    ),
    "docs/memory.md": (
        TORCH
        + """
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
batch, another = ({"x": torch.randn(size, 6), "y": torch.arange(size) % 3} for size in (4, 4))
chunks = [batch] * 4
""",
        "assert predict_memory(program, job.optimizer, microbatches=4).peak > 0",
    ),
    "docs/several_losses.md": (
        TORCH
        + """
clamp_weights = lambda optimizer, args, kwargs: [p.data.clamp_(-0.01, 0.01) for g in optimizer.param_groups for p in g["params"]]
""",
        """
model = nn.Linear(4, 1)
made = optimizer(model.named_parameters())
model(torch.ones(1, 4)).sum().backward()
made.step()
assert model.weight.abs().max() <= 0.01
assert trained(job, "dp=2")  # with LBFGS
""",
    ),
    "docs/over_time.md": (
        TORCH
        + """
from torch.optim.lr_scheduler import ReduceLROnPlateau
cosine = lambda step: 0.1 / (1 + step)
held_out, val_loss = Rows, job.loss
""",
        """
assert len(trained(replace(job, scheduler=scheduler))) == 2
with ml.Trainer(job, "dp=2") as trainer:
    trainer.evaluate()
    assert trainer.replicas[0].updater.state.schedulers[0].state_dict()["last_epoch"] == 1
""",
    ),
    "docs/watching.md": (
        TORCH
        + """
held_out = Rows
accuracy = lambda model, batch: (model(batch["x"]).argmax(1) == batch["y"]).float().mean()
""",
        """
told = []
note = ml.Listener(step=lambda progress: told.append(progress.logged["accuracy"]), started=lambda text: None, note=lambda text: None)
with ml.Trainer(replace(job, loss=loss, evaluate=evaluate), "dp=2", listener=note) as trainer:
    trainer.fit()
assert len(told) == 2 and evaluate.patience == 3
""",
    ),
    "docs/weights.md": (TINY_GPT2, "assert callable(ml.Job) and weight_names\n" + FINE_TUNES),
    "docs/guides/larger_than_a_device.md": (TINY_GPT2, FINE_TUNES),
    "docs/guides/pretraining.md": (
        "import numpy as np\nimport torch",
        """
np.arange(41, dtype=np.uint16).tofile("tokens.bin")
tokens = Tokens("tokens.bin", 8)
assert len(tokens) == 5 and torch.equal(tokens[4]["y"], torch.arange(33, 41))
""",
    ),
    "docs/guides/convolutional_network.md": (
        TORCH + "\nfrom torch.nn.functional import cross_entropy",
        """
class Pictures(Rows):
    def __getitem__(self, index):
        return {"image": super().__getitem__(index)["x"], "digit": index % 3}
assert trained(replace(job, loss=loss, data=Pictures))
""",
    ),
}
