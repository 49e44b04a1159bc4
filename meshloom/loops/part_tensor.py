"""A parameter, or a gradient, of which this rank has a part: torch's functions give what one device gives, or refuse.

elementwise            on the part; what is not a part is of the whole, and its range is taken
reduced to a number    over the ranks, with the gradient of one device
random fills           draw the whole on each rank and keep the part, so that generators stay alike
shape, size, numel     of the whole
all else               one sentence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as of_optimizers  # pyright: ignore[reportPrivateUsage]
from torch.utils._foreach_utils import _foreach_supported_types as of_norms  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves

from meshloom.loops.loop_lines import say_once
from meshloom.loops.part_numbers import EXTREMES, NORMS, SUMS, TRUTHS, foreach_norm, number_of, over_ranks
from meshloom.loops.part_place import TensorPlace

# A context in which parts are plain tensors of this rank.
AsPlain: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_GRAD, _DATA = cast(Any, Tensor.grad), cast(Any, Tensor.data)
# Names of functions without underscores: `add` is `add_` and `__add__`, too.
ELEMENTWISE = {
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "atan2", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or", "and",
    "or", "xor", "invert", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "copy", "copysign", "cos", "cosh",
    "cpu", "cuda", "deg2rad", "detach", "div", "divide", "double", "empty_like", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "fill", "float", "floor", "floordiv", "floor_divide", "fmod", "frac", "full_like", "ge", "greater", "gt", "half", "hypot", "iadd", "imul", "isub",
    "itruediv", "isclose", "isfinite", "isinf", "isnan", "ldexp", "le", "lerp", "less", "lgamma", "log", "log10", "log1p", "log2",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mul",
    "multiply", "nan_to_num", "ne", "neg", "negative", "nextafter", "not_equal", "ones_like", "pos", "positive", "pow", "radd", "rdiv",
    "reciprocal", "relu", "remainder", "requires_grad", "rmul", "round", "rpow", "rsqrt", "rsub", "rtruediv", "sgn", "sigmoid", "sign",
    "signbit", "silu", "sin", "sinh", "softplus", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to", "true_divide",
    "truediv", "trunc", "type", "where", "xlogy", "zero", "zeros_like",
}  # fmt: skip
# What only asks, or makes something else.
ASKS = {
    "is_complex", "is_floating_point", "is_signed", "is_inference", "is_contiguous", "is_pinned", "is_conj", "is_neg",
    "element_size", "get_device", "stride", "storage_offset", "backward", "retain_grad", "new_zeros", "new_ones", "new_empty", "new_full",
    "has_names", "is_shared", "register_post_accumulate_grad_hook", "__hash__", "__format__", "__repr__", "__str__",
    "is_distributed", "_has_compatible_shallow_copy_type", "_is_view", "is_tensor", "is_storage", "result_type", "can_cast",
    "promote_types",
}  # fmt: skip
PROPERTIES = {
    "device", "dtype", "layout", "requires_grad", "is_leaf", "grad_fn", "output_nr", "_version", "names", "is_cuda", "is_cpu", "is_mps",
    "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_xpu", "is_ipu", "is_mtia", "is_xla", "is_nested",
    "itemsize", "_backward_hooks", "_base", "retains_grad", "_post_accumulate_grad_hooks", "is_vulkan", "is_maia",
}  # fmt: skip
RANDOM = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}
RANDOM_LIKE = {"rand_like", "randint_like", "randn_like"}
OF_ITS_SHAPE = {"expand", "expand_as", "reshape", "reshape_as", "view", "view_as"}


class PartTensor(Tensor):
    """place: which part of which tensor it is."""

    place: TensorPlace

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """This rank's part of the gradient."""
        with AsPlain():
            found = _GRAD.__get__(self)
            if type(found) is Tensor:  # as autograd has left it
                found.__class__ = PartTensor
                cast(PartTensor, found).place = self.place
            return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with AsPlain():
            local = value if value is None else _own(self, value).as_subclass(Tensor)
            _GRAD.__set__(self, local)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        with AsPlain():
            _GRAD.__set__(self, None)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The part without its history; changes of it are seen by the next forward, as those under `no_grad` are."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with AsPlain():
            _DATA.__set__(self, _own(self, value).as_subclass(Tensor).detach())
            torch.autograd.graph.increment_version(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"{self.place.refusal('Part')!s}".split(". ml.whole", maxsplit=1)[0]
            + f"\n{plain(self.detach())!r}"
        )

    def __len__(self) -> int:
        return self.place.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> PartTensor:
        if not self.is_leaf:
            raise self.place.refusal("copy.deepcopy in a graph")
        with AsPlain():
            copied = made_part(self.detach().clone(), self.place, type(self))
        memo[id(self)] = copied
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.place.refusal("Pickling")

    # the protocol of torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from meshloom.comm.torch.checkpoint_chunks import written

        return written(fqn, plain(self.detach()), self.place.own_start, self.place.shape)

    def __create_chunk_list__(self) -> list[Any]:
        from meshloom.comm.torch.checkpoint_chunks import box

        return box(self.place.own_start, self.place.own_shape)

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return plain(self.detach())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with AsPlain():
            return _call(func, args, dict(kwargs) if kwargs else {})


class PartParameter(PartTensor, nn.Parameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A parameter of a module."""


def plain(part: Tensor) -> Tensor:
    """The part as a plain tensor, with its graph."""
    with AsPlain():
        return part.as_subclass(Tensor)


def made_part(local: Tensor, place: TensorPlace, kind: type[PartTensor] = PartTensor) -> PartTensor:
    with AsPlain():
        part = local.as_subclass(kind)
    part.place = place
    return part


def whole_tensor(part: Tensor) -> Tensor:
    """All of it, on every rank of its group, detached; another tensor is whole already."""
    return part.place.whole_of(plain(part.detach())) if isinstance(part, PartTensor) else part.detach()


@cache
def take_as_plain() -> None:
    """torch's optimizers and norms take parts for tensors of which one call computes many, as they take plain ones."""
    for kinds in (of_optimizers, of_norms):
        kinds.extend([PartTensor, PartParameter])


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name.strip("_") in ELEMENTWISE:
        return _elementwise(name, func, args, kwargs)
    if name in ("__get__", "__set__", "__delete__"):
        return _property(name, func, args)
    if name in ASKS or (name == "new_tensor" and not isinstance(args[1], Tensor)):
        return func(*args, **kwargs)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _of_lists(name, func, args, kwargs)
    if func is torch.autograd.grad:
        return _gradients(func, args, kwargs)
    part = _first_part((*args, *kwargs.values()))
    place = part.place
    if name in ("dim", "ndimension"):
        return len(place.shape)
    if name in ("numel", "nelement"):
        return place.shape.numel()
    if name == "size":
        dims = args[1:] or tuple(kwargs.values())
        return place.shape[dims[0]] if dims and dims[0] is not None else place.shape
    if name in RANDOM or name in RANDOM_LIKE or getattr(func, "__module__", "") == "torch.nn.init":
        return _draw(name, func, part, args, kwargs)
    if name == "register_hook":
        return func(part, lambda gradient: args[1](made_part(gradient, place)))
    if name in OF_ITS_SHAPE and args[0] is part and _shape(args[1:] or tuple(kwargs.values())) == place.shape:
        return made_part(plain(part).view(place.own_shape), place)
    if args and args[0] is part and (name in NORMS or name in SUMS or name in EXTREMES or name in TRUTHS):
        others = [_own(part, each) if isinstance(each, Tensor) else each for each in args[1:]]
        result = number_of(name, plain(part), place, others, kwargs)
        if result is not None:
            return result
    raise place.refusal(name)


def _property(name: str, func: Callable[..., Any], args: Sequence[Any]) -> Any:
    asked, part = getattr(cast(Any, func).__self__, "__name__", "?"), args[0]
    if name == "__get__" and asked not in PROPERTIES:
        shape = part.place.shape
        of_whole = {"shape": shape, "ndim": len(shape), "nbytes": shape.numel() * part.element_size()}
        if asked not in of_whole:
            raise part.place.refusal(asked)
        return of_whole[asked]
    return func(*args)


def _elementwise(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    place, fits = _together(values)
    if place is None or not isinstance(kwargs.get("out"), PartTensor | None):
        raise _first_part(values).place.refusal(name)
    if not fits and name not in ("to", "type"):
        in_place = (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")
        aligned = _aligned(name, values, in_place)
        args, kwargs = aligned[: len(args)], dict(zip(kwargs, aligned[len(args) :], strict=True))
    result = func(*args, **kwargs)
    if isinstance(result, PartTensor | str) or result is args[0]:
        return result
    if not isinstance(result, Tensor):
        raise place.refusal(name)
    if result.shape != place.own_shape:
        raise place.refusal(f"{name} to {tuple(result.shape)}")
    return _named(result, place)


def _named(new: Tensor, place: TensorPlace) -> Tensor:
    """A tensor that nobody else has, as a part."""
    new.__class__ = PartTensor
    cast(PartTensor, new).place = place
    return new


def _together(values: Sequence[Any]) -> tuple[TensorPlace | None, bool]:
    """The place of the first part among them, and whether all others are parts of it, too, or numbers."""
    place, fits = None, True
    for each in values:
        if isinstance(each, PartTensor):
            if place is None:
                place = each.place
            elif each.place is not place:
                fits = False
        elif isinstance(each, Tensor) and each.dim():
            fits = False
    return place, fits


def _aligned(name: str, values: Sequence[Any], in_place: bool) -> list[Any]:
    """This rank's part of each tensor that is whole; in place, where the first is whole, all of the others."""
    part, first = _first_part(values), values[0]
    if in_place and not isinstance(first, PartTensor) and first.shape == part.place.shape:
        if torch.is_grad_enabled() and part.requires_grad:
            raise part.place.refusal(f"{name} into a whole tensor with a gradient")
        say_once(
            "a whole tensor is changed by parameters of which each rank has a part, such as an average that was made before the "
            "module was parallel: they are gathered each time. Made after it, it has parts, too."
        )
        return [whole_tensor(each) if isinstance(each, PartTensor) else each for each in values]
    return [_own(part, each) if isinstance(each, Tensor) else each for each in values]


def _own(part: PartTensor, other: Tensor) -> Tensor:
    if not isinstance(other, PartTensor):
        return part.place.own_of(other)
    if not part.place.is_as(other.place):
        raise part.place.refusal(f"A function of it and {other.place.name}")
    return other


def _draw(
    name: str, func: Callable[..., Any], part: PartTensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Fills or makes the whole, of which the part is kept."""
    whole = plain(part.detach()).new_empty(part.place.shape)
    drawn = func(
        *(whole if each is part else each for each in args),
        **{key: whole if each is part else each for key, each in kwargs.items()},
    )
    own = part.place.own_part(drawn)
    if name in RANDOM_LIKE:
        return made_part(own.clone(), part.place)
    with torch.no_grad():
        return part.copy_(own)


def _of_lists(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Functions of lists of tensors, as optimizers call them, on the parts."""
    of_tensors = [
        i for i, each in enumerate(args) if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)
    ]  # fmt: skip
    rows: list[Sequence[Any]] = list(zip(*(args[i] for i in of_tensors), strict=True))
    together = [_together(row) for row in rows]
    places = [place for place, _ in together]
    if name == "_foreach_norm":
        return foreach_norm(args[0], places, *args[1:], **kwargs)
    given = list(args)
    if not all(fits or place is None for place, fits in together):
        in_place = name.endswith("_")
        rows = [
            _aligned(name, row, in_place) if place else row for row, place in zip(rows, places, strict=True)
        ]
        for i, column in zip(of_tensors, zip(*rows, strict=True), strict=True):
            given[i] = list(column)
    results = func(*given, **kwargs)
    if name.startswith("_fused_"):  # which tells nobody
        torch.autograd.graph.increment_version(args[0])
    if name.startswith("_amp_foreach_"):  # what one rank finds, all know
        for group in dict.fromkeys(place.group for place in places if place):
            args[1].copy_(over_ranks(args[1], group, "max"))
    if name.endswith("_") or not isinstance(results, list | tuple) or len(results) != len(places):
        return results
    return [_named(each, place) if place else each for each, place in zip(results, places, strict=True)]


def _gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    inputs = [args[1]] if isinstance(args[1], Tensor) else args[1]
    return tuple(
        made_part(each, given.place) if each is not None and isinstance(given, PartTensor) else each
        for each, given in zip(func(*args, **kwargs), inputs, strict=True)
    )


def _shape(given: Sequence[Any]) -> torch.Size | None:
    first = given[0] if len(given) == 1 else given
    if isinstance(first, Tensor):
        return first.shape
    return (
        torch.Size(first)
        if isinstance(first, list | tuple) and all(isinstance(each, int) for each in first)
        else None
    )


def _first_part(values: Sequence[Any]) -> PartTensor:
    for each in values:
        if isinstance(each, PartTensor):
            return each
    return next(each for each in tree_leaves(list(values)) if isinstance(each, PartTensor))
