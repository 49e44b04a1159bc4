"""The job's file: the script's text, with its set-up and its loop as functions of a job."""

from __future__ import annotations

import ast
import builtins
import textwrap
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from meshloom.adopt.counters import accumulation, loader_name, steps_of_epoch, total_steps
from meshloom.adopt.loop_pieces import clip_expression, loss_piece, rates_piece
from meshloom.adopt.route import Line, slice_of
from meshloom.adopt.script import Script, configures, is_talk, one_refusal, seeds
from meshloom.adopt.setup_pieces import (
    Piece,
    did_not_run,
    model_piece,
    optimizer_piece,
    refuse_uses_of_model,
    scheduler_piece,
)
from meshloom.adopt.source import Source, bound, calls, changed, used

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass
class Parts:
    """What a job is written from. arguments: of `ml.Job`, as text, in order."""

    pieces: list[Piece] = field(default_factory=list[Piece])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    inline: str = ""

    @property
    def needs(self) -> set[str]:
        """Names that these texts use."""
        names = set[str]().union(*(each.needs for each in self.pieces))
        for text in [*self.arguments.values(), self.inline]:
            names |= used(ast.parse(text)) if text else set()
        return names


def parts_of(script: Script) -> Parts:
    """Raises `UntranslatedError`."""
    parts = Parts()
    model = model_piece(script)
    optimizer = optimizer_piece(script, model)
    loss = loss_piece(script)
    arguments = {"model": "make_model", "loss": "training_loss", "optimizer": "make_optimizer"}
    arguments |= _data(script, parts)
    steps, line = total_steps(script)
    arguments["steps"] = steps
    script.because(line, f"the run has {steps} optimizer steps, and a job counts those")
    rates = rates_piece(script)
    scheduler = scheduler_piece(script, steps_of_epoch(script))
    if rates is not None and scheduler is not None:
        raise rates.lines[-1].refuse("rates are set by hand and by a scheduler. Use one of them.")
    if rates is not None:
        alias = rates.text.partition("(")[2].partition(",")[0]
        arguments["scheduler"] = f"lambda {alias}: ByHand({alias}, set_rates)"
    elif scheduler is not None:
        arguments["scheduler"] = "make_scheduler"
    clip = clip_expression(script)
    if clip is not None:
        arguments["clip_grad_norm"] = clip[0]
        script.because(clip[1], "a job clips the gradient of the whole model, over all ranks")
    parts.pieces += [model, optimizer, *(each for each in (scheduler, rates, loss) if each is not None)]
    parts.arguments = arguments
    return parts


def _data(script: Script, parts: Parts) -> dict[str, str]:
    """Arguments of the job about its data."""
    accumulated = accumulation(script)
    times = f" * {accumulated}" if accumulated else ""
    loader: Any = script.watched.loader
    if loader is None:
        return _stream(script, parts, times)
    name = loader_name(script)
    loop = script.data_loop
    line = loop.node.lineno if loop else script.first.line[1]
    own = [
        each
        for each in script.route.body
        if any(script.values.get(one) is loader for one in bound(each.node))
    ]
    if script.loader is None and own:
        name = next(each for each in bound(own[0].node) if script.values.get(each) is loader)
        parts.inline = own[0].source.segment(own[0].node)
    elif script.loader is None:
        if loop is None or not isinstance(loop.node, ast.For):
            raise one_refusal(
                script,
                line,
                "the DataLoader has no name in the set-up. Make it before the loop, and give it a name.",
            )
        parts.inline = f"{name} = {loop.source.segment(script.unwrapped(loop.node.iter))}"
    if loader.batch_size is None or script.watched.nexts > 1:
        what = (
            "several batches come for one backward()"
            if script.watched.nexts > 1
            else "the DataLoader has a batch_sampler, or none"
        )
        raise one_refusal(
            script,
            line,
            f"{what}. Use one DataLoader with batch_size=..., or write Job(data=..., batch_size=..., collate=...) by hand.",
        )
    arguments = {"data": f"lambda: {name}.dataset", "batch_size": f"{name}.batch_size{times}"}
    script.because(line, "each rank reads its share of the batches that the DataLoader's dataset gives")
    if not isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            kind = type(loader.sampler).__name__
            raise one_refusal(
                script,
                line,
                f"the DataLoader draws by {kind}. A job reads in order or shuffled: make the order a part of the dataset (torch.utils.data.Subset), and leave the sampler out.",
            )
        if isinstance(loader.sampler, SequentialSampler):
            arguments["shuffle"] = "False"
        else:
            script.because(
                line, "the order of samples is drawn from the job's seed, in place of torch's generator"
            )
        if loader.drop_last:
            arguments["drop_last"] = "True"
    if loader.num_workers:
        arguments["num_workers"] = f"{name}.num_workers"
    collate = loader.collate_fn
    if getattr(collate, "__module__", "").startswith("torch.utils.data"):
        return arguments
    return arguments | {"collate": f"{name}.collate_fn"}


def _stream(script: Script, parts: Parts, times: str) -> dict[str, str]:
    """Of a function that returns a batch each time it is called."""
    getter = script.first.source
    found = [
        (line, call)
        for line in [*script.route.body, *script.route.setup, *script.route.beside]
        for call in calls(line.node)
        if isinstance(call.func, ast.Name) and call.func.id == getter
    ]
    if not found:
        raise one_refusal(
            script, script.first.line[1], "no batch was seen coming into the loop, from a DataLoader or from a function that returns tensors of as many rows. Put the data into a DataLoader, or into a function like get_batch()."
        )  # fmt: skip
    line, call = found[0]
    rows = (
        len(script.first.batch[0])
        if isinstance(script.first.batch, tuple | list)
        else len(script.first.batch)
    )
    names = [
        name
        for name, value in script.setup_values.items()
        if type(value) is int and value == rows and "batch" in name.lower()
    ]
    text = line.source.segment(call)
    if not isinstance(script.first.batch, tuple | list):
        raise line.refuse(
            f"{getter}() returns a {type(script.first.batch).__name__}. Let it return a tuple of tensors, one row a sample."
        )
    body = f'class Batches(IterableDataset):\n    """The rows of what {getter} returns, call after call."""\n\n    def __iter__(self):\n        while True:\n            yield from zip(*{text}, strict=True)'
    parts.pieces.append(Piece("Batches", body, [], {"IterableDataset", *used(call)}))
    script.because(line.at, f"{text} is called by the job's data, which divides what it returns among ranks")
    return {"data": "Batches", "batch_size": f"{names[0] if names else rows}{times}"}


def write(script: Script, parts: Parts) -> str:
    """The text of the job's file. Raises `UntranslatedError`."""
    main = script.route.sources[0]
    drop_functions_of_roles(script, main)
    functions = script.route.functions
    made = {id(line.node) for piece in parts.pieces for line in piece.lines if not line.depth}
    provided = {
        "make_model",
        "make_optimizer",
        "make_scheduler",
        "training_loss",
        "set_rates",
        "Batches",
        "ml",
        "ByHand",
        "OnceIn",
        "ParametersOf",
        "IterableDataset",
    }
    kept_definitions = [
        node for node in main.tree.body if isinstance(node, DEFINITIONS) and node not in functions
    ]
    of_definitions = set[str]().union(*(used(node) for node in kept_definitions))
    wanted = (parts.needs | of_definitions) - provided - set(dir(builtins))
    lines = [
        each
        for each in script.route.setup
        if id(each.node) not in made and not isinstance(each.node, ast.Import | ast.ImportFrom)
    ]
    kept, _ = slice_of(lines, wanted, lambda name: True, lambda line, names: _stays(script, line, names))
    refuse_uses_of_model(script, [each for each in kept if not is_talk(each.node)])
    inner = _is_inner(script)
    imports = _imports(script, parts, kept)
    if not script.watched.seeded:
        script.because(
            main.tree.body[-1].lineno,
            "the script seeds nothing, and every rank has to make the same data: torch.manual_seed(0)",
        )
    return _composed(script, main, parts, kept, made, imports, inner)


def drop_functions_of_roles(script: Script, main: Source) -> None:
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


def _bound_at_top(main: Source) -> set[str]:
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
        line.frame > 0 or (line.at == line.node.lineno and id(line.node) not in top)
        for line in script.route.setup
    )


def _imports(script: Script, parts: Parts, kept: list[Line]) -> list[str]:
    needs = parts.needs
    schedules = sorted(needs & {"ByHand", "OnceIn"})
    found = ["import meshloom as ml"]
    if schedules:
        found.append(f"from meshloom.adopt.schedules import {', '.join(schedules)}")
    if "ParametersOf" in needs:
        found.append("from meshloom.adopt.views import ParametersOf")
    main = script.route.sources[0]
    have = set[str]().union(*(bound(node) for node in main.tree.body)) | {
        name for line in kept for name in bound(line.node)
    }
    if "IterableDataset" in needs - have:
        found.append("from torch.utils.data import IterableDataset")
    of_kept = set[str]().union(*(used(line.node) for line in kept), needs)
    for frame in script.watched.frames[1:]:
        if frame.path != main.path:
            names = sorted(
                name
                for name in of_kept - have
                if name in frame.globals and not name.startswith("__") and name not in dir(builtins)
            )
            found += [_import_of(script, frame.path.stem, name, frame.globals[name]) for name in names]
            have |= set(names)
    return found


def _import_of(script: Script, module: str, name: str, value: Any) -> str:
    own = getattr(value, "__name__", None)
    if type(value).__name__ == "module":
        return f"import {own}" if own == name else f"import {own} as {name}"
    return f"from {module} import {name}"


def _composed(
    script: Script,
    main: Source,
    parts: Parts,
    kept: list[Line],
    made: set[int],
    imports: list[str],
    inner: bool,
) -> str:
    """The script's lines, of which some are replaced."""
    top = {id(node) for node in main.tree.body}
    staying = {id(each.node) for each in kept}
    last = {
        id(piece.lines[-1].node): piece for piece in parts.pieces if piece.lines and not piece.lines[-1].depth
    }
    edits: list[tuple[int, int, str]] = []
    job: list[str] = []
    placed: set[str] = set()
    active = _active(script, main)
    for line in script.route.setup:
        node, here = line.node, line.frame == 0 and id(line.node) in top
        text = ""
        if id(node) in last:
            text = last[id(node)].text
            placed.add(last[id(node)].name)
        elif id(node) not in made and (
            id(node) in staying
            or (here and isinstance(node, DEFINITIONS) and node not in script.route.functions)
        ):
            if here:
                continue
            text = line.source.statement(node)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not here:
            text = line.source.statement(node)
        if here and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the file's docstring
        if here and isinstance(node, DEFINITIONS):
            continue
        if here:
            edits.append((*main.span(node), text))
        elif text:
            job.append(text)
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
        text = _spaced([*tail, f"job = {call}"], 2)
    for function in script.route.functions:
        if function in main.tree.body:
            edits.append((*main.span(function), ""))
    edits.append((*main.span(active), text))
    for node in main.tree.body:
        if node.lineno > active.lineno and not isinstance(node, DEFINITIONS):
            edits.append((*main.span(node), ""))
    if not script.watched.seeded and not inner:
        imports = [*imports, "", "torch.manual_seed(0)"]
    edits.append((_after_imports(main), _after_imports(main) - 1, "\n".join(imports)))
    return _edited(main, edits)


def _active(script: Script, main: Source) -> ast.stmt:
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


def _after_imports(main: Source) -> int:
    """The line behind the last import at the top."""
    line = 1
    for node in main.tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or docstring:
            line = (node.end_lineno or 0) + 1
        elif line > 1:
            break
    return line


def _edited(main: Source, edits: list[tuple[int, int, str]]) -> str:
    lines = list(main.lines)
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
