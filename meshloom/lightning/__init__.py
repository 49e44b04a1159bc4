"""Lightning's `Trainer` on many devices: `Trainer(strategy=ml.lightning.Strategy("dp=2,tp=2"))`.

mesh_strategy.py    modules become parallel, training's loaders are shared, one process writes
global_values.py    what training logs and measures is of the global batch
"""

from meshloom.lightning.mesh_strategy import MeshStrategy as Strategy

__all__ = ["Strategy"]
