"""All rules by operator: the built-in ones and a user's."""

from __future__ import annotations

from collections.abc import Mapping

from meshloom.core.errors import CaptureError
from meshloom.tensor_parallel.rules.attention import ATTENTION
from meshloom.tensor_parallel.rules.copies import COPIES
from meshloom.tensor_parallel.rules.dim_reductions import REDUCTIONS
from meshloom.tensor_parallel.rules.elementwise import ELEMENTWISE, elementwise, is_elementwise
from meshloom.tensor_parallel.rules.expansion import EXPANSION
from meshloom.tensor_parallel.rules.factors import Factors
from meshloom.tensor_parallel.rules.gradients import GRADIENTS
from meshloom.tensor_parallel.rules.indexing import INDEXING
from meshloom.tensor_parallel.rules.losses import LOSSES
from meshloom.tensor_parallel.rules.matrices import MATRICES
from meshloom.tensor_parallel.rules.normalisation import NORMALISATION
from meshloom.tensor_parallel.rules.operator_call import Call, Rule
from meshloom.tensor_parallel.rules.permutations import PERMUTATIONS
from meshloom.tensor_parallel.rules.products import PRODUCTS
from meshloom.tensor_parallel.rules.recurrent import RECURRENT
from meshloom.tensor_parallel.rules.reshapes import RESHAPES
from meshloom.tensor_parallel.rules.slices import SLICES
from meshloom.tensor_parallel.rules.spatial import SPATIAL
from meshloom.tensor_parallel.rules.user_rules import user_rules

Rules = Mapping[str, Rule]

BUILT_IN: Rules = {
    **ELEMENTWISE,
    **RESHAPES,
    **PERMUTATIONS,
    **SLICES,
    **EXPANSION,
    **COPIES,
    **PRODUCTS,
    **ATTENTION,
    **NORMALISATION,
    **REDUCTIONS,
    **INDEXING,
    **LOSSES,
    **SPATIAL,
    **MATRICES,
    **RECURRENT,
    **GRADIENTS,
}


def rules_with(texts: Mapping[str, str]) -> Rules:
    """The built-in rules and a user's, by operator: `{"mylib::gate": "b* f, b* f -> b* f"}`. Raises
    `CaptureError` for a text that is no factor map."""
    return {**BUILT_IN, **user_rules(texts)} if texts else BUILT_IN


def factors_of(call: Call, rules: Rules) -> Factors | None:
    """The factor map of a call. None: the operator has no rule."""
    rule = rules.get(call.name) or (elementwise if is_elementwise(call) else None)
    factors = rule(call) if rule is not None else None
    if factors is None:
        return None
    mapped, given = (factors.operands, factors.outputs), (call.operands, call.outputs)
    if [[*map(len, dims)] for dims in mapped] != [[len(each.shape) for each in side] for side in given]:
        raise CaptureError(
            f"The rule of {call.name} does not fit its call: {factors} for {[each.shape for each in call.operands]}."
        )
    return factors
