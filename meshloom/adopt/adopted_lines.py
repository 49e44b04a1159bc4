"""Writes the lines of docs/loops.md, or of a library's adapter, at the places that a `Watch` has seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from meshloom.adopt.source_lines import SourceLines, loaded
from meshloom.adopt.watched_loop import ModuleCall, UserFrame, Watch, parameters_of

_COUNT = re.compile(r"(int\()?(len\([^()]*\)|[^()]*\.(size\(0\)|shape\[0\]))\)?")  # of rows
_NO_NAME = "is trained, and has no name where its optimizer is made: write model = ml.parallel(model) before."
_NO_LOADER = "The loader of training has no name where it is made. Write ml.loader(...) around it."
_NO_BATCH = "Each replica computes whole batches. Write ml.loader(...) around a DataLoader, or ml.share(...) around what makes a batch."
_BY_HAND = {
    "lightning": 'Write strategy=ml.lightning.Strategy() where Trainer(...) is made; of LightningCLI, strategy={"class_path": "meshloom.lightning.Strategy"}.',
    "pytorch_lightning": "Write lightning.pytorch in place of pytorch_lightning, and adopt that: it is the same, and has an adapter.",
    "transformers": "Write ml.transformers.Trainer, or class Mine(ml.transformers.Parallel, ...), where the Trainer is made.",
    "accelerate": "Write from meshloom.accelerate import Accelerator.",
}


class AdoptedLines:
    """The user's files with their lines. dim: that of batches which come from no loader, along which they are shared; None: they stay whole. total:
    whether `ml.sum` of losses is written. modules: how many become parallel, or trainers of libraries. notes: what was not found, with the line to write."""

    def __init__(self, watch: Watch, files: Iterable[Path], *, dim: int | None, total: bool) -> None:
        self._watch, self._dim, self.notes = watch, dim, list[str]()
        self.sources = {str(each): SourceLines(each) for each in files}
        self._calls, libraries = watch.trained(methods=dim is not None), watch.libraries()
        if libraries:
            self.modules = sum(self._write_adapter(*each) for each in libraries.items())
        else:
            modules = dict.fromkeys(each.module for each in self._calls)
            inner = {id(each) for one in modules for each in one.modules() if each is not one}
            self.modules = sum(self._write_module(each) for each in modules if id(each) not in inner)
            for each in dict.fromkeys(each for call in self._calls for each in call.loaders):
                self._write_loader(each)
        if set(libraries.values()) <= {"accelerate"}:  # the loop is the script's
            self._write_shares([each for each in self._calls if not each.loaders])
            methods = {each.method for each in self._calls}
            for frames, rows in watch.draws.values():
                if not methods & {each.frame.f_code for each in frames}:  # a call has draws of its own
                    self._write_draw(frames, rows)
            for _, source, call in self._calls_at(watch.backwards.values()) if total else ():
                of_loss = [call.func.value] if isinstance(call.func, ast.Attribute) else []
                source.wrap([*call.args, *of_loss][0], "sum")
        if waiting := len(watch.optimizers) - len(watch.stepped):
            self.notes.append(f"{waiting} of {len(watch.optimizers)} optimizers made no step meanwhile.")
        for number, source in enumerate(self.sources.values()):
            for node in source.nodes:
                if isinstance(node, ast.Call) and source.text(node.func) == "torch.save":
                    source.replace(node.func, f"{source.ml}.save")
            if source.edits or number == 0:  # ranks are hidden from all that the script imports
                source.write_import()

    def _calls_at(self, frames: Iterable[UserFrame]) -> Iterator[tuple[UserFrame, SourceLines, Any]]:
        for frame in frames:
            source = self.sources.get(frame.place[0])
            if source is not None and (call := source.call_at(frame.place)) is not None:
                yield frame, source, call

    def _write_adapter(self, trainer: Any, library: str) -> bool:
        kind = type(trainer).__name__
        for _, source, call in self._calls_at(self._watch.made[trainer][:1]):
            function = source.text(call.func)
            if function.split(".")[-1] == kind and library != "pytorch_lightning":
                if library == "lightning":
                    source.write_keywords(
                        call,
                        {"strategy": f"{source.ml}.lightning.Strategy()", "devices": "1", "num_nodes": "1"},
                    )
                    return True
                new = f"{source.ml}.{library}.{kind}"
                if kind not in ("Trainer", "Accelerator"):
                    new = f"Parallel{kind}"
                    source.write_line(
                        source.statement(call),
                        f"class {new}({source.ml}.transformers.Parallel, {function}): pass",
                    )
                source.replace(call.func, new)
                return True
        self.notes.append(_BY_HAND[library])
        return False

    def _write_module(self, module: nn.Module) -> bool:
        own = [each for each in self._watch.optimizers if parameters_of(each) & parameters_of(module)]
        calls = [each for each in self._calls if each.module is module]
        frames = [*(self._watch.made[each] for each in own), *(each.frames[::-1] for each in calls)][0]
        methods = sorted({each.method.co_name for each in calls if each.method})
        batch = {name: self._dim for each in calls if self._dim and not each.loaders for name in each.shapes}
        words = f"{f', methods={methods}' if methods else ''}{f', batch={batch}' if batch else ''}"
        written = self._write_named("parallel", module, frames, words)
        self.notes += [] if written else [f"{type(module).__name__} {_NO_NAME}"]
        return written

    def _write_loader(self, loader: Any) -> None:
        places = [each[0].place for made, each in self._watch.made.items() if made is not loader and each]
        made = self._watch.made.get(loader, [])
        for frame, source, call in self._calls_at(made[:1]):
            if frame.place not in places and source.text(call.func).endswith(type(loader).__name__):
                source.wrap(call, "loader")
                return
        self.notes += (
            [] if self._write_named("loader", loader, self._watch.read[loader][::-1]) else [_NO_LOADER]
        )

    def _write_named(self, function: str, value: Any, frames: Iterable[UserFrame], words: str = "") -> bool:
        """Whether one of the frames has a name for the value. It becomes `ml.function(name)` before what runs there."""
        for frame, source, call in self._calls_at(frames):
            if frame.names.get("self") is value or not (names := frame.names_of(value)):
                continue
            name = next((each for each in names if each in source.text(source.statement(call))), names[0])
            assigned = (
                f"{name} = " if frame.owns(name) or not name.isidentifier() or function == "loader" else ""
            )
            source.write_line(
                source.before_loops(call, name), f"{assigned}{source.ml}.{function}({name}{words})"
            )
            return True
        return False

    def _write_shares(self, calls: Sequence[ModuleCall]) -> None:
        """Of batches that come from no loader: of names just before a call, of other expressions where they stand."""
        lines, wraps = dict[tuple[SourceLines, ast.stmt], dict[str, None]](), dict[ast.AST, SourceLines]()
        for call in calls if self._dim is not None else ():
            for frames, source, at, value in self._read_by(call):
                lengths = frames[0].rows(self._dim)
                found = [(each, name) for each, name in _reads(value) if name in lengths]
                wraps |= {value: source} if isinstance(value, ast.Call) and not found else {}
                for each, name in found:
                    if isinstance(each, ast.Subscript) and not self._dim:
                        wraps[each] = source
                    elif name in frames[0].given():
                        continue  # the caller's
                    elif call.rows(self._dim) in lengths[name] or isinstance(value, ast.Call | ast.BinOp):
                        for one in source.made_of(at, name, lengths) if self._dim else {name}:
                            for _, its, there in [
                                each for each in self._calls_at(frames) if each[0].owns(one)
                            ][:1]:
                                lines.setdefault((its, its.before_loops(there, one)), {})[one] = None
        starts = [(*key, set(names)) for key, names in lines.items()]
        starts += [(source, source.statement(each), set[str]()) for each, source in wraps.items()]

        def shared(source: SourceLines, at: ast.stmt, but: ast.stmt | None = None) -> set[str]:
            before = [
                each
                for each in starts
                if each[0] is source and each[1] is not but and each[1].lineno <= at.lineno
            ]
            return set[str]().union(*(source.computed(first, names, at) for _, first, names in before))

        words = ", dim=1" if self._dim else ""
        for (source, at), names in lines.items():
            if given := ", ".join(each for each in names if each not in shared(source, at, at)):
                source.write_line(
                    at, f"{given} = {source.ml}.share({f'({given})' if ',' in given else given}{words})"
                )
        for each, source in wraps.items():
            if not loaded(each) & shared(source, source.statement(each)) and not set(wraps) & set(
                ast.walk(each)
            ) - {each}:
                source.wrap(each, "share", words)
        if self._calls and not starts and len(calls) == len(self._calls):
            self.notes.append(_NO_BATCH)

    def _read_by(
        self, call: ModuleCall
    ) -> Iterator[tuple[Sequence[UserFrame], SourceLines, ast.AST, ast.AST]]:
        """The arguments of a call, and the statements that its result goes through, each with its frames."""
        gives, returns = True, True
        for number, frame in enumerate(call.frames):
            for _, source, at in self._calls_at([frame]) if gives or returns else ():
                given = _given(at) if gives and isinstance(at, ast.Call) else []
                for each in (*given, *(source.readers(at) if returns else ())):
                    yield call.frames[number:], source, at, each
                gives = gives and bool(frame.given() & set(frame.rows(self._dim or 0)))
                returns = returns and isinstance(source.statement(at), ast.Return)

    def _write_draw(self, frames: Sequence[UserFrame], rows: int) -> None:
        """Draw for the whole batch, and take the share: what counts the rows of a share counts those of the batch."""
        for _, source, call in self._calls_at(frames[:1]):
            edits = {
                each: f"int({source.ml}.sum({source.text(each)}))"
                for each in self._counts(call, frames, rows)
            }
            for each in _given(call):
                of, _, what = source.text(each).rpartition(".")
                if what in ("shape", "size()"):
                    edits[each] = f"{source.ml}.gather({of}).{what}"
            if source.text(call.func).endswith("_like"):
                edits[call.args[0]] = f"{source.ml}.gather({source.text(call.args[0])})"
            for each, text in edits.items():
                source.replace(each, text)
            source.wrap(call, "share")

    def _counts(self, node: ast.AST, frames: Sequence[UserFrame], rows: int) -> Iterator[ast.expr]:
        """What counts the rows of a share: as it stands, by a name, or by an argument where the caller gives a count."""
        source = self.sources[frames[0].place[0]]
        for each in ast.iter_child_nodes(node):
            values, given = [each], list[ast.expr]()
            if isinstance(each, ast.Name):
                values = [one for scope in source.scopes(node) for one in source.values(scope, each.id)]
                if not values and isinstance(number := frames[0].names.get(each.id), int) and number == rows:
                    given = [
                        one
                        for *_, call in self._calls_at(frames[1:2])
                        for one in self._counts(call, frames[1:], rows)
                    ]
            if isinstance(each, ast.expr) and (
                given or any(_COUNT.fullmatch(ast.unparse(one)) for one in values)
            ):
                yield each
            else:
                yield from self._counts(each, frames, rows)


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
