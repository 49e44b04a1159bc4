"""The way through a script from its first line to `backward()`, as one list of statements.

main():                       set-up       args = ...; model = ...; loader = ...
    for epoch in ...:         loop         scheduler.step()
        train(model, loader)  call         net = model
            for x, y in ...:  loop         out = net(x); loss = ...; loss.backward()
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshloom.adopt.watching.inlining import Part, arguments_of, single_statements
from meshloom.adopt.watching.modules import with_numbers_of_module
from meshloom.adopt.watching.owners import NotInlinedError, Owner, owner_of
from meshloom.adopt.watching.passes import SeenFrame
from meshloom.adopt.watching.source import PythonSource, bound, calls, method, used


@dataclass(frozen=True)
class Refusal:
    """What cannot be translated. line: of `file`. text: what it is, and what to do."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class UntranslatedError(Exception):
    """One `Refusal` or several."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("\n".join(map(str, refusals)))
        self.refusals = list(refusals)


@dataclass(frozen=True)
class Line:
    """A statement. frame: whose it is; depth: of how many loops of the way it is in. at: the line for messages. part_of: the
    statement of the file that stands for it and others."""

    source: PythonSource
    node: ast.stmt
    frame: int
    depth: int
    at: int
    part_of: Line | None = None

    @property
    def whole(self) -> Line:
        return self.part_of or self

    def refuse(self, text: str, node: ast.AST | None = None) -> UntranslatedError:
        line = getattr(node, "lineno", self.at) if self.at == self.node.lineno else self.at
        return UntranslatedError(Refusal(self.source.path.name, line, text))


@dataclass(frozen=True)
class Loop:
    """A loop on the way. depth: of the loops around it."""

    source: PythonSource
    node: ast.For | ast.While
    frame: int
    depth: int


@dataclass
class WayToBackward:
    """before: statements on the way, in order. loops: from the outermost. beside: statements in these loops that are not on
    the way, before or after. after: those behind the loops. contexts: `with` statements around `backward()` within the
    innermost loop. branches: `if` statements of which a branch was taken. end: the statement with `backward()`. owner: the object
    whose methods are on the way."""

    sources: list[PythonSource] = field(default_factory=list[PythonSource])
    before: list[Line] = field(default_factory=list[Line])
    loops: list[Loop] = field(default_factory=list[Loop])
    beside: list[Line] = field(default_factory=list[Line])
    after: list[Line] = field(default_factory=list[Line])
    contexts: list[Line] = field(default_factory=list[Line])
    branches: list[Line] = field(default_factory=list[Line])
    functions: list[ast.FunctionDef] = field(default_factory=list[ast.FunctionDef])
    end: Line | None = None
    owner: Owner | None = None

    @property
    def setup(self) -> list[Line]:
        return [each for each in self.before if not each.depth]

    @property
    def body(self) -> list[Line]:
        return [each for each in self.before if each.depth]


def follow(frames: Sequence[SeenFrame], sources: Sequence[PythonSource] = ()) -> WayToBackward:
    """frames: outermost first. sources: of files that have been read. Raises `UntranslatedError`."""
    route = WayToBackward()
    known = {each.path: each for each in sources}
    try:
        route.owner = owner_of(frames, known)
    except NotInlinedError as error:
        raise _in_a_method(frames, str(error)) from error
    for index, frame in enumerate(frames):
        if frame.path not in known:
            known[frame.path] = PythonSource.read(frame.path)
        if isinstance(frame.values.get("self"), nn.Module):
            known[frame.path] = with_numbers_of_module(known[frame.path], frame)
        source = known[frame.path]
        route.sources.append(source)
        following = frames[index + 1] if index + 1 < len(frames) else None
        body = _body(route, source, frame)
        _Walker(route, source, index, frame, following).walk(body)
    return route


def _in_a_method(frames: Sequence[SeenFrame], why: str, owner: Owner | None = None) -> UntranslatedError:
    frame = next((each for each in frames if each.owner is not None), frames[-1])
    kind = type(owner.value if owner else frame.owner).__name__
    where = frame.function if owner is None else "fit"
    return UntranslatedError(
        Refusal(
            frame.path.name, frame.line,
            f"the loop runs in a method of {kind} ({where}), {why}. Move it into a function of (model, loader, optimizer, ...), which the script calls.",
        )
    )  # fmt: skip


def _body(route: WayToBackward, source: PythonSource, frame: SeenFrame) -> list[ast.stmt]:
    if frame.function == "<module>":
        return source.tree.body
    function = source.function(frame.function, frame.line)
    if function is None:
        raise UntranslatedError(
            Refusal(
                source.path.name, frame.line, f"backward() is reached through {frame.function}, which is not a "
        f"plain function. Call backward() in a loop or in functions called from it."
            )
        )  # fmt: skip
    of_object = frame.owner is None and "self" in [each.arg for each in function.args.args[:1]]
    if of_object and not isinstance(frame.values.get("self"), nn.Module):
        raise UntranslatedError(
            Refusal(
                source.path.name, function.lineno, f"the loop runs in a method ({function.name}) of an object. Move it "
        f"into a function of (model, loader, optimizer, ...), which is then called."
            )
        )  # fmt: skip
    route.functions.append(function)
    return function.body


@dataclass
class _Walker:
    route: WayToBackward
    source: PythonSource
    index: int
    frame: SeenFrame
    following: SeenFrame | None

    def walk(self, body: list[ast.stmt]) -> None:
        depth = len(self.route.loops)
        reached = False
        following = self._following(body)
        for node in body:
            line = Line(self.source, node, self.index, depth, node.lineno)
            if reached:
                (self.route.beside if depth else self.route.after).append(line)
            elif node is following:
                reached = True
                self._enter(line, depth)
            else:
                self.route.before += self._of_batches(line) if depth else self._singles(line)

    def _of_batches(self, line: Line) -> list[Line]:
        """A statement of a loop; `batch = next(batches)` where it is tried, and done again behind the end of an epoch."""
        node = line.node
        if isinstance(node, ast.Try) and [ast.unparse(each.type) for each in node.handlers if each.type] == [
            "StopIteration"
        ]:
            return [Line(self.source, each, line.frame, line.depth, each.lineno) for each in node.body]
        return [line]

    def _singles(self, line: Line) -> list[Line]:
        """A statement of the set-up, or those that it stands for."""
        known = self.source.singles.get(id(line.node))
        if known is None:
            known = self.source.singles[id(line.node)] = self._parts(line.node)
        return [Line(source, node, line.frame, 0, node.lineno, line) for source, node in known] or [line]

    def _parts(self, node: ast.stmt) -> list[Part]:
        owner = self.route.owner
        if owner is None or self.index != owner.frame or not owner.is_made_by(node):
            return list(single_statements(self.source, node, self.frame))
        try:
            parts = owner.construction(self.source, node, self.frame)
        except NotInlinedError as error:
            raise _in_a_method([self.frame], str(error), owner) from error
        return [
            again
            for inner, each in parts
            for again in list(single_statements(inner, each, self.frame)) or [(inner, each)]
        ]

    def _following(self, body: list[ast.stmt]) -> ast.stmt | None:
        """The statement in which the frame is; of several in one line, the one that calls what comes next."""
        found = [each for each in body if each.lineno <= self.frame.line <= (each.end_lineno or 0)]
        name = self.following.function if self.following else "backward"
        calling = [each for each in found if any(method(call) == name for call in calls(each))]
        return next(iter([*calling, *found]), None)

    def _enter(self, line: Line, depth: int) -> None:
        node = line.node
        if isinstance(node, ast.For | ast.While):
            self.route.loops.append(Loop(self.source, node, self.index, depth))
            self.walk(node.body)
        elif isinstance(node, ast.If):
            self.route.branches.append(line)
            taken = any(each.lineno <= self.frame.line <= (each.end_lineno or 0) for each in node.body)
            self.walk(node.body if taken else node.orelse)
        elif isinstance(node, ast.With):
            if depth:
                self.route.contexts.append(line)
            self.walk(node.body)
        elif isinstance(node, ast.Try):
            self.walk(node.body)
        elif self.following is None:
            self.route.end = line
        else:
            self._bind(line, depth)

    def _bind(self, line: Line, depth: int) -> None:
        """The parameters of the function that is called, as assignments."""
        assert self.following is not None
        name = self.following.function
        found = [each for each in calls(line.node) if method(each) == name]
        if not found:
            raise line.refuse(f"{name}() is not called here by its name. Call it directly.")
        source = PythonSource.read(self.following.path)
        function = source.function(name, self.following.line)
        assert function is not None
        if (
            not depth
            and self.route.owner is not None
            and self.index == self.route.owner.frame
            and self.route.owner.is_made_by(line.node)
        ):
            self.route.before += self._singles(line)
        given = arguments_of(self.source, found[0], source, function, self.frame.globals | self.frame.values)
        if given is None:
            raise line.refuse(
                f"{function.name}() takes *arguments, or is given several **arguments. Give each by its name.",
                found[0],
            )
        if self.following.owner is None and [each.arg for each in function.args.args[:1]] == ["self"]:
            assert isinstance(found[0].func, ast.Attribute)
            given = [("self", self.source.segment(found[0].func.value)), *given]
        for parameter, text in given:
            if parameter != text:
                bind = PythonSource(self.source.path, f"{parameter} = {text}")
                self.route.before.append(Line(bind, bind.tree.body[0], self.index, depth, line.at))


def slice_of(lines: list[Line], wanted: set[str], inside: Any, takes: Any) -> tuple[list[Line], set[str]]:
    """The statements that make the `wanted` names, in order, and the other names that they use.

    inside: whether a name that they use is made with them. takes: whether a statement is one of them, of it and the names
    wanted so far.
    """
    wanted, outside = set(wanted), set[str]()
    kept: list[Line] = []
    again = True
    while again:  # a name that becomes wanted late may be changed by a statement behind
        kept, before = [], set(wanted)
        for line in reversed(lines):
            if takes(line, wanted):
                kept.insert(0, line)
                names = used(line.node)
                wanted |= {name for name in names if inside(name)}
                outside |= {name for name in names if not inside(name)}
        again = wanted != before
    return kept, outside - wanted


def binds(line: Line, wanted: set[str]) -> bool:
    """Whether the statement binds one of the names."""
    return bool(bound(line.node) & wanted)
