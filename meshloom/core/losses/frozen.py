"""Parameters that are not trained in some steps: `Job(frozen={"trunk": range(100)})`.

A frozen parameter has no gradient and is not updated, nor is its optimizer state: on one device, `requires_grad_(False)`. Where the
user's module runs, that is what it has; a program computes the gradient, and it is dropped before anything sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.losses.turns import OwnGradients
from meshloom.core.objectives import names_parameter


class FrozenParameters:
    """Of a job. named: its trainable parameters, of the whole model. own: which loss trains which, of several.

    Raises `JobError` for a name that names none of them, and for a step in which a loss has nothing to train.
    """

    def __init__(
        self, job: Job, named: Sequence[tuple[str, nn.Parameter]], own: OwnGradients | None = None
    ) -> None:
        names = [name for name, _ in named]
        self._ranges = {
            name: [steps for text, steps in job.frozen.items() if names_parameter(text, name)]
            for name in (names if job.frozen else ())
        }
        for text in job.frozen:
            if not any(names_parameter(text, name) for name in names):
                raise JobError(
                    f"Job(frozen=...) names {text!r}, which is none of the model's {len(names)} trainable parameters, such as {', '.join(names[:3])}. "
                    "Give names of modules or parameters."
                )
        self._check(job, names, own)

    def at(self, step: int) -> Collection[str]:
        """The names of those that are frozen in this step."""
        return {name for name, ranges in self._ranges.items() if any(step in steps for steps in ranges)}

    @contextmanager
    def without_gradients(self, step: int, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """A context in which those of `named` that are frozen require no gradients."""
        frozen = self.at(step)
        changed = [each for name, each in named if name in frozen and each.requires_grad]
        for each in changed:
            each.requires_grad_(False)
        try:
            yield
        finally:
            for each in changed:
                each.requires_grad_(True)

    def dropped(self, step: int, names: Iterable[str], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients, None of what is frozen. names: of the parameter that each is of."""
        if not (frozen := self.at(step)):
            return gradients
        return [None if name in frozen else each for name, each in zip(names, gradients, strict=True)]

    def _check(self, job: Job, names: Sequence[str], own: OwnGradients | None) -> None:
        changes = {0, *(end for steps in job.frozen.values() for end in (steps.start, steps.stop))}
        losses = {name: own.number_of(name) if own else 0 for name in names}
        for step in sorted(each for each in changes if 0 <= each < job.steps):
            frozen = self.at(step)
            trained = {losses[name] for name in names if name not in frozen}
            for number in sorted({*losses.values()} - trained):
                of = f" of loss {[*job.losses][number]!r}" if job.losses else ""
                raise JobError(
                    f"Job(frozen=...) leaves nothing to train in step {step}: it names all trainable parameters{of}."
                )
