"""What watching sees, and that it changes nothing."""

from __future__ import annotations

import numpy
import torch
from torch import nn

from meshloom.verify.reference.observers import CastWatch, ModuleWatch, digest_values


def test_digests_tell_values_dtypes_and_shapes_apart():
    trees = [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(3, 2)},
        {"x": torch.zeros(2, 3, dtype=torch.float64)},
        {"x": torch.ones(2, 3)},
        {"x": numpy.zeros((2, 3))},
        {"x": "text"},
        {"x": None},
        [torch.zeros(2, 3), 1],
        [torch.zeros(0)],
    ]
    digests = [digest_values(tree) for tree in trees]
    assert len(set(digests)) == len(trees)
    assert digests == [digest_values(tree) for tree in trees]


def test_a_digest_follows_elements_and_not_memory():
    matrix = torch.arange(6.0).view(2, 3)
    assert digest_values(matrix.t().contiguous().t()) == digest_values(matrix)
    assert digest_values(matrix[:, 1]) == digest_values(matrix[:, 1].clone())
    waves = torch.fft.fft(matrix.flatten().float())
    assert digest_values(waves.conj()) == digest_values(waves.conj().resolve_conj()) != digest_values(waves)


def test_what_cannot_be_pickled_still_has_a_digest():
    assert digest_values([lambda: 0]) == digest_values([lambda: 1])


def test_equal_parameters_have_equal_digests():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert digest_values(dict(one.named_parameters())) != digest_values(dict(two.named_parameters()))
    two.load_state_dict(one.state_dict())
    assert digest_values(dict(one.named_parameters())) == digest_values(dict(two.named_parameters()))


def test_modules_are_seen_only_between_start_and_stop():
    model = nn.Sequential(nn.Linear(2, 2))
    watch = ModuleWatch(model)
    with watch.attached():
        model(torch.ones(1, 2))
        assert watch.stop() == ()
        watch.start()
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert [(output.name, output.call) for output in watch.stop()] == [
            ("0", 0),
            ("", 0),
            ("0", 1),
            ("", 1),
        ]
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


def test_a_module_that_fails_does_not_confuse_the_place():
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.after = Fails(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.fails(x)
            except ValueError:
                return self.after(x)

    watch = ModuleWatch(Catches())
    with watch.attached():
        watch.start()
        watch.model(torch.ones(1))
        assert [output.name for output in watch.stop()] == ["after", ""] and watch.place == ""


def test_nested_outputs_count_all_floating_tensors():
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"a": x, "b": (2 * x, x.long(), torch.complex(x, x))}

    watch = ModuleWatch(Nested())
    with watch.attached():
        watch.start()
        watch.model(torch.ones(3))
        output = watch.stop()[0]
    assert (output.total, output.square, output.count) == (3 + 6 + 6, 3 + 12 + 6, 3 + 3 + 6)


def test_only_less_precise_results_of_precise_values_are_casts():
    with CastWatch(torch.float64) as watch:
        torch.ones(2, dtype=torch.float64) * 2
        torch.arange(3).float() + 1  # never was float64
        torch.ones(2, dtype=torch.float64).gt(0)
    assert not watch.casts
    with watch:
        torch.ones(2, dtype=torch.float64).half()
        torch.ones(3, dtype=torch.float64).half()
    assert [cast.dtype for cast in watch.casts] == ["float16"]
