"""A timeline in the terminal: a row for each rank, boxes as wide as the actions took, what is idle shaded,
idle shares at the right.

rank 0 (dp=0)       ▏F0▏F1·······▏B0   ▏B1      28%   25%   26%
rank 1 (dp=0,pp=1)  ···▏F0▏B0   ▏F1▏B1          25%   25%   24%
"""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from meshloom.core.units import format_count, format_seconds
from meshloom.pipeline.schedules.spans import Span, SpanKind
from meshloom.telemetry.timeline import Timeline, TimelineRow, idle_of

MIN_CELLS = 24  # of the grid
HEADINGS = ("idle", "formula", "own")
COLUMN = 9  # cells of each of them
EXPLANATION = "formula: the idle share when all actions of a kind take the same; own: when they take what each stage's took on average"
WORDS: dict[SpanKind, str] = {
    "F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights", "exchange": "exchange of gradients", "update": "update",
}  # fmt: skip
STYLES: dict[SpanKind, str] = {
    "F": "black on dodger_blue1", "B": "black on orange1", "I": "black on gold1", "W": "black on dark_sea_green3",
    "exchange": "black on medium_purple1", "update": "black on grey70",
}  # fmt: skip
IDLE_STYLE = "grey50"


def print_timeline(timeline: Timeline, console: Console, plan: str = "") -> None:
    """Draws the timeline as wide as the console. It is readable without colour: a box begins with a line,
    then its kind and microbatch as far as they fit."""
    ascii_only = console.options.ascii_only
    idle = idle_of(timeline)
    names = [row.name for row in timeline.rows]
    left = max(map(len, names)) + 2
    cells = max(MIN_CELLS, console.width - left - len(HEADINGS) * COLUMN - 1)
    second = cells / max(timeline.stop - timeline.start, 1e-12)  # in cells
    _print(console, Text(": ".join(headline(timeline, plan))))
    headings = "".join(f"{heading:>{COLUMN}}" for heading in HEADINGS)
    _print(console, Text(" " * (left + cells) + headings, style="bold"))
    for row, name, share in zip(timeline.rows, names, idle, strict=True):
        line = Text(f"{name:{left}}")
        line.append_text(_cells(timeline, row, cells, second, ascii_only))
        shares = (share.measured, share.formula, share.own_seconds)
        line.append("".join(f"{value:>{COLUMN}.1%}" for value in shares))
        _print(console, line)
    for line in _axis(timeline, cells, second, ascii_only):
        _print(console, Text(" " * left + line, style=IDLE_STYLE))
    _print(console, _legend(timeline, ascii_only))
    _print(console, Text(EXPLANATION))


def headline(timeline: Timeline, plan: str = "") -> tuple[str, str]:
    """What is drawn, and its results."""
    schedule = timeline.schedule
    what = f"step {timeline.step}" if timeline.step else "on paper"
    clocks = timeline.clock_error_seconds
    error = f"; clocks within {format_seconds(clocks)}" if clocks else ""
    return (
        f"{what}{f' of {plan}' if plan else ''}",
        f"{schedule.name}, {format_count(schedule.num_stages, 'stage')} on {format_count(schedule.num_ranks, 'rank')}, "
        f"{format_count(schedule.num_microbatches, 'microbatch')}; {format_seconds(timeline.seconds)} from the first forward to the last backward{error}",
    )


def ticks(seconds: float, most: int) -> list[float]:
    """Round seconds from 0 on, at most `most` of them, for an axis of this length.

    >>> ticks(0.0101, 6)
    [0.0, 0.002, 0.004, 0.006, 0.008, 0.01]
    """
    seconds = max(seconds, 1e-9) * (1 + 1e-9)
    power = 10.0 ** math.floor(math.log10(seconds / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if int(seconds / (factor * power)) < most)
    return [round(number * step, 12) for number in range(int(seconds / step) + 1)]


def _cells(timeline: Timeline, row: TimelineRow, cells: int, second: float, ascii_only: bool) -> Text:
    """The row of a rank. Ends of boxes are rounded to whole cells, so that boxes that touch in time touch in
    the drawing."""
    edge, shade = ("|", ".") if ascii_only else ("▏", "·")
    window = [_place(at, timeline, cells, second) for at in timeline.windows[row.place.dp, row.place.tp]]
    letters = [shade if window[0] <= cell < window[1] else " " for cell in range(cells)]
    styles = [IDLE_STYLE] * cells
    several = len(timeline.schedule.stages_of(row.place.pp)) > 1
    for span in row.spans:
        if span.kind not in WORDS:
            continue
        start, stop = (_place(at, timeline, cells, second) for at in (span.start, span.stop))
        letters[start:stop] = _box(span, stop - start, several, edge)
        styles[start:stop] = [STYLES[span.kind]] * (stop - start)
    line = Text()
    for letter, style in zip(letters, styles, strict=True):
        line.append(letter, style)
    return line


def _place(at: float, timeline: Timeline, cells: int, second: float) -> int:
    return min(max(round((at - timeline.start) * second), 0), cells)


def _box(span: Span, width: int, several: bool, edge: str) -> str:
    """A line, then as much of what it is as fits.

    >>> span = Span(kind="F", start=0.0, stop=1.0, stage=2, microbatch=11)
    >>> [_box(span, width, True, "|") for width in range(7)]
    ['', 'F', '|F', '|F ', '|F11', '|2F11', '|2F11 ']
    """
    if width <= 1:
        return span.kind[0] * width
    short = f"{span.kind}{span.microbatch}" if span.action else span.kind
    labels = [span.name, short] if several else [short]
    label = next((each for each in [*labels, span.kind[0]] if len(each) < width), "")
    return f"{edge}{label:{width - 1}}"


def _axis(timeline: Timeline, cells: int, second: float, ascii_only: bool) -> tuple[str, str]:
    """Ticks, and their times from the first forward on."""
    dash, mark = "-+" if ascii_only else "─┬"
    line, labels = [dash] * cells, ""
    length = timeline.stop - timeline.start
    unit, factor = time_unit(length)
    for tick in ticks(length, max(cells // 12, 2)):
        place = min(round(tick * second), cells - 1)
        line[place] = mark
        text = f"{tick * factor:g}" + (f" {unit}" if tick == 0 else "")
        if place >= len(labels) and place + len(text) <= cells + 2:
            labels = f"{labels:{place}}{text} "
    return "".join(line), labels.rstrip()


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis of this length, and how many of it are a second."""
    return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1.0)


def _legend(timeline: Timeline, ascii_only: bool) -> Text:
    kinds = {span.kind for row in timeline.rows for span in row.spans}
    line = Text()
    for kind, word in WORDS.items():
        if kind in kinds:
            line.append(f" {kind[0]} ", STYLES[kind])
            line.append(f" {word}   ")
    line.append(" . " if ascii_only else " · ", IDLE_STYLE)
    line.append(" idle")
    return line


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True, highlight=False)
