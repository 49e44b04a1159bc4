"""What `meshloom plan` says of 20 (job, plan) pairs, beside what the same plans take when they run.

    python benchmarks/advice/main.py                     a table, and whether the goals are met; about eleven minutes
    python benchmarks/advice/main.py --json -            the same as JSON lines
    python benchmarks/advice/main.py --jobs gpt,lstm     some of the jobs

The machine is calibrated first, into a directory of its own. Prices of a job's plans, and trials of two of them, come before its runs.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import JOBS

from meshloom.at_hand import Wish, devices_for
from meshloom.cluster import load, machine_file
from meshloom.launch import run_ranks
from meshloom.plan import Plan
from meshloom.planner.advise import advise, finalists, tried
from meshloom.planner.pricing import Option
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
    """A plan of a job, predicted and measured. bytes by axis, of rank 0 in a step."""

    job: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: dict[str, float]
    measured_bytes: dict[str, float]
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.measured_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(PAIRS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=2, help="over a job's plans, in turns")
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
        taken: dict[str, list[str]] = {}
        for name in arguments.jobs.split(","):
            devices = devices_for(Wish(devices="cpu", ranks=4), 1, print)
            assert not isinstance(devices, int)
            advice = advise(JOBS[name], devices, plans=map(Plan.parse, PAIRS[name]))
            trials = try_plans(finalists(advice, TRIED), f"{Path(__file__).with_name('jobs.py')}:{name}", "auto", lambda text: None)
            assert not isinstance(trials, int)
            taken[name] = [str(each.recommended.plan) for each in (advice, tried(advice, trials)) if each.recommended]
            pairs += _pairs(name, advice.options, arguments.rounds, Path(home) / "measured.json")
            for pair in pairs[-len(PAIRS[name]) :]:
                print(_row(pair), file=out, flush=True)
    goals = goals_of(pairs, taken)
    print(f"\n{machine.name}: {machine.model}, {machine.cores} cores, {time.monotonic() - started:.0f} s", file=out)
    for goal in goals:
        print(f"{'met   ' if goal['met'] else 'MISSED'}  {goal['goal']}: {goal['found']}", file=out)
    if arguments.json:
        lines = [{"event": "pair", **asdict(each), "ratio": each.ratio} for each in pairs] + [{"event": "goal", **each} for each in goals]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0


def _pairs(name: str, options: Sequence[Option], rounds: int, path: Path) -> list[Pair]:
    """In the order of `PAIRS`. All plans run once in every round, in turns."""
    ordered = sorted(options, key=lambda each: PAIRS[name].index(str(each.plan)))
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for option in ordered[:: -1 if number % 2 else 1]:
            found.setdefault(str(option.plan), []).append(_run(name, option.plan, path))
    return [_pair(name, option, found[str(option.plan)]) for option in ordered]


def _run(name: str, plan: Plan, path: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), name, str(STEPS), str(path)]
    code = run_ranks(command, plan.mesh, "cpu", str(plan)) if plan.mesh.size > 1 else subprocess.run(command).returncode
    if code:
        raise SystemExit(f"{name} under {plan} failed")
    return json.loads(path.read_text())


def _pair(name: str, option: Option, runs: Sequence[dict[str, Any]]) -> Pair:
    price = option.price
    return Pair(
        job=name,
        plan=str(option.plan),
        predicted_seconds=price.seconds,
        measured_seconds=statistics.median(seconds for run in runs for seconds in run["step_seconds"]),
        predicted_bytes={axis: float(count) for axis, count in option.num_bytes.items()},
        measured_bytes=runs[0]["bytes"],
        seconds={"chunks": price.chunks, "exchange": price.exchange, "update": price.update, "other": price.other},
    )


def goals_of(pairs: Sequence[Pair], taken: dict[str, list[str]]) -> list[dict[str, Any]]:
    """What was asked of the prices, and what came out. taken: for each job, what was recommended by price, and after trials."""
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
        for how, plan in zip(("recommended by price", f"recommended after {TRIED} trials"), taken[name], strict=True):
            ratio = next(each.measured_seconds for each in mine if each.plan == plan) / best
            goals.append({"goal": f"{name}: {how} / best <= {BEST}", "met": ratio <= BEST, "found": f"{ratio:.2f} ({plan})"})
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
