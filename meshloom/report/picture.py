"""A timeline as an SVG or PNG picture: a row for each rank, boxes as wide as the actions took, idle time
shaded, idle shares at the right."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from meshloom.core.errors import ReportError
from meshloom.pipeline.schedules.spans import ACTION_KINDS, SpanKind
from meshloom.report.drawing import EXPLANATION, HEADINGS, WORDS, headline, ticks, time_unit
from meshloom.telemetry.timeline import Timeline, TimelineRow, idle_of

# Okabe and Ito's colours, which can be told apart by people who are colour-blind, made lighter so that black
# labels can be read.
COLOURS: dict[SpanKind, str] = {
    "F": "#8fc7ea", "B": "#f2b766", "I": "#f5e27a", "W": "#7fcbb0", "exchange": "#d9a5c3", "update": "#bdbdbd",
}  # fmt: skip
IDLE_COLOUR = "#ededed"
INCHES = 14.0  # across
RIGHT_INCHES = 2.7  # for idle shares
LETTER_INCHES = 0.085  # of a rank's name
TITLE_LETTERS = 150  # that fit into a line
ROW_INCHES = 0.42
AROUND_INCHES = (0.95, 1.05)  # above for the title, below for the axis and the legend
DOTS_PER_INCH = 150
LABEL_POINTS = (8.0, 6.0)  # sizes that are tried for labels
SPACE_DOTS = 4.0  # beside a label
MOST, HALF = 0.9, 0.5  # of the boxes of a kind that a way to label them must fit into, and the shortest way
LIGHTER = 0.45  # how much of the way to white the last of a rank's stages is


def save_picture(timeline: Timeline, path: Path, plan: str = "") -> None:
    """Draws it to a file; the ending, .svg or .png, selects the format. Raises `ReportError` when matplotlib
    is missing or the file cannot be written."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ReportError(
            "A picture is drawn with matplotlib, which is not installed: pip install matplotlib."
        ) from None
    # the same timeline gives the same file
    with mpl.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "timeline"}):
        figure = draw(timeline, plan)
        kind = path.suffix[1:].lower()
        try:
            figure.savefig(
                path, format=kind, dpi=DOTS_PER_INCH, metadata={"Date": None} if kind == "svg" else {}
            )
        except OSError as error:
            raise ReportError(
                f"{path} cannot be written: {error.strerror}. Give a file in a directory that exists."
            ) from None


def draw(timeline: Timeline, plan: str = "") -> Any:
    """The matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    left = 0.4 + LETTER_INCHES * max(len(row.name) for row in timeline.rows)
    width = INCHES - left - RIGHT_INCHES
    above, below = AROUND_INCHES
    height = above + below + ROW_INCHES * len(timeline.rows)
    figure = Figure(figsize=(INCHES, height), dpi=DOTS_PER_INCH)
    axes = figure.add_axes((left / INCHES, below / height, width / INCHES, 1 - (above + below) / height))
    length = timeline.stop - timeline.start
    axes.set_xlim(0.0, length * 1.002)  # the last box has a border too
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    for number, row in enumerate(timeline.rows):
        _draw_row(axes, timeline, row, number)
    _write_labels(axes, timeline)
    unit, factor = time_unit(length)
    at = ticks(length, 10)
    axes.set_xticks(at, [f"{tick * factor:g}" for tick in at])
    axes.set_xlabel(f"{unit} since the first forward began", labelpad=4)
    axes.set_yticks(range(len(timeline.rows)), [row.name for row in timeline.rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = [
        line if len(line) <= TITLE_LETTERS else f"{line[: TITLE_LETTERS - 3]}..."
        for line in headline(timeline, plan)
    ]
    figure.text(0.25 / INCHES, 1 - 0.15 / height, "\n".join(title), fontsize=10, va="top", linespacing=1.4)
    _write_idle(axes, timeline, width)
    kinds = {span.kind for row in timeline.rows for span in row.spans}
    patches = [
        Patch(facecolor=COLOURS[kind], edgecolor="black", linewidth=0.5, label=word)
        for kind, word in WORDS.items()
        if kind in kinds
    ]
    patches.append(Patch(facecolor=IDLE_COLOUR, label="idle"))
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(left / INCHES, 0.2 / height), ncols=len(patches), frameon=False, fontsize=8.5
    )  # fmt: skip
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    about = EXPLANATION + ("; lighter: a rank's later stages" if several else "")
    figure.text(left / INCHES, 0.08 / height, about, fontsize=7.5, va="bottom", color="#555555")
    return figure


def _draw_row(axes: Any, timeline: Timeline, row: TimelineRow, number: int) -> None:
    from matplotlib.patches import Rectangle

    low, high = timeline.windows[row.place.dp, row.place.tp]
    axes.add_patch(
        Rectangle((low - timeline.start, number - 0.4), high - low, 0.8, facecolor=IDLE_COLOUR, linewidth=0)
    )
    stages = timeline.schedule.stages_of(row.place.pp)
    for span in row.spans:
        if span.kind in COLOURS:
            share = stages.index(span.stage) / len(stages) if span.stage in stages else 0.0
            colour, corner = _lighter(COLOURS[span.kind], share), (span.start - timeline.start, number - 0.4)
            box = Rectangle(corner, span.seconds, 0.8, facecolor=colour, edgecolor="black", linewidth=0.4)
            axes.add_patch(box)


def _write_labels(axes: Any, timeline: Timeline) -> None:
    """Labels all boxes of a kind in one style: the longest and largest that fits into most of them. Boxes in
    which it does not fit have no label; if even the shortest does not fit into half of them, none has one."""
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    dots = axes.bbox.width / axes.get_xlim()[1]  # of a second

    @cache
    def width(words: str, points: float) -> float:
        """In dots."""
        text = axes.text(0.0, 0.0, words, fontsize=points)
        extent = text.get_window_extent()
        text.remove()
        return extent.width

    spans = [(number, span) for number, row in enumerate(timeline.rows) for span in row.spans]
    for kind in COLOURS:
        boxes = [(number, span) for number, span in spans if span.kind == kind]
        forms = ["{0.name}"] * (several or kind not in ACTION_KINDS)
        forms += ["{0.kind}{0.microbatch}", "{0.microbatch}"] * (kind in ACTION_KINDS)
        for form, points in product(forms, LABEL_POINTS):
            fitting = [
                (number, span)
                for number, span in boxes
                if width(form.format(span), points) <= span.seconds * dots - SPACE_DOTS
            ]
            least = HALF if (form, points) == (forms[-1], LABEL_POINTS[-1]) else MOST
            if len(fitting) >= least * len(boxes):
                for number, span in fitting:
                    middle = (span.start + span.stop) / 2 - timeline.start
                    label = form.format(span)
                    axes.text(middle, number, label, fontsize=points, ha="center", va="center_baseline")
                break


def _write_idle(axes: Any, timeline: Timeline, width_inches: float) -> None:
    """Three columns at the right of the rows."""
    columns = [1 + inches / width_inches for inches in (0.75, 1.6, 2.45)]
    write = partial(axes.text, transform=axes.get_yaxis_transform(), ha="right", fontsize=8.5)
    for place, heading in zip(columns, HEADINGS, strict=True):
        write(place, -0.62, heading, va="bottom", fontweight="bold")
    for number, idle in enumerate(idle_of(timeline)):
        for place, value in zip(columns, (idle.measured, idle.formula, idle.own_seconds), strict=True):
            write(place, number, f"{value:.1%}", va="center")


def _lighter(colour: str, share: float) -> str:
    """The colour of a stage; stages of one rank differ in lightness."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * LIGHTER * share * 2):02x}" for part in parts)
