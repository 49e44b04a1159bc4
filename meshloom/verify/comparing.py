"""The comparison of a plan's run with one device's, as the run sees it, wherever one device is; and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import BetweenSteps, DifferingTensor
from meshloom.verify.compared.compare import Comparer, Comparison
from meshloom.verify.compared.compare_evaluation import PlanEvaluation
from meshloom.verify.compared.compare_values import Values
from meshloom.verify.compared.whole_batch import WholeBatch
from meshloom.verify.reference.step_records import StepRecord


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """The result of comparing a plan with the reference. whole: None if the whole batch does not fit in
    memory. explained: by which factor the first difference is, in a sentence; "": by none. differing: the first tensor that does, if one does."""

    steps: Sequence[Comparison]
    explained: str
    whole: WholeBatch | None
    comparer: Comparer
    differing: DifferingTensor | None = None


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """What a plan's run is compared with. dtype, device, shares: of the `Reference`."""

    plan: Plan
    dtype: torch.dtype | None
    device: torch.device
    shares: Sequence[tuple[int, Sequence[int]]]


class Comparing(ABC):
    """Compares a plan's run with one device's, wherever that is. Tensors are not kept."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a step: forward and backward of the reference."""

    @abstractmethod
    def add_gradient(self, name: str, ours: Tensor | None) -> None:
        """Compare the plan's next averaged gradient; None: unused."""

    @abstractmethod
    def update(self) -> None:
        """Update the reference after all gradients have arrived."""

    @abstractmethod
    def add_state(self, name: str, ours: Tensor) -> None:
        """Compare the plan's next parameter or buffer after the step."""

    @abstractmethod
    def begin_averages(self) -> None:
        """After `add_state` of everything."""

    @abstractmethod
    def add_average(self, name: str, ours: Tensor) -> None:
        """Compare the plan's average of a parameter, or any other tensor in its place."""

    @abstractmethod
    def end(self, ours: StepRecord) -> None:
        """Compare the rest of the step. ours: the plan's record, without gradients."""

    @abstractmethod
    def go_to(self, step: int) -> None:
        """The next step is the one of this number."""

    @abstractmethod
    def check_metrics(self, ours: PlanEvaluation, updates: int) -> BetweenSteps:
        """Compare the plan's metrics after so many updates."""

    @abstractmethod
    def step_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step one device's schedulers that go by a metric, with the plan's."""

    @abstractmethod
    def check_saved(self, path: Path, what: str) -> BetweenSteps:
        """Compare the checkpoint in `path`."""

    @abstractmethod
    def adopt(self, name: str, ours: Tensor) -> None:
        """Once something differs: one device has this value of a parameter or buffer."""

    @abstractmethod
    def place(self, of_chunks: Mapping[int, Sequence[Values]]) -> str | None:
        """Then: the first module whose output differs, which is that of the first step that does; of `stage_outputs.py`."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether all steps so far agree."""

    @abstractmethod
    def result(self) -> ComparisonResult:
        """The result of all steps so far."""
