"""Captures a program by shapes for other sizes, once one equals eager: no model is built during the run.

The program must equal the known one except for sizes. Otherwise the caller builds a model and compares again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch._subclasses import FakeTensor

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.program.capture.shapes import fake_of, model_by_shapes, moved_to, on_cpu
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes.forms import alike
from meshloom.program.trace.repeated_export import capturing

Capture = Callable[[nn.Module, tuple[Any, Any]], Program]


def resized(known: Program, job: Job, batches: tuple[Any, Any], capture: Capture) -> Program | None:
    """The program for batches like these two, with `known`'s constants; None if it differs in more than
    sizes, or if the capture needs values.

    known: a compared program of the same loss and mode. capture: captures a model and two batches.
    """
    try:
        with capturing(known.precision), on_cpu(known.device):
            model, mode = model_by_shapes(job, known.precision, training=known.training)
            first, second = (
                leaves.rebuild([fake_of(each, mode) for each in leaves.tensors.values()])
                for leaves in map(leaves_of, batches)
            )
            found = capture(model, (first, second))
    except CaptureError:
        return None
    found = moved_to(found, known.device)
    # for example, a constructor draws nothing
    values_are_known = not any(isinstance(each, FakeTensor) for each in found.constants.values())
    if not values_are_known or not alike(found, known):
        return None
    return replace(found, constants=dict(known.constants))
