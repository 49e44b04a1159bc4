"""What forwards leave in plain attributes of modules, put back when a step is run once more to measure its rounding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

Attributes = list[dict[str, Any]]  # of each module


class PlainAttributes:
    """Numbers, and tensors without gradients, in attributes of a model's own modules."""

    def __init__(self, model: nn.Module) -> None:
        own = [each for each in model.modules() if not type(each).__module__.startswith("torch.")]
        self._modules = [
            (each, {name for name, value in vars(each).items() if not _is_left(value)}) for each in own
        ]

    def now(self) -> Attributes:
        """What is there. Forwards may write to it, so tensors are copies."""
        return [
            {
                name: _copied(value)
                for name, value in vars(module).items()
                if name not in others and _is_left(value)
            }
            for module, others in self._modules
        ]

    def put(self, found: Attributes) -> None:
        """What `now` has given; attributes that came later are gone."""
        for (module, others), values in zip(self._modules, found, strict=True):
            for name, value in list(vars(module).items()):
                if name not in others and name not in values and _is_left(value):
                    del vars(module)[name]
            vars(module).update({name: _copied(value) for name, value in values.items()})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _is_left(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_left, value))
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return value is None or type(value) in (int, float) or (is_tensor and not value.requires_grad)
