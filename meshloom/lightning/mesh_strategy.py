"""Lightning's Strategy of a plan: each rank runs the whole script as one device does, with its share of every training batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, scatter_objects
from meshloom.core.buffer_rules import BufferRule
from meshloom.core.errors import JobError, PlanError
from meshloom.core.plan import Plan
from meshloom.launch.environment import is_first_rank, is_rank, launched_plan, launched_rank
from meshloom.lightning.global_values import GlobalResults, share_metrics
from meshloom.loops import means, parallel
from meshloom.loops.loader import loader
from meshloom.loops.loop_lines import say
from meshloom.loops.ranks import ranks
from meshloom.loops.saving import on_main, write_once

_LOADERS = (
    "meshloom_loaders"  # in a checkpoint, where plain Lightning does not look for states of its loaders
)


class MeshStrategy(SingleDeviceStrategy):
    """The LightningModule trained under `plan` (None: the launcher's), equal to `Trainer(devices=1)` on whole batches.

    module: the name of the module within it that tp and pp divide, or names; None: those that `training_step` calls outermost, from their first
        call on. What is divided is captured, and the rest of `training_step` runs as written; under dp and zero nothing is captured.
    collate: of training's loaders, as of `ml.loader`. leaves, buffers, batch: as of `ml.parallel`.

    `trainer.world_size` is 1, and batch sizes are of the global batch. Evaluation has whole batches on every rank. Raises `PlanError` for
    a plan of several ranks in one process, and for what does not go with a plan.
    """

    strategy_name = "meshloom"

    def __init__(
        self, plan: Plan | str | None = None, *, module: str | Sequence[str] | None = None, collate: Literal["share", "whole"] = "share",
        leaves: Sequence[str] = (), buffers: Mapping[str, BufferRule] | None = None, batch: Mapping[str, int | None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._plan = plan
        self._collate: Literal["share", "whole"] = collate
        divide = [module] if isinstance(module, str) else module
        self._settings: dict[str, Any] = {
            "leaves": leaves, "buffers": buffers, "batch": batch, "divide": "outermost" if divide is None else divide,
        }  # fmt: skip
        if launched := launched_rank():
            cast(Any, rank_zero_only).rank = launched.rank  # loggers, bars and warnings of one process

    @property
    def root_device(self) -> torch.device:
        """The one that this process sees."""
        assert self.accelerator is not None
        return self.accelerator.get_parallel_devices(self.accelerator.parse_devices(1))[0]

    @property
    def is_global_zero(self) -> bool:
        return is_first_rank()

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self._check(self.lightning_module.trainer)
        # one process of a host prepares data
        self.local_rank = launched.local_rank if (launched := launched_rank()) else 0

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if group := self._everyone():
            collect(group, name)
        self.local_rank = 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        group = self._everyone()
        if group is None:
            return obj
        return scatter_objects(group, [obj] * group.size if group.rank == src else None, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's own name
        group = self._everyone()
        decisions = collect(group, bool(decision)) if group else [decision]
        return False not in decisions if all else True in decisions

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """What one device has: in training the rows of the global batch, of a number its mean."""
        if self.lightning_module is None or not self.lightning_module.trainer.training:
            return tensor
        return means.gather(tensor) if tensor.ndim else means.mean(tensor)

    def process_dataloader(self, dataloader: object) -> object:
        """Of training: its share."""
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.training:
            return dataloader
        return loader(dataloader, collate=self._collate)

    def _setup_model(self, model: Any) -> Any:
        trainer = model.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return model
        if model._compiler_ctx is not None:
            to_uncompiled(model)
            say("torch.compile around a parallel module is left out: it runs as written")
        if not parallel.was_made(model):
            parallel.parallel(model, self._plan, methods=["training_step"], **self._settings)
            share_metrics(model)
        trainer.fit_loop.epoch_loop._results = GlobalResults(training=True)
        return model

    def pre_backward(self, closure_loss: Tensor) -> None:
        model: Any = self.lightning_module
        if parallel.is_parallel(model):
            parallel.execution_of(model).refresh()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Gathered by all ranks, written by one, and read by plain Lightning, too."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted and is_rank():
            say("no checkpoint is written of a run that was interrupted, since its ranks may have parted")
            return
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        if "combined_loader" in loop:
            checkpoint[_LOADERS] = loop.pop("combined_loader")
        whole = on_main(checkpoint)
        write_once(
            lambda: self.checkpoint_io.save_checkpoint(whole, filepath, storage_options=storage_options),
            filepath,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if _LOADERS in checkpoint and (is_rank() or launched_plan() is not None):
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = checkpoint.pop(_LOADERS)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Where a checkpoint is made. Lightning takes no more batches of an epoch after its last one."""
        assert self.lightning_module is not None
        loop: Any = self.lightning_module.trainer.fit_loop
        if loop.epoch_loop.batch_progress.is_last_batch and loop._combined_loader is not None:
            for each in loop._combined_loader.flattened:
                if hasattr(each, "end_epoch"):
                    each.end_epoch()
        return super().lightning_module_state_dict()

    def _everyone(self) -> Group | None:
        """All ranks, which meet at the first call; None: there is one."""
        if not is_rank():
            return None
        return ranks(None if launched_plan() is not None else self._plan).everyone

    def _check(self, trainer: Any) -> None:
        """Raise a sentence for what does not go with a plan."""
        connector = trainer._accelerator_connector
        devices, hosts = len(connector._parallel_devices), connector._num_nodes_flag
        if devices > 1 or hosts > 1:
            raise PlanError(
                f"Trainer(devices={devices}, num_nodes={hosts}) has meshloom's Strategy, whose plan says on how many devices: each process has one. Leave both out, and "
                "start the script with meshloom run SCRIPT.py --plan PLAN."
            )
        if connector._layer_sync is not None:
            raise PlanError(
                "Trainer(sync_batchnorm=True) has meshloom's Strategy, under which batch norm normalizes by the share of a replica. Leave it out."
            )
        if trainer._val_check_time_interval is not None:
            raise PlanError(
                "Trainer(val_check_interval=...) is a time, and the clocks of ranks differ, so they would part ways. Give a number of batches."
            )
        finder = next(
            (each for each in trainer.callbacks if isinstance(each, BatchSizeFinder | LearningRateFinder)),
            None,
        )
        if finder is not None and (launched := launched_rank()) and launched.size > 1:
            raise JobError(
                f"{type(finder).__name__} decides on each rank by itself. Run it in one process, without a plan, and write what it has found."
            )
        if (group := self._everyone()) and (device := ranks().device).type != self.root_device.type:
            raise PlanError(
                f"The {group.size} ranks communicate on {device.type}, and Trainer(accelerator=...) computes on {self.root_device.type}. Start with meshloom run "
                f"--devices {'cpu' if self.root_device.type == 'cpu' else 'cuda'}, or change the accelerator."
            )
