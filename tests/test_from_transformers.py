"""`meshloom.from_transformers`: the job takes the steps of `trainer.train()`, is equal under other plans, and what has no
counterpart is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
)
from transformers.utils import logging

import meshloom
from meshloom.core.errors import DataError, JobError
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.trainer_jobs import (
    Classified,
    Make,
    OwnModel,
    Words,
    WordStream,
    accuracy,
    agree,
    arguments,
    by_job,
    by_train,
    classifier,
    collate,
    language_model,
    summed,
)

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.set_verbosity_error()


class Weighted(Trainer):
    """A trainer with a loss and an optimizer of its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            heads = [each for name, each in self.model.named_parameters() if name.startswith("classifier")]
            others = [
                each for name, each in self.model.named_parameters() if not name.startswith("classifier")
            ]
            self.optimizer = torch.optim.SGD([{"params": heads, "lr": 0.1}, {"params": others}], lr=0.01)
        return self.optimizer


def classified(directory: Path) -> Trainer:
    torch.manual_seed(1)
    return Trainer(
        classifier(), arguments(directory, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3, seed=3), collate, Classified(22), Classified(7, 2),
        compute_metrics=accuracy,
    )  # fmt: skip


def accumulated(directory: Path) -> Trainer:
    settings = arguments(
        directory, gradient_accumulation_steps=3, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine", max_grad_norm=0.5, max_steps=5,
    )  # fmt: skip
    return Trainer(model_init=classifier, args=settings, data_collator=collate, train_dataset=Classified(22))


def on_plateau(directory: Path) -> Trainer:
    """Losses that fall are no better by the rule "max", so the rate is halved after each evaluation but the first."""
    torch.manual_seed(1)
    settings = arguments(
        directory, eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau", optim="sgd", learning_rate=0.3, num_train_epochs=4,
        lr_scheduler_kwargs={"mode": "max", "factor": 0.5, "patience": 0},
    )  # fmt: skip
    return Trainer(classifier(), settings, collate, Classified(22), Classified(6, 2))


def own_model(directory: Path) -> Trainer:
    torch.manual_seed(2)
    settings = arguments(
        directory, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.3, dataloader_drop_last=True
    )
    return Trainer(OwnModel(), settings, collate, Words(23))  # fmt: skip


def own_loss(directory: Path) -> Trainer:
    torch.manual_seed(2)
    settings = arguments(
        directory, gradient_accumulation_steps=3, lr_scheduler_type="constant_with_warmup", warmup_steps=0.4
    )
    return Trainer(OwnModel(), settings, collate, Words(22), compute_loss_func=summed)  # fmt: skip


def tokens(directory: Path) -> Trainer:
    torch.manual_seed(3)
    settings = arguments(
        directory, gradient_accumulation_steps=2, eval_strategy="epoch", per_device_eval_batch_size=3
    )
    return Trainer(language_model(), settings, collate, Words(15), Words(7, 2))  # fmt: skip


def smoothed(directory: Path) -> Trainer:
    torch.manual_seed(3)
    settings = arguments(directory, label_smoothing_factor=0.1, optim="sgd", learning_rate=0.5)
    return Trainer(language_model(), settings, collate, Words(15, ragged=True))


def grouped_by_length(directory: Path) -> Trainer:
    torch.manual_seed(4)
    settings = arguments(
        directory, train_sampling_strategy="group_by_length", gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2
    )  # fmt: skip
    return Trainer(classifier(), settings, collate, Classified(22, ragged=True), Classified(6, 2))


def streamed(directory: Path) -> Trainer:
    torch.manual_seed(5)
    return Trainer(OwnModel(), arguments(directory, max_steps=7, optim="adafactor"), collate, WordStream(18))


def streamed_with_length(directory: Path) -> Trainer:
    torch.manual_seed(5)
    settings = arguments(directory, max_steps=7, gradient_accumulation_steps=2)
    return Trainer(OwnModel(), settings, collate, WordStream(18, has_length=True))


def own_optimizers(directory: Path) -> Trainer:
    torch.manual_seed(6)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    settings = arguments(directory, train_sampling_strategy="sequential")
    return Trainer(model, settings, collate, Classified(10), optimizers=(optimizer, scheduler))


def own_trainer(directory: Path) -> Trainer:
    torch.manual_seed(7)
    return Weighted(classifier(), arguments(directory, data_seed=9), collate, Classified(14))


# how far losses and parameters may differ: language models' losses are computed in float32 by transformers
MAKES: dict[str, tuple[Make, float]] = {
    "classified": (classified, 1e-12), "accumulated": (accumulated, 1e-12), "own_model": (own_model, 1e-10), "own_loss": (own_loss, 1e-10),
    "on_plateau": (on_plateau, 1e-12),
    "tokens": (tokens, 3e-6), "smoothed": (smoothed, 3e-6), "grouped_by_length": (grouped_by_length, 1e-12), "streamed": (streamed, 1e-10),
    "streamed_with_length": (streamed_with_length, 1e-10), "own_optimizers": (own_optimizers, 1e-12), "own_trainer": (own_trainer, 1e-12),
}  # fmt: skip
QUICK = {("own_loss", "dp=2"), ("own_model", "tp=2"), ("own_optimizers", "pp=2")}
PAIRS = [
    pytest.param(name, plan, marks=pytest.mark.long if (name, plan) in QUICK else pytest.mark.slow)
    for name in MAKES
    for plan in ("dp=2", "tp=2", "pp=2")
]


@pytest.mark.covering("classified", "own_loss", "smoothed", "streamed_with_length", "own_trainer")
@pytest.mark.long
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.slow
def test_the_job_takes_the_steps_of_train(name: str, tmp_path: Path) -> None:
    make, tolerance = MAKES[name]
    expected = by_train(make(tmp_path))
    job = meshloom.from_transformers(make(tmp_path))
    agree(by_job(job), expected, tolerance)


@pytest.mark.covering("own_model", "own_loss")
@pytest.mark.parametrize(("name", "plan"), PAIRS)
@pytest.mark.slow
def test_the_job_is_equal_under_other_plans(name: str, plan: str, tmp_path: Path) -> None:
    job = meshloom.from_transformers(MAKES[name][0](tmp_path))
    report = verify(
        job, Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2, quick=job.evaluate is None
    )
    assert report is not None and report.passed, report.first_wrong


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(8, marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (5, 6, 12)),
    ],
)
@pytest.mark.slow
def test_evaluation_batches_need_not_align_with_chunks(size: int, tmp_path: Path) -> None:
    """Chunks of 6 in training, and 22 samples to evaluate in batches of 8, 8 and 6, in a pipeline."""
    torch.manual_seed(2)
    settings = arguments(
        tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=size, prediction_loss_only=True,
    )  # fmt: skip
    job = meshloom.from_transformers(Trainer(OwnModel(), settings, collate, Words(24), Words(22, 2)))
    assert job.evaluate is not None and job.evaluate.batch_size == size
    report = verify(job, Plan.parse("pp=2,microbatches=2"), devices="simulated", dtype=torch.float64, steps=2)
    assert report is not None and report.passed, report.first_wrong


@pytest.mark.long
def test_a_plan_of_two_replicas_trains_as_train_does(tmp_path: Path) -> None:
    """An accumulation over three microbatches, cut in two."""
    agree(
        by_job(meshloom.from_transformers(accumulated(tmp_path)), "dp=2"),
        by_train(accumulated(tmp_path)),
        1e-9,
    )


def test_evaluations_stop_and_keep_what_the_trainer_says(tmp_path: Path) -> None:
    settings = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=4, save_total_limit=3, load_best_model_at_end=True,
        metric_for_best_model="accuracy", seed=8,
    )  # fmt: skip
    trainer = Trainer(
        classifier(), settings, collate, Classified(22), Classified(7, 2), compute_metrics=accuracy, callbacks=[EarlyStoppingCallback(4)],
    )  # fmt: skip
    job = meshloom.from_transformers(trainer)
    assert job.evaluate is not None and (job.evaluate.best, job.evaluate.patience) == ("eval_accuracy:max", 4)
    assert (job.seed, job.steps, job.evaluate.every) == (8, 12, 2)
    assert (job.checkpoint_every, job.keep_checkpoints, job.clip_grad_norm) == (4, 3, 1.0)


def test_an_epoch_of_a_stream_without_a_length_has_whole_steps(tmp_path: Path) -> None:
    """A Trainer adds the gradients of an incomplete accumulation to those of the next epoch's first step."""
    trainer = Trainer(
        OwnModel(), arguments(tmp_path, max_steps=7, gradient_accumulation_steps=2), collate, WordStream(18)
    )
    with pytest.raises(DataError, match="ends after 1 of the 2 microbatches"):
        by_job(meshloom.from_transformers(trainer))


class Reports(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        print(logs)


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = state.global_step > 3
        return control


class Decays(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        for each in model.parameters():
            each.data.mul_(0.99)


class OwnSteps(Trainer):
    def training_step(self, *given: Any) -> Any:
        return super().training_step(*given)


class OwnPredictions(Trainer):
    def prediction_step(self, *given: Any, **more: Any) -> Any:
        return super().prediction_step(*given, **more)


class Batches(torch.utils.data.Sampler[list[int]]):
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3, 4]])

    def __len__(self) -> int:
        return 2


class OwnBatches(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=Batches(), collate_fn=collate)


class Penalised(OwnModel):
    """A loss of which a part is not divided by the number of items."""

    def forward(self, input_ids: Any, labels: Any, **given: Any) -> Any:
        outputs = super().forward(input_ids, labels)
        if items := given.get("num_items_in_batch"):
            outputs["loss"] = outputs["loss"] / items + self.mix.weight.pow(2).sum()
        return outputs


def f1(given: Any) -> dict[str, float]:
    predicted, actual = given.predictions.argmax(-1) == 1, given.label_ids == 1
    both = float(numpy.logical_and(predicted, actual).sum())
    return {"f1": 2 * both / max(1.0, float(predicted.sum() + actual.sum()))}


def test_callbacks_that_report_are_left_out_and_named(tmp_path: Path) -> None:
    trainer = Trainer(OwnModel(), arguments(tmp_path), collate, Words(8), callbacks=[Reports])
    with pytest.warns(UserWarning, match="Reports: not called, as a job has no callbacks"):
        meshloom.from_transformers(trainer)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bf16": ({"bf16": True}, {}, "precision=bf16-mixed"),
    "compile": ({"torch_compile": True}, {}, "compile=true"),
    "checkpointing": ({"gradient_checkpointing": True}, {}, "recompute="),
    "neftune": ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha=5.0"),
    "batch size": ({"auto_find_batch_size": True}, {}, "meshloom plan"),
    "at the start": ({"eval_on_start": True, "eval_strategy": "epoch"}, {"eval_dataset": Words(3)}, "eval_on_start"),
    "greedy": ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, {"eval_dataset": Words(3)}, "searches rates by evaluations"),
    "lomo": ({"optim": "lomo"}, {}, "updates parameters within backward"),
    "two datasets": ({"eval_strategy": "epoch"}, {"eval_dataset": {"a": Words(3), "b": Words(3)}}, "'a', 'b'"),
    "iterable evaluation": ({"eval_strategy": "epoch"}, {"eval_dataset": WordStream(3)}, "eval_dataset is an iterable WordStream"),
    "f1": ({"eval_strategy": "epoch"}, {"eval_dataset": Classified(16, 2), "compute_metrics": f1, "model": classifier}, "'f1', which is no mean"),
    "stops": ({}, {"callbacks": [Stops]}, "Stops.on_step_end sets control.should_training_stop"),
    "decays": ({}, {"callbacks": [Decays]}, "Decays.on_step_end takes the model"),
    "threshold": (
        {"eval_strategy": "epoch", "metric_for_best_model": "loss"},
        {"eval_dataset": Words(3), "callbacks": [EarlyStoppingCallback(2, 0.1)]},
        "early_stopping_threshold=0.1",
    ),
    "own steps": ({}, {"kind": OwnSteps}, "OwnSteps.training_step is its own"),
    "own predictions": ({"eval_strategy": "epoch"}, {"eval_dataset": Words(3), "kind": OwnPredictions}, "OwnPredictions.prediction_step is its own"),
    "own batches": ({"max_steps": 2}, {"kind": OwnBatches}, "a job has steps of one size"),
    "penalised": ({"gradient_accumulation_steps": 2}, {"model": Penalised}, "partly divided by the number of labels"),
    "no data": ({}, {"train_dataset": None}, "no train_dataset"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, given, message = REFUSED[name]
    given = dict(given)
    model, kind = given.pop("model", OwnModel)(), given.pop("kind", Trainer)
    data = Classified(16) if model.__class__.__name__.startswith("Bert") else Words(16)
    trainer = kind(model, arguments(tmp_path, **settings), collate, given.pop("train_dataset", data), **given)
    with pytest.raises(JobError) as raised:
        meshloom.from_transformers(trainer)
    text = str(raised.value)
    assert message in text and "\n" not in text and text.endswith("."), text


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(JobError, match="takes a transformers.Trainer, not a Linear"):
        meshloom.from_transformers(torch.nn.Linear(1, 1))


@pytest.mark.slow
def test_importing_meshloom_imports_no_trainer() -> None:
    code = "import sys, meshloom; print([each for each in ('transformers', 'lightning', 'accelerate') if each in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == "[]", found.stderr


FILE = """
import torch
import meshloom as ml
from transformers import Trainer
from tests.trainer_jobs import OwnModel, Words, arguments, collate, summed

torch.manual_seed(2)
trainer = Trainer(OwnModel(), arguments({directory!r}, gradient_accumulation_steps=3), collate, Words(22), compute_loss_func=summed)
job = ml.from_transformers(trainer)

if __name__ == "__main__":
    trainer.train()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_are_meshloom_s_and_equal_one_device(tmp_path: Path) -> None:
    """The arguments say use_cpu=True, with which accelerate makes a rank of each process that has the launcher's variables."""
    file = tmp_path / "train.py"
    file.write_text(FILE.format(directory=str(tmp_path / "out")))
    words = [
        "-m",
        "meshloom",
        "verify",
        str(file),
        "--plan",
        "dp=2",
        "--devices",
        "cpu",
        "--quick",
        "--steps",
        "2",
    ]
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0 and "EQUAL" in found.stdout, found.stdout + found.stderr
