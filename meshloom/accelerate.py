"""accelerate's `Accelerator` on many devices: one changed import in a script that has a loop of its own.

    from meshloom.accelerate import Accelerator    # in place of: from accelerate import Accelerator

Every rank runs the whole script. accelerate knows of one process, whose batches are the global ones; this rank's number tells it
whether it is the main one. Modules that are prepared are parallel. Loaders that are prepared give shares while a module trains, and
whole batches on every rank otherwise, so that an evaluation is one process's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn

import meshloom as ml
from meshloom.comm.objects import collect, share
from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.launch.environment import launched_rank, ranks_aside
from meshloom.launch.first_of_host import main_first
from meshloom.loops import means
from meshloom.loops.loader import loader
from meshloom.loops.loader_parts import SharedCollate
from meshloom.loops.means import gather, reduced
from meshloom.loops.parallel import accumulate, modules, was_made, whole
from meshloom.loops.part_tensor import whole_tensor
from meshloom.loops.ranks import ranks
from meshloom.loops.saving import on_main, save_pretrained, whole_state, write_once

# what divides the model by itself
_REFUSED = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config",
)  # fmt: skip


class Accelerator(accelerate.Accelerator):
    """accelerate's, for the ranks of a plan, with its arguments; those that divide models or batches by themselves are refused.

    plan: as of `ml.parallel`. `num_processes` is 1, so batch sizes are of the global batch, and schedules as of one process. With one
    process it is accelerate's own. Raises `JobError` for what it refuses.
    """

    def __init__(self, *args: Any, plan: Plan | str | None = None, **kwargs: Any) -> None:
        found = ranks(plan)
        self._reading = OpenEpochs()
        self._is_alone = found.plan.mesh.size == 1
        self._writes = False  # on the main process alone
        if self._is_alone:
            super().__init__(*args, **kwargs)
            return
        said = inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments
        if refused := [name for name in _REFUSED if said.get(name) is not None]:
            raise JobError(
                f"Accelerator({refused[0]}=...) under {found.plan}: leave it out, the plan says how the model is divided (zero=1, 2 or 3, tp, pp)."
            )
        with ranks_aside():
            given: dict[str, Any] = {**said, "cpu": found.device.type == "cpu"}
            super().__init__(**given)
        if self.distributed_type != DistributedType.NO:
            raise JobError(
                f"accelerate is set up for {self.distributed_type.value}, and the ranks are those of {found.plan}. Leave it out of accelerate's configuration."
            )
        self.dataloader_config.dispatch_batches = False
        launched = launched_rank()
        states: list[Any] = [PartialState(), self.state]
        for state in states:
            state.device = found.device
            state.process_index = found.own.rank
            state.local_process_index = launched.local_rank if launched else 0

    # who it is

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        return self._only(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        return self._only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        return self._only(self.is_main_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        return self._only(self.is_main_process, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        return self._only(self.is_local_main_process, function)

    def _only(self, runs: bool, function: Callable[..., Any] | None) -> Any:
        if function is None:
            return lambda function: self._only(runs, function)
        return function if runs else _nothing

    def main_process_first(self) -> Any:
        return main_first()

    def local_main_process_first(self) -> Any:
        return main_first()

    def wait_for_everyone(self) -> None:
        if not self._writes:
            ranks().everyone.barrier().wait()

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def end_training(self) -> None:
        for tracker in self.trackers:
            tracker.finish()

    # what it prepares

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Parallel, where any of its parameters is trained."""
        is_new = not was_made(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode or not is_new or not any(each.requires_grad for each in model.parameters()):
            return prepared
        made = self._models[-1] = ml.parallel(prepared)
        found = ranks().plan
        if (found.zero or found.tp > 1 or found.pp > 1) and hasattr(made, "save_pretrained"):
            cast(Any, type(made)).save_pretrained = save_pretrained  # a class of this model alone
        return made

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Shares in training, whole batches otherwise; shares always, where it was `ml.loader`'s before."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self._is_alone or isinstance(prepared, TrainingLoader):
            return prepared
        is_shared = isinstance(data_loader.collate_fn, SharedCollate)
        self._dataloaders[-1] = self._in_training(prepared, None if is_shared else prepared)
        return self._dataloaders[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        skipped = super().skip_first_batches(dataloader, num_batches)
        if not isinstance(dataloader, TrainingLoader):
            return skipped
        left = dataloader.whole and super().skip_first_batches(dataloader.whole, num_batches)
        return self._in_training(skipped, left)

    def _in_training(self, prepared: Any, whole: Any) -> TrainingLoader:
        made = object.__new__(TrainingLoader)
        vars(made).update(vars(prepared))
        shared = loader(made)
        shared.reading, shared.whole = self._reading, whole
        return shared

    # what replicas have

    def no_sync(self, model: nn.Module) -> Any:
        return accumulate(model)

    def gather(self, tensor: Any) -> Any:
        """Of shares, the rows of all replicas in the order of the batch, of a number one for each replica; of whole batches the same."""
        if self._is_alone or not self._reading.shares:
            return tensor
        return recursively_apply(lambda x: gather(x if x.ndim else x[None]), tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Each sample once, in the order of the loader; lists of any objects, too."""
        if self._is_alone or not self._reading.shares:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not _are_tensors(input_data):
            return gather(list(input_data))
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Of shares: their sum, their mean by samples, or the largest; of whole batches the same."""
        if reduction == "none":
            return super().reduce(tensor, reduction, scale)
        if self._is_alone or not self._reading.shares:
            return means.reported(super().reduce(tensor, reduction, scale))

        def of_all(x: Tensor) -> Tensor:
            if reduction == "max":
                return gather(x[None]).amax(0)
            return reduced(x, by_samples=reduction == "mean")

        return means.reported(recursively_apply(of_all, tensor, error_on_other_type=True))

    def check_trigger(self) -> bool:
        mine = self.flag_tensor is not None and bool(self.flag_tensor)
        found = any(collect(ranks().everyone, mine))
        if found:
            self.flag_tensor = None
        return found

    # files

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """With whole tensors on every rank, which all call it."""
        if isinstance(model, _Kept):
            return model.state
        return whole_state(self.unwrap_model(model) if unwrap else model, whole_tensor)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        super().save(obj if self._writes else on_main(obj), f, safe_serialization)

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        state = _Kept(whole_state(self.unwrap_model(model)))
        self._write(
            lambda: super(Accelerator, self).save_model(state, save_directory, *args, **kwargs),
            save_directory,
        )

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Path:
        """One process's folder, with whole tensors, by the main process; every rank calls it, and goes on when it is there."""
        where: list[str] = []
        with ExitStack() as around:
            models = self._models
            if self._save_model_state_pre_hook:  # which see the models
                for each in models:
                    around.enter_context(whole(each))
            else:
                models = [_Kept(whole_state(each)) for each in models]
            optimizers, custom = (
                [_Kept(on_main(each.state_dict())) for each in all_of]
                for all_of in (self._optimizers, self._custom_objects)
            )
            around.enter_context(self._with(_models=models, _optimizers=optimizers, _custom_objects=custom))
            self._write(
                lambda: where.append(str(super(Accelerator, self).save_state(output_dir, *args, **kwargs))),
                output_dir or self.project_dir,
            )
        if not self.is_main_process:
            self.project_configuration.iteration += 1
        return Path(share(ranks().everyone, where)[0])

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """A folder that accelerate, or `save_state` under any plan, has written."""
        kept = [_Kept() for _ in self._optimizers]
        state: Any = self.state
        number = state.process_index
        with ExitStack() as around:
            for each in self._models:
                around.enter_context(whole(each))
            around.enter_context(self._with(_optimizers=kept))
            state.process_index = 0  # whose draws are everyone's
            try:
                super().load_state(*args, **kwargs)
            finally:
                state.process_index = number
        for optimizer, each in zip(self._optimizers, kept, strict=True):
            optimizer.load_state_dict(each.state)

    def _write(self, write: Callable[[], Any], path: Any) -> None:
        with self._with(_writes=True):
            write_once(write, path)

    @contextmanager
    def _with(self, **changes: Any) -> Iterator[None]:
        """A context in which these attributes are others."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)


class TrainingLoader(DataLoaderShard):
    """A prepared loader. whole: the same for who does not train, which gives whole batches; None: it gives shares to all."""

    whole: DataLoaderShard | None
    reading: OpenEpochs

    def __iter__(self) -> Any:
        trains = torch.is_grad_enabled() and any(each.training for each in modules())
        whole = None if trains else self.whole
        with self.reading.epoch(shares=whole is None):
            if whole is not None:
                whole.iteration = self.iteration
            yield from super().__iter__() if whole is None else whole
            if whole is not None:
                self.iteration = whole.iteration


class OpenEpochs:
    """Whether the batches that the script has are shares: those of the innermost epoch, else of the last one."""

    def __init__(self) -> None:
        self._epochs: list[tuple[object, bool]] = []
        self._last = True

    @property
    def shares(self) -> bool:
        return self._epochs[-1][1] if self._epochs else self._last

    @contextmanager
    def epoch(self, shares: bool) -> Iterator[None]:
        this = (object(), shares)
        self._epochs.append(this)
        try:
            yield
        finally:
            self._epochs.remove(this)
            self._last = shares


class _Kept(nn.Module):
    """In place of a model, an optimizer or another object whose state is written, or read before the object can take it."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        self.state = state_dict


def _are_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a function of the main process."""
