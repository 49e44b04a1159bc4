"""Causes that a search in ranks' programs finds, and the order in which causes are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.parameters.file_weights import build_filled_model
from meshloom.program.store.drawn_batches import drawn_alone, loss_of
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.causes.of_inputs import causes_of
from meshloom.verify.compared.compare import first_differing
from meshloom.verify.comparing import Comparing, ComparisonResult
from meshloom.verify.lockstep_check import first_wrong_operator
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.stage_outputs import RanForwards

_AGAIN = "In forwards of the step's chunks on equal parameters, by all ranks,"
_INPUTS = ("data", "same draws", "weights", "buffers")  # causes that explain outputs
_VAGUE = ("unknown", "optimizer", "batch statistics", "buffers", "loss", "replicas")
_EXACT = ("None or zero", "border")  # causes that say which numbers are wrong
_OF_STATE = ("forward", "stages")  # causes of what parameters, or what forwards find, may be as well


@dataclass(frozen=True, kw_only=True)
class InPrograms:
    """What a search has found. module: of the first operator whose value is wrong; "": none is. are_right: whether operators were searched, and all
    agree, as does a forward."""

    causes: Sequence[Cause] = ()
    module: str = ""
    are_right: bool = False

    def before(self, causes: Sequence[Cause]) -> list[Cause]:
        """These, and then others; behind them where nothing is wrong in programs, and the others give the numbers."""
        first = next(iter(causes), None)
        if self.are_right and first and first.kind in _EXACT:
            return [*causes, *self.causes]
        if self.are_right and first and first.explains:
            return [*causes]  # which is not of what is around programs
        return [*self.causes, *causes]


def in_order(
    causes: Sequence[Cause], special: Cause | None, changed: Sequence[Cause], *, resumed: bool
) -> list[Cause]:
    """Causes with what a step's place in the run says, which comes first unless something says more. changed: what has changed between steps, or
    was other before them, which comes before all. resumed: whether the step is the first one after resuming."""
    if any(each.kind == "initial values" for each in changed):  # forwards had other parameters
        causes = [each for each in causes if each.kind not in _OF_STATE]
    if special is None:
        return [*changed, *causes]
    first = next(iter(causes), None)
    vague = (*_VAGUE, *_OF_STATE) if resumed else _VAGUE
    if first and special.kind == "saved" and first.kind != "between steps":
        vague = (*vague, first.kind)
    comes_first = first is None or (first.kind in vague and not first.explains)
    return [*changed, *([special, *causes] if comes_first else [*causes, special])]


def of_programs(
    trainer: Trainer,
    comparison: Comparing,
    forwards: RanForwards | None,
    plan: Plan,
    dtype: torch.dtype | None,
) -> InPrograms:
    """What is wrong with programs, with what they are given, or with what ranks that run them send each other. forwards: of the step that
    differs, if ranks have run them once more."""
    wrong_output = comparison.place(forwards.of_chunks) if forwards else None
    module, unseen = (wrong_output.module, wrong_output.unseen) if wrong_output else (None, ())
    before = f", or in {', '.join(unseen)} before it, whose output is not compared" if unseen else ""
    if forwards and forwards.facts:
        place = next((path for _, _, path, _ in forwards.facts if path), "")
        return InPrograms(causes=[*causes_of(forwards.facts)], module=place)
    result = comparison.result()
    engine = trainer.replicas[0].engine
    division = engine.division
    if not module and (found := _of_lent(result, engine.lent)):
        return InPrograms(causes=[found])
    if division is None:
        draws = _is_dropout(trainer, module)
        return InPrograms(
            causes=[*_of_stages(result, module, plan, forwards, draws=draws, before=before)]
            if forwards
            else ()
        )
    known, wrong_gradients = _kinds(result), bool(_wrong(result, "gradient"))
    # without replicas nothing but the ranks' programs makes gradients
    of_ranks = wrong_gradients and ("unknown" in known or plan.dp == 1)
    replica = trainer.replicas[0]
    device, job = replica.context.device, replica.job
    batches = first_batches(job, 1, plan.largest_share(job.batch_size)[0])
    model = build_filled_model(job, device, dtype)
    (batch,) = drawn_alone(job, model, [to_device(each, device, dtype) for each in batches], dtype)
    wrong, sentence, path = first_wrong_operator(division.first, model, loss_of(batch, job.loss), batch)
    if known.intersection(_INPUTS) or not (wrong or module or of_ranks):
        return InPrograms()
    if not wrong and module:
        sentence += f" {_AGAIN} the output of {module} is the first that differs: what is computed or sent there is wrong{before}."
    elif not wrong and forwards and "loss" in _wrong(result, "loss"):
        sentence += f" {_AGAIN} compared outputs agree, and losses in the step did not: what is outside modules is wrong, or was so in the step alone."
    elif not wrong and forwards:
        sentence += f" {_AGAIN} compared outputs agree, and gradients in the step did not: look at what is sent in backward, or added up behind it."
    again = not (wrong or module) and wrong_gradients and "unknown" in known and plan.recompute != "none"
    return InPrograms(
        causes=[*([_recomputed(forwards)] if again else []), Cause("division", sentence)],
        module=path or ("the model or loss" if wrong else ""),
        are_right=not wrong and module is None,
    )


def _of_lent(result: ComparisonResult, lent: Collection[str]) -> Cause | None:
    """Whether gradients are wrong of parameters alone that several stages use."""
    wrong = _wrong(result, "gradient")
    if not wrong or not set(wrong).issubset(lent) or (result.causes and result.causes[0].explains):
        return None
    names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    what = f"Of all gradients those of {names} alone are wrong, which several stages use"
    return Cause(
        "tied", f"{what}: what one of these stages adds is lost, or does not count once, on its way to the one that updates it."
    )  # fmt: skip


def _recomputed(forwards: RanForwards | None) -> Cause:
    """Gradients are wrong under a plan that recomputes, and nothing before them is."""
    what = "Forwards agree with one device's, and gradients do not: what backward needs is not what forward has computed: under a plan that recomputes,"
    other = "other values there, of parameters or buffers, as nothing draws"
    return Cause(
        "recompute",
        f"{what} {'other draws or values there' if forwards is None or forwards.draw else other}.",
    )


def _is_dropout(trainer: Trainer, module: str | None) -> bool:
    held = dict(trainer.replicas[0].model.named_modules()).get(module or "")
    return isinstance(held, _DropoutNd)


def _of_stages(
    result: ComparisonResult,
    module: str | None,
    plan: Plan,
    forwards: RanForwards,
    *,
    draws: bool,
    before: str,
) -> Iterator[Cause]:
    """The same of a plan that divides no operators. draws: whether the module does nothing but draw. before: what else may be wrong, before it."""
    known = _kinds(result)
    if not module and plan.recompute != "none" and "unknown" in known:
        yield _recomputed(forwards)
    elif not module and plan.pp > 1 and plan.dp == 1 and _wrong(result, "gradient") and "unknown" in known:
        yield Cause(
            "stages",
            "Forwards of the stages agree with one device's, and gradients do not: what a stage computes or keeps for backward, or is sent there, is wrong.",
        )
    if module and not known.intersection(_INPUTS):
        why = "what a stage computes there, or what it is sent, is wrong"
        if plan.pp > 1 and not any(kind == "stages" for kind, *_ in forwards.facts):
            why = (
                "what a stage computes there is wrong, and what stages send each other arrives as it was sent"
            )
        if draws:
            why = "it draws other numbers than on one device, as after another number of draws before it"
        yield Cause(
            "stages",
            f"In forwards of the stages on one device's parameters the output of {module} is the first that differs: {why}{before}.",
        )


def _kinds(result: ComparisonResult) -> set[str]:
    return {cause.kind for cause in result.causes}


def _wrong(result: ComparisonResult, kind: Literal["gradient", "loss"]) -> Sequence[str]:
    """The names of what is of this kind and differs, in the first step in which something does."""
    first = first_differing(result.steps)
    return first.failed(kind) if first is not None else ()


def after_resuming(causes: Sequence[Cause], again: BetweenSteps) -> list[Cause]:
    """Causes of a difference behind a checkpoint, with what `again` shows: the comparison of it with what is saved once it is resumed."""
    of_place = [each for each in causes if each.kind == "resuming"]
    others = [each for each in causes if each.kind != "resuming"]
    if not again.passed:
        return [*again.causes, *of_place, *others]
    if not others:
        return of_place
    right = "All steps before the checkpoint agree. Parameters, state and numbers are resumed as they were saved: saved again, they are the same."
    if others[0].kind == "data" and not others[0].explains:
        right = f"{right} With the first one after resuming the data goes on elsewhere."
    return [*others, Cause("resuming", right)] if of_place else others
