"""A timeline drawn in the terminal, as a picture, and as a trace says what happened, and can be read."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshloom.core.mesh import Mesh
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.spans import Span
from meshloom.pipeline.schedules.timing import run_on_paper
from meshloom.report.chrome_trace import chrome_trace
from meshloom.report.drawing import print_timeline
from meshloom.report.picture import draw, save_picture
from meshloom.telemetry.timeline import Timeline, TimelineRow, on_paper

TAKES = {"F": 1.0e-3, "B": 2.1e-3, "I": 1.0e-3, "W": 0.9e-3}  # seconds


def example(name: str, p: int, m: int, v: int | None = None) -> Timeline:
    """On paper, with microbatches that take longer and shorter."""
    return on_paper(
        make_schedule(name, p, m, v),
        lambda action: TAKES[action.kind] * (1 + 0.1 * ((action.microbatch * 7 + action.stage * 3) % 5)),
    )


def grid() -> Timeline:
    """dp=2,pp=2,tp=2 with all that is recorded around the actions, and recomputation within backwards."""
    mesh, paper = Mesh(dp=2, pp=2, tp=2), example("1f1b", 2, 4)
    rows: list[TimelineRow] = []
    for rank in range(mesh.size):
        place = mesh.place(rank)
        late = 2e-4 * place.dp
        spans = [
            replace(each, start=each.start + late, stop=each.stop + late)
            for each in paper.rows[place.pp].spans
        ]
        again = [
            Span(kind="recompute", stage=each.stage, microbatch=each.microbatch, start=each.start, stop=each.start + 3e-4) for each in spans if each.kind == "B"
        ]  # fmt: skip
        wait = Span(kind="wait", stage=0, microbatch=0, start=-1e-3, stop=spans[0].start)
        end = spans[-1].stop
        after = [Span(kind="exchange", start=end, stop=0.025), Span(kind="update", start=0.025, stop=0.026)]
        spans = [wait, *sorted([*spans, *again], key=lambda each: (each.start, -each.stop)), *after]
        rows.append(TimelineRow(rank=rank, place=place, spans=tuple(spans)))
    return Timeline(step=3, schedule=paper.schedule, rows=tuple(rows), clock_error_seconds=35e-6)


EXAMPLES = {
    "1f1b": lambda: example("1f1b", 4, 8), "zb-h1": lambda: example("zb-h1", 4, 8), "interleaved": lambda: example("interleaved", 4, 8, 2),
    "zb-v": lambda: example("zb-v", 3, 5), "crowded": lambda: example("interleaved", 8, 16, 2), "grid": grid, "one": lambda: example("gpipe", 1, 1),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens a font when it first writes with it, and keeps it."""
    if find_spec("matplotlib") is not None:
        save_picture(example("gpipe", 1, 1), tmp_path_factory.mktemp("fonts") / "x.png")


# --- the terminal


def drawn(timeline: Timeline, width: int = 140, **settings: Any) -> list[str]:
    stream = io.StringIO()
    print_timeline(timeline, Console(file=stream, width=width, **settings), "dp=1,pp=4")
    return stream.getvalue().splitlines()


def rows_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("rank ")]


def test_boxes_are_as_wide_as_actions_took():
    """Every box that is drawn begins and ends within a cell of where it should, from the drawing alone."""
    timeline = example("1f1b", 4, 8)
    lines = drawn(timeline, 200)
    assert (
        lines[0]
        == "on paper of dp=1,pp=4: 1f1b, 4 stages on 4 ranks, 8 microbatches; 41.9 ms from the first forward to the last backward"
    )
    for row, line in zip(timeline.rows, rows_of(lines), strict=True):
        cells = line[20:-27]
        boxes = [(found[1], found.start(), found.end()) for found in re.finditer(r"▏([FB]\d) *", cells)]
        assert [f"{label[0]}{int(label[1:])}" for label, _, _ in boxes] == [
            f"{each.kind}{each.microbatch}" for each in row.actions
        ]
        cell = timeline.seconds / len(cells)
        for (_, start, stop), each in zip(boxes, row.actions, strict=True):
            assert abs(start * cell - each.start) <= cell and abs(stop * cell - each.stop) <= cell
        idle = cells.count("·") / len(cells)
        # 16 edges, rounded to one of 155 cells
        assert idle == pytest.approx(timeline.idle_share(row), abs=0.03)
        # (4 - 1) / (8 + 4 - 1)
        assert line.split()[-3:] == [
            f"{timeline.idle_share(row):.1%}",
            "27.3%",
            f"{own(timeline, row.rank):.1%}",
        ]


def own(timeline: Timeline, rank: int) -> float:
    """The idle share on paper with the mean of what a stage's actions took."""
    means: dict[tuple[int, str], float] = {}
    for stage in range(4):
        for kind in "FB":
            took = [each.stop - each.start for each in timeline.rows[stage].spans if each.kind == kind]
            means[stage, kind] = sum(took) / len(took)
    return run_on_paper(timeline.schedule, lambda action: means[action.stage, action.kind]).idle_share(rank)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [80, 100, 250])
def test_no_line_is_longer_than_the_console(name: str, width: int):
    timeline = EXAMPLES[name]()
    lines = drawn(timeline, width)
    grid_lines = [
        *rows_of(lines),
        *(line for line in lines[1:] if "┬" in line or " ms" in line or "formula " in line),
    ]
    assert len(rows_of(lines)) == len(timeline.rows)
    assert all(len(line) <= width for line in grid_lines)


def test_a_terminal_without_other_letters_gets_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_timeline(grid(), Console(file=stream, width=120))
    stream.seek(0)
    text = stream.read()
    assert text.isascii() and "|F0" in text and ".." in text


def test_colours_are_only_colours():
    coloured = "\n".join(drawn(grid(), 160, force_terminal=True, color_system="truecolor"))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == "\n".join(drawn(grid(), 160))


def test_the_grid_names_ranks_by_place_and_shows_what_follows():
    lines = drawn(grid(), 200)
    assert lines[0].startswith("step 3 of ") and lines[0].endswith("; clocks within 35 us")
    assert rows_of(lines)[7].startswith("rank 7 (dp=1,pp=1,tp=1)")
    assert all("▏exchange" in row for row in rows_of(lines)) and any(
        "exchange of gradients" in line and "update" in line for line in lines
    )


# --- the trace


def problems(trace: Any) -> Iterator[str]:
    """What the Trace Event Format (Google's document of that name, and what Perfetto's importer takes) does
    not allow."""
    events = trace["traceEvents"]
    tracks: defaultdict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    flows: defaultdict[tuple[Any, Any, Any], list[dict[str, Any]]] = defaultdict(list)
    named: set[int] = set()
    for event in events:
        if missing := {"ph", "name", "pid", "tid"} - event.keys():
            yield f"{event} has no {missing}"
            continue
        if not (isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int):
            yield f"{event} has a name, pid or tid of another type"
        match event["ph"]:
            case "M":
                key = {
                    "process_name": "name",
                    "thread_name": "name",
                    "process_sort_index": "sort_index",
                    "thread_sort_index": "sort_index",
                }
                if event["name"] not in key or key[event["name"]] not in event.get("args", {}):
                    yield f"{event} is no metadata"
                elif event["name"] == "process_name":
                    named.add(event["pid"])
            case "X":
                if not all(
                    isinstance(event.get(each), int | float) and event[each] >= 0 for each in ("ts", "dur")
                ):
                    yield f"{event} has no ts and dur of 0 or more"
                else:
                    tracks[event["pid"], event["tid"]].append(
                        (event["ts"], event["ts"] + event["dur"], event["name"])
                    )
            case "s" | "f" | "t":
                if "id" not in event or not isinstance(event.get("ts"), int | float):
                    yield f"{event} has no id or ts"
                else:
                    flows[event.get("cat"), event["name"], event["id"]].append(event)
            case other:
                yield f"phase {other} is not used"
    for (pid, _), boxes in tracks.items():
        if pid not in named:
            yield f"process {pid} has no name"
        for one, two in combinations(sorted(boxes, key=lambda box: (box[0], -box[1])), 2):
            # neither apart nor nested; times are rounded to a nanosecond
            if two[0] < one[1] - 0.002 and two[1] > one[1] + 0.002:
                yield f"{one} and {two} overlap on a track"
    for name, ends in flows.items():
        if [each["ph"] for each in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"]:
            yield f"arrow {name} does not go from a start to a later end"
        for end in ends:
            if not any(start <= end["ts"] <= stop for start, stop, _ in tracks[end["pid"], end["tid"]]):
                yield f"arrow {name} begins or ends outside of all boxes"


@pytest.mark.parametrize("name", EXAMPLES)
def test_traces_keep_the_format(name: str):
    timeline = EXAMPLES[name]()
    trace = chrome_trace(timeline)
    assert not list(problems(trace))
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(boxes) == sum(len(row.spans) for row in timeline.rows)
    assert {(event["pid"], event["name"]) for event in boxes if event["cat"] in ("forward", "backward")} >= {
        (row.rank, str(action))
        for row in timeline.rows
        for action in timeline.schedule.actions[row.place.pp]
        if action.kind in "FB"
    }
    assert max(event["ts"] + event["dur"] for event in boxes) == pytest.approx(
        (timeline.stop - min(each.start for row in timeline.rows for each in row.spans)) * 1e6, abs=0.01
    )


def test_arrows_are_the_messages_between_neighbours():
    timeline = example("zb-h1", 3, 4)
    arrows = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "s"]
    assert sorted(event["name"] for event in arrows) == sorted(
        [
            *(f"{stage}F{m}>{stage + 1}" for stage in (0, 1) for m in range(4)),
            *(f"{stage}I{m}>{stage - 1}" for stage in (1, 2) for m in range(4)),
        ]
    )


def test_the_check_of_the_format_sees_mistakes():
    good = chrome_trace(grid())
    number = next(
        place for place, event in enumerate(good["traceEvents"]) if event["ph"] == "X" and event["tid"] == 0
    )
    arrow = next(place for place, event in enumerate(good["traceEvents"]) if event["ph"] == "s")
    for place, key, value in [
        (number, "dur", -1.0), (number, "dur", 1500.0), (number, "ts", None), (number, "pid", "rank 0"), (number, "ph", "Q"), (0, "args", {}), (0, "name", "x"),
        (arrow, "ts", 1e9), (arrow, "id", -1),
    ]:  # fmt: skip
        wrong = deepcopy(good)
        wrong["traceEvents"][place][key] = value
        assert list(problems(wrong)), (place, key, value)


# --- the picture


def extents(figure: Any) -> list[tuple[str, Any]]:
    """(text, its bounding box in dots) of all that is written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()  # places what is written
    axes = figure.axes[0]
    outside = axes.get_xlim()[1]
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    shown = [
        text for text in shown if text not in axes.get_xticklabels() or 0 <= text.get_position()[0] <= outside
    ]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


@pytest.mark.covering("1f1b", "zb-v", "grid", "one")
@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_that_is_written_overlaps_or_leaves_the_picture(name: str):
    pytest.importorskip("matplotlib")
    timeline = EXAMPLES[name]()
    # long names, and a plan that is too long for a line
    rows = tuple(replace(row, rank=row.rank + 1000) for row in timeline.rows)
    figure = draw(
        replace(timeline, rows=rows),
        "dp=1,pp=4,cuts=" + "+".join(f"model.layers.{number}" for number in range(20)),
    )
    written = extents(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in written:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, (
            f"{text} leaves the picture"
        )
    ordered = sorted(written, key=lambda each: each[1].x0)
    for number, (one, box) in enumerate(ordered):
        for other, next_ in ordered[number + 1 :]:
            if next_.x0 > box.x1:
                break
            assert box.y1 <= next_.y0 or next_.y1 <= box.y0 or next_.x0 >= box.x1, (
                f"{one} and {other} overlap"
            )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.slow
def test_labels_lie_in_their_boxes(name: str):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Rectangle

    timeline = EXAMPLES[name]()
    figure = draw(timeline)
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    boxes = [
        patch.get_window_extent()
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_linewidth() > 0
    ]
    assert len(boxes) == sum(len(row.actions) for row in timeline.rows)
    labels = [text for text in axes.texts if re.fullmatch(r"\d*[FBIW]\d+", text.get_text())]
    assert len(labels) >= 0.9 * len(boxes)
    for label in labels:
        inner = label.get_window_extent()
        assert any(
            box.x0 < inner.x0 and inner.x1 < box.x1 and box.y0 < inner.y0 and inner.y1 < box.y1
            for box in boxes
        ), label.get_text()


@pytest.mark.slow
def test_svg_is_xml_and_the_same_each_time(tmp_path: Path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        save_picture(grid(), tmp_path / name, "dp=2,pp=2,tp=2")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "one.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    patches = [each for each in root.iter() if each.get("id", "").startswith("patch_")]
    num_boxes = sum(len(row.actions) + 2 for row in grid().rows)  # of exchange and update, too
    assert len(patches) >= num_boxes + len(grid().rows)  # and what is idle


@pytest.mark.long
def test_png_has_its_size(tmp_path: Path):
    pytest.importorskip("matplotlib")
    save_picture(example("1f1b", 4, 8), tmp_path / "x.png")
    header = (tmp_path / "x.png").read_bytes()[:24]
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and width == 2100 and 400 < height < 700


def test_actions_have_names():
    assert Span(kind="B", start=0, stop=1, stage=3, microbatch=12).action == Action(3, "B", 12)
