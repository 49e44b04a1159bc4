"""meshloom: take a PyTorch model that trains on one device and train it on many."""

from meshloom.errors import MeshloomError
from meshloom.job import Evaluate, Job
from meshloom.mesh import Mesh
from meshloom.plan import Plan
from meshloom.trainer import Trainer

__all__ = ["Evaluate", "Job", "Mesh", "MeshloomError", "Plan", "Trainer"]
__version__ = "0.1.0"
