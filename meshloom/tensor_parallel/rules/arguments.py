"""The arguments of a call by the names of its operator's schema, as rules for a rank's part need them."""

from __future__ import annotations

from typing import Any


def given_by_name(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives, by name; not those that it leaves to their defaults."""
    return dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | kwargs


def set_argument(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> Any:
    """(target, args, kwargs) with argument `name` of the operator's schema set to `value`."""
    names = [argument.name for argument in target._schema.arguments]
    place = names.index(name)
    if place < len(args):
        return target, (*args[:place], value, *args[place + 1 :]), kwargs
    return target, args, {**kwargs, name: value}


def to_output_shape(name: str) -> Any:
    """A `Local`: argument `name` is the shape of this rank's part of the result."""
    return lambda target, args, kwargs, sizes: set_argument(
        target, args, kwargs, name, tuple(sizes.outputs[0])
    )
