"""meshloom: take a PyTorch model that trains on one device and train it on many."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.core.averaged import Averaged
from meshloom.core.buffer_rules import ema
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Evaluate, Job
from meshloom.core.job_functions import ByMetric, Metric
from meshloom.core.losses.logged import log
from meshloom.core.mesh import Mesh
from meshloom.core.moments.current_step import step
from meshloom.core.moments.leaf import leaf
from meshloom.core.plan import Plan
from meshloom.core.random import seed_script
from meshloom.launch.environment import begin_script, is_first_rank, script_seed
from meshloom.telemetry.progress import Listener, Progress

if TYPE_CHECKING:
    main: bool  # whether this process is the one of a script's ranks that prints, draws and logs
    accelerate: Any  # modules, for who has these libraries
    lightning: Any
    transformers: Any
    from meshloom.launch.first_of_host import main_first
    from meshloom.loops.loader import loader
    from meshloom.loops.means import gather, mean, sum  # noqa: A004
    from meshloom.loops.parallel import accumulate, parallel, train_step, whole
    from meshloom.loops.saving import save
    from meshloom.loops.share import share
    from meshloom.train.trainer import Trainer

__all__ = [
    "Averaged",
    "ByMetric",
    "Circumstances",
    "Evaluate",
    "Job",
    "Listener",
    "Mesh",
    "MeshloomError",
    "Metric",
    "Plan",
    "Progress",
    "Trainer",
    "accelerate",
    "accumulate",
    "ema",
    "gather",
    "leaf",
    "lightning",
    "loader",
    "log",
    "main",
    "main_first",
    "mean",
    "parallel",
    "save",
    "share",
    "step",
    "sum",
    "train_step",
    "transformers",
    "whole",
]
__version__ = "0.2.0.dev0"
_LATER = {
    "accelerate": "meshloom.accelerate",
    "accumulate": "meshloom.loops.parallel",
    "gather": "meshloom.loops.means",
    "lightning": "meshloom.lightning",
    "loader": "meshloom.loops.loader",
    "main_first": "meshloom.launch.first_of_host",
    "mean": "meshloom.loops.means",
    "parallel": "meshloom.loops.parallel",
    "save": "meshloom.loops.saving",
    "share": "meshloom.loops.share",
    "sum": "meshloom.loops.means",
    "train_step": "meshloom.loops.parallel",
    "transformers": "meshloom.transformers",
    "whole": "meshloom.loops.parallel",
    "Trainer": "meshloom.train.trainer",
}

if begin_script():  # ranks draw alike from here on
    seed_script(script_seed())


def __getattr__(name: str) -> Any:
    """`Trainer` and what loops need are imported when they are first used: who only describes a job, as in a process that serves
    its parameters, starts in half the time."""
    if name in _LATER:
        module = import_module(_LATER[name])
        found = globals()[name] = module if module.__name__ == f"meshloom.{name}" else getattr(module, name)
        return found
    if name == "main":
        return is_first_rank()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
