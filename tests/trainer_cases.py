"""Small trainings by transformers' Trainer and Seq2SeqTrainer, and by ours, which must not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_callback import TrainerCallback
from transformers.utils import logging

import meshloom as ml
from meshloom.launch.environment import begin_script
from meshloom.loops.ranks import leave_ranks, ranks

LENGTH, WORDS = 7, 19


class Words(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of 3 to 7 tokens, of which the first two are no labels."""

    def __init__(self, num_samples: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LENGTH + 1, (num_samples,), generator=generator)
        self._rows = [torch.randint(2, WORDS, (int(each),), generator=generator).tolist() for each in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self._rows[index], "labels": [-100, -100, *self._rows[index][2:]]}


class WordStream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Any:
        return iter([*Words(29)])


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([(each[name] + [fill] * LENGTH)[:LENGTH] for each in samples])

    words = padded("input_ids", 0)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": padded("labels", -100)}


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=2 * LENGTH, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def t5() -> Any:
    """Its loss is a mean over the labels of each call, whatever the number of all items."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def entropy(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """In float64, where the library's is in float32; the library counts labels from the second on."""
    logits = outputs["logits"][:, :-1].reshape(-1, WORDS)
    total = F.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
    return total / (labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class Observer(TrainerCallback):
    """Notes the events in order."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen


def _noting(event: str) -> Any:
    def note(self: Observer, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"{event} {state.global_step}")

    return note


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Observer, _event, _noting(_event))


class Asking(TrainerCallback):
    """On the first rank alone: evaluates after step 1, ends after step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            control.should_evaluate |= state.global_step == 1
            control.should_training_stop |= state.global_step == 3


def metrics(predicted: Any) -> dict[str, float]:
    """Of tokens that `generate` has made, or of logits."""
    values = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {"rows": float(len(values)), "sum": float(abs(values).astype("float64").sum())}


SETTINGS: dict[str, Any] = {
    "max_steps": 5, "per_device_train_batch_size": 6, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "steps",
    "eval_steps": 2, "save_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": [], "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
}  # fmt: skip
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "sum", "greater_is_better": False, "save_total_limit": 1}  # fmt: skip
SHORT = {"train_dataset": Words(29), "eval_dataset": Words(10, seed=2)}  # last batches
# by name: the model, settings of its own, what else the Trainer takes
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (gpt2, {}, {"compute_loss_func": entropy, **SHORT}),
    "inner": (gpt2, {"include_num_input_tokens_seen": "all"}, {}),
    "smoothed": (gpt2, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1, **BEST}, SHORT),
    "asking": (llama, {}, {"callbacks": [Asking()], **SHORT}),
    "bf16": (llama, {"bf16": True}, {}),
    "stream": (gpt2, {}, {"compute_loss_func": entropy, "train_dataset": WordStream()}),
    "t5": (t5, {"predict_with_generate": True, "generation_max_length": 5}, {}),
}


def trained(name: str, out: Path, *, plain: bool = False, resume: str | None = None) -> dict[str, Any]:
    """What a case reports, and its files. plain: by the library alone."""
    model_of, own, others = CASES[name]
    torch.manual_seed(3)
    model, seen = model_of(), list[str]()
    library = transformers.Seq2SeqTrainer if model_of is t5 else transformers.Trainer
    kind: Any = library if plain else ml.transformers.Trainer if library is transformers.Trainer else type("Mine", (ml.transformers.Parallel, library), {})  # fmt: skip
    of = transformers.Seq2SeqTrainingArguments if model_of is t5 else transformers.TrainingArguments
    given = {
        "train_dataset": Words(30),
        "eval_dataset": Words(8, seed=2),
        "compute_metrics": metrics,
        **others,
    }
    given["callbacks"] = [*given.get("callbacks", []), Observer(seen)]
    trainer = kind(
        model if own.get("bf16") else model.double(),
        of(output_dir=str(out), **{**SETTINGS, **own}),
        collate,
        **given,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(out / "last"))
    model.save_pretrained(out / "by hand")
    tokens = model.generate(torch.tensor([[2, 3]]), max_length=6, do_sample=False).flatten().tolist()
    timed = ("_second", "_runtime", "_time")
    return {
        "events": seen,
        "tokens": tokens,
        "logged": [{key: each for key, each in line.items() if not key.endswith(timed)} for line in trainer.state.log_history],
        "files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
        "weights": {key: each.double().square().sum().item() for key, each in load_file(out / "last" / "model.safetensors").items()},
        "first": trainer.is_world_process_zero(),
    }  # fmt: skip


def all_trained(
    plan: str, names: list[str], out: Path, resume: str | None = None
) -> dict[str, dict[str, Any]]:
    """On this rank; in one process under no plan by the library alone. resume: the checkpoint to go on from."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not plan:
        return {name: trained(name, out / name, plain=True, resume=resume) for name in names}
    begin_script()
    ranks(plan)
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in names:
            found[name] = trained(name, out / name, resume=resume)
    finally:
        leave_ranks(well=len(found) == len(names))
    return found
