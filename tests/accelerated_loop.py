"""A loop of one's own with accelerate: it returns what it has seen, which must not depend on whose Accelerator it is, nor on the plan."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from meshloom.core.random import preserved_draws
from meshloom.launch.environment import ranks_aside
from meshloom.loops.ranks import leave_ranks, ranks

BATCH = 8


class Tied(nn.Module):
    """Its first and its last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(6, 10), nn.Linear(10, 10), nn.Linear(10, 6)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.layer(self.embedding(ids).mean(1))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 6, (4,), generator=generator) for _ in range(count)]
    return [{"ids": each, "labels": each[0]} for each in ids]


def trained(kind: Any, folder: str, *, start: int = 0, end: int = 2, read_from: str = "") -> list[Any]:
    """Epochs `start` to `end`, with a state in `folder` after each. read_from: a folder with such states."""
    with preserved_draws():
        accelerator = kind(gradient_accumulation_steps=2, cpu=True)
        torch.manual_seed(3)
        model = Tied().double()
        training = DataLoader(samples(45), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        testing = DataLoader(samples(21), batch_size=BATCH)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        model, optimizer, training, testing, schedule = accelerator.prepare(
            model, optimizer, training, testing, schedule
        )
        if start:
            accelerator.load_state(f"{read_from or folder}/{start}")
        seen: list[Any] = [len(training), accelerator.num_processes]
        for epoch in range(start, end):
            model.train()
            coming = training if epoch else accelerator.skip_first_batches(training, 1)
            for batch in coming:
                with accelerator.accumulate(model):
                    outputs = model(**batch)
                    loss = outputs["loss"]
                    accelerator.backward(loss)
                    seen += [accelerator.reduce(loss.detach(), "mean"), *accelerator.gather(batch["labels"])]
                    if accelerator.sync_gradients:
                        seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            model.eval()
            for batch in testing:
                with torch.no_grad():
                    outputs = model(**batch)
                labels, logits = accelerator.gather_for_metrics((batch["labels"], outputs["logits"]))
                losses = accelerator.gather_for_metrics(outputs["loss"].repeat(BATCH))
                seen += [len(labels), *labels, logits.sum(), losses.sum()]
            if epoch and not start:
                break_off(accelerator, training, testing, seen)
            accelerator.save_state(f"{folder}/{epoch + 1}")
        accelerator.save_model(model, f"{folder}/model")
        accelerator.save(accelerator.get_state_dict(model), f"{folder}/model.pt")
        accelerator.wait_for_everyone()
        with accelerator.main_process_first():
            seen.append(torch.load(f"{folder}/model.pt")["head.weight"].square().sum())
        accelerator.end_training()
    return [float(each) for each in seen]


def break_off(accelerator: Any, training: Any, testing: Any, seen: list[Any]) -> None:
    """An evaluation within an epoch that ends early: what is gathered belongs to the loader around it."""
    model = accelerator._models[0]
    next(iter(training))
    model.train()
    for batch in training:
        model.eval()
        inner = [len(accelerator.gather(each["labels"])) for each in testing]
        model.train()
        seen += [*inner, *accelerator.gather(batch["labels"])]
        break
    seen.append(len(accelerator.gather_for_metrics(list(range(len(batch["labels"]))))))
    if accelerator.is_main_process:
        accelerator.set_trigger()
    seen += [accelerator.check_trigger(), accelerator.check_trigger()]


def on_a_rank(plan: str, folder: str, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What this rank has seen, and who it is."""
    import meshloom as ml

    try:
        seen = trained(lambda **given: ml.accelerate.Accelerator(plan=plan, **given), folder, **options)
        accelerator, said = ml.accelerate.Accelerator(cpu=True), list[str]()
        accelerator.on_main_process(said.append)("main")
        accelerator.on_process(process_index=1)(said.append)("main, as the only process")
        accelerator.on_local_main_process(said.append)("local main")
        who = [accelerator.is_main_process, accelerator.is_local_main_process, PartialState().is_main_process]
    except BaseException:
        leave_ranks(well=False)
        raise
    leave_ranks(well=True)
    return seen, [*who, len(said)]


def with_a_plain_accelerator(kind: str) -> str:
    """The sentence on this rank."""
    import meshloom as ml

    with ranks_aside():
        accelerate.Accelerator(cpu=True)
    try:
        if kind == "module":
            ml.parallel(Tied(), "dp=2")
        else:
            ranks("dp=2")
            ml.loader(DataLoader(samples(4), batch_size=2))  # type: ignore[arg-type]
    except ml.MeshloomError as error:
        return str(error)
    finally:
        leave_ranks(well=False)
    return ""
