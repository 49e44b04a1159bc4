"""The charts of a page, as plotly's figures. Where two runs stand side by side, each chart has lines of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.core.units import format_bytes, format_seconds
from meshloom.report.drawing import WORDS, headline, time_unit
from meshloom.report.page.history import Points, RunHistory
from meshloom.report.picture import COLOURS
from meshloom.telemetry.timeline import Timeline

# Okabe and Ito's colours, which people who are colour-blind can tell apart, of those that are seen on white and on black.
LINES = ("#0090d9", "#e08a00", "#00a37a", "#d55e00", "#cc79a7", "#8a8a00")
MOST_POINTS = 2000  # of a line; of more, the lowest and the highest of each stretch are drawn
ROW_PIXELS = 34


@dataclass(frozen=True, kw_only=True)
class Chart:
    """figure: of plotly. about: a sentence for those who do not see it. rows: its numbers, with a heading first."""

    title: str
    figure: Any
    about: str
    rows: Sequence[Sequence[str]]


def charts(runs: Sequence[RunHistory]) -> Iterator[tuple[str, Chart]]:
    """With the heading that each belongs under."""
    if any(run.steps.get("loss") for run in runs):
        yield "Loss and metrics", _lines("Training loss", runs, ["loss"])
    for heading, title, begins in _LINES_OF:
        found = [name for name in _names(runs) if name.startswith(begins)]
        if found:
            yield heading, _lines(title, runs, found)
    for name in dict.fromkeys(name for run in runs for name in run.logged):
        yield "Loss and metrics", _lines(f"Logged by the loss: {name}", runs, [name])
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        yield "Loss and metrics", _metric(name, runs)
    if any(run.end for run in runs):
        yield "Time", _time(runs)
    for run in runs:
        if run.recording is not None:
            yield "Time", _timeline(run.recording.timeline(), run.recording.plan)
    if any(run.memory or run.peak_bytes for run in runs):
        yield "Memory", _memory(runs)
    if any(_bytes_of(run) for run in runs):
        yield "Bytes", _bytes(runs)


_LINES_OF: Sequence[tuple[str, str, str]] = (
    ("Loss and metrics", "Gradient norm", "gradient_norm"),
    ("Loss and metrics", "Learning rate", "learning_rate"),
    ("Loss and metrics", "Loss scale", "loss_scale"),
    ("Loss and metrics", "Age of gradients in updates", "age"),
    ("Throughput", "Samples per second", "samples_per_second"),
    ("Throughput", "Tokens per second", "tokens_per_second"),
)


def _names(runs: Sequence[RunHistory]) -> list[str]:
    """Of what is measured whatever the job is."""
    jobs = {"loss", *(name for run in runs for name in run.logged)}
    return [name for name in dict.fromkeys(name for run in runs for name in run.steps) if name not in jobs]


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Of each of `most / 2` stretches the points with the lowest and the highest value; the first and the last point stay.

    >>> thinned([(step, float(step % 10)) for step in range(100)], 8)
    [(0, 0.0), (9, 9.0), (29, 9.0), (30, 0.0), (50, 0.0), (59, 9.0), (79, 9.0), (80, 0.0), (99, 9.0)]
    """
    if len(points) <= most:
        return points
    stretches = most // 2
    kept: dict[int, float] = dict([points[0]])
    for number in range(stretches):
        stretch = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        kept.update(sorted([low, high]))
    kept.update([points[-1]])
    return list(kept.items())


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _lines(title: str, runs: Sequence[RunHistory], names: Sequence[str]) -> Chart:
    lines = [(_called(run, name, runs, names), run.steps[name]) for run in runs for name in names if name in run.steps]  # fmt: skip
    return _line_chart(title, lines, markers=False)


def _metric(name: str, runs: Sequence[RunHistory]) -> Chart:
    lines = [(run.name, run.metrics[name]) for run in runs if name in run.metrics]
    return _line_chart(f"Evaluation: {name}", lines, markers=True)


def _called(run: RunHistory, name: str, runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    if len(runs) == 1:
        return name
    return f"{run.name}: {name}" if len(names) > 1 else run.name


def _line_chart(title: str, lines: Sequence[tuple[str, Points]], *, markers: bool) -> Chart:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for number, (name, points) in enumerate(lines):
        few = thinned(points)
        figure.add_trace(
            Scatter(
                x=[step for step, _ in few], y=[value for _, value in few], name=name, mode="lines+markers" if markers else "lines",
                line={"color": LINES[number % len(LINES)], "width": 1.8},
            )
        )  # fmt: skip
    figure.update_layout(xaxis_title="step", showlegend=len(lines) > 1, height=300)
    rows = [["line", "steps", "first", "last", "lowest", "highest"]]
    for name, points in lines:
        values = [value for _, value in points]
        rows.append([name, str(len(points)), *(f"{each:.6g}" for each in (values[0], values[-1], min(values), max(values)))])  # fmt: skip
    told = "; ".join(f"{row[0]} from {row[2]} to {row[3]}" for row in rows[1:])
    return Chart(title=title, figure=figure, about=f"{title} by step: {told}.", rows=rows)


_TIME = {
    "compute": "computing",
    "communication": "moving data between ranks",
    "waiting": "waiting for slower ranks",
    "data": "reading data",
}


def _time(runs: Sequence[RunHistory]) -> Chart:
    from plotly.graph_objects import Bar, Figure

    ended = [run for run in runs if run.end]
    figure = Figure()
    for number, (kind, words) in enumerate(_TIME.items()):
        shares = [run.end["time"][kind] for run in ended]
        figure.add_trace(
            Bar(
                y=[run.name for run in ended], x=shares, name=words, orientation="h", marker_color=LINES[number],
                hovertemplate="%{x:.1%}",
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack", height=150 + ROW_PIXELS * len(ended), xaxis_tickformat=".0%")
    rows = [["run", *_TIME.values()]]
    rows += [[run.name, *(f"{run.end['time'][kind]:.1%}" for kind in _TIME)] for run in ended]
    about = "; ".join(f"{row[0]}: {', '.join(f'{share} {kind}' for kind, share in zip(rows[0][1:], row[1:], strict=True))}" for row in rows[1:])  # fmt: skip
    return Chart(title="Shares of the steps' time, rank 0", figure=figure, about=f"{about}.", rows=rows)


def _memory(runs: Sequence[RunHistory]) -> Chart:
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    kinds = [kind for kind in dict.fromkeys(kind for run in runs for kind in run.memory) if kind != "event"]
    names = [run.name for run in runs]
    for number, kind in enumerate(kinds):
        sizes = [run.memory.get(kind, 0) for run in runs]
        figure.add_trace(
            Bar(
                y=names, x=sizes, name=kind, orientation="h", marker_color=LINES[number % len(LINES)],
                customdata=[format_bytes(size) for size in sizes], hovertemplate="%{customdata}",
            )
        )  # fmt: skip
    rest = [max(0, run.peak_bytes - sum(run.memory.get(kind, 0) for kind in kinds)) for run in runs]
    figure.add_trace(
        Bar(
            y=names, x=rest, name="the rest of the measured peak", orientation="h", marker_color="#9a9a9a",
            customdata=[format_bytes(size) for size in rest], hovertemplate="%{customdata}",
        )
    )  # fmt: skip
    figure.update_layout(
        barmode="stack",
        height=150 + ROW_PIXELS * len(runs),
        xaxis={"ticksuffix": "B", "exponentformat": "SI"},
    )
    rows = [["run", *kinds, "measured peak of the process"]]
    rows += [[run.name, *(format_bytes(run.memory.get(kind, 0)) for kind in kinds), format_bytes(run.peak_bytes)] for run in runs]  # fmt: skip
    about = "; ".join(f"{row[0]}: {', '.join(f'{kind} {size}' for kind, size in zip(rows[0][1:], row[1:], strict=True))}" for row in rows[1:])  # fmt: skip
    return Chart(
        title="What rank 0 holds from step to step by the plan, and the peak that was measured (activations, libraries and "
        "Python, and on simulated devices all other ranks are the rest)",
        figure=figure,
        about=f"{about}.",
        rows=rows,
    )


def _bytes_of(run: RunHistory) -> list[tuple[str, int, int]]:
    """Axis and collective, bytes predicted, bytes counted."""
    if not run.end:
        return []
    predicted, counted = run.end["bytes"]["predicted"], run.end["bytes"]["counted"]
    found: list[tuple[str, int, int]] = []
    for axis in counted:
        kinds = dict.fromkeys([*predicted.get(axis, {}), *counted[axis]])
        found += [(f"{axis} {kind}", predicted.get(axis, {}).get(kind, 0), counted[axis].get(kind, 0)) for kind in kinds]  # fmt: skip
    return [row for row in found if row[1] or row[2]]


def _bytes(runs: Sequence[RunHistory]) -> Chart:
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    rows = [["run", "axis and collective", "predicted", "counted", "difference"]]
    for number, run in enumerate(runs):
        found = _bytes_of(run)
        before = f"{run.name}: " if len(runs) > 1 else ""
        for which, words in enumerate(("predicted", "counted")):
            sizes = [(expected, seen)[which] for _, expected, seen in found]
            figure.add_trace(
                Bar(
                    x=[row[0] for row in found], y=sizes, name=f"{before}{words}", marker_color=LINES[(2 * number + which) % len(LINES)],
                    customdata=[format_bytes(size) for size in sizes], hovertemplate="%{customdata}",
                )
            )  # fmt: skip
        rows += [[run.name, name, f"{expected:,}", f"{seen:,}", f"{seen - expected:+,}" if seen != expected else "none"] for name, expected, seen in found]  # fmt: skip
    figure.update_layout(height=340, yaxis={"type": "log", "ticksuffix": "B", "exponentformat": "SI"})
    about = "; ".join(f"{row[1]} {row[2]} predicted, {row[3]} counted" for row in rows[1:])
    return Chart(
        title="Bytes that rank 0 handed to collectives, by axis", figure=figure, about=f"{about}.", rows=rows
    )


def _timeline(timeline: Timeline, plan: str) -> Chart:
    from plotly.graph_objects import Bar, Figure

    unit, factor = time_unit(timeline.stop - timeline.start)
    figure = Figure()
    rows = [["rank", "what", f"from ({unit})", f"to ({unit})"]]
    names = [row.name for row in timeline.rows]
    for kind, words in WORDS.items():
        spans = [(row.name, span) for row in timeline.rows for span in row.spans if span.kind == kind]
        if not spans:
            continue
        labels = [span.name if span.action else words for _, span in spans]
        figure.add_trace(
            Bar(
                y=[name for name, _ in spans], x=[span.seconds * factor for _, span in spans],
                base=[(span.start - timeline.start) * factor for _, span in spans], name=words, orientation="h",
                marker={"color": COLOURS[kind], "line": {"color": "#333333", "width": 0.5}},
                text=[span.name if span.action else "" for _, span in spans], textfont={"color": "#111111"}, insidetextanchor="middle",
                textposition="inside", textangle=0, constraintext="inside",
                customdata=[f"{label}: {format_seconds(span.seconds)}" for label, (_, span) in zip(labels, spans, strict=True)],
                hovertemplate="%{y}, %{customdata}<extra></extra>",
            )
        )  # fmt: skip
        for label, (name, span) in zip(labels, spans, strict=True):
            times = ((each - timeline.start) * factor for each in (span.start, span.stop))
            rows.append([name, label, *(f"{each:.4g}" for each in times)])
    figure.update_layout(
        barmode="overlay",
        height=170 + ROW_PIXELS * len(names),
        xaxis_title=f"{unit} since the first forward began",
        yaxis={"categoryorder": "array", "categoryarray": names[::-1]},
    )
    title = ": ".join(headline(timeline, plan))
    return Chart(title=title, figure=figure, about=f"Timeline of {title}.", rows=rows)
