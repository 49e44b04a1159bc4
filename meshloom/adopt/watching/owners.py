"""A class of the user's whose methods train, as plain names and statements.

trainer = Trainer(net, lr=0.1)      the statements of __init__, with the arguments' names: model = net; optimizer = SGD(model.parameters(), lr=0.1)
trainer.fit(3)                      the statements of fit, with model for self.model
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.adopt.watching.inlining import Part, arguments_of, can_rename, part, replacements
from meshloom.adopt.watching.passes import SeenFrame
from meshloom.adopt.watching.source import (
    PythonSource,
    Replacement,
    bound,
    calls,
    is_docstring,
    method,
    used,
)

OBJECT = "trainer"  # the name of one that the script gives none


class NotInlinedError(Exception):
    """Why an object cannot be taken apart, in words that go on from "the loop runs in a method of ...":"""


@dataclass(frozen=True)
class OwnClass:
    """A class of the user's. written: its file; node: its definition there."""

    kind: type
    written: PythonSource
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return _methods(self.node)

    @property
    def globals(self) -> Mapping[str, Any]:
        """Of its file."""
        return next(each.__globals__ for each in _functions(self.kind))


@dataclass(frozen=True)
class Owner:
    """sources: the files of its classes, with plain names for attributes. lineage: the class and its base classes, in the
    order in which methods are looked up. made: the call that makes the object, in a function of `frame`. names: of attributes
    and methods."""

    value: Any
    sources: Mapping[Path, PythonSource]
    lineage: list[OwnClass]
    made: ast.Call
    frame: int
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def class_names(self) -> list[str]:
        return [each.node.name for each in self.lineage]

    def methods_in(self, names: Collection[str]) -> list[ast.FunctionDef]:
        """Its methods that are called by these plain names, and those that they call."""
        methods: dict[str, ast.FunctionDef] = {}
        for each in reversed(self.lineage):
            methods |= _methods(_class_in(self.sources[each.written.path], each.node.name))
        methods = {name: each for name, each in methods.items() if self.names.get(name) == name}
        wanted, found = set(names), list[ast.FunctionDef]()
        while new := [each for name, each in methods.items() if name in wanted and each not in found]:
            found = [*new, *found]
            wanted |= set[str]().union(*(used(each) for each in new))
        return found

    def source_of(self, method: ast.FunctionDef) -> PythonSource:
        """The one of `sources` that a method of `methods_in` is in."""
        return next(
            each for each in self.sources.values() if any(node is method for node in ast.walk(each.tree))
        )

    def written(self, source: PythonSource) -> PythonSource | None:
        """The file as it is; None where it is none of `sources`."""
        return next(
            (each.written for each in self.lineage if source is self.sources[each.written.path]), None
        )

    def as_function(self, method: ast.FunctionDef, edits: Sequence[Replacement]) -> str:
        """The text of a method as a function of its other arguments, with an empty line behind."""
        return re.sub(r"\(self(, *)?", "(", self.source_of(method).statement(method, edits), count=1) + "\n"

    def is_made_by(self, node: ast.AST) -> bool:
        """Whether the object is made within a statement; by its place, since the file may have been read anew."""
        return any(self._is_made(each) for each in calls(node))

    def _is_made(self, call: ast.Call) -> bool:
        place = (self.made.lineno, self.made.col_offset)
        return (call.lineno, call.col_offset) == place and ast.unparse(call.func) == ast.unparse(
            self.made.func
        )

    def construction(self, source: PythonSource, node: ast.stmt, frame: SeenFrame) -> list[Part]:
        """The statements of `__init__` for the call in `node`, which is of `source`. frame: whose it is; its values gain
        those of the constructor's names. Raises `NotInlinedError`."""
        call = next(each for each in calls(node) if self._is_made(each))
        frame.add({name: each for name, each in self._values(frame).items() if name in self.names.values()})
        return self._constructed(0, source, call, node, frame, {})

    def _values(self, frame: SeenFrame) -> dict[str, Any]:
        return {self.names[name]: each for name, each in vars(self.value).items() if name in self.names}

    def _constructed(
        self, first: int, source: PythonSource, call: ast.Call, node: ast.stmt, frame: SeenFrame, outer: Mapping[str, str]
    ) -> list[Part]:  # fmt: skip
        """Of the `__init__` of the first class from place `first` on that has one, for a call in `node`. outer: names of the `__init__` that
        calls it, where they differ outside."""
        found = next(((place, each) for place, each in enumerate(self.lineage) if place >= first and "__init__" in each.methods), None)  # fmt: skip
        if found is None:
            return []
        place, own_class = found
        constructor, written = own_class.methods["__init__"], own_class.written
        values = _locals_at_end(own_class.kind, frame)
        known = frame.globals | frame.values | (_locals_at_end(self.lineage[first - 1].kind, frame) if first else {})  # fmt: skip
        given = dict(arguments_of(source, call, written, constructor, known) or [])
        if first:
            given = {name: _text_plain(text, self.names, outer) for name, text in given.items()}
        rebound = set[str]().union(*(bound(each) for each in constructor.body))
        own = rebound | set(given)
        missing = {each.arg for each in constructor.args.args[1:]} - set(given)
        if missing or any(isinstance(each, ast.Return) for each in ast.walk(constructor)):
            raise NotInlinedError("whose __init__ takes *arguments, is given several **arguments, or returns early")  # fmt: skip
        locals_of = {name: self._name(name, frame) for name in sorted(own)}
        locals_of |= {
            name: text for name, text in given.items() if text.isidentifier() and name not in rebound
        }
        if not can_rename(constructor.body, locals_of):
            raise NotInlinedError("whose __init__ defines functions of the same names")
        frame.add({new: values[name] for name, new in locals_of.items() if name in values})
        parts = [
            part(source, node, f"{locals_of[name]} = {text}")
            for name, text in given.items()
            if locals_of[name] != text
        ]
        for each in constructor.body:
            if is_docstring(each):
                continue
            if (above := _call_of_base(each)) is not None:
                parts += self._constructed(place + 1, written, above, each, frame, locals_of)
                continue
            if "super" in used(each):
                raise NotInlinedError("whose __init__ uses super() for more than super().__init__(...)")
            text = written.statement(each, _plain(each, self.names, locals_of))
            inner, made = part(written, each, text)
            if not _is_itself(made):
                parts.append((inner, made))
        return parts

    def _name(self, name: str, frame: SeenFrame) -> str:
        """The name that one of `__init__` has outside."""
        taken = name in frame.values or name in frame.globals
        return f"{OBJECT}_{name}" if taken and name not in self.names.values() else name


def _locals_at_end(kind: type, frame: SeenFrame) -> dict[str, Any]:
    """Of the `__init__` of a class, as it returned."""
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    return frame.made.get(code, {}) if code is not None else {}


def owner_of(frames: Sequence[SeenFrame], known: dict[Path, PythonSource]) -> Owner | None:
    """The object whose methods lead to `backward()`, taken apart: its class's file in `known` is the one with plain names, and
    the frames' values have its attributes; so are those of its base classes. None where there is none. Raises `NotInlinedError`."""
    inside = [index for index, each in enumerate(frames) if each.owner is not None]
    if not inside:
        return None
    for each in frames:
        each.forget_added()  # by an earlier call: they would be other things of the same names
    value, kind = frames[inside[0]].owner, type(frames[inside[0]].owner)
    if any(frames[each].owner is not value for each in inside):
        raise NotInlinedError("which calls those of another object")
    lineage = _lineage(kind, frames[0].path.parent)
    methods: dict[str, ast.FunctionDef] = {}
    for each in reversed(lineage):
        methods |= each.methods
    if "__init__" not in methods or any(frames[each].function not in methods for each in inside):
        raise NotInlinedError("which has no __init__ of its own")
    index, made = _made(frames[: inside[0]], kind, value)
    paths = list(dict.fromkeys(each.written.path for each in lineage))
    flat = [known[each].flattened for each in paths if each in known and known[each].flattened]
    names = flat[0] if flat else _names(lineage, frames[index], frames[inside[0]].attributes)
    for path in paths:
        if path not in known or not known[path].flattened:
            known[path] = _flattened([each for each in lineage if each.written.path == path], names)
    for each in [index, *inside]:
        attributes = frames[each].attributes if each != index else frames[inside[-1]].attributes
        plain = {names[name]: one for name, one in attributes.items() if name in names}
        frames[each].add(plain)
    return Owner(value, {each: known[each] for each in paths}, lineage, made, index, names)


def _flattened(classes: Sequence[OwnClass], names: Mapping[str, str]) -> PythonSource:
    """The file of these classes, with plain names in their methods but for `__init__`."""
    written = classes[0].written
    inner = [
        replacement
        for each in classes
        for name, method in each.methods.items()
        if name != "__init__"
        for replacement in _plain(method, names, {})
    ]
    source = PythonSource(written.path, written.replaced(inner))
    source.flattened.update(names)
    return source


def _lineage(kind: type, folder: Path) -> list[OwnClass]:
    """The classes of the user's that a class is made of. folder: of the script. Raises `NotInlinedError` for one of a library."""
    files: dict[Path, PythonSource] = {}
    found: list[OwnClass] = []
    for each in kind.__mro__:
        if each.__module__ in ("builtins", "abc", "typing"):
            continue
        path = next((Path(own.__code__.co_filename).resolve() for own in _functions(each)), None)
        if path is None and not found:
            raise NotInlinedError(
                f"which has no methods of its own ({each.__name__}), but those of its base classes"
            )
        path = path or found[-1].written.path
        if not path.is_relative_to(folder) or "site-packages" in path.parts:
            raise NotInlinedError(
                f"which has a base class of a library ({each.__name__} of {each.__module__})"
            )
        written = files[path] = files.get(path) or PythonSource.read(path)
        try:
            found.append(OwnClass(each, written, _class_in(written, each.__name__)))
        except StopIteration:
            raise NotInlinedError(
                f"which has a base class that is made in another way than `class {each.__name__}:`"
            ) from None
    return found


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The functions that are written in a class."""
    return (each for each in vars(kind).values() if isinstance(each, types.FunctionType))


def _class_in(source: PythonSource, name: str) -> ast.ClassDef:
    return next(
        each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef) and each.name == name
    )


def _methods(definition: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in definition.body if isinstance(each, ast.FunctionDef)}


def _call_of_base(node: ast.stmt) -> ast.Call | None:
    """`super().__init__(...)`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and method(node.value) == "__init__":
        inner = node.value.func
        assert isinstance(inner, ast.Attribute)
        if isinstance(inner.value, ast.Call) and method(inner.value) == "super":
            return node.value
    return None


def _text_plain(text: str, names: Mapping[str, str], locals_of: Mapping[str, str]) -> str:
    """An expression with plain names."""
    own = PythonSource(Path(), text)
    return own.replaced(_plain(own.tree, names, locals_of))


def _made(frames: Sequence[SeenFrame], kind: type, value: Any) -> tuple[int, ast.Call]:
    """The frame and the call that made the object: one with a name, or one in the statement on the way."""
    for index, frame in reversed(list(enumerate(frames))):
        source = PythonSource.read(frame.path)
        body = source.tree if frame.function == "<module>" else source.function(frame.function, frame.line)
        known = frame.globals | frame.values
        for node in ast.walk(body) if body is not None else []:
            named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and known.get(node.targets[0].id) is value  # fmt: skip
            here = isinstance(node, ast.Expr) and node.lineno <= frame.line <= (node.end_lineno or 0)
            for call in calls(node) if named or here else []:
                if isinstance(call.func, ast.Name) and known.get(call.func.id) is kind:
                    return index, call
    raise NotInlinedError("which is made in a way that is not known (trainer = Trainer(...) before the call)")


def _names(lineage: Sequence[OwnClass], frame: SeenFrame, attributes: Mapping[str, Any]) -> dict[str, str]:
    """A plain name of each attribute and method: its own, unless that is another thing in a method or where the object is made;
    such methods have none."""
    every = [(name, each) for one in lineage for name, each in one.methods.items()]
    methods = dict(reversed(every))
    stored = {each.attr for one in lineage for each in _of_self(one.node) if isinstance(each.ctx, ast.Store)}
    later = {
        each.attr
        for name, method in every
        if name != "__init__"
        for each in _of_self(method)
        if isinstance(each.ctx, ast.Store)
    }
    in_methods = set[str]().union(
        *(_locals(each) for name, each in every if name != "__init__" and not _is_static(each))
    )
    outside = frame.globals | frame.values
    found: dict[str, str] = {}
    for name in sorted((stored | set(attributes)) - set(methods)):
        value = attributes.get(name)
        same = (
            name in attributes
            and name in outside
            and (outside[name] is value or _equal(outside[name], value))
        )
        other = name in outside and not (same and name not in later)
        found[name] = f"{OBJECT}_{name}" if other or name in in_methods else name
    own = {name for name, each in methods.items() if not each.decorator_list and name not in stored}
    static = {
        name: f"{one.node.name}.{name}"
        for one in reversed(lineage)
        for name, each in one.methods.items()
        if _is_static(each)
    }
    return found | static | {name: name for name in own - in_methods - set(outside) - set(found.values())}


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, int | float | str) and one == other


def _locals(method: ast.FunctionDef) -> set[str]:
    """Names that a method binds, but for those of `model = self.model`."""
    names = {each.arg for each in [*method.args.args, *method.args.kwonlyargs]}
    for node in method.body:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        same = {
            ast.unparse(target)
            for target, value in pairs
            if ast.unparse(value) == f"self.{ast.unparse(target)}"
        }
        names |= bound(node) - same
    return names


def _of_self(node: ast.AST) -> Iterator[ast.Attribute]:
    return (
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    )


def _plain(
    node: ast.AST, names: Mapping[str, str], locals_of: Mapping[str, str]
) -> list[tuple[ast.AST, str]]:
    """Replacements of the attributes of `self`, and of names."""

    def new(each: ast.AST) -> str | None:
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            return names.get(each.attr)
        return locals_of.get(each.id) if isinstance(each, ast.Name) else None

    class Plain(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            text = new(node)
            return ast.Name(text, ast.Load()) if text else self.generic_visit(node)

    return replacements(node, new, Plain())


def _is_static(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) in ("staticmethod", "classmethod") for each in method.decorator_list)


def _is_itself(node: ast.stmt) -> bool:
    """`model = model`."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(node.value)
