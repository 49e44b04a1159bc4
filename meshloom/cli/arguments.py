"""The command line's verbs and options, with their help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from meshloom.asynchronous.options import add_asynchronous
from meshloom.core.job import CHECKPOINTS
from meshloom.launch.devices import MOST_SIMULATED, PROCESSES_PER_CORE
from meshloom.launch.processes.hang import DEFAULT_SECONDS
from meshloom.launch.transport import TRANSPORTS
from meshloom.report.dashboards import DASHBOARDS

_GONE = {  # options that `verify` had, and what says the same
    "--blocks": "--blocks is gone: build the model with fewer layers where one device cannot hold it, as in meshloom verify FILE.py --plan tp=2 -- --layers 2.",
    "--against": "--against is gone: verify --dtype float64 tells rounding from mistakes.",
    "--junit": "--junit is gone: --json has the same records.",
}
CACHE_HELP = "where captured losses are kept for later starts of the same job; off: nowhere (default: MESHLOOM_CACHE, else ~/.cache/meshloom/readings)"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; its `words`, those after `--`, are the job file's own. A mistake ends the
    process."""
    own = list(words)
    theirs: list[str] | None = None
    if "--" in own:
        at = own.index("--")
        own, theirs = own[:at], own[at + 1 :]
    built = parser()
    arguments, unknown = built.parse_known_args(own)
    if unknown:
        gone = (_GONE.get(each.partition("=")[0]) for each in unknown if arguments.verb == "verify")
        if said := next(filter(None, gone), None):
            built.error(said)
        hint = ""
        if "target" in arguments and theirs is None:
            theirs_is = "script" if arguments.verb == "run" else "job file"
            hint = f" Words for the {theirs_is} follow --, as in: meshloom {arguments.verb} {arguments.target} -- {' '.join(unknown)}"
        built.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    if theirs is not None and "target" not in arguments:
        built.error(f"meshloom {arguments.verb} loads no job file, so nothing can follow --.")
    arguments.words = tuple(theirs or ())
    return arguments


def parser() -> argparse.ArgumentParser:
    """The parser of `meshloom`."""
    built = argparse.ArgumentParser(
        prog="meshloom",
        description="Train a single-device PyTorch job on many devices, and prove that the result is the same.",
        epilog="What follows -- is for the job file or the script, which finds it in sys.argv: meshloom train job.py --plan dp=2 -- --lr 0.5",
    )
    built.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    verbs = built.add_subparsers(
        dest="verb", required=True, metavar="run | adopt | train | verify | plan | describe | calibrate | report | watch | export | doctor | completion"
    )  # fmt: skip
    _add_run(verbs.add_parser("run", help="run a training script with a loop of its own under a plan"))
    _add_adopt(
        verbs.add_parser(
            "adopt", help="write the lines that a training script needs into a copy of it, and verify that"
        )
    )
    _add_runs(
        verbs.add_parser("train", help="train a job under a plan"),
        verbs.add_parser(
            "verify", help="run a job, or a script, under a plan and on one device, and compare"
        ),
    )
    _add_plan(
        verbs.add_parser(
            "plan", help="price the plans that the devices allow, and recommend one with reasons"
        )
    )
    _add_describe(
        verbs.add_parser(
            "describe", help="print the parts of a job's, or a script's, model and the costs of a step"
        )
    )
    _add_calibrate(verbs.add_parser("calibrate", help="measure what this machine does, for predictions"))
    _add_report(
        verbs.add_parser("report", help="list what a run has written to its directory, or draw a step of it")
    )
    watch = verbs.add_parser("watch", help="follow a run that goes on elsewhere, in the terminal")
    watch.add_argument("run", metavar="RUN", help="the directory that the run was given as --out")
    _add_export(
        verbs.add_parser(
            "export", help="write the weights of a checkpoint, and the optimizer's state, for other programs"
        )
    )
    _add_common(
        verbs.add_parser("doctor", help="print what is installed and what the machine has, for a bug report")
    )
    completion = verbs.add_parser("completion", help="print a script that completes words in a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that reads it")
    return built


class _Version(argparse.Action):
    """Imports the package's face only where its version is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from meshloom import __version__

        print(f"meshloom {__version__}")
        parser.exit()


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = (
        "Start a process for each rank of the plan, each of which runs the script as python SCRIPT.py would. The script finds no variables "
        "of ranks (MESHLOOM_KEEP_RANKS=1 keeps them), sees one GPU or none, and draws as on all ranks (MESHLOOM_SEED, default 0)."
    )
    run.add_argument(
        "target", metavar="SCRIPT.py", help="a training script whose model is given to parallel()"
    )
    run.add_argument("--plan", help="like dp=2,tp=2 (default: MESHLOOM_PLAN, else one process)")
    run.add_argument(
        "--devices", default="auto", choices=("auto", "cpu", "cuda"), help="auto: GPUs if there is one for each rank (default: auto)"
    )  # fmt: skip
    _add_common(run, transport=True, timeout_seconds=600, records=False)


def _add_adopt(adopt: argparse.ArgumentParser) -> None:
    adopt.add_argument("target", metavar="SCRIPT.py", help="a training script for one device")
    adopt.add_argument(
        "--out",
        metavar="DIR",
        default="adopted",
        help="a new folder for the script and its files (default: adopted)",
    )
    adopt.add_argument("--plan", default="dp=2", help="what it is verified under (default: dp=2)")
    adopt.add_argument(
        "--devices", default="auto", choices=("auto", "cpu", "cuda"), help="as for run (default: auto)"
    )
    adopt.add_argument(
        "--seconds", type=float, default=120, help="how long the script may take to the first step of its optimizers (default: 120)"
    )  # fmt: skip


def _add_runs(train: argparse.ArgumentParser, verify: argparse.ArgumentParser) -> None:
    for verb in (train, verify):
        verb.add_argument(
            "target", metavar="FILE.py[:NAME]",
            help="the file that holds the job; NAME is a Job or a function that returns one (default: job)",
        )  # fmt: skip
        verb.add_argument(
            "--plan", help="like dp=4,microbatches=2 or dp=4,shares=measured (default: one replica per GPU, or dp=1)"
        )  # fmt: skip
        verb.add_argument(
            "--memory", metavar="SIZE",
            help="memory limit of a rank, like 8GiB: the plan's memory_bytes",
        )  # fmt: skip
        verb.add_argument(
            "--devices", default="auto", help="auto, cuda, cpu, simulated, or simulated:cuda (default: auto)"
        )
        _add_common(verb, transport=True, oversubscribe=True, timeout_seconds=600)
        verb.add_argument("--cache", default="auto", metavar="DIR", help=CACHE_HELP)
        verb.add_argument(
            "--overcommit", action="store_true", help="run although memory is predicted not to suffice"
        )  # fmt: skip
        verb.add_argument(
            "--hang-seconds", type=float, default=DEFAULT_SECONDS, metavar="SECONDS",
            help=f"end the run when a rank of this machine hangs in a pipeline's action for so long; 0: never (default: {DEFAULT_SECONDS:g})",
        )  # fmt: skip
    train.add_argument("--steps", type=int, help="steps of the whole run, instead of the job's")
    train.add_argument("--out", metavar="DIR", help="write checkpoints and metrics.csv here")
    train.add_argument(
        "--checkpoint", choices=CHECKPOINTS,
        help="whether training stands still while one is written, or only while its state is copied, instead of what the job says",
    )  # fmt: skip
    train.add_argument(
        "--resume", metavar="DIR", help="go on from the newest checkpoint in DIR, or from this checkpoint"
    )
    train.add_argument(
        "--overwrite", action="store_true", default=None,
        help="begin anew although DIR holds an earlier run's checkpoints; they go once this run has saved its first",
    )  # fmt: skip
    train.add_argument(
        "--log", action="append", choices=DASHBOARDS,
        help="show the run's numbers there, too, by its own library where that is installed; several may be given (metrics.csv in --out always has them)",
    )  # fmt: skip
    train.add_argument(
        "--timings", action="store_true", help="print the seconds of each phase of the start and of the run at the end"
    )  # fmt: skip
    add_asynchronous(train)
    verify.add_argument("--steps", type=int, default=3, help="steps to compare (default: 3)")
    verify.add_argument(
        "--quick", action="store_true", help="these steps alone: no evaluation, no checkpoint and resuming, no end of an epoch"
    )  # fmt: skip
    verify.add_argument(
        "--whole-batch", action="store_true",
        help="exit code 1 also where one device computes something else on the whole batch, draws alone excepted; 2 where it cannot be computed",
    )  # fmt: skip
    verify.add_argument(
        "--report", metavar="FILE.html", help="write the report as one self-contained page, too"
    )
    verify.add_argument(
        "--repro", metavar="DIR",
        help="where something differs, write the first tensor that does, of both sides, and the command, into DIR",
    )  # fmt: skip
    verify.add_argument(
        "--bisect", action="store_true",
        help="where something differs, leave out the plan's settings one by one, and say which of them it takes (on simulated devices)",
    )  # fmt: skip
    verify.add_argument(
        "--dtype", choices=["float64", "float32"], help="compare in this precision (default: the model's own)"
    )


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="as for train, or a script, of which the first backward is priced",
    )
    plan.add_argument("--plan", metavar="PLAN", help="price this plan alone")
    plan.add_argument(
        "--devices", default="auto", metavar="DEVICES", help="auto, cpu, or at most how many ranks (default: one per core, up to 8)"
    )  # fmt: skip
    plan.add_argument(
        "--ranks", type=int, metavar="N", help="plans of at most N ranks; they share cores if there are fewer"
    )
    plan.add_argument(
        "--hosts", type=int, default=1, metavar="N", help="hosts over which the ranks are spread, as many on each (default: 1)"
    )  # fmt: skip
    plan.add_argument(
        "--memory", metavar="SIZE", help="memory limit of a rank, like 8GiB (default: its share of the host's memory)"
    )  # fmt: skip
    plan.add_argument(
        "--machine", metavar="FILE", help="the machine to price for (default: this one; it is measured first if it was not)"
    )  # fmt: skip
    plan.add_argument(
        "--cluster", metavar="NAME", help="price plans for all GPUs of a cluster that is not here: a name like h100-80gb-sxm, or a file"
    )  # fmt: skip
    plan.add_argument(
        "--fabric", metavar="NxGBITS", help="what joins its hosts, like 8x400: eight rails of 400 Gb/s a host"
    )
    plan.add_argument(
        "--fix", metavar="SETTINGS", help="settings that all plans for it have, like tp=8,zero=1"
    )
    plan.add_argument(
        "--objective",
        choices=["time", "memory", "cost"],
        default="time",
        help="what the best plan for it takes least of; of cost, on fewer of its hosts, too (default: time)",
    )
    plan.add_argument("--compare", nargs="+", metavar="PLAN", help="price these plans for it side by side")
    plan.add_argument(
        "--try", type=int, metavar="N", help="train a few steps under the N plans that look fastest, and recommend by what they took"
    )  # fmt: skip
    plan.add_argument("--cache", default="auto", metavar="DIR", help=CACHE_HELP)
    # for our own ranks: where rank 0 writes what a step took
    plan.add_argument("--trial", help=argparse.SUPPRESS)
    plan.add_argument("--trial-steps", type=int, default=1, help=argparse.SUPPRESS)
    _add_common(plan, transport=True, oversubscribe=True)


def _add_describe(describe: argparse.ArgumentParser) -> None:
    describe.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="as for train, or a script, whose first backward is described",
    )
    describe.add_argument(
        "--batch", type=int, metavar="N", help="describe a batch of N samples (default: the job's batch_size)"
    )
    describe.add_argument(
        "--plan", metavar="PLAN",
        help="show how this plan shards the model over tp and splits it over pp, and what ranks send (such as tp=2 or pp=4)",
    )  # fmt: skip
    describe.add_argument("--memory", metavar="SIZE", help="as for train")
    describe.add_argument(
        "--depth", type=int, metavar="N", help="show N levels of blocks (default: until blocks repeat)"
    )
    describe.add_argument(
        "--machine", metavar="FILE", help="predict seconds for this machine (default: what meshloom calibrate wrote on this one)"
    )  # fmt: skip
    describe.add_argument("--cache", default="auto", metavar="DIR", help=CACHE_HELP)
    describe.add_argument(
        "--timings", action="store_true", help="print the seconds of capturing, pricing, sharding and splitting the model"
    )  # fmt: skip
    _add_common(describe, transport=True, oversubscribe=True)


def _add_calibrate(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument(
        "--devices", default="auto", choices=["auto", "cpu", "cuda"], help="what to measure (default: GPUs if there are any)"
    )  # fmt: skip
    calibrate.add_argument(
        "--ranks", type=int, help="ranks that measure together (default: one per GPU; on the CPU one per core, at most 8)"
    )  # fmt: skip
    calibrate.add_argument(
        "--out", metavar="FILE", help="write the measurements here (default: ~/.cache/meshloom/machines/HOST-DEVICE.json)"
    )  # fmt: skip
    # for our own ranks: where their part of the measurements goes
    calibrate.add_argument("--part", help=argparse.SUPPRESS)
    # the same for ranks of which there are not most
    calibrate.add_argument("--links", help=argparse.SUPPRESS)
    _add_common(calibrate, transport=True, timeout_seconds=60)


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("run", metavar="RUN", help="the directory that the run was given as --out")
    report.add_argument(
        "--timeline", metavar="FILE", nargs="?", const="-",
        help="what every rank did and when: FILE.svg, FILE.png, FILE.json (for Perfetto); without FILE, or with -, in the terminal",
    )  # fmt: skip
    report.add_argument(
        "--step", type=int, metavar="N", help="the timeline of step N (default: the newest that was recorded)"
    )
    report.add_argument(
        "--html", metavar="FILE",
        help="one page for a browser: loss and metrics, throughput, time, memory, bytes, the division of the model; it opens without a network",
    )  # fmt: skip
    report.add_argument("--beside", metavar="RUN", help="another run's directory, shown beside in the page")
    report.add_argument(
        "--plans", metavar="FILE", help="what meshloom plan --json FILE wrote: the page shows the plan among its runners-up"
    )  # fmt: skip
    _add_common(report)


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN", help="a run's directory, or one of its checkpoints")
    export.add_argument(
        "--to", required=True, choices=("safetensors", "torch", "dcp"),
        help="safetensors: a directory that transformers reads; torch: a file for torch.load; dcp: a directory of torch.distributed.checkpoint",
    )  # fmt: skip
    export.add_argument("--out", required=True, metavar="PATH", help="the file or directory to write")
    export.add_argument(
        "--optimizer", action="store_true", help="the optimizer's state, too: three times as much with Adam"
    )
    export.add_argument(
        "--average", action="store_true", help="the moving averages of the parameters (ml.Averaged) in their place"
    )  # fmt: skip
    export.add_argument(
        "--masters", action="store_true", help="of a run with precision=bf16: weights as the float32 copies that were updated"
    )  # fmt: skip
    export.add_argument("--overwrite", action="store_true", help="replace weights that PATH holds")


def _add_common(
    verb: argparse.ArgumentParser, *, transport: bool = False, oversubscribe: bool = False, timeout_seconds: int = 0, records: bool = True,
) -> None:  # fmt: skip
    """The options that several verbs share. timeout_seconds: the default; 0: there is no such option. records: whether it writes any."""
    if transport:
        verb.add_argument(
            "--transport", default="auto", choices=TRANSPORTS,
            help="transport of ranks on the CPU: auto (shared memory where they share a host), or gloo (default: auto)",
        )  # fmt: skip
    if timeout_seconds:
        waits = f"how long a rank waits for another (default: {timeout_seconds})"
        verb.add_argument(
            "--timeout", type=float, default=float(timeout_seconds), metavar="SECONDS", help=waits
        )
    if oversubscribe:
        verb.add_argument(
            "--oversubscribe", action="store_true",
            help=f"allow more ranks than make sense: {PROCESSES_PER_CORE} processes per core, {MOST_SIMULATED} simulated ranks",
        )  # fmt: skip
    if records:
        verb.add_argument(
            "--json", metavar="FILE", help="write records as JSON lines to FILE; - is standard output"
        )
