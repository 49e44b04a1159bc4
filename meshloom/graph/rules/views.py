"""Views and copies that move elements without changing them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.graph.rules.call import Call, Rule
from meshloom.graph.rules.factors import Concat, Dims, Factors, Product, Sizes, Term

_FIRST = (frozenset({0}),)


def _labels(shape: Sequence[int], prefix: str = "d") -> tuple[list[Term], dict[str, int]]:
    names: list[Term] = [f"{prefix}{place}" for place in range(len(shape))]
    return names, {f"{prefix}{place}": size for place, size in enumerate(shape)}


def reshaped(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of a tensor and of its reshape in labels that both are made of, where their boundaries agree.

    >>> reshaped((2, 12), (2, 3, 4))[:2]
    (('r0', Product(parts=('r1', 'r2'))), ('r0', 'r1', 'r2'))
    >>> reshaped((4, 6), (6, 4))[:2]
    ((None, None), (None, None))
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    broken_left, broken_right = set[int](), set[int]()
    sizes: dict[str, int] = {}
    if 0 in (*before, *after):
        return (None,) * len(before), (None,) * len(after), {}
    i = j = 0
    a = b = 1  # what is left of the dims i and j
    while True:
        while a == 1 and i < len(before):
            a, i = before[i], i + 1
        while b == 1 and j < len(after):
            b, j = after[j], j + 1
        if a == 1 and b == 1:
            break
        step = math.gcd(a, b) if (a % b == 0 or b % a == 0) else 0
        if not step:
            # Boundaries do not nest: whole, until both are at a boundary again.
            broken_left.add(i - 1)
            broken_right.add(j - 1)
            while a != b and (i < len(before) or j < len(after)):
                if a < b and i < len(before):
                    a, i = a * before[i], i + 1
                    broken_left.add(i - 1)
                elif j < len(after):
                    b, j = b * after[j], j + 1
                    broken_right.add(j - 1)
                else:
                    break
            a = b = 1
            continue
        name = f"r{len(sizes)}"
        sizes[name] = step
        left[i - 1].append(name)
        right[j - 1].append(name)
        a, b = a // step, b // step
    return _terms(left, broken_left), _terms(right, broken_right), sizes


def _terms(labels: list[list[str]], broken: set[int]) -> Dims:
    return tuple(
        None if place in broken or not names else names[0] if len(names) == 1 else Product(tuple(names)) for place, names in enumerate(labels)
    )


def set_argument(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> Any:
    names = [argument.name for argument in target._schema.arguments]
    place = names.index(name)
    if place < len(args):
        return target, (*args[:place], value, *args[place + 1 :]), kwargs
    return target, args, {**kwargs, name: value}


def _to_output_shape(name: str) -> Any:
    return lambda target, args, kwargs, sizes: set_argument(target, args, kwargs, name, tuple(sizes.outputs[0]))


def _reshape(name: str | None) -> Rule:
    def rule(call: Call) -> Factors | None:
        left, right, sizes = reshaped(call.operands[0].shape, call.outputs[0].shape)
        local = _to_output_shape(name) if name else None
        others: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.operands[1:])
        return Factors(operands=(left, *others), outputs=(right,), sizes=sizes, linear=_FIRST, local=local)

    return rule


def _as_other(name: str) -> Rule:
    """view_as, reshape_as, expand_as: of the other tensor only the shape counts."""
    inner = _expand if name == "expand" else _reshape(None)

    def rule(call: Call) -> Factors | None:
        factors = inner(call)
        if factors is None:
            return None

        def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sizes) -> Any:
            return getattr(torch.ops.aten, name).default, (args[0], tuple(sizes.outputs[0])), {}

        return dataclasses.replace(factors, local=local, operands=(factors.operands[0], (None,) * len(call.operands[1].shape)))

    return rule


def _unflatten(call: Call) -> Factors | None:
    left, right, sizes = reshaped(call.operands[0].shape, call.outputs[0].shape)
    dim = call.dim("dim", len(call.operands[0].shape))
    count = len(call.arguments["sizes"])

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return set_argument(target, args, kwargs, "sizes", tuple(here.outputs[0][dim : dim + count]))

    return Factors(operands=(left,), outputs=(right,), sizes=sizes, linear=_FIRST, local=local)


def _expand(call: Call) -> Factors | None:
    before, after = call.operands[0].shape, call.outputs[0].shape
    names, sizes = _labels(after)
    lead = len(after) - len(before)
    operand = tuple(None if size == 1 and after[lead + place] != 1 else names[lead + place] for place, size in enumerate(before))
    others: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.operands[1:])
    return Factors(
        operands=(operand, *others), outputs=(tuple(names),), sizes=sizes, linear=_FIRST,
        local=_to_output_shape("size") if call.name == "expand" else None,
    )  # fmt: skip


def _permuted(order: Any) -> Rule:
    def rule(call: Call) -> Factors | None:
        names, sizes = _labels(call.operands[0].shape)
        return Factors(operands=(tuple(names),), outputs=(tuple(names[place] for place in order(call, len(names))),), sizes=sizes, linear=_FIRST)

    return rule


def _transposed(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    first, second = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
    if ndim:
        one, other = call.dim(first, ndim), call.dim(second, ndim)
        order[one], order[other] = order[other], order[one]
    return order


def _moved(call: Call, ndim: int) -> list[int]:
    source, destination = call.dims("source", ndim), call.dims("destination", ndim)
    order = [-1] * ndim
    for one, other in zip(source, destination, strict=True):
        order[other] = one
    rest = iter(each for each in range(ndim) if each not in source)
    return [each if each >= 0 else next(rest) for each in order]


def _squeeze(call: Call) -> Factors | None:
    """A part may have a single index where the whole has several, so the dims that go are named."""
    shape = call.operands[0].shape
    left, right, sizes = reshaped(shape, call.outputs[0].shape)
    gone = tuple(place for place in call.dims("dim", len(shape)) if shape[place] == 1)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return torch.ops.aten.squeeze.dims, (args[0], gone), {}

    return Factors(operands=(left,), outputs=(right,), sizes=sizes, linear=_FIRST, local=local)


def _select(call: Call) -> Factors | None:
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    return Factors(
        operands=(tuple(names),), outputs=(tuple(names[:dim] + names[dim + 1 :]),), sizes=sizes, whole=frozenset({f"d{dim}"}), linear=_FIRST
    )


def _unbind(call: Call) -> Factors | None:
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    out = tuple(names[:dim] + names[dim + 1 :])
    return Factors(operands=(tuple(names),), outputs=(out,) * len(call.outputs), sizes=sizes, whole=frozenset({f"d{dim}"}), linear=_FIRST)


def _split(call: Call) -> Factors | None:
    """chunk, split, split_with_sizes, tensor_split: a dim becomes one after another."""
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    parts = [f"s{place}" for place in range(len(call.outputs))]
    sizes.update({part: output.shape[dim] for part, output in zip(parts, call.outputs, strict=True)})
    operand: list[Term] = list(names)
    operand[dim] = Concat(tuple(parts)) if len(parts) > 1 else parts[0]
    sizes.pop(f"d{dim}")
    outputs: tuple[Dims, ...] = tuple(tuple(part if place == dim else name for place, name in enumerate(names)) for part in parts)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        if all(here.here[part] == here.whole[part] for part in parts):
            return target, args, kwargs
        return torch.ops.aten.split_with_sizes.default, (args[0], tuple(here.here[part] for part in parts), dim), {}

    return Factors(operands=(tuple(operand),), outputs=outputs, sizes=sizes, linear=_FIRST, local=local)


def _slice(call: Call) -> Factors | None:
    """x[..., start:end]: of before | kept | after, the middle."""
    shape, out = call.operands[0].shape, call.outputs[0].shape
    names, sizes = _labels(shape)
    dim = call.dim("dim", len(names))
    step = call.arguments.get("step", 1) if call.name == "slice" else 1
    kept = out[dim]
    result: list[Term] = list(names)
    operand: list[Term] = list(names)
    if kept == shape[dim]:
        return Factors(operands=(tuple(operand),), outputs=(tuple(result),), sizes=sizes, linear=_FIRST, local=_all_of(dim))
    start: Any = call.arguments.get("start") or 0
    if not isinstance(start, int):
        return None
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    result[dim] = "kept"
    sizes.pop(f"d{dim}")
    if step != 1:
        sizes["kept"] = kept
        if shape[dim] != kept * step or start >= step:
            operand[dim] = None
            return Factors(operands=(tuple(operand),), outputs=(tuple(result),), sizes=sizes, whole=frozenset({"kept"}), linear=_FIRST)
        sizes["step"] = step
        operand[dim] = Product(("kept", "step"))
        return Factors(operands=(tuple(operand),), outputs=(tuple(result),), sizes=sizes, whole=frozenset({"step"}), linear=_FIRST)
    parts = {"before": start, "kept": kept, "after": shape[dim] - start - kept}
    sizes.update(parts)
    operand[dim] = Concat(tuple(part for part, size in parts.items() if size or part == "kept"))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        if all(here.here[part] == here.whole[part] for part in parts):
            return target, args, kwargs
        begin = here.here["before"]
        return torch.ops.aten.slice.Tensor, (args[0], dim, begin, begin + here.here["kept"]), {}

    return Factors(operands=(tuple(operand),), outputs=(tuple(result),), sizes=sizes, linear=_FIRST, local=local)


def _all_of(dim: int) -> Any:
    """A slice that takes all of a dim takes all of a part of it."""

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return torch.ops.aten.slice.Tensor, (args[0], dim, 0, here.outputs[0][dim]), {}

    return local


def _cat(call: Call) -> Factors | None:
    ndim = len(call.outputs[0].shape)
    operands = [each for each in call.operands if len(each.shape) == ndim]
    if len(operands) != len(call.operands):  # empty tensors of another shape are let through by torch
        return None
    dim = call.dim("dim", ndim)
    names, sizes = _labels(call.outputs[0].shape)
    sizes.pop(f"d{dim}")
    sizes.update({f"c{place}": each.shape[dim] for place, each in enumerate(operands)})
    rows: list[Dims] = [tuple(f"c{place}" if each == dim else name for each, name in enumerate(names)) for place in range(len(operands))]
    out: list[Term] = list(names)
    out[dim] = Concat(tuple(f"c{place}" for place in range(len(operands)))) if len(operands) > 1 else "c0"
    return Factors(operands=tuple(rows), outputs=(tuple(out),), sizes=sizes, linear=(frozenset(range(len(operands))),))


def _stack(call: Call) -> Factors | None:
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names) + 1)
    return Factors(
        operands=(tuple(names),) * len(call.operands),
        outputs=((*names[:dim], None, *names[dim:]),),
        sizes=sizes,
        linear=(frozenset(range(len(call.operands))),),
    )


def _broadcast_tensors(call: Call) -> Factors | None:
    """Every tensor stretched to the shape that all of them make together."""
    names, sizes = _labels(call.outputs[0].shape)
    if len(call.outputs) != len(call.operands):
        return None
    rows: list[Dims] = []
    for operand in call.operands:
        shown = names[len(names) - len(operand.shape) :]
        rows.append(tuple(None if size == 1 and sizes[str(name)] != 1 else name for name, size in zip(shown, operand.shape, strict=True)))
    return Factors(operands=tuple(rows), outputs=(tuple(names),) * len(call.outputs), sizes=sizes, linear=(frozenset(range(len(rows))),))


def _pixel_shuffle(call: Call) -> Factors | None:
    """x [*, (c r s), h, w] -> [*, c, (h r), (w s)]; pixel_unshuffle is the way back."""
    back = call.name == "pixel_unshuffle"
    fine, coarse = (call.operands[0], call.outputs[0]) if back else (call.outputs[0], call.operands[0])
    factor: int = call.arguments["downscale_factor" if back else "upscale_factor"]
    lead: list[Term] = [f"b{place}" for place in range(len(fine.shape) - 3)]
    sizes = {f"b{place}": fine.shape[place] for place in range(len(lead))}
    sizes |= {"c": fine.shape[-3], "h": coarse.shape[-2], "w": coarse.shape[-1], "r": factor, "s": factor}
    packed: Dims = (*lead, Product(("c", "r", "s")), "h", "w")
    spread: Dims = (*lead, "c", Product(("h", "r")), Product(("w", "s")))
    one, other = (spread, packed) if back else (packed, spread)
    return Factors(operands=(one,), outputs=(other,), sizes=sizes, whole=frozenset({"r", "s"}), filled=frozenset(sizes), linear=_FIRST)


def _im2col(call: Call) -> Factors | None:
    """x [b, c, space] -> columns [b, (c kernel), windows]; col2im is the way back."""
    x, out = call.operands[0].shape, call.outputs[0].shape
    image, columns = (out, x) if call.name == "col2im" else (x, out)
    lead: list[Term] = ["b"] if len(columns) == 3 else []
    channels = image[-3]
    sizes = {"c": channels, "k": columns[-2] // channels} | ({"b": image[0]} if lead else {})
    one: Dims = (*lead, "c", None, None)
    other: Dims = (*lead, Product(("c", "k")), None)
    one, other = (other, one) if call.name == "col2im" else (one, other)
    return Factors(operands=(one,), outputs=(other,), sizes=sizes, whole=frozenset({"k"}), filled=frozenset({"b", "c"} & sizes.keys()), linear=_FIRST)


def _repeat_interleave(call: Call) -> Factors | None:
    if call.arguments.get("dim") is None or not isinstance(call.arguments.get("repeats"), int):
        return None
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    sizes["repeats"] = call.arguments["repeats"]
    out: list[Term] = list(names)
    out[dim] = Product((f"d{dim}", "repeats"))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return set_argument(target, args, {key: each for key, each in kwargs.items() if key != "output_size"}, "repeats", here.here["repeats"])

    return Factors(operands=(tuple(names),), outputs=(tuple(out),), sizes=sizes, linear=_FIRST, local=local)


def _repeat(call: Call) -> Factors | None:
    names, sizes = _labels(call.operands[0].shape)
    repeats: tuple[int, ...] = call.arguments["repeats"]
    lead = len(repeats) - len(names)
    out: list[Term] = []
    for place, count in enumerate(repeats):
        name = names[place - lead] if place >= lead else None
        label = f"t{place}"
        sizes[label] = count
        out.append(name if count == 1 and name is not None else label if name is None else Product((label, str(name))))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return set_argument(target, args, kwargs, "repeats", tuple(here.here[f"t{place}"] for place in range(len(repeats))))

    return Factors(operands=(tuple(names),), outputs=(tuple(out),), sizes=sizes, linear=_FIRST, local=local)


def _pad(call: Call) -> Factors | None:
    """Padded dims are before | kept | after; only what is kept may be cut."""
    pad: tuple[int, ...] = call.arguments["pad"]
    if call.name == "pad" and call.arguments.get("mode", "constant") != "constant":
        count = len(pad) // 2
        names, sizes = _labels(call.operands[0].shape)
        keep = len(names) - count
        return Factors(
            operands=((*names[:keep], *[None] * count),), outputs=((*names[:keep], *[None] * count),),
            sizes={f"d{place}": sizes[f"d{place}"] for place in range(keep)}, linear=_FIRST,
        )  # fmt: skip
    names, sizes = _labels(call.operands[0].shape)
    out: list[Term] = list(names)
    operand: list[Term] = list(names)
    whole: set[str] = set()
    for number in range(len(pad) // 2):
        before, after = pad[2 * number : 2 * number + 2]
        dim = len(names) - 1 - number
        if before < 0 or after < 0:
            operand[dim] = out[dim] = None
            sizes.pop(f"d{dim}")
        elif before or after:
            parts: list[Term] = [f"f{dim}"] * bool(before) + [names[dim]] + [f"a{dim}"] * bool(after)
            sizes.update({f"f{dim}": before, f"a{dim}": after})
            whole |= {f"f{dim}", f"a{dim}"}
            out[dim] = Concat(tuple(parts))
    linear = _FIRST if not call.arguments.get("value") else ()
    return Factors(operands=(tuple(operand),), outputs=(tuple(out),), sizes=sizes, whole=frozenset(whole), linear=linear)


def _one_dim_whole(*names_of_dims: str) -> Rule:
    """flip, roll: those dims stay whole."""

    def rule(call: Call) -> Factors | None:
        names, sizes = _labels(call.operands[0].shape)
        found = [dim for name in names_of_dims for dim in call.dims(name, len(names))]
        return Factors(operands=(tuple(names),), outputs=(tuple(names),), sizes=sizes, whole=frozenset(f"d{dim}" for dim in found), linear=_FIRST)

    return rule


def _stays(call: Call) -> Factors | None:
    """The same shape: contiguous, to, clone, detach."""
    operand = call.operands[0]
    names, sizes = _labels(operand.shape)
    same = operand.meta.dtype == call.outputs[0].dtype
    others: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.operands[1:])
    return Factors(operands=(tuple(names), *others), outputs=(tuple(names),), sizes=sizes, linear=_FIRST if same else ())


def _scatter_into(call: Call) -> Factors | None:
    """slice_scatter, select_scatter: the dim that is written into stays whole."""
    names, sizes = _labels(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    source = call.operands[1]
    rows: list[Term] = list(names) if call.name == "slice_scatter" else names[:dim] + names[dim + 1 :]
    if call.name == "slice_scatter" and source.shape[dim] != call.operands[0].shape[dim]:
        rows[dim] = None
    return Factors(
        operands=(tuple(names), tuple(rows)), outputs=(tuple(names),), sizes=sizes, whole=frozenset({f"d{dim}"}), linear=(frozenset({0, 1}),)
    )


def _diagonal(call: Call) -> Factors | None:
    names, sizes = _labels(call.operands[0].shape)
    one, other = call.dim("dim1", len(names)), call.dim("dim2", len(names))
    rest = [name for place, name in enumerate(names) if place not in (one, other)]
    return Factors(operands=(tuple(names),), outputs=((*rest, None),), sizes=sizes, whole=frozenset({f"d{one}", f"d{other}"}), linear=_FIRST)


def _constructor(call: Call) -> Factors | None:
    """Filled with one value: any part of it is filled with it, too."""
    names, sizes = _labels(call.outputs[0].shape)
    return Factors(operands=(), outputs=(tuple(names),), sizes=sizes, local=_to_output_shape("size"))


def _constructor_like(call: Call) -> Factors | None:
    """The same, with the shape given (`new_zeros`) or that of the operand (`zeros_like`)."""
    names, sizes = _labels(call.outputs[0].shape)
    if call.name.endswith("_like"):
        return Factors(operands=(tuple(names),), outputs=(tuple(names),), sizes=sizes)
    other: Dims = (None,) * len(call.operands[0].shape)
    return Factors(operands=(other,), outputs=(tuple(names),), sizes=sizes, local=_to_output_shape("size"))


VIEWS: dict[str, Rule] = {
    "view": _reshape("size"),
    "_unsafe_view": _reshape("size"),
    "reshape": _reshape("shape"),
    "flatten": _reshape(None),
    "ravel": _reshape(None),
    "unsqueeze": _reshape(None),
    "squeeze": _squeeze,
    "unflatten": _unflatten,
    "expand": _expand,
    "expand_as": _as_other("expand"),
    "view_as": _as_other("reshape"),
    "reshape_as": _as_other("reshape"),
    "permute": _permuted(lambda call, ndim: call.dims("dims", ndim)),
    "transpose": _permuted(_transposed),
    "swapaxes": _permuted(_transposed),
    "swapdims": _permuted(_transposed),
    "movedim": _permuted(_moved),
    "t": _permuted(lambda call, ndim: range(ndim)[::-1]),
    "numpy_T": _permuted(lambda call, ndim: range(ndim)[::-1]),
    "mT": _permuted(lambda call, ndim: [*range(ndim - 2), ndim - 1, ndim - 2]),
    "select": _select,
    "unbind": _unbind,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "tensor_split": _split,
    "slice": _slice,
    "narrow": _slice,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "broadcast_tensors": _broadcast_tensors,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_shuffle,
    "im2col": _im2col,
    "col2im": _im2col,
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "pad": _pad,
    "flip": _one_dim_whole("dims"),
    "roll": _one_dim_whole("dims"),
    "slice_scatter": _scatter_into,
    "select_scatter": _scatter_into,
    "diagonal": _diagonal,
    **dict.fromkeys(("contiguous", "clone", "alias", "detach", "to", "_to_copy", "lift_fresh_copy", "type_as"), _stays),
    **dict.fromkeys(("zeros", "ones", "full", "empty"), _constructor),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"), _constructor_like),
}
