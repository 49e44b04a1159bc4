"""What `meshloom plan` says of 20 (job, plan) pairs, beside what the same plans take when they run.

    python benchmarks/advice/main.py                     a table, and whether the goals are met; half an hour
    python benchmarks/advice/main.py --json -            the same as JSON lines
    python benchmarks/advice/main.py --jobs gpt,lstm     some of the jobs

The machine is calibrated first, into a directory of its own. In every round a job's plans are priced and then run, so that what changes on the machine from
minute to minute changes both; the medians over all rounds are compared, and what is recommended by them is judged. What each round's advice recommends is shown.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs import JOBS

from meshloom.at_hand import Wish, devices_for
from meshloom.cluster import load, machine_file
from meshloom.companions import advise_beside
from meshloom.launch import run_ranks
from meshloom.plan import Plan
from meshloom.planner.advise import finalists, recommended, tried
from meshloom.planner.pricing import Devices, Option
from meshloom.trials import try_plans

PAIRS = {
    "gpt": ["dp=1", "dp=2", "dp=1,pp=2,microbatches=4", "dp=2,pp=2,microbatches=2"],
    "mlp": ["dp=2", "dp=1,tp=2", "dp=2,exchange=server", "dp=4"],
    "convolutions": ["dp=1", "dp=2,microbatches=2", "dp=1,tp=2", "dp=4,zero=1"],
    "lstm": ["dp=1", "dp=2", "dp=3", "dp=1,pp=2,microbatches=2"],
    "small_llama": ["dp=2", "dp=1,tp=2", "dp=1,pp=2,microbatches=4", "dp=2,tp=2"],
}
STEPS = 14
WITHIN = 0.25
CORRELATION = 0.8
BEST = 1.10
TRIED = 2  # of a job's plans


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A plan of a job, predicted and measured. bytes: by axis, of rank 0 in a step. rounds: seconds predicted and measured in each. seconds: predicted, by part."""

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
class Advised:
    """The plans that one round's advice recommends."""

    by_price: str
    after_trials: str


@dataclass(frozen=True)
class Round:
    """Of one job. options, trials, runs: by plan."""

    options: dict[str, Option]
    trials: dict[str, float | None]
    runs: dict[str, dict[str, Any]]
    advised: Advised


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(PAIRS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="of pricing and running a job's plans")
    parser.add_argument("--machine", metavar="FILE", type=Path, help="measurements of this machine that are there already")
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
        pairs: list[Pair] = []
        advised: dict[str, list[Advised]] = {}
        for name in arguments.jobs.split(","):
            devices = devices_for(Wish(devices="cpu", ranks=4), 1, print)
            assert not isinstance(devices, int)
            rounds = [_round(name, number, devices, Path(home) / "measured.json") for number in range(arguments.rounds)]
            advised[name] = [_advised(rounds), *(each.advised for each in rounds)]
            for pair in (_pair(name, plan, rounds) for plan in PAIRS[name]):
                pairs.append(pair)
                print(_row(pair), file=out, flush=True)
    goals = goals_of(pairs, advised)
    print(f"\n{machine.name}: {machine.model}, {machine.cores} cores, {time.monotonic() - started:.0f} s", file=out)
    for goal in goals:
        print(f"{'met   ' if goal['met'] else 'MISSED'}  {goal['goal']}: {goal['found']}", file=out)
    if arguments.json:
        lines = [{"event": "pair", **asdict(each), "ratio": each.ratio} for each in pairs] + [{"event": "goal", **each} for each in goals]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0


def _round(name: str, number: int, devices: Devices, path: Path) -> Round:
    """Advice, trials, and a run of each plan, there or back."""
    target = f"{Path(__file__).with_name('jobs.py')}:{name}"
    advice = advise_beside(JOBS[name], target, devices, plans=[*map(Plan.parse, PAIRS[name])])
    trials = try_plans(finalists(advice, TRIED), target, "auto", lambda text: None)
    assert not isinstance(trials, int)
    by_price, after_trials = advice.recommended, tried(advice, trials).recommended
    assert by_price and after_trials
    runs = {plan: _run(name, Plan.parse(plan), path) for plan in PAIRS[name][:: -1 if number % 2 else 1]}
    return Round({str(each.plan): each for each in advice.options}, trials, runs, Advised(str(by_price.plan), str(after_trials.plan)))


def _advised(rounds: Sequence[Round]) -> Advised:
    """What the medians over all rounds recommend."""
    prices = {plan: statistics.median(each.options[plan].price.seconds for each in rounds) for plan in rounds[0].options}
    options = [replace(option, price=replace(option.price, seconds=prices[plan])) for plan, option in rounds[0].options.items()]
    took: dict[str, list[float]] = {}
    for plan, seconds in (item for each in rounds for item in each.trials.items()):
        took.setdefault(plan, []).extend([seconds] if seconds is not None else [])
    by_price = recommended(options)
    after_trials = recommended(
        [replace(each, measured_seconds=statistics.median(took[str(each.plan)])) for each in options if took.get(str(each.plan))]
    )
    assert by_price and after_trials
    return Advised(str(by_price.plan), str(after_trials.plan))


def _run(name: str, plan: Plan, path: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), name, str(STEPS), str(path)]
    code = run_ranks(command, plan.mesh, "cpu", str(plan)) if plan.mesh.size > 1 else subprocess.run(command).returncode
    if code:
        raise SystemExit(f"{name} under {plan} failed")
    return json.loads(path.read_text())


def _pair(name: str, plan: str, rounds: Sequence[Round]) -> Pair:
    prices = [each.options[plan].price for each in rounds]
    return Pair(
        job=name,
        plan=plan,
        predicted_seconds=statistics.median(each.seconds for each in prices),
        measured_seconds=statistics.median(seconds for each in rounds for seconds in each.runs[plan]["step_seconds"]),
        predicted_bytes={axis: float(count) for axis, count in rounds[0].options[plan].num_bytes.items()},
        measured_bytes=rounds[0].runs[plan]["bytes"],
        rounds=[(price.seconds, statistics.median(each.runs[plan]["step_seconds"])) for price, each in zip(prices, rounds, strict=True)],
        seconds={part: statistics.median(getattr(each, part) for each in prices) for part in ("chunks", "exchange", "update", "other")},
    )


def goals_of(pairs: Sequence[Pair], advised: Mapping[str, Sequence[Advised]]) -> list[dict[str, Any]]:
    """What was asked of the prices, and what came out. advised: for each job, what is recommended by all rounds, and then by each of them."""
    close = [each for each in pairs if abs(each.ratio - 1) <= WITHIN]
    exact = [each for each in pairs if each.predicted_bytes == each.measured_bytes]
    overall = rank_correlation([each.predicted_seconds for each in pairs], [each.measured_seconds for each in pairs])
    goals = [
        {"goal": f"predicted / measured step within {WITHIN:.0%}", "met": len(close) == len(pairs), "found": f"{len(close)} of {len(pairs)}"},
        {"goal": "bytes exact", "met": len(exact) == len(pairs), "found": f"{len(exact)} of {len(pairs)}"},
        {"goal": f"rank correlation of all pairs >= {CORRELATION}", "met": overall >= CORRELATION, "found": f"{overall:.2f}"},
    ]
    for name in dict.fromkeys(each.job for each in pairs):
        mine = [each for each in pairs if each.job == name]
        within = rank_correlation([each.predicted_seconds for each in mine], [each.measured_seconds for each in mine])
        goals.append({"goal": f"{name}: rank correlation >= {CORRELATION}", "met": within >= CORRELATION, "found": f"{within:.2f}"})
        best = min(each.measured_seconds for each in mine)
        took = {each.plan: each.measured_seconds / best for each in mine}
        chosen = {
            "recommended by price": [each.by_price for each in advised[name]],
            f"recommended after {TRIED} trials": [each.after_trials for each in advised[name]],
        }
        for how, plans in chosen.items():
            of_all, *of_each = (took[plan] for plan in plans)
            found = f"{of_all:.2f} ({plans[0]}; by single rounds {', '.join(f'{ratio:.2f}' for ratio in of_each)})"
            goals.append({"goal": f"{name}: {how} / best <= {BEST}", "met": of_all <= BEST, "found": found})
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
    same = "bytes equal" if pair.predicted_bytes == pair.measured_bytes else f"bytes {pair.predicted_bytes} / {pair.measured_bytes}"
    predicted, measured = 1e3 * pair.predicted_seconds, 1e3 * pair.measured_seconds
    return f"{pair.job:13} {pair.plan:26} predicted {predicted:7.1f} ms  measured {measured:7.1f} ms  ratio {pair.ratio:.2f}  {same}"


if __name__ == "__main__":
    raise SystemExit(main())
