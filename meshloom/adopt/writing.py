"""The job's file: the script's text, with its set-up and its loop as functions of a job."""

from __future__ import annotations

import ast
import builtins
import textwrap
from typing import Any

from meshloom.adopt.parts import JobParts
from meshloom.adopt.setup_pieces import (
    did_not_run,
    numbers_of_model,
    refuse_uses_of_model,
)
from meshloom.adopt.watching.route import Line, slice_of
from meshloom.adopt.watching.script import Script, configures, is_talk, seeds
from meshloom.adopt.watching.source import PythonSource, bound, changed, is_docstring, used

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def write(script: Script, parts: JobParts) -> str:
    """The text of the job's file. Raises `UntranslatedError`."""
    main = script.route.sources[0]
    drop_functions_of_roles(script, main)
    if parts.evaluation is not None:
        drop_functions_of_evaluation(script, main, parts)
    functions = script.route.functions
    owner = script.route.owner
    unused = [
        each
        for each in main.tree.body
        if owner is not None and isinstance(each, ast.ClassDef) and each.name in owner.class_names
    ]
    made = {id(line.node) for piece in parts.pieces for line in piece.lines if not line.depth}
    provided = {
        "make_model",
        "make_optimizer",
        "make_scheduler",
        "training_loss",
        "set_rates",
        "Batches",
        "ml",
        "OnceIn",
        "ParametersOf",
        "IterableDataset",
        "Subset",
        "TensorDataset",
        "DrawnSamples",
        "ZippedLoader",
    }
    kept_definitions = [
        node
        for node in main.tree.body
        if isinstance(node, DEFINITIONS) and node not in functions and node not in unused
    ]
    of_definitions = set[str]().union(*(used(node) for node in kept_definitions))
    wanted = (parts.needs | of_definitions) - provided - set(dir(builtins))
    lines = [
        each
        for each in script.route.setup
        if id(each.node) not in made and not isinstance(each.node, ast.Import | ast.ImportFrom)
    ]
    kept, _ = slice_of(lines, wanted, lambda name: True, lambda line, names: _stays(script, line, names))
    _refuse_owner(script, parts, kept)
    refuse_uses_of_model(script, [each for each in kept if not is_talk(each.node)])
    inner = _is_inner(script)
    imports = _imports(script, parts, kept)
    if not script.watched.seeded:
        script.because(
            main.tree.body[-1].lineno,
            "the script seeds nothing, and every rank has to make the same data: torch.manual_seed(0)",
        )
    needed = set[str]().union(parts.needs, *(used(each.node) for each in kept))
    dropped = [each for each in unused if each.name not in needed]
    return _composed(script, main, parts, kept, made, imports, inner, dropped)


def _refuse_owner(script: Script, parts: JobParts, kept: list[Line]) -> None:
    """Nothing of the job uses the object whose methods were on the way. Raises `UntranslatedError`."""
    owner = script.route.owner
    if owner is None:
        return
    methods = {each.name for each in owner.methods_in(owner.names)}
    for line in [*kept, *(line for piece in parts.pieces for line in piece.lines)]:
        unknown = {"self"} if line.depth else {"self", *methods}
        if used(line.node) & unknown:
            kind = owner.class_names[0]
            raise line.refuse(
                f"the job needs what this line does with the {kind} itself. Make what it calls a function of the values that it uses."
            )


def drop_functions_of_roles(script: Script, main: PythonSource) -> None:
    """Functions at the top that read the model or the optimizer as globals go, since only ranks have them."""
    roles = {name for name in (script.model, script.optimizer) if name}
    for node in main.tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node not in script.route.functions
            and used(node) & roles & _bound_at_top(main)
        ):
            script.route.functions.append(node)
            script.because(
                node.lineno,
                f"{node.name} reads {' and '.join(sorted(used(node) & roles))} of the file, which only ranks have",
            )


def drop_functions_of_evaluation(script: Script, main: PythonSource, parts: JobParts) -> None:
    """Functions at the top that evaluated go, since the job's metrics are in their place."""
    assert parts.evaluation is not None
    on_way = {each.function for each in parts.evaluation.seen.frames if each.path == main.path}
    for node in main.tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node not in script.route.functions
            and node.name in on_way - parts.needs
        ):
            script.route.functions.append(node)


def _bound_at_top(main: PythonSource) -> set[str]:
    return set[str]().union(*(bound(node) for node in main.tree.body))


def _stays(script: Script, line: Line, wanted: set[str]) -> bool:
    node = line.node
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and line.frame == 0:
        return False  # stays anyway
    if (
        isinstance(node, ast.If)
        and did_not_run(script, node)
        and used(node) & {script.model, script.optimizer}
    ):
        return False
    if seeds(node) or configures(node) or bound(node) & wanted:
        return True
    roles = {script.model, script.optimizer}
    return bool(changed(node) & wanted) and not is_talk(node) and not changed(node) & roles


def _is_inner(script: Script) -> bool:
    """Whether the job is made in a function, since the script's set-up is in one, or in `if __name__ == "__main__":`."""
    top = {id(node) for node in script.route.sources[0].tree.body}
    return any(
        line.frame > 0 or (line.at == line.node.lineno and id(line.whole.node) not in top)
        for line in script.route.setup
    )


def _imports(script: Script, parts: JobParts, kept: list[Line]) -> list[str]:
    needs = parts.needs
    found = ["import meshloom as ml"]
    if "OnceIn" in needs:
        found.append("from meshloom.adopt.rate_schedules import OnceIn")
    if "ParametersOf" in needs:
        found.append("from meshloom.adopt.views import ParametersOf")
    if "DrawnSamples" in needs:
        found.append("from meshloom.adopt.data.drawn_samples import DrawnSamples")
    if "ZippedLoader" in needs:
        found.append("from meshloom.adopt.data.zipped_loader import ZippedLoader")
    main = script.route.sources[0]
    have = set[str]().union(*(bound(node) for node in main.tree.body)) | {
        name for line in kept for name in bound(line.node)
    }
    found += [
        f"from torch.utils.data import {name}"
        for name in ("IterableDataset", "Subset", "TensorDataset")
        if name in needs - have
    ]
    of_kept = set[str]().union(*(used(line.node) for line in kept), needs)
    evaluation = parts.evaluation.seen.frames if parts.evaluation else []
    files = [(each.path, each.globals) for each in [*script.watched.frames[1:], *evaluation[1:]]]
    if script.route.owner is not None:
        files += [
            (each.written.path, each.globals) for each in script.route.owner.lineage if any(each.methods)
        ]
    for path, values in files:
        if path != main.path:
            names = sorted(
                name
                for name in of_kept - have
                if name in values and not name.startswith("__") and name not in dir(builtins)
            )
            found += [_import_of(script, values["__name__"], name, values[name]) for name in names]
            have |= set(names)
    return found


def _import_of(script: Script, module: str, name: str, value: Any) -> str:
    own = getattr(value, "__name__", None)
    if type(value).__name__ == "module":
        return f"import {own}" if own == name else f"import {own} as {name}"
    return f"from {module} import {name}"


def _composed(
    script: Script,
    main: PythonSource,
    parts: JobParts,
    kept: list[Line],
    made: set[int],
    imports: list[str],
    inner: bool,
    dropped: list[ast.ClassDef],
) -> str:
    """The script's lines, of which some are replaced."""
    top = {id(node) for node in main.tree.body}
    staying = {id(each.node) for each in kept}
    rows = TopLines(main)
    last = {
        id(piece.lines[-1].node): piece for piece in parts.pieces if piece.lines and not piece.lines[-1].depth
    }
    edits: list[tuple[int, int, str]] = []
    job: list[str] = []
    placed: set[str] = set()
    active = _active(script, main)
    for line in script.route.setup:
        node, whole = line.node, line.whole.node
        here = line.frame == 0 and id(whole) in top and whole is not active
        if here and ((isinstance(node, DEFINITIONS) and line.part_of is None) or is_docstring(node)):
            continue
        text: str | None = ""
        if id(node) in last:
            text = last[id(node)].text
            placed.add(last[id(node)].name)
        elif id(node) not in made and (id(node) in staying or isinstance(node, ast.Import | ast.ImportFrom)):
            numbers = numbers_of_model(script, line)
            text = None if here and not numbers else line.source.statement(node, numbers)
        if here:
            rows.put(line, text)
        elif text:
            job.append(text)
    edits += rows.edits()
    rest = [piece.text for piece in parts.pieces if piece.name not in placed]
    arguments = "".join(f"    {name}={value},\n" for name, value in parts.arguments.items())
    call = f"ml.Job(\n{arguments})"
    tail = [*([parts.inline] if parts.inline else []), *rest]
    if inner:
        body = [*([] if script.watched.seeded else ["torch.manual_seed(0)"]), *job, *tail, f"return {call}"]
        text = "def job():\n" + textwrap.indent(_spaced(body), "    ").replace("\n    \n", "\n\n")
        doc = '    """What meshloom adopt made of the loop."""\n'
        text = text.replace("def job():\n", f"def job():\n{doc}", 1)
    else:
        text = _spaced([*job, *tail, f"job = {call}"], 2)
    edits += [
        (*main.span(each), "") for each in [*script.route.functions, *dropped] if each in main.tree.body
    ]
    edits.append((*main.span(active), text))
    behind = [each for each in main.tree.body if each.lineno > active.lineno]
    edits += [(*main.span(each), "") for each in behind if not isinstance(each, DEFINITIONS)]
    if not script.watched.seeded and not inner:
        imports = [*imports, "", "torch.manual_seed(0)"]
    edits.append((_after_imports(main), _after_imports(main) - 1, "\n".join(imports)))
    return _edited(main, edits)


class TopLines:
    """The statements at the top of a file that share lines, with their new texts, as edits of these lines."""

    def __init__(self, main: PythonSource) -> None:
        self._main = main
        self._rows: list[list[ast.stmt]] = []
        for node in main.tree.body:
            if self._rows and node.lineno <= (self._rows[-1][-1].end_lineno or 0):
                self._rows[-1].append(node)
            else:
                self._rows.append([node])
        self._texts: dict[int, list[tuple[Line, str | None]]] = {}

    def put(self, line: Line, text: str | None) -> None:
        """text: of a statement, or of one that it stands for; None: it stays; "": it goes."""
        self._texts.setdefault(id(line.whole.node), []).append((line, text))

    def edits(self) -> list[tuple[int, int, str]]:
        """(first line, last line, text in their place) of rows that change."""
        found: list[tuple[int, int, str]] = []
        for row in self._rows:
            parts = [each for node in row for each in self._texts.get(id(node), [])]
            if all(text is None for _, text in parts):
                continue
            texts = [text for node in row for text in self._of(node, first=node is row[0])]
            start, _ = self._main.span(row[0])
            found.append((start, max(node.end_lineno or 0 for node in row), _spaced(texts, 2)))
        return found

    def _of(self, node: ast.stmt, first: bool) -> list[str]:
        parts = self._texts.get(id(node), [])
        if all(text is None for _, text in parts):
            return [self._main.statement(node) if first else self._main.segment(node)]
        return [
            text if text is not None else line.source.statement(line.node)
            for line, text in parts
            if text != ""
        ]


def _active(script: Script, main: PythonSource) -> ast.stmt:
    line = script.watched.frames[0].line
    return next(node for node in main.tree.body if node.lineno <= line <= (node.end_lineno or 0))


def _spaced(texts: list[str], empty: int = 1) -> str:
    """Statements, with empty lines around definitions."""
    out = ""
    for index, text in enumerate(texts):
        definition = text.startswith(("def ", "class ")) or (
            index and texts[index - 1].startswith(("def ", "class "))
        )
        out += ("\n" * (empty + 1) if definition and index else "\n" if index else "") + text
    return out


def _after_imports(main: PythonSource) -> int:
    """The line behind the last import at the top."""
    line = 1
    for node in main.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring(node):
            line = (node.end_lineno or 0) + 1
        elif line > 1:
            break
    return line


def _edited(main: PythonSource, edits: list[tuple[int, int, str]]) -> str:
    lines = list(PythonSource.read(main.path).lines)  # in which attributes are not plain names
    for first, last, text in sorted(edits, key=lambda each: (each[0], each[1]), reverse=True):
        new = text.split("\n") if text else []
        definition = text.startswith(("def ", "class "))
        if definition:
            above, below = lines[: first - 1], lines[last:]
            while above and not above[-1].strip():
                above.pop()
            while below and not below[0].strip():
                below.pop(0)
            lines = [*above, *([""] * 2 if above else []), *new, *([""] * 2 if below else []), *below]
        else:
            lines[first - 1 : last] = new
    text = "\n".join(lines).rstrip() + "\n"
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text
