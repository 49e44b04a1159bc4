"""The records as pictures: SVG files, drawn alike each time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from tables import SMOOTHED

Record = dict[str, Any]
mpl.use("svg")
mpl.rcParams.update(
    {
        "svg.hashsalt": "links",
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

EXCHANGES = {  # algorithm -> label, colour, marker
    "gloo": ("Gloo's own", "tab:gray", "x"),
    "ring": ("ring", "tab:blue", "o"),
    "hosts": ("shared memory and Gloo, 2 ranks a host", "tab:cyan", "d"),
    "server": ("one server", "tab:red", "v"),
}

LEARNING = {  # exchange -> label
    "all_reduce": "synchronous, all-reduce",
    "server": "synchronous, server",
    "local_sgd": "8 local steps, then averaged",
    "bounded": "bounded: at most 4 updates ahead",
    "async": "asynchronous",
}


def draw(records: Sequence[Record], directory: Path) -> list[Path]:
    """A file for each part that was measured; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for part, drawing in DRAWINGS.items():
        if some := [record for record in records if record["part"] == part]:
            figure = drawing(some)
            made.append(directory / f"links_{part}.svg")
            figure.savefig(made[-1], bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
    return made


def _exchange(records: Sequence[Record]) -> plt.Figure:
    """Left all exchanges, right those that do not grow; points are measured, lines are the formulas."""
    figure, (wide, near) = plt.subplots(1, 2, figsize=(10, 4.2))
    for axes, names in ((wide, EXCHANGES), (near, ("gloo", "ring", "hosts"))):
        for name in names:
            label, colour, marker = EXCHANGES[name]
            some = sorted(
                (each for each in records if each["algorithm"] == name and each["servers"] <= 1),
                key=lambda each: each["hosts"],
            )
            hosts = [each["hosts"] for each in some]
            if name not in ("gloo", "hosts"):  # whose formula is the ring's
                axes.plot(hosts, [each["formula"] for each in some], color=colour, linewidth=1)
            axes.plot(
                hosts,
                [each["median"] for each in some],
                marker,
                color=colour,
                label=label,
                fillstyle="none" if marker == "o" else "full",
            )
        _label(axes, "hosts", "seconds")
        axes.set_xticks(sorted({each["hosts"] for each in records}))
    most = max(each["hosts"] for each in records)
    for each in records:
        if each["servers"] > 1 and each["hosts"] == most:
            wide.plot(each["hosts"], each["median"], "v", color="tab:red", fillstyle="none")
            wide.annotate(
                f"{each['servers']} servers",
                (each["hosts"], each["median"]),
                (6, 0),
                textcoords="offset points",
                va="center",
            )
    figure.legend(
        *wide.get_legend_handles_labels(),
        frameon=False,
        loc="lower center",
        ncols=len(EXCHANGES),
        bbox_to_anchor=(0.5, -0.08),
        fontsize=9,
    )
    wide.set_xlim(right=most + 1.4)
    near.set_ylim(bottom=0)
    figure.suptitle(
        f"One exchange of {records[0]['bytes'] / 1e6:g} MB, links of {records[0]['links']}: points measured, lines by formula"
    )
    return figure


def _overlap(records: Sequence[Record]) -> plt.Figure:
    """What a step takes: alone, with overlap, without."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    bars = {
        "compute": "one rank alone",
        "with_overlap": "gradients travel during backward",
        "without_overlap": "gradients travel after backward",
    }
    for number, (name, label) in enumerate(bars.items()):
        axes.bar(
            [place + 0.27 * (number - 1) for place in range(len(records))],
            [each[name] for each in records],
            0.25,
            label=label,
        )
    for place, each in enumerate(records):
        axes.annotate(
            f"{each['hidden']:.0%} hidden",
            (place, each["with_overlap"]),
            (0, 3),
            textcoords="offset points",
            ha="center",
        )
    axes.set_xticks(range(len(records)), [f"{each['hosts']} hosts" for each in records])
    _label(axes, "", "seconds per step")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.3))
    return figure


def _curves(records: Sequence[Record]) -> plt.Figure:
    """Loss, as a mean over as many samples, against seconds."""
    kinds = sorted({each["slower"] for each in records})
    figure, rows = plt.subplots(1, len(kinds), figsize=(10, 3.8), sharey=True, squeeze=False)
    for axes, slower in zip(rows[0], kinds, strict=True):
        for each in records:
            if each["slower"] == slower:
                wide = SMOOTHED // each["samples"]
                smooth = [
                    statistics.mean(each["losses"][max(0, at - wide + 1) : at + 1])
                    for at in range(len(each["losses"]))
                ]
                axes.plot(each["seconds"], smooth, label=LEARNING[each["exchange"]])
        axes.set_title("even ranks" if slower == 1 else f"one rank {slower:g} times slower")
        _label(axes, "seconds", f"loss, mean of {SMOOTHED} samples")
        axes.set_yscale("log")
    figure.legend(
        *rows[0][0].get_legend_handles_labels(),
        frameon=False,
        loc="lower center",
        ncols=3,
        bbox_to_anchor=(0.5, -0.16),
    )
    return figure


def _traffic(records: Sequence[Record]) -> plt.Figure:
    """Bytes per step: predicted, counted, to be sent, on the wires."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    kinds: dict[str, Callable[[Record], float]] = {
        "predicted": lambda each: sum(each["predicted"].values()),
        "counted": lambda each: sum(each["counted"].values()),
        "on the wires, headers included": lambda each: each["wire"],
    }
    for number, (label, value) in enumerate(kinds.items()):
        axes.bar(
            [place + 0.27 * (number - 1) for place in range(len(records))],
            [value(each) / 1e6 for each in records],
            0.25,
            label=label,
        )
    axes.set_xticks(range(len(records)), [each["plan"].split(",microbatches")[0] for each in records])
    _label(axes, "", "MB per step, all ranks")
    axes.legend(frameon=False)
    return figure


def _speedup(records: Sequence[Record]) -> plt.Figure:
    """One picture per axis: measured, and both bounds."""
    figure, rows = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True)
    for axes, axis in zip(rows, ("dp", "pp", "tp"), strict=True):
        some = [each for each in records if each["axis"] == axis]
        ranks = [1, *(each["ranks"] for each in some)]
        for name, label, style in (
            ("amdahl", "Amdahl", "k:"),
            ("with_communication", "with communication", "-"),
            ("speedup", "measured", "o"),
        ):
            axes.plot(ranks, [1.0, *(each[name] for each in some)], style, label=label)
        axes.set_title(axis)
        axes.set_xticks(ranks)
        _label(axes, "ranks", "times as fast as one rank")
    figure.legend(
        *rows[0].get_legend_handles_labels(),
        frameon=False,
        loc="lower center",
        ncols=3,
        bbox_to_anchor=(0.5, -0.1),
    )
    return figure


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


DRAWINGS: dict[str, Callable[[Sequence[Record]], plt.Figure]] = {
    "exchange": _exchange,
    "overlap": _overlap,
    "curves": _curves,
    "traffic": _traffic,
    "speedup": _speedup,
}
