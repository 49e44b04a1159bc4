"""meshloom: take a PyTorch model that trains on one device and train it on many."""

from meshloom.errors import MeshloomError
from meshloom.exchange.elastic.circumstances import Circumstances
from meshloom.job import Evaluate, Job
from meshloom.mesh import Mesh
from meshloom.plan import Plan
from meshloom.report.progress import Listener, Progress
from meshloom.trainer import Trainer

__all__ = ["Circumstances", "Evaluate", "Job", "Listener", "Mesh", "MeshloomError", "Plan", "Progress", "Trainer"]
__version__ = "0.1.0"
