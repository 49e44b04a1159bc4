"""Writes the lines of docs/loops.md, or of a library's adapter, at the places that a `Watch` has seen."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshloom.adopt.source_lines import SourceLines, root_of
from meshloom.adopt.watched_loop import ModuleCall, UserFrame, Watch, parameters_of

Frames = Sequence[UserFrame]
# an expression, or a name and the statement before which it is whole; the dim
_Shared = tuple[SourceLines, Any, str, int]
_COUNT = re.compile(r"(int\()?(len\([^()]*\)|[^()]*\.(size\(0\)|shape\[0\]))\)?")  # of rows
_NO_NAME = "is trained, and has no name where its optimizer is made: write model = ml.parallel(model) before."
_NO_LOADER = "The loader of training has no name where it is made. Write ml.loader(...) around it."
_NO_BATCH = "Each replica computes whole batches. Write ml.loader(...) around a DataLoader, or ml.share(...) around what makes a batch."
_NO_CALL = "What the optimizers step was trained outside of calls of modules. Call modules themselves: layer(x), not layer.forward(x)."
_BY_HAND = {
    "lightning": 'Write strategy=ml.lightning.Strategy() where Trainer(...) is made; of LightningCLI, strategy={"class_path": "meshloom.lightning.Strategy"}.',
    "pytorch_lightning": "Write lightning.pytorch in place of pytorch_lightning, which has an adapter, and adopt that.",
    "transformers": "Write ml.transformers.Trainer, or class Mine(ml.transformers.Parallel, ...), where the Trainer is made.",
    "accelerate": "Write from meshloom.accelerate import Accelerator.",
}


class AdoptedLines:
    """The user's files with their lines. dim: that of batches which come from no loader, along which they are shared; None: they stay whole. total:
    whether `ml.sum` of losses is written. counted: whether what counts rows, or labels of a mean, is written as that of shares. modules: how many become
    parallel, or trainers of libraries. notes: what was not found, with the line to write."""

    def __init__(
        self,
        watch: Watch,
        files: Iterable[Path],
        *,
        dim: int | None,
        total: bool = False,
        counted: bool = False,
    ) -> None:
        self._watch, self._dim, self._counted, self.notes = watch, dim, counted, list[str]()
        self.sources = {str(each): SourceLines(each) for each in files}
        self._calls, trainers = watch.trained(methods=dim is not None), watch.trainers()
        self._loaders = dict.fromkeys(each for call in self._calls for each in call.loaders)
        modules = dict.fromkeys(each.module for each in self._calls)
        inner = {id(each) for one in modules for each in one.modules() if each is not one}
        written = [self._write_adapter(*each) for each in trainers.items()]
        if not trainers:
            written = [self._write_module(each) for each in modules if id(each) not in inner]
            for each in self._loaders:
                self._write_loader(each)
        self.modules = sum(written)
        if set(trainers.values()) <= {"accelerate"}:  # the loop is the script's
            self._write_shares()
            for frames, rows in watch.draws.values():
                self._write_draw(frames, rows)
            if counted:
                self._write_means()
                self._write_rows()
            for _, source, call in self._calls_at(watch.backwards.values()) if total else ():
                source.wrap(call.args[0] if call.args else call.func.value, "sum")
        if watch.stepped and not (self._calls or trainers):
            self.notes.append(_NO_CALL)
        if waiting := len(watch.optimizers) - len(watch.stepped):
            self.notes.append(f"{waiting} of {len(watch.optimizers)} optimizers made no step meanwhile.")
        for number, source in enumerate(self.sources.values()):
            for node in source.nodes:
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save":
                    source.replace(node.func, f"{source.ml}.save")
            if source.edits or number == 0:  # ranks are hidden from all that the script imports
                source.write_import()

    def _calls_at(self, frames: Iterable[UserFrame]) -> Iterator[tuple[UserFrame, SourceLines, Any]]:
        for frame in frames:
            source = self.sources.get(frame.place[0])
            if source is not None and (call := source.call_at(frame.place)) is not None:
                yield frame, source, call

    def _write_adapter(self, trainer: Any, library: str) -> bool:
        kind, frames = type(trainer).__name__, self._watch.made[trainer][:1]
        for _, source, call in self._calls_at(frames if library != "pytorch_lightning" else ()):
            function, of_library = ast.unparse(call.func), f"{source.ml}.{library}"
            if function.split(".")[-1] != kind:
                break
            if library == "lightning":
                texts = {"strategy": f"{of_library}.Strategy()", "devices": "1", "num_nodes": "1"}
                source.write_keywords(call, texts)
            elif kind in ("Trainer", "Accelerator"):
                source.replace(call.func, f"{of_library}.{kind}")
            else:
                subclass = f"class Parallel{kind}({of_library}.Parallel, {function}): pass"
                source.write_line(source.statement(call), subclass)
                source.replace(call.func, f"Parallel{kind}")
            return True
        self.notes.append(_BY_HAND[library])
        return False

    def _write_module(self, module: nn.Module) -> bool:
        own = [each for each in self._watch.optimizers if parameters_of(each) & parameters_of(module)]
        calls = [each for each in self._calls if each.module is module]
        frames = [*(self._watch.made[each] for each in own), *(each.frames[::-1] for each in calls)][0]
        methods = sorted({each.method.co_name for each in calls if each.method})
        batch = {name: self._dim for each in calls if self._dim and not each.loaders for name in each.inputs}
        batch |= {name: 1 for each in calls if self._dim == 0 for name in each.states()}
        words = f"{f', methods={methods}' if methods else ''}{f', batch={batch}' if batch else ''}"
        words += next((f", weight={each}" for each in map(_weight, calls) if each and self._counted), "")
        for frame, source, call in self._calls_at(frames):
            if frame.names.get("self") is module or not (names := frame.names_of(module)):
                continue
            name = next((each for each in names if each in ast.unparse(source.statement(call))), names[0])
            assigned = f"{name} = " if frame.owns(name) or not name.isidentifier() else ""
            before = source.before_loops(call, name)  # what is made once becomes parallel once
            source.write_line(before, f"{assigned}{source.ml}.parallel({name}{words})")
            return True
        self.notes.append(f"{type(module).__name__} {_NO_NAME}")
        return False

    def _write_loader(self, loader: Any) -> None:
        others = set(self._watch.made) - {*self._loaders, *self._watch.optimizers}
        frames = self._watch.made.get(loader, [])
        for frame, source, call in self._calls_at(frames):
            there = [at for each in others for at in self._watch.made[each] if at.place == frame.place]
            if frame is frames[0] and not there and ast.unparse(call.func).endswith(type(loader).__name__):
                source.wrap(call, "loader")
                return
            statement = [source.statement(call), *(source.loops(call) if there else [])][-1]
            names = frame._replace(names=dict(frame.frame.f_locals)).names_of(loader)
            names = [each for each in names if {each, root_of(each)} & source.stored(statement)]
            if names and all(at.frame is frame.frame for at in there):
                source.write_line(statement, f"{names[0]} = {source.ml}.loader({names[0]})", after=True)
                return
        self.notes.append(_NO_LOADER)

    def _write_shares(self) -> None:
        """Of batches that come from no loader: of names just before a call, of other expressions where they stand."""
        calls = [each for each in self._calls if self._dim is not None and not each.loaders]
        found = dict.fromkeys(each for call in calls for each in self._batch(call))
        names = dict[tuple[SourceLines, Any, int], list[str]]()
        shared = set[tuple[ast.AST, str]]()  # names of a scope, once
        for source, at, name, dim in found:
            if not name:
                source.wrap(at, "share")
            elif (key := (source.scopes(at)[0], name)) not in shared:
                shared.add(key)
                names.setdefault((source, at, dim), []).append(name)
        for (source, at, dim), each in names.items():
            given = ", ".join(each)
            whole = f"({given})" if each[1:] else given
            source.write_line(at, f"{given} = {source.ml}.share({whole}{', dim=1' if dim else ''})")
        if self._calls and not self._loaders and not found:
            self.notes.append(_NO_BATCH)

    def _batch(self, call: ModuleCall) -> Iterator[_Shared]:
        """What the arguments of a call are, and other tensors of as many rows that its loss takes."""
        dim, returns, given = self._dim or 0, True, True
        states = [each for name in call.states() if not dim for each in call.inputs[name]]
        for number, frame in enumerate(call.frames):
            lengths, arguments, of_states = frame.rows(dim), frame.arguments(), frame.names_of_tensors(states)
            for _, source, at in self._calls_at([frame]) if returns or given else ():
                for each, name in _reads(*(source.readers(at) if returns else [at])):
                    if isinstance(each, ast.Subscript) and name in lengths and not dim:
                        yield source, each, "", dim
                    elif call.rows(dim) in lengths.get(name, ()) and name not in arguments:
                        whole = source.made_of(at, name, lengths) if dim else [name]
                        yield from (
                            one for each in whole for one in self._before(call.frames[number:], each, dim)
                        )
                    elif name in of_states and name not in arguments:
                        yield from self._before(call.frames[number:], name, 1)
                given = given and any(each in lengths for each in arguments)  # the caller's
                returns = returns and isinstance(source.statement(at), ast.Return)

    def _before(self, frames: Frames, name: str, dim: int) -> Sequence[_Shared]:
        owners = (each for each in self._calls_at(frames) if each[0].owns(name))
        return [(source, source.before_loops(at, name), name, dim) for _, source, at in owners][:1]

    def _write_means(self) -> None:
        """Of losses that the loop takes over labels which are not ignored: by how many each share has."""
        methods = {each.method for each in self._calls}
        for frame, label in self._watch.means.values():
            for _, source, call in self._calls_at([frame] if frame.frame.f_code not in methods else ()):
                labels = [each.value for each in call.keywords if each.arg in ("target", "labels")]
                for each in [*call.args[1:2], *labels][:1]:
                    count = f"({ast.unparse(each)} != {label}).sum()"
                    source.wrap(call, "mean", f" * {count}, {count}")

    def _write_rows(self) -> None:
        """Of the share, where a loop counts them by the batch size that its loader was given. Draws are for the whole batch."""
        draws = [frames[:1] for frames, _ in self._watch.draws.values()]
        drawn = {id(one) for each in draws for *_, call in self._calls_at(each) for one in ast.walk(call)}
        for call in self._calls:
            makers = [self._watch.made.get(each, [])[:1] for each in call.loaders]
            sizes = {
                size for each in makers for *_, maker in self._calls_at(each) for size in _batch_size(maker)
            }
            for frame, source, at in self._calls_at(call.frames if sizes else ()):
                rows = {name for name, each in frame.names.items() if _length(each) == call.rows(0)}
                for loop in source.loops(at):
                    names = source.targets(loop, rows)
                    nodes = (each for statement in loop.body for each in ast.walk(statement) if names)
                    for each in (each for each in nodes if id(each) not in drawn):
                        if isinstance(getattr(each, "ctx", 0), ast.Load) and ast.unparse(each) in sizes:
                            source.replace(each, f"len({names[0]})")

    def _write_draw(self, frames: Frames, rows: int) -> None:
        """Draw for the whole batch, and take the share: what counts the rows of a share counts those of the batch."""
        in_a_method = {each.method for each in self._calls} & {each.frame.f_code for each in frames}
        for _, source, call in self._calls_at([] if in_a_method else frames[:1]):
            for each in self._counts(call, frames, rows):
                source.replace(each, f"int({source.ml}.sum({ast.unparse(each)}))")
            for each in call.args[:1] if ast.unparse(call.func).endswith("_like") else []:
                source.wrap(each, "gather")
            for each in (*call.args, *call.keywords):
                each = each.value if isinstance(each, ast.Starred | ast.keyword) else each
                of, _, what = ast.unparse(each).rpartition(".")
                if what in ("shape", "size()"):
                    source.replace(each, f"{source.ml}.gather({of}).{what}")
            source.wrap(call, "share")

    def _counts(self, node: ast.AST, frames: Frames, rows: int) -> Iterator[ast.expr]:
        """What counts the rows of a share: as it stands, by a name, or by an argument where the caller gives a count."""
        source = self.sources[frames[0].place[0]]
        for each in ast.iter_child_nodes(node):
            values, given = [each], []
            if isinstance(each, ast.Name):
                values = [one for scope in source.scopes(node) for one in source.values(scope, each.id)]
                number = frames[0].names.get(each.id) if not values else None
                callers = self._calls_at(frames[1:2]) if isinstance(number, int) and number == rows else ()
                given = [one for *_, call in callers for one in self._counts(call, frames[1:], rows)]
            is_count = given or any(_COUNT.fullmatch(ast.unparse(one)) for one in values)
            if isinstance(each, ast.expr) and is_count:
                yield each
            else:
                yield from self._counts(each, frames, rows)


def _weight(call: ModuleCall) -> str:
    """A function of what it gets: how many labels its loss is a mean over; "": all."""
    name, label = next(iter(call.ignored().items()), ("", 0))
    if not name:
        return ""
    method = getattr(call.module, call.method.co_name if call.method else "forward")
    empty = inspect.Parameter.empty
    given = [
        each.replace(annotation=empty, default=empty if each.default is empty else None)
        for each in inspect.signature(method).parameters.values()
    ]
    count = f"({name} != {label}).sum()"
    optional = any(each.name == name and each.default is None for each in given)
    return f"lambda {str(inspect.Signature(given))[1:-1]}: {f'None if {name} is None else ' if optional else ''}{count}"


def _batch_size(maker: ast.Call) -> list[str]:
    """What gives it to a loader, if it is no number."""
    found = [*maker.args[1:2], *(each.value for each in maker.keywords if each.arg == "batch_size")]
    return [ast.unparse(each) for each in found if isinstance(each, ast.Name | ast.Attribute)]


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Tensor) and value.ndim else None


def _reads(*nodes: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Names, and what is indexed by other than a constant, each with the name."""
    for node in nodes:
        indexed: ast.AST = node
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            indexed = node.value
        if isinstance(indexed, ast.Name) and isinstance(getattr(node, "ctx", 0), ast.Load):
            yield node, indexed.id
        else:
            yield from _reads(*ast.iter_child_nodes(node))
