"""What `meshloom plan` says of 20 (job, plan) pairs, beside what the same plans take when they run.

    python benchmarks/advice/main.py                     a table, and whether the goals are met; half an hour
    python benchmarks/advice/main.py --json -            the same as JSON lines
    python benchmarks/advice/main.py --jobs gpt,lstm     some of the jobs

The machine is calibrated first, into a directory of its own. In every round each of a job's plans is priced,
and then runs for some steps, so that what changes on the machine from minute to minute changes both; the
medians over all rounds are compared, and what is recommended by them is judged. What single rounds recommend
is shown. Between its turns a plan's ranks stand still. Trials are made once, after the advice that `meshloom
plan JOB --try 2` would try them after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs import JOBS
from turns import Run

from meshloom.core.plan import Plan
from meshloom.launch.allocator import keep_freed_memory
from meshloom.machine.machine import load, machine_file
from meshloom.measure.at_hand import Wish, devices_for
from meshloom.measure.trials import try_plans
from meshloom.planner.advise import advise, finalists, recommended
from meshloom.planner.pricing import Devices, Option

PAIRS = {
    "gpt": ["dp=1", "dp=2", "dp=1,pp=2,microbatches=4", "dp=2,pp=2,microbatches=2"],
    "mlp": ["dp=2", "dp=1,tp=2", "dp=2,exchange=server", "dp=4"],
    "convolutions": ["dp=1", "dp=2,microbatches=2", "dp=1,tp=2", "dp=4,zero=1"],
    "lstm": ["dp=1", "dp=2", "dp=3", "dp=1,pp=2,microbatches=2"],
    "small_llama": ["dp=2", "dp=1,tp=2", "dp=1,pp=2,microbatches=4", "dp=2,tp=2"],
}
WITHIN = 0.25
CORRELATION = 0.8
BEST = 1.10
TRIED = 2  # of a job's plans


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A plan of a job, predicted and measured. bytes: by axis, of rank 0 in a step. rounds: seconds predicted
    and measured in each. seconds: predicted, by part."""

    job: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: dict[str, float]
    measured_bytes: dict[str, float]
    rounds: list[tuple[float, float]]
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.measured_seconds


@dataclass(frozen=True)
class Measured:
    """Of one job. options, turns: what every round has found, by plan. trials: seconds of the plans that were
    tried, None if one failed."""

    job: str
    options: dict[str, list[Option]]
    turns: dict[str, list[dict[str, Any]]]
    trials: dict[str, float | None]


@dataclass(frozen=True)
class Advised:
    """The plans that are recommended: by the medians of all rounds, by each round, and after trials."""

    by_price: str
    in_rounds: list[str]
    after_trials: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", default=",".join(PAIRS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of pricing each of a job's plans and running some steps under it",
    )
    parser.add_argument(
        "--machine", metavar="FILE", type=Path, help="measurements of this machine that are there already"
    )
    arguments = parser.parse_args()
    out = sys.stderr if arguments.json == "-" else sys.stdout
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # what was measured of this machine lies there, for prices and runs alike
        if arguments.machine:
            machine_file("cpu").parent.mkdir(parents=True)
            machine_file("cpu").write_text(arguments.machine.read_text())
        else:
            words = [sys.executable, "-m", "meshloom", "calibrate", "--devices", "cpu", "--ranks", "4"]
            subprocess.run(words, check=True, stdout=out)
        machine = load(machine_file("cpu"))
        keep_freed_memory()  # as `meshloom plan` does
        devices = devices_for(Wish(devices="cpu", ranks=4), 1, print)
        assert not isinstance(devices, int)
        pairs: list[Pair] = []
        advised: dict[str, Advised] = {}
        for name in arguments.jobs.split(","):
            measured = _measured(name, devices, arguments.rounds, Path(home))
            advised[name] = _advised(measured)
            for pair in (_pair(measured, plan) for plan in PAIRS[name]):
                pairs.append(pair)
                print(_row(pair), file=out, flush=True)
    goals = goals_of(pairs, advised)
    print(
        f"\n{machine.name}: {machine.model}, {machine.cores} cores, {time.monotonic() - started:.0f} s",
        file=out,
    )
    for goal in goals:
        print(f"{'met   ' if goal['met'] else 'MISSED'}  {goal['goal']}: {goal['found']}", file=out)
    if arguments.json:
        lines = [{"event": "pair", **asdict(each), "ratio": each.ratio} for each in pairs] + [
            {"event": "goal", **each} for each in goals
        ]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0


def _measured(name: str, devices: Devices, num_rounds: int, home: Path) -> Measured:
    """All plans' ranks stay while the job is measured; in each round, and for each plan there or back, price and steps
    follow each other."""
    target = f"{Path(__file__).with_name('jobs.py')}:{name}"
    plans = PAIRS[name]
    options: dict[str, list[Option]] = {plan: [] for plan in plans}
    turns: dict[str, list[dict[str, Any]]] = {plan: [] for plan in plans}
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for number, plan in enumerate(plans):
            folder = home / f"{name}-{number}"
            folder.mkdir()
            runs[plan] = stack.enter_context(Run(name, plan, folder))
            runs[plan].turn()  # once it has started, the next one does
        for number in range(num_rounds):
            for plan in plans[:: -1 if number % 2 else 1]:
                options[plan] += advise(JOBS[name], devices, plans=[Plan.parse(plan)]).options
                turns[plan].append(runs[plan].turn())
    advice = advise(JOBS[name], devices, plans=[*map(Plan.parse, plans)])
    trials = try_plans(finalists(advice, TRIED), target, "auto", lambda text: None)
    assert not isinstance(trials, int)
    return Measured(name, options, turns, trials)


def _recommended(options: Sequence[Option]) -> str:
    best = recommended(options)
    assert best
    return str(best.plan)


def _advised(measured: Measured) -> Advised:
    medians = [
        replace(
            mine[0],
            price=replace(mine[0].price, seconds=statistics.median(each.price.seconds for each in mine)),
        )
        for mine in measured.options.values()
    ]
    in_rounds = [_recommended(options) for options in zip(*measured.options.values(), strict=True)]
    after_trials = [
        replace(each, measured_seconds=measured.trials[str(each.plan)])
        for each in medians
        if measured.trials.get(str(each.plan))
    ]
    return Advised(_recommended(medians), in_rounds, _recommended(after_trials))


def _pair(measured: Measured, plan: str) -> Pair:
    prices, turns = [each.price for each in measured.options[plan]], measured.turns[plan]
    return Pair(
        job=measured.job,
        plan=plan,
        predicted_seconds=statistics.median(each.seconds for each in prices),
        measured_seconds=statistics.median(seconds for each in turns for seconds in each["step_seconds"]),
        predicted_bytes={axis: float(count) for axis, count in measured.options[plan][0].num_bytes.items()},
        measured_bytes=turns[0]["bytes"],
        rounds=[
            (price.seconds, statistics.median(each["step_seconds"]))
            for price, each in zip(prices, turns, strict=True)
        ],
        seconds={
            part: statistics.median(getattr(each, part) for each in prices)
            for part in ("chunks", "exchange", "update", "other")
        },
    )


def goals_of(pairs: Sequence[Pair], advised: Mapping[str, Advised]) -> list[dict[str, Any]]:
    """What was asked of the prices, and what came out. advised: by job."""
    close = [each for each in pairs if abs(each.ratio - 1) <= WITHIN]
    exact = [each for each in pairs if each.predicted_bytes == each.measured_bytes]
    overall = rank_correlation(
        [each.predicted_seconds for each in pairs], [each.measured_seconds for each in pairs]
    )
    goals = [
        {
            "goal": f"predicted / measured step within {WITHIN:.0%}",
            "met": len(close) == len(pairs),
            "found": f"{len(close)} of {len(pairs)}",
        },
        {"goal": "bytes exact", "met": len(exact) == len(pairs), "found": f"{len(exact)} of {len(pairs)}"},
        {
            "goal": f"rank correlation of all pairs >= {CORRELATION}",
            "met": overall >= CORRELATION,
            "found": f"{overall:.2f}",
        },
    ]
    for name in dict.fromkeys(each.job for each in pairs):
        mine = [each for each in pairs if each.job == name]
        within = rank_correlation(
            [each.predicted_seconds for each in mine], [each.measured_seconds for each in mine]
        )
        goals.append(
            {
                "goal": f"{name}: rank correlation >= {CORRELATION}",
                "met": within >= CORRELATION,
                "found": f"{within:.2f}",
            }
        )
        best = min(each.measured_seconds for each in mine)
        took = {each.plan: each.measured_seconds / best for each in mine}
        chosen = advised[name]
        single = ", ".join(f"{took[plan]:.2f}" for plan in chosen.in_rounds)
        for how, plan, more in (
            ("by price", chosen.by_price, f"; by single rounds {single}"),
            (f"after {TRIED} trials", chosen.after_trials, ""),
        ):
            found = f"{took[plan]:.2f} ({plan}{more})"
            goals.append(
                {
                    "goal": f"{name}: recommended {how} / best <= {BEST}",
                    "met": took[plan] <= BEST,
                    "found": found,
                }
            )
    return goals


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks.

    >>> rank_correlation([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    return round(statistics.correlation(_ranks(a), _ranks(b)), 6)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(place)) for place in range(len(values))]


def _row(pair: Pair) -> str:
    same = (
        "bytes equal"
        if pair.predicted_bytes == pair.measured_bytes
        else f"bytes {pair.predicted_bytes} / {pair.measured_bytes}"
    )
    predicted, measured = 1e3 * pair.predicted_seconds, 1e3 * pair.measured_seconds
    return f"{pair.job:13} {pair.plan:26} predicted {predicted:7.1f} ms  measured {measured:7.1f} ms  ratio {pair.ratio:.2f}  {same}"


if __name__ == "__main__":
    raise SystemExit(main())
