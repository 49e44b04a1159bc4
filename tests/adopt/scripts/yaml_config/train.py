import argparse
from pathlib import Path

import torch
import yaml
from src.datasets import build_loaders
from src.engine import evaluate, train_epoch
from src.models import build_model


def load_config(path):
    with open(path) as f:
        return yaml.safe_load(f)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).parent / "config.yaml"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    cfg = load_config(args.config)
    torch.manual_seed(cfg["seed"])
    loaders = build_loaders(cfg["data"], cfg["seed"])
    model = build_model(cfg["model"]).to(args.device)
    optimizer = getattr(torch.optim, cfg["optimizer"]["name"])(
        model.parameters(), **cfg["optimizer"]["params"]
    )
    scheduler = getattr(torch.optim.lr_scheduler, cfg["scheduler"]["name"])(
        optimizer, **cfg["scheduler"]["params"]
    )
    best_acc = 0.0
    history = []
    for epoch in range(cfg["trainer"]["epochs"]):
        train_stats = train_epoch(
            model,
            loaders["train"],
            optimizer,
            args.device,
            cfg["trainer"]["clip"],
            cfg["trainer"]["log_every"],
            epoch,
        )
        val_stats = evaluate(model, loaders["val"], args.device)
        scheduler.step()
        history.append(
            {
                **{f"train_{k}": v for k, v in train_stats.items()},
                **{f"val_{k}": v for k, v in val_stats.items()},
            }
        )
        if val_stats["acc"] > best_acc:
            best_acc = val_stats["acc"]
            torch.save(model.state_dict(), "best.pt")
    print("best accuracy", best_acc)


if __name__ == "__main__":
    main()
