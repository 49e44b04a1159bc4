"""What a transformers `Trainer` may have that no job has: each is refused in one sentence, with the way out."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from meshloom.core.errors import JobError

# methods that decide what a step is
_OF_STEPS = (
    "train", "_inner_training_loop", "_run_epoch", "_prepare_for_training", "training_step", "get_batch_samples", "set_initial_training_values",
    "_prepare_inputs", "_prepare_input", "_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate", "compute_loss_context_manager",
    "autocast_smart_context_manager", "_wrap_model",
)  # fmt: skip
_OF_EVALUATIONS = ("evaluate", "evaluation_loop", "prediction_step", "_evaluate")
_STRATEGIES = {"no", "steps", "epoch"}


def check_trainer(trainer: Any) -> None:
    """Raises `JobError` for the first thing that has no counterpart."""
    for sentence in _refusals(trainer):
        raise JobError(sentence)


def _refusals(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if args.world_size > 1:
        yield (
            f"This Trainer is one of {args.world_size} processes of its own, and ranks are meshloom's: start it by `meshloom train FILE.py --plan ...` "
            "or, on several hosts, `torchrun -m meshloom train FILE.py --plan ...`."
        )
    if trainer.state.global_step:
        yield (
            f"This Trainer has taken {trainer.state.global_step} steps, and a job begins with the first. Make another one, over the trained model if you like."
        )
    if trainer.optimizer is not None and trainer.optimizer.state:
        yield f"{type(trainer.optimizer).__name__} has state of earlier steps, and a job begins with the first. Give a new optimizer."
    if trainer.train_dataset is None:
        yield "This Trainer has no train_dataset. Give it one."
    yield from _of_settings(args)
    yield from _of_methods(trainer, _OF_STEPS, "steps")
    if args.eval_strategy != "no":
        yield from _of_evaluation(trainer)
    if args.eval_strategy == "no" and (args.load_best_model_at_end or args.save_strategy == "best"):
        yield 'The best model is chosen by evaluations, and eval_strategy="no". Set eval_strategy="steps" or "epoch".'
    if trainer.lr_scheduler is not None and trainer.optimizer is None:
        yield "optimizers=(None, scheduler) has a scheduler of an optimizer that does not train. Give both, or neither."
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "early_stopping_threshold", None):
            yield (
                f"early_stopping_threshold={callback.early_stopping_threshold} has no counterpart: a job stops after evaluations without any better value. Leave it out."
            )
        yield from _of_callback(callback)


def _of_settings(args: Any) -> Iterator[str]:
    given: dict[str, tuple[Any, str]] = {
        "deepspeed": (args.deepspeed, "Leave it out, and divide by the plan: zero=1, zero=2 or zero=3"),
        "fsdp": (args.fsdp, "Leave it out, and divide parameters by the plan: zero=3"),
        "parallelism_config": (
            args.parallelism_config,
            "Leave it out, and divide by the plan: dp=..., tp=..., pp=...",
        ),
        "bf16": (args.bf16, "Leave it out, and give the plan precision=bf16-mixed"),
        "fp16": (args.fp16, "Leave it out, and give the plan precision=fp16-mixed"),
        "bf16_full_eval": (
            args.bf16_full_eval,
            "Leave it out: evaluations are in the plan's precision, like bf16-mixed",
        ),
        "fp16_full_eval": (
            args.fp16_full_eval,
            "Leave it out: evaluations are in the plan's precision, like fp16-mixed",
        ),
        "torch_compile": (args.torch_compile, "Leave it out, and give the plan compile=true"),
        "activation_checkpointing": (
            args.activation_checkpointing or args.gradient_checkpointing,
            "Leave it out, and give the plan recompute=..., as `meshloom plan` advises",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "Leave it out, or apply it to the model before the Trainer is made",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha,
            "Leave it out, or add the noise in the model's forward",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "Give the batch size that fits; `meshloom plan` predicts memory",
        ),
        "debug": (args.debug, "Leave it out: a step that is not finite is named by its operator"),
        "push_to_hub": (args.push_to_hub, "Leave it out, and push what `meshloom export` writes"),
        "enable_jit_checkpoint": (
            args.enable_jit_checkpoint,
            "Leave it out: a run with --out saves when it is asked to end",
        ),
        "eval_on_start": (args.eval_on_start, "Leave it out: a metric is tried on one batch before training"),
        "eval_delay": (
            args.eval_strategy != "no" and args.eval_delay,
            "Leave it out: evaluations are every eval_steps from the start",
        ),
    }
    for name, (value, way_out) in given.items():
        if value:
            yield f"TrainingArguments({name}={value!r}) has no counterpart in a job. {way_out}."
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim:
        yield f"optim={optim!r} updates parameters within backward, before gradients are exchanged. Use another one, like adamw_torch."
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if scheduler == "greedy":
        yield "lr_scheduler_type='greedy' searches rates by evaluations, and a job's schedulers have no search. Use another one, like linear or reduce_lr_on_plateau."


def _of_methods(trainer: Any, names: tuple[str, ...], what: str) -> Iterator[str]:
    for name in names:
        function = getattr(type(trainer), name, None)
        own = getattr(trainer, "__dict__", {}).get(name, function)
        module = getattr(own, "__module__", None) or ""
        if function is not None and not module.startswith("transformers."):
            yield (
                f"{type(trainer).__name__}.{name} is its own, and the {what} of a job are meshloom's. Override compute_loss, create_optimizer, create_scheduler or "
                "get_train_dataloader, which are kept, or write a Job."
            )


def _of_evaluation(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) not in _STRATEGIES:
        yield f'eval_strategy={args.eval_strategy!r} is not known. Use "steps" or "epoch".'
    if isinstance(trainer.eval_dataset, dict):
        names = ", ".join(map(repr, trainer.eval_dataset))
        yield f"eval_dataset has several datasets ({names}), and a job evaluates one. Give one of them, or join them with torch.utils.data.ConcatDataset."
    if not hasattr(trainer.eval_dataset, "__getitem__") or not hasattr(trainer.eval_dataset, "__len__"):
        yield f"eval_dataset is an iterable {type(trainer.eval_dataset).__name__}, and ranks share an evaluation by index. Give one with __len__ and __getitem__."
    if getattr(args, "predict_with_generate", False):
        yield "predict_with_generate=True generates text in evaluations, which no metric of a job does. Leave it out, and generate with the exported model."
    if trainer.compute_metrics is not None and args.batch_eval_metrics:
        yield "batch_eval_metrics=True keeps the state of compute_metrics from batch to batch. Leave it out: metrics are averaged over batches exactly."
    if trainer.compute_metrics is not None and args.include_for_metrics:
        yield f"include_for_metrics={args.include_for_metrics!r} gives compute_metrics more than predictions and labels. Leave it out, or write Evaluate(metrics=...)."
    yield from _of_methods(trainer, _OF_EVALUATIONS, "evaluations")


def _of_callback(callback: Any) -> Iterator[str]:
    if not is_users(callback):
        return
    kind = type(callback)
    for name in filter(lambda each: each.startswith("on_"), dir(kind)):
        code = getattr(getattr(kind, name), "__code__", None)
        if code is None or getattr(getattr(kind, name), "__module__", "").startswith(
            "transformers.trainer_callback"
        ):
            continue
        if changed := sorted(set(_set_by(code))):
            yield (
                f"{kind.__name__}.{name} sets control.{changed[0]}, and a job's steps are known before. Remove the callback; Evaluate(patience=...) of a job, or "
                "EarlyStoppingCallback(early_stopping_threshold=0), stops early."
            )
        takes = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *_texts_of(code)}
        if found := sorted(takes & {"model", "optimizer", "lr_scheduler"}):
            yield (
                f"{kind.__name__}.{name} takes the {found[0]}, of which a rank may hold a part. Remove it; Job(average=...) keeps an average of parameters, and "
                "ml.Trainer(job).batches() is a loop of one's own."
            )


def is_users(callback: Any) -> bool:
    """Whether this callback is none of transformers' own, which report or are translated."""
    return not type(callback).__module__.startswith("transformers.")


def is_left_out(callback: Any) -> bool:
    """Whether this callback would report, and has no counterpart of its own in a run."""
    names = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback", "EarlyStoppingCallback")  # fmt: skip
    return is_users(callback) or type(callback).__name__ not in names


def _set_by(code: CodeType) -> Iterator[str]:
    """The attributes `should_...` that this code sets."""
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR" and str(each.argval).startswith("should_"):
            yield str(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _set_by(inner)


def _texts_of(code: CodeType) -> set[str]:
    return {each for each in code.co_consts if isinstance(each, str)}
