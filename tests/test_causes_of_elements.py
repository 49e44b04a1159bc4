"""Where single elements of wrong gradients come from is told, and noise comes from nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.verify.causes.of_elements import from_elements


def gradients(*names: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, dtype=torch.float64, generator=generator) for name in names}


RIGHT = gradients("a", "b")
MATRIX = RIGHT["a"].view(5, 8)


def said(actual: dict[str, Tensor], transposed: dict[str, Tensor] | None = None) -> tuple[str, str]:
    right = {name: RIGHT[name] for name in actual}
    cause = from_elements(actual, right, RIGHT, transposed or {})
    return (cause.kind, cause.sentence) if cause else ("", "")


def test_elements_that_are_cut_off_are_clipped():
    kind, sentence = said({"a": RIGHT["a"].clamp(-0.5, 0.4)})
    assert kind == "clipping" and "limited to between -0.5 and 0.4" in sentence


def test_a_matrix_that_is_transposed_is_told_from_another_order():
    transposed = MATRIX.t().reshape(-1)
    assert "transposed" in said({"a": transposed}, {"a": transposed})[1]
    assert said({"a": transposed}) == (
        "exchanged",
        "The elements of a are one device's, in another order: they are in the wrong places.",
    )
    assert "from the last to the first" in said({"a": RIGHT["a"].flip(0)})[1]


def test_elements_one_place_further_are_at_a_wrong_index():
    for places, which in ((1, "before"), (-1, "behind")):
        kind, sentence = said({name: each.roll(places) for name, each in RIGHT.items()})
        assert kind == "border" and f"one place {which} them" in sentence


def test_values_from_other_tensors_are_found_there():
    mixed = torch.cat([RIGHT["b"][10:], RIGHT["a"][:10]])
    kind, sentence = said({"a": mixed})
    assert kind == "exchanged" and "most in b, a" in sentence


def test_noise_and_factors_come_from_nowhere():
    noise = gradients("c", "d", seed=1)
    for actual in ({"a": noise["d"]}, {"a": 2 * RIGHT["a"]}, {"a": RIGHT["a"] * (1 + 1e-4 * noise["c"])}):
        assert said(actual) == ("", "")
