"""What a LightningModule may have that no job has: each is refused in one sentence, with the way out."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from meshloom.core.errors import JobError

_WAY_OUT = {
    "optimizer_step": "Give the optimizer what it does in a class of its own",
    "optimizer_zero_grad": "Leave it out: gradients are cleared after each update",
    "lr_scheduler_step": "Use a scheduler with a step() of no arguments",
    "backward": "Return the loss; its gradients are computed by the plan",
    "configure_gradient_clipping": "Leave it out, and give gradient_clip_val",
    "configure_callbacks": "Leave it out; best= and patience= stop early, ml.Trainer(listener=...) reports",
    "on_before_batch_transfer": "Do it in the dataset, or in training_step",
    "on_after_batch_transfer": "Do it in the dataset, or in training_step",
    "transfer_batch_to_device": "Leave it out: batches are moved where they are needed",
    "configure_sharded_model": "Leave it out: the plan divides the model",
}
# events that a job does not have: a hook that only reports is left out
_EVENTS = (
    "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_fit_start", "on_fit_end",
    "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_validation_model_eval", "on_validation_model_train",
)  # fmt: skip
_CHANGES = {
    "append", "extend", "clear", "update", "step", "zero_grad", "backward", "freeze", "unfreeze", "train", "eval", "load_state_dict", "reset", "clip_gradients",
    "clip_grad_norm_", "copy_", "setattr", "compute", "toggle_optimizer", "manual_backward", "optimizers", "lr_schedulers",
}  # fmt: skip


def check_module(module: Any, data: Any) -> list[str]:
    """The hooks that are left out. Raises `JobError` for the first thing that has no counterpart."""
    for sentence in _refusals(module):
        raise JobError(sentence)
    if is_datamodule(data):
        for name in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
            if is_overridden(data, name):
                raise JobError(f"{type(data).__name__}.{name} has no counterpart in a job. {_WAY_OUT[name]}.")
    return [f"{type(module).__name__}.{name}" for name in _EVENTS if is_overridden(module, name)]


def _refusals(module: Any) -> Iterator[str]:
    kind = type(module).__name__
    if not module.automatic_optimization:
        yield (
            f"{kind} has automatic_optimization=False: it takes its steps by hand. Give each loss an ml.Objective in Job(losses=...), or set automatic_optimization=True."
        )
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(module, name):
            yield f"{kind} has no {name}. Write it, as for Lightning's own Trainer."
    for name, way_out in _WAY_OUT.items():
        if is_overridden(module, name):
            yield f"{kind}.{name} has no counterpart in a job. {way_out}."
    if "dataloader_iter" in _parameters(module.training_step):
        yield f"{kind}.training_step takes dataloader_iter, and ranks read their own batches. Take (batch, batch_idx)."
    for path, each in module.named_modules():
        if type(each).__module__.startswith("torchmetrics"):
            yield (
                f"{kind}.{path} is a {type(each).__name__}, which keeps state over batches, of which each rank sees its own. Log values of the batch instead, like "
                "torchmetrics.functional has them: ranks' are averaged exactly."
            )
    for name in _EVENTS:
        if is_overridden(module, name) and (found := _acts(getattr(type(module), name).__code__)):
            yield (
                f"{kind}.{name} does more than report: it {found}. Do it in training_step, or in a loop of ml.Trainer(job).batches()."
            )


def is_datamodule(data: Any) -> bool:
    """Whether this is a LightningDataModule, and not a loader."""
    return hasattr(data, "train_dataloader")


def is_overridden(module: Any, name: str) -> bool:
    """Whether the class of a module has a method of this name that is not Lightning's own."""
    own = getattr(type(module), name, None)
    return own is not None and not (getattr(own, "__module__", "") or "").startswith(
        ("lightning.", "pytorch_lightning.")
    )


def _parameters(function: Any) -> tuple[str, ...]:
    code = function.__func__.__code__
    return code.co_varnames[: code.co_argcount]


def _acts(code: CodeType) -> str:
    """What a hook does besides reporting, as a clause; "" if nothing is seen."""
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_ATTR", "DELETE_ATTR"):
            return f"sets .{each.argval}"
        if each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            return "sets an item"
        called = each.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL") and str(each.argval)
        if called and (called in _CHANGES or (called.endswith("_") and not called.endswith("__"))):
            return f"calls {called}()"
        if each.opname in ("LOAD_CONST", "RETURN_CONST") and each.argval == -1:
            return "may return -1, which skips the rest of the epoch"
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and (found := _acts(inner)):
            return found
    return ""
