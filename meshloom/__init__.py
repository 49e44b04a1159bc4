"""meshloom: take a PyTorch model that trains on one device and train it on many."""

from typing import TYPE_CHECKING, Any

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Evaluate, Job
from meshloom.core.losses.logged import log
from meshloom.core.mesh import Mesh
from meshloom.core.moments.current_step import step
from meshloom.core.objectives import Objective
from meshloom.core.plan import Plan
from meshloom.telemetry.progress import Listener, Progress

if TYPE_CHECKING:
    from meshloom.train.trainer import Trainer

__all__ = [
    "Circumstances",
    "Evaluate",
    "Job",
    "Listener",
    "Mesh",
    "MeshloomError",
    "Objective",
    "Plan",
    "Progress",
    "Trainer",
    "log",
    "step",
]
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """`Trainer` is imported when it is first used: who only describes a job, as in a process that serves its
    parameters, starts in half the time."""
    if name == "Trainer":
        from meshloom.train.trainer import Trainer

        globals()[name] = Trainer
        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
