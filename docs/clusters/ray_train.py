"""A loop of one's own on the workers of Ray Train: python ray_train.py dp=2 /shared/runs"""

import os
import sys
import tempfile

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml


def train(config):
    torch.manual_seed(0)
    x = torch.randn(45, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    model = ml.parallel(model.to(ray.train.torch.get_device()), plan=config["plan"])
    loader = ml.loader(DataLoader(data, batch_size=8, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if checkpoint := ray.train.get_checkpoint():  # of a run that was broken off, under any plan
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "last.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        first = state["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        total = 0.0
        for inputs, labels in loader:
            inputs, labels = (each.to(ray.train.torch.get_device()) for each in (inputs, labels))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += float(ml.mean(loss.detach()))
        with tempfile.TemporaryDirectory() as folder:  # each worker has its own; the main one's has the file
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            ml.save({**state, "epoch": epoch}, os.path.join(folder, "last.pt"))
            saved = Checkpoint.from_directory(folder) if ml.main else None
            ray.train.report({"epoch": epoch, "loss": total / len(loader)}, checkpoint=saved)


if __name__ == "__main__":
    plan, storage = sys.argv[1:]
    trainer = TorchTrainer(
        train,
        train_loop_config={"plan": plan, "epochs": 3},
        scaling_config=ScalingConfig(
            num_workers=ml.Plan.parse(plan).mesh.size, use_gpu=torch.cuda.is_available()
        ),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(result.metrics, result.checkpoint)  # noqa: T201
