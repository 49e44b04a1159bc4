"""The result of a verification, as a value, as JSON records and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from meshloom.core.units import format_count
from meshloom.replica.model_state import shown_names
from meshloom.verify.between_steps.checks import BetweenSteps, DifferingTensor, TensorError
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.compared.whole_batch import WholeBatch
from meshloom.verify.reference.step_records import Cast
from meshloom.verify.smaller_plans import SmallestPlan

ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan compared with one device that runs the same chunks.

    devices: one line about what ran the plan. precision: of the parameters. casts: lower precisions in the
        reference, but the plan's own. autocast: what the plan computes losses under, in a sentence; "": nothing.
        settings: torch's, of both sides, that change what operators return.
    owned: the share of the trainable elements that each rank updates. whole: the comparison with the whole
        batch, in the first step.
    digest: of what ran. notes: in what both sides are not as
        in training, a sentence each. between: what was compared between steps.
    explained: by which factor the first difference is. operator: the first that differs in lockstep, if it was looked for. moment: of the step that
        differs, in the run. differing: the first tensor of a step that differs. smallest: if it was looked for.
    """

    plan: str
    precision: str
    steps: Sequence[Comparison]
    casts: Sequence[Cast]
    whole: WholeBatch | None
    devices: str = ""
    owned: Sequence[float] = ()
    explained: str = ""
    operator: str = ""
    moment: str = ""
    autocast: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    digest: str = ""
    notes: Sequence[str] = ()
    between: Sequence[BetweenSteps] = ()
    differing: DifferingTensor | None = None
    smallest: SmallestPlan | None = None

    @property
    def passed(self) -> bool:
        """Whether the plan computes what one device computes."""
        return bool(self.steps) and all(each.passed for each in (*self.steps, *self.between))

    @property
    def first_wrong(self) -> Comparison | None:
        """The first step that differs."""
        return next((step for step in self.steps if not step.passed), None)

    def worst(self, rows: int = ROWS) -> list[TensorError]:
        """The largest errors relative to their tolerance, one per name and kind: of the first step that
        differs, or of all steps."""
        failed = [each for each in self.between if not each.passed]
        steps = [self.first_wrong] if self.first_wrong else failed or self.steps
        errors = [error for step in steps for error in _told(step.errors)]
        worst: dict[tuple[str, str], TensorError] = {}
        for error in sorted(errors, key=_severity, reverse=True):
            worst.setdefault((error.name, error.kind), error)
        return list(worst.values())[:rows]

    def records(self) -> list[dict[str, Any]]:
        """JSON-able values: one record per step, and a final one. Infinite errors are null."""
        end: dict[str, Any] = _plain(replace(self, differing=None))
        steps = [
            {"event": "verify_step", **step, "loss": step["loss"][0], "one_device_loss": step["loss"][1]}
            for step in end.pop("steps")
        ]
        del end["differing"]
        names = {"between": "between_steps", "smallest": "smallest_plan", "whole": "whole_batch"}
        named = {names.get(key, key): value for key, value in end.items()}
        return [*steps, {"event": "verify", **named, "worst": _plain(self.worst())}]


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if is_dataclass(value):
        own = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
        return {name: getattr(value, name) for name in ("passed", "equal") if hasattr(value, name)} | own
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return list(map(_plain, cast(Sequence[Any], value))) if isinstance(value, list | tuple) else value


def print_report(report: Report, console: Console) -> None:
    """Print the report: the verdict with what is known of the first difference, losses, the worst tensors, the rest."""

    def print_line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    lines = lines_of(report)
    above = 1 + next((number for number, line in enumerate(lines[1:]) if not line.startswith("  ")), 0)
    for line in lines[:above]:
        print_line(line)
    print_line(
        f"verify {report.plan} on {report.devices}, {report.precision}, against one device that runs the same chunks"
    )
    console.print(_losses(report))
    console.print(_errors(report))
    for line in lines[above:]:
        print_line(line)


def _losses(report: Report) -> Table:
    table = Table("step", "loss", "one device", "largest error", box=None, pad_edge=False)
    for step in report.steps:
        worst = max(_told(step.errors), key=_severity)
        which = f"{step.step}{' skipped' if step.skipped else ''}"
        whose = "" if worst.kind in ("loss", "norm") else f" of {worst.name}"
        losses = (f"{loss:.6f}" for loss in step.loss)
        table.add_row(which, *losses, f"{worst.error:.1e} ({worst.kind}{whose})")
    return table


def _errors(report: Report) -> Table:
    table = Table("worst", "of", "step", "error", "tolerance", "", box=None, pad_edge=False)
    for error in report.worst():
        verdict = "differs" if not error.passed else "within rounding of one device" if error.moved else ""
        sizes = f"{error.error:.1e}", f"{error.tolerance:.1e}"
        table.add_row(error.name, error.kind, str(error.step), *sizes, verdict)
    return table


def lines_of(report: Report) -> list[str]:
    """The verdict in its two halves, its reasons, and what was compared besides steps: a line each, the verdict first."""
    parts = [(report.first_wrong is None, _step_lines(report))]
    parts += [(each.passed, _between_lines(each)) for each in report.between]
    # what differs comes before what is equal
    first, *others = (line for _, lines in sorted(parts, key=lambda part: part[0]) for line in lines)
    return [f"{first}; on the whole batch: {whole_sentence(report)}", *others, *_notes_of(report)]


def _step_lines(report: Report) -> list[str]:
    wrong = report.first_wrong
    if wrong:
        names = {error.name for error in wrong.errors if not error.passed}
        module = f"; first module: {wrong.first_module}" if wrong.first_module else ""
        first = f"DIFFERS from step {wrong.step} on{report.moment}: {len(names)} tensors{module}"
        known = (report.explained, report.operator, *wrong.facts[:ROWS])
        return [first, *(f"  {each}" for each in known if each)]
    steps = format_count(len({each.step for each in report.steps}), "step")
    verdict = "EQUAL" if report.passed else "steps are equal"
    return [f"{verdict} to one device that runs the same chunks: {steps}"]


def _notes_of(report: Report) -> Iterator[str]:
    if report.smallest:
        yield report.smallest.sentence
    yield from report.notes
    if skipped := sum(step.skipped and step.passed for step in report.steps):
        yield (
            f"{format_count(skipped, 'update')} of {len(report.steps)} skipped on both sides, as gradients overflow float16: compared are their losses and buffers. "
            "More --steps have more updates"
        )
    yield from _rounding_lines([error for step in report.steps for error in step.errors])
    if report.autocast:
        yield report.autocast
    yield from _cast_lines(report.casts)
    if any(share < 1 for share in report.owned):
        yield f"sharded: ranks own {', '.join(f'{each:.1%}' for each in report.owned)} of the optimizer's state"


def whole_sentence(report: Report) -> str:
    """One device on the whole batch, held against one that runs the chunks."""
    whole = report.whole
    if whole is None and all(step.skipped for step in report.steps):
        return "not compared, every update is skipped"
    if whole is None:
        return "not compared, it does not fit in one device's memory"
    if not whole.ran:
        return f"not compared, {whole.why}"
    if whole.equal:
        return f"equal (largest error of a gradient {whole.error:.1e})"
    return f"differs by up to {whole.error:.1e} in a gradient, because {whole.why}"


def _between_lines(checked: BetweenSteps) -> list[str]:
    what = checked.what[0].upper() + checked.what[1:]
    worst = max(checked.errors, key=_severity, default=None)
    if checked.passed:
        size = f" (largest error {worst.error:.1e}, of {worst.name})" if worst else ""
        return [f"{what}: equal{size}"]
    wrong = sorted((error for error in checked.errors if not error.passed), key=_severity, reverse=True)
    shown = [
        f"{each.name} differs by {each.error:.1e}, and {each.tolerance:.1e} is tolerated" for each in wrong
    ]
    module = f"; first module: {checked.first_module}" if checked.first_module else ""
    return [
        f"DIFFERS: {checked.what}{module}",
        *(f"  {each}" for each in (*checked.facts[:ROWS], *shown[:ROWS])),
    ]


def _told(errors: Sequence[TensorError]) -> list[TensorError]:
    """Without those that are nothing but rounding, as they should be."""
    return [error for error in errors if not (error.noise and error.passed)]


def _rounding_lines(errors: Sequence[TensorError]) -> Iterator[str]:
    """The gradients that are no errors, however far they are off; a warning that mistakes smaller than the measured effect of rounding cannot
    be seen in some."""
    if names := list(dict.fromkeys(error.name for error in errors if error.noise and error.passed)):
        verb, whose = ("is", "its") if len(names) == 1 else ("are", "their")
        yield (
            f"{format_count(len(names), 'gradient')} ({shown_names(names)}) {verb} nothing but rounding, on one device too, as the terms of the sum cancel: nothing but "
            f"{whose} size is compared"
        )
    if moved := [error for error in _told(errors) if error.moved]:
        names, widest = {error.name for error in moved}, max(error.tolerance for error in moved)
        yield (
            f"{format_count(len(names), 'gradient')} of the plan may differ by up to {widest:.1e}, which is how far rounding alone moves gradients of one "
            "device: use --dtype float64 to detect smaller mistakes in them"
        )


def _cast_lines(casts: Sequence[Cast]) -> Iterator[str]:
    """One line for each lower precision."""
    places: dict[tuple[str, bool, bool], list[str]] = {}
    for each in casts:
        key = each.dtype, each.in_optimizer, each.in_products
        places.setdefault(key, []).append(each.place or "the model or loss")
    for (dtype, in_optimizer, in_products), found in places.items():
        how = f"computed in {dtype}"
        if in_products:
            how = f"float32 is multiplied as {'TF32' if dtype == 'float16' else dtype}, by a setting of torch"
        allowed = "nothing is tolerated for it but what rounding is measured to do"
        allowed = f"what it updates may differ as {dtype} does" if in_optimizer else allowed
        yield f"{how}, in {shown_names(found)}: {allowed}"


def _severity(error: TensorError) -> float:
    if not error.error:
        return 0.0
    return error.error / error.tolerance if error.tolerance and error.error == error.error else float("inf")
