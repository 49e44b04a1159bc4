"""Writes the lines of docs/loops.md at the places that a `Watch` has seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from meshloom.adopt.source_lines import SourceLines
from meshloom.adopt.watched_loop import UserFrame, Watch

# the file and an expression, with ""; of a loop, the first statement of its body, with the names that go through it
Made = tuple[SourceLines, ast.AST, str]
_COUNT = re.compile(r"(int\()?(len\([^()]*\)|[^()]*\.(size\(0\)|shape\[0\]))\)?")  # of rows
_NO_NAME = "is trained, and has no name where its optimizer is made: write model = ml.parallel(model) before."
_NO_LOADER = "The loader of training has no name where it is made. Write ml.loader(...) around it."
_NO_BATCH = "Each replica computes whole batches. Write ml.loader(...) around a DataLoader, or ml.share(...) around what makes a batch."


class AdoptedLines:
    """The user's files with their lines. modules: how many become parallel. shares: whether batches come from no loader. share, total: whether
    `ml.share` of these, and `ml.sum` of losses, are written. notes: what was not found, with the line to write."""

    def __init__(self, watch: Watch, files: Iterable[Path], *, share: bool, total: bool) -> None:
        self._watch, self.notes = watch, list[str]()
        self.sources = {str(each): SourceLines(each) for each in files}
        owned = set[int]().union(*map(_parameters, watch.optimizers))
        trained = (each for each in watch.calls.values() if each.trained)
        self._calls = [each for each in trained if not owned or owned & _parameters(each.module)]
        self._loaders = dict.fromkeys(each for call in self._calls for each in call.loaders)
        modules = dict.fromkeys(each.module for each in self._calls)
        inner = {id(each) for one in modules for each in one.modules() if each is not one}
        self.modules = sum(self._write_module(each) for each in modules if id(each) not in inner)
        for each in self._loaders:
            self._write_loader(each)
        calls = (each for each in self._calls if not each.loaders)
        batches = {each for call in calls for each in self._batch(call.frames, call.rows)}
        self.shares = bool(batches)
        for source, value, names in batches if share else ():
            if names:
                source.write_line(value, f"{names} = {source.ml}.share(({names}))")
            else:
                source.wrap(value, "share")
        if self._calls and not self._loaders and not batches:
            self.notes.append(_NO_BATCH)
        if waiting := len(watch.optimizers) - len(watch.stepped):
            self.notes.append(f"{waiting} of {len(watch.optimizers)} optimizers made no step meanwhile.")
        for _, source, call in self._calls_at(watch.draws.values()):
            _write_draw(source, call)
        for _, source, call in self._calls_at(watch.backwards.values()) if total else ():
            of_loss = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            source.wrap([*call.args, *of_loss][0], "sum")
        for number, source in enumerate(self.sources.values()):
            for node in source.nodes:
                if isinstance(node, ast.Call) and source.text(node.func) == "torch.save":
                    source.replace(node.func, f"{source.ml}.save")
            if source.edits or number == 0:  # ranks are hidden from all that the script imports
                source.write_import()

    def _calls_at(self, frames: Iterable[UserFrame]) -> Iterator[tuple[UserFrame, SourceLines, ast.Call]]:
        for frame in frames:
            source = self.sources.get(frame.place[0])
            if source is not None and (call := source.call_at(frame.place)) is not None:
                yield frame, source, call

    def _write_module(self, module: nn.Module) -> bool:
        own = [each for each in self._watch.optimizers if _parameters(each) & _parameters(module)]
        called = [each.frames[::-1] for each in self._calls if each.module is module]
        frames = [*(self._watch.made[each] for each in own), *called][0]
        for frame, source, call in self._calls_at(frames):
            if frame.names.get("self") is module or not (names := frame.names_of(module)):
                continue
            statement = source.statement(call)
            name = next((each for each in names if each in source.text(statement)), names[0])
            for loop in source.loops(call):  # what is made once becomes parallel once
                if not _roots(name) & source.stored(loop):
                    statement = loop
            code = frame.frame.f_code
            is_own = code.co_name == "<module>" or name in (*code.co_varnames, *code.co_cellvars)
            assigned = f"{name} = " if is_own or not name.isidentifier() else ""
            source.write_line(statement, f"{assigned}{source.ml}.parallel({name})")
            return True
        self.notes.append(f"{type(module).__name__} {_NO_NAME}")
        return False

    def _write_loader(self, loader: Any) -> None:
        others = set(self._watch.made) - {*self._loaders, *self._watch.optimizers}
        frames = self._watch.made.get(loader, [])
        for frame, source, call in self._calls_at(frames):
            there = [at for each in others for at in self._watch.made[each] if at.place == frame.place]
            if frame is frames[0] and not there and source.text(call.func).endswith(type(loader).__name__):
                source.wrap(call, "loader")
                return
            statement = [source.statement(call), *(source.loops(call) if there else [])][-1]
            names = frame._replace(names=dict(frame.frame.f_locals)).names_of(loader)
            names = [each for each in names if _roots(each) & source.stored(statement)]
            if names and all(at.frame is frame.frame for at in there):
                source.write_line(statement, f"{names[0]} = {source.ml}.loader({names[0]})", after=True)
                return
        self.notes.append(_NO_LOADER)

    def _batch(self, frames: Sequence[UserFrame], rows: int) -> Iterator[Made]:
        """What made the arguments of a call, and other tensors of as many rows that its loss takes. frames: at the call, from within."""
        for _, source, call in self._calls_at(frames[:1]):
            yield from self._made(_given(call), call, frames, None)
            yield from self._made(source.readers(call), call, frames, rows)

    def _made(
        self, read: Iterable[ast.AST], at: ast.AST, frames: Sequence[UserFrame], rows: int | None
    ) -> Iterator[Made]:
        """What made the values that are read at a node of the first frame. rows: of the tensors that are meant; None: all."""
        source, lengths = self.sources[frames[0].place[0]], frames[0].rows()
        for value in read:
            found = [(each, name) for each, name in _reads(value) if name in lengths]
            if isinstance(value, ast.Call) and not found:
                yield source, value, ""
            for each, name in found:
                if isinstance(each, ast.Subscript):
                    yield source, each, ""
                elif rows is None or rows in lengths[name]:
                    yield from self._bound(name, at, frames, rows)

    def _bound(self, name: str, at: ast.AST, frames: Sequence[UserFrame], rows: int | None) -> Iterator[Made]:
        """What gives the name its value: here, or, of an argument, where the function is called."""
        source, codes = self.sources[frames[0].place[0]], [each.frame.f_code.co_name for each in frames]
        for scope in source.scopes(at):
            found = list(source.values(scope, name))
            yield from ((source, *each) for each in found)
            names = [each.arg for each in scope.args.args] if isinstance(scope, ast.FunctionDef) else []
            if not found and isinstance(scope, ast.FunctionDef) and name in names and scope.name in codes:
                callers = frames[codes.index(scope.name) + 1 :]
                place = names.index(name) - (names[0] == "self")
                for *_, call in self._calls_at(callers[:1]):
                    given = [each.value for each in call.keywords if each.arg == name]
                    yield from self._made([*given, *call.args[place : place + 1]][:1], call, callers, rows)
            if found or name in names:
                return


def _parameters(owner: Optimizer | nn.Module) -> set[int]:
    groups = owner.param_groups if isinstance(owner, Optimizer) else [{"params": owner.parameters()}]
    return {id(each) for group in groups for each in group["params"]}


def _roots(name: str) -> set[str]:
    return {name, re.split(r"[.\[]", name)[0]}


def _given(call: ast.Call) -> list[ast.expr]:
    given = [*call.args, *(each.value for each in call.keywords)]
    return [each.value if isinstance(each, ast.Starred) else each for each in given]


def _reads(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Names, and what is indexed by other than a constant, each with the name."""
    indexed = (
        node.value if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant) else node
    )
    if isinstance(indexed, ast.Name):
        yield node, indexed.id
    else:
        for each in ast.iter_child_nodes(node):
            yield from _reads(each)


def _write_draw(source: SourceLines, call: ast.Call) -> None:
    """Draw for the whole batch, and take the share: what counts the rows of a share counts those of the batch."""
    source.wrap(call, "share")
    for each in _counts(source, call, call):
        source.replace(each, f"int({source.ml}.sum({source.text(each)}))")
    for each in call.args[:1] if source.text(call.func).endswith("_like") else []:
        source.wrap(each, "gather")
    for each in _given(call):
        of, _, what = source.text(each).rpartition(".")
        if what in ("shape", "size()"):
            source.replace(each, f"{source.ml}.gather({of}).{what}")


def _counts(source: SourceLines, node: ast.AST, call: ast.Call) -> Iterator[ast.expr]:
    """What counts the rows of a batch, or is a name of that."""
    for each in ast.iter_child_nodes(node):
        values = [each]
        if isinstance(each, ast.Name):
            bound = (one for scope in source.scopes(call) for one in source.values(scope, each.id))
            values = [value for value, through in bound if not through]
        if isinstance(each, ast.expr) and any(_COUNT.fullmatch(ast.unparse(value)) for value in values):
            yield each
        else:
            yield from _counts(source, each, call)
