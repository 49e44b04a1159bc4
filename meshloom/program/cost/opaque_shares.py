"""Which parts of a program are leaves, why, and how much of its parameters and FLOPs they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshloom.core.errors import CaptureError
from meshloom.core.modules.named_leaves import is_within, modules_of, shown
from meshloom.core.plan import Plan
from meshloom.program.cost.cost import Cost
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import is_opaque

NAMED = 3


def opaque_notes(program: Program, costs: Mapping[str, Cost]) -> list[str]:
    """One sentence per reason; none for a program without opaque parts."""
    named: dict[str, list[str]] = {}
    for path, why in program.opaque.items():
        named.setdefault(why, []).append(path)
    return [_note(program, costs, paths, why) for why, paths in named.items()]


def check_divided(plan: Plan, leaves: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Raise `CaptureError` where leaves hold half of the parameters or more, as nothing is divided beside them. sizes: of
    parameters, by name."""
    modules = modules_of(leaves)
    held = sum(size for name, size in sizes.items() if any(is_within(name, path) for path in modules))
    if leaves and 2 * held >= sum(sizes.values()):
        named = ", ".join(map(shown, leaves[:NAMED]))
        more = f" and {len(leaves) - NAMED} more" if len(leaves) > NAMED else ""
        raise CaptureError(
            f"{plan} divides nothing of this model: leaves ({named}{more}) run whole on every rank, and no other parameter is divided. "
            "Use dp, with zero=3 if the model is large."
        )


def _note(program: Program, costs: Mapping[str, Cost], paths: Sequence[str], why: str) -> str:
    names = ", ".join(map(shown, paths[:NAMED]))
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    parameters, flops = shares(program, costs, paths)
    several = len(paths) > 1
    return (
        f"{names}{more} {'run' if several else 'runs'} as written, as one operator that is not divided: {why.removesuffix('.')}. "
        f"{'They are' if several else 'It is'} {parameters:.1%} of the parameters and {flops:.1%} of the FLOPs."
    )


def shares(program: Program, costs: Mapping[str, Cost], paths: Sequence[str]) -> tuple[float, float]:
    """The share of the opaque parts at `paths` in a program's parameters, and in its FLOPs forward and backward."""
    nodes = [node for node in program.nodes if is_opaque(node) and node.args[2] in paths]
    used = {ref.name for node in nodes for ref in node.operands()}
    sizes = {each.value: math.prod(each.meta.shape) for each in program.parameters.values()}
    work = {name: each.flops + each.backward_flops for name, each in costs.items()}
    return (
        sum(size for value, size in sizes.items() if value in used) / (sum(sizes.values()) or 1),
        sum(work[node.name] for node in nodes) / (sum(work.values()) or 1),
    )
