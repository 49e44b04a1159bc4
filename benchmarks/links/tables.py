"""The records as markdown tables, and the goals of the exchanges with what was measured of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
WITHIN = 0.15  # of the formula: ring and servers
RATIO = 1.03  # ours to Gloo's own ring, at most
SMOOTHED = 1280  # samples whose losses make one value: 20 steps of four ranks


def tables(records: Sequence[Record]) -> list[str]:
    """A table for each part that was measured, and below the exchanges their goals."""
    made: dict[str, Callable[[list[Record]], str]] = {
        "exchange": lambda some: (
            f"{_exchange(some)}\n\n{goals(some) if some[0]['links'] != 'loopback' else 'No goals: they are for links of known bandwidth.'}"
        ),
        "overlap": _overlap,
        "curves": _curves,
        "traffic": _traffic,
        "speedup": _speedup,
    }
    by_part = {part: [record for record in records if record["part"] == part] for part in made}
    return [made[part](some) for part, some in by_part.items() if some]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In markdown.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "|" + "|".join(cells) + "|" if cells[0] == "---" else "| " + " | ".join(cells) + " |"
        for cells in lines
    )


def goals(records: Sequence[Record]) -> str:
    """A line for each goal: the ratios, and whether all keep to it.

    >>> ring = {"algorithm": "ring", "hosts": 2, "servers": 0, "seconds": [1.1], "median": 1.1, "formula": 1.0}
    >>> print(goals([ring, {**ring, "algorithm": "gloo", "seconds": [1.0], "median": 1.0}]))
    ring / formula, within 15 %: 1.100 (N=2): kept
    ring / Gloo's own, at most 1.03: 1.100 (N=2): MISSED
    """
    of: dict[tuple[str, int, int], Record] = {
        (each["algorithm"], each["hosts"], each["servers"]): each for each in records
    }
    ring = {
        f"N={hosts}": each["median"] / each["formula"]
        for (name, hosts, _), each in of.items()
        if name == "ring"
    }
    one = {
        f"N={hosts}": each["median"] / each["formula"]
        for (name, hosts, servers), each in of.items()
        if name == "server" and servers == 1
    }
    more = {
        f"N={hosts}, k={k}": each["median"] / each["formula"]
        for (name, hosts, k), each in of.items()
        if name == "server" and k > 1
    }
    gloo = {
        f"N={hosts}": each["median"] / of["gloo", hosts, 0]["median"]
        for (name, hosts, _), each in of.items()
        if name == "ring" and ("gloo", hosts, 0) in of
    }
    near: Callable[[float], bool] = lambda ratio: abs(ratio - 1) <= WITHIN  # noqa: E731
    lines = [
        ("ring / formula, within 15 %", ring, near),
        ("one server / formula, within 15 %", one, near),
        ("k servers / formula, within 15 %", more, near),
        ("ring / Gloo's own, at most 1.03", gloo, lambda ratio: ratio <= RATIO),
    ]
    return "\n".join(_goal(*line) for line in lines if line[1])


def _goal(text: str, ratios: dict[str, float], kept: Callable[[float], bool]) -> str:
    found = ", ".join(f"{ratio:.3f} ({where})" for where, ratio in ratios.items())
    return f"{text}: {found}: {'kept' if all(map(kept, ratios.values())) else 'MISSED'}"


def _exchange(records: list[Record]) -> str:
    hosts = sorted({each["hosts"] for each in records})
    rows = []
    for name, servers in dict.fromkeys((each["algorithm"], each["servers"]) for each in records):
        of = {
            each["hosts"]: each for each in records if (each["algorithm"], each["servers"]) == (name, servers)
        }
        named = f"{servers} server{'s' if servers > 1 else ''}" if servers else name
        rounds = max(len(each["seconds"]) for each in of.values())
        rows.append(
            [
                f"{named} ({rounds})",
                *(
                    f"{_seconds(of[n]['median'])} / {_seconds(of[n]['formula'])}" if n in of else ""
                    for n in hosts
                ),
            ]
        )
    return table(["seconds, median (of rounds) / formula", *(f"N={n}" for n in hosts)], rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def _overlap(records: list[Record]) -> str:
    rows = [
        [
            str(each["hosts"]),
            *(f"{each[name]:.2f}" for name in ("compute", "without_overlap", "with_overlap")),
            f"{each['hidden']:.0%}",
        ]
        for each in records
    ]
    return table(["N", "compute alone, s", "without overlap, s", "with overlap, s", "hidden"], rows)


def _curves(records: list[Record]) -> str:
    rows = []
    for each in records:
        ranks = "even" if each["slower"] == 1 else f"one {each['slower']:g} times slower"
        loss = statistics.mean(each["losses"][-SMOOTHED // each["samples"] :])
        rows.append(
            [
                f"`{each['plan']}`",
                ranks,
                f"{each['seconds'][-1]:.1f}",
                f"{loss:.3f}",
                f"{each['accuracy']:.3f}",
            ]
        )
    return table(["plan", "ranks", "seconds", f"loss, last {SMOOTHED} samples", "accuracy"], rows)


def _traffic(records: list[Record]) -> str:
    rows = []
    for each in records:
        for axis, predicted in each["predicted"].items():
            formula = f"{each['formula'][axis]:,.0f}" if axis in each["formula"] else ""
            rows.append(
                [
                    f"`{each['plan']}`",
                    axis,
                    formula,
                    f"{predicted:,.0f}",
                    f"{each['counted'][axis]:,.0f}",
                    "",
                    "",
                    "",
                ]
            )
        rows[-1][-3:] = [f"{each['payload_on_wire']:,.0f}", f"{each['wire']:,.0f}", f"{each['overhead']:.2%}"]
    return table(
        ["plan", "axis", "formula", "predicted", "counted", "to be sent", "on the wires", "more"], rows
    )


def _speedup(records: list[Record]) -> str:
    rows = [
        [
            each["axis"],
            str(each["ranks"]),
            f"{each['seconds']:.2f}",
            f"{each['speedup']:.2f}",
            f"{each['amdahl']:.2f}",
            f"{each['with_communication']:.2f}",
            f"{each['communication']:.2f}",
        ]
        for each in records
    ]
    head = f"One rank: {records[0]['alone']:.2f} s, serial share {records[0]['serial_share']:.1%}.\n\n"
    return head + table(
        ["axis", "ranks", "seconds", "speed-up", "Amdahl", "with communication", "communication, s"], rows
    )
