"""A transformers `Trainer` on many devices: `ml.transformers.Trainer`, and `ml.transformers.Parallel`, a mixin for its subclasses.

    class Mine(ml.transformers.Parallel, Seq2SeqTrainer): ...

Every rank runs the whole script. The model becomes parallel in `train()`, once its weights are loaded; training loaders are shared, evaluations are
whole on every rank. accelerate knows of one process, of which this rank's number tells it whether it is the main one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, skip_first_batches
from transformers.trainer_callback import CallbackHandler

import meshloom as ml
from meshloom.comm.objects import collect, scatter_objects, share
from meshloom.core.errors import JobError, TrainingError
from meshloom.loops.loop_lines import say_once
from meshloom.loops.parallel import was_made
from meshloom.loops.ranks import ranks
from meshloom.loops.saving import save_pretrained, whole_state, write_once
from meshloom.loops.taken_shares import TakenShare, bind, counted_as, tensors_in

_AnyTrainer: Any = object  # that stands behind the mixin
# settings that divide, or find their batches, by themselves
_REFUSED = {
    "deepspeed": "zero=1, 2 or 3 of the plan divides the model",
    "fsdp": "zero=3 of the plan divides the model",
    "parallelism_config": "the plan says how the model and its batches are divided",
    "auto_find_batch_size": "ranks would find sizes of their own",
}


# events after which a Trainer looks at the flags that callbacks set
_ASKED_NEXT = ("on_step_end", "on_substep_end", "on_epoch_end", "on_log", "on_evaluate", "on_save")


class Parallel(_AnyTrainer):
    """A mixin, before the `Trainer` that it makes parallel. Batch sizes are of the global batch, whatever the plan."""

    _shares: Mapping[int, TakenShare]  # by tensors of the batches of an update

    def make_parallel(self, model: nn.Module, **options: Any) -> None:
        """`ml.parallel(model, **options)`, for subclasses that have options to say, such as `leaves`."""
        ml.parallel(model, **cast(Any, {"batch": {"num_items_in_batch": "part"}, **options}))

    def loss_count(self, inputs: Mapping[str, Any]) -> int | Tensor | None:
        """How many things the loss of a batch is a mean over, by which it counts among those of other replicas: labels that are not -100, where
        there are any. None: samples."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return None
        shifts = self._loss_shifts_labels and "shift_labels" not in inputs
        return (labels[..., 1:] if shifts else labels).ne(-100).sum()

    def create_accelerator_and_postprocess(self) -> None:
        found, args = ranks(), self.args
        args._n_gpu = min(1, args.n_gpu)
        if found.plan.mesh.size == 1:
            super().create_accelerator_and_postprocess()
            return
        for name, instead in _REFUSED.items():
            if getattr(args, name):
                raise JobError(
                    f"TrainingArguments({name}={getattr(args, name)!r}) under {found.plan}: leave it out, {instead}."
                )
        _check_whole(self.model)
        args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()
        for state in (args.distributed_state, self.accelerator.state):
            state.process_index = state.local_process_index = found.own.rank
        say_once(
            f"per_device_train_batch_size={args.per_device_train_batch_size} is that of the global batch, of which each replica gets its share"
        )

    def get_train_dataloader(self) -> Any:
        return ml.loader(super().get_train_dataloader())

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training and not was_made(model):
            written = type(model)
            if ranks().plan.mesh.size > 1:
                _check_whole(model)
                self.callback_handler.__class__ = _HandlerOfAll
            self.make_parallel(model)
            if (made := cast(Any, type(model))) is not written:  # a class of this model alone
                if hasattr(model, "generate"):
                    made.generate = _generate
                if hasattr(model, "save_pretrained"):
                    made.save_pretrained = save_pretrained
        return super()._wrap_model(model, training, dataloader)

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        shared, epoch = given["train_dataloader"], given["epoch"]
        resumes = given["resume_from_checkpoint"] is not None and epoch == given["epochs_trained"]
        if resumes and ranks().plan.mesh.size > 1:
            shared.load_state_dict({**shared.state_dict(), "epoch": epoch})
            given["train_dataloader"] = _Rest(shared, epoch, given["steps_trained_in_current_epoch"])
        super()._run_epoch(*args, **given)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        found = ranks()
        if found.plan.dp > 1:
            everyone = collect(found.own.readers, [self._count_of(each) for each in batches])
            shares = dict[int, TakenShare]()
            for batch, sizes in zip(batches, zip(*everyone, strict=True), strict=True):
                taken = TakenShare(sizes if any(sizes) else (1,) * found.plan.dp, found.replica)
                shares |= {id(each): taken for each in tensors_in(dict(batch))}
            self._shares = shares
            if items is not None:
                items = torch.tensor(sum(map(sum, everyone)), dtype=torch.float64, device=device)
        return batches, items

    def _count_of(self, inputs: Any) -> int:
        taken, count = bind(dict(inputs)), self.loss_count(inputs)
        samples = int(taken.sizes[taken.replica]) if taken else 1
        return samples if count is None or not samples else int(count)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with ExitStack() as around:
            if ranks().plan.dp > 1:
                taken = self._share_of(inputs)
                around.enter_context(counted_as(taken))
                if num_items_in_batch is not None:  # all losses are means over a share
                    part = max(1, taken.sizes[taken.replica]) / sum(taken.sizes)
                    num_items_in_batch = num_items_in_batch * part
            if not self.accelerator.sync_gradients:
                around.enter_context(ml.accumulate(self.model))
            return ml.mean(super().training_step(model, inputs, num_items_in_batch))

    def _share_of(self, inputs: Any) -> TakenShare:
        for each in tensors_in(dict(inputs)):
            if id(each) in self._shares:
                return self._shares[id(each)]
        raise TrainingError(
            "training_step is called with no tensor of its batch, of which this is a share. Change inputs in the collator, or in compute_loss."
        )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if self.args.include_num_input_tokens_seen != "no":
            new = ml.sum(self.state.num_input_tokens_seen - before)
            self.state.num_input_tokens_seen = before + new

    def store_flos(self) -> None:
        self.current_flos = sum(collect(ranks().own.readers, self.current_flos))
        super().store_flos()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as around:
            if getattr(self.args, "predict_with_generate", False):
                around.enter_context(ml.whole(self.model))
            output = super().evaluation_loop(*args, **kwargs)
        everyone = ranks().everyone
        metrics = [output.metrics] * everyone.size if everyone.rank == 0 else None
        return output._replace(metrics=scatter_objects(everyone, metrics))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state = whole_state(self.model) if state_dict is None else state_dict
        write_once(lambda: super(Parallel, self)._save(output_dir, state), output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        ml.save(self.optimizer.state_dict(), os.path.join(output_dir, OPTIMIZER_NAME))
        ml.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        write_once(lambda: super(Parallel, self)._save_rng_state(output_dir), output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        ranks().everyone.barrier().wait()  # other ranks find all of it


class Trainer(Parallel, transformers.Trainer):
    """`transformers.Trainer` on many devices."""


class _Rest(IterableDataset[Any]):
    """The batches of a shared loader's epoch but for the first `count`, in whose place are others: the Trainer passes over so many of what looks like a
    loader to accelerate."""

    batch_size, prefetch_factor, drop_last, collate_fn = None, None, False, staticmethod(lambda batch: batch)

    def __init__(self, shared: Any, epoch: int, count: int) -> None:
        is_stream = isinstance(shared.dataset, IterableDataset)
        self.dataset, self._count = self, 0 if is_stream else count
        self._batches = shared if is_stream else ml.loader(skip_first_batches(shared, count))
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from [None] * self._count
        yield from self._batches


class _HandlerOfAll(CallbackHandler):
    """Calls callbacks on every rank, and has the flags that those of the first rank set."""

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = super().call_event(event, args, state, control, **kwargs)
        if event in _ASKED_NEXT:
            flags = {name: value for name, value in vars(control).items() if name.startswith("should_")}
            vars(control).update(share(ranks().everyone, flags))
        return control


def _check_whole(model: Any) -> None:
    """Raise `JobError` for a model that the library has put on several devices."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if getattr(model, "is_distributed_loading_by_transformers", False) or len(places) > 1:
        raise JobError(
            f"{type(model).__name__} was loaded in parts (distributed_config=, tp_plan= or device_map=). Load it whole: the plan says how it is divided."
        )


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    with ml.whole(self):
        return cast(Any, super(type(self), self)).generate(*args, **kwargs)
