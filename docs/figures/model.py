"""The figures of a divided model: a pipeline's grid, a pair of linear layers over two ranks, the grid of ranks, and what each of them holds."""

from __future__ import annotations

import torch
from sketch import EVERYBODY, LINE, NOTHING, QUIET, RANKS, Page
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.mesh import AXES, Mesh, MeshCoordinates
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import most_in_flight
from meshloom.pipeline.schedules.timing import Durations, run_on_paper

# What travels along dp, pp and tp: its colour, where its legend begins, what it is.
SENT = (
    ("#0072b2", 0.1, "dp: gradients, once a step"),
    ("#d55e00", 3.2, "pp: activations and their gradients"),
    ("#009e73", 7.0, "tp: sums in every block"),
)


def pipeline() -> Page:
    """gpipe above 1f1b: four ranks, eight microbatches, backward twice as long as forward."""
    p, m = 4, 8
    page, left, cell = Page(11.2, 5.2), 0.85, 0.34
    for number, name in enumerate(("gpipe", "1f1b")):
        schedule = make_schedule(name, p, m)
        timed, peaks = run_on_paper(schedule, Durations.uniform(p).of), most_in_flight(schedule)
        unit, top = 9.0 / timed.length, 4.9 - number * 2.3
        page.words(
            left,
            top,
            f"schedule={name}: every rank waits {timed.mean_idle_share:.0%} of the time",
            at="left",
            bold=True,
        )
        page.words(left + 9.1, top, "holds at most", at="left", size=9.5)
        for rank in range(p):
            y = top - 0.58 - rank * (cell + 0.06)
            page.words(0.1, y + cell / 2, f"rank {rank}", at="left", size=10)
            page.shade(left, y, unit * timed.length, cell)
            for action in schedule.actions[rank]:
                start, seconds = timed.starts[action], timed.ends[action] - timed.starts[action]
                page.box(
                    left + unit * start,
                    y,
                    unit * seconds,
                    cell,
                    f"{action.microbatch}",
                    colour=RANKS["FB".index(action.kind)],
                    size=9,
                )
            page.words(
                left + 9.1,
                y + cell / 2,
                f"{peaks[rank]} microbatches" if peaks[rank] > 1 else "1 microbatch",
                at="left",
                size=9.5,
            )
    page.box(left, 0.12, 0.3, 0.24, colour=RANKS[0])
    page.words(left + 0.4, 0.24, "forward of a microbatch", at="left", size=10)
    page.box(left + 2.6, 0.12, 0.3, 0.24, colour=RANKS[1])
    page.words(left + 3.0, 0.24, "backward", at="left", size=10)
    page.box(left + 4.2, 0.12, 0.3, 0.24, colour=NOTHING)
    page.words(left + 4.6, 0.24, "waiting", at="left", size=10)
    page.arrow((left + 7.2, 0.24), (left + 9.0, 0.24), colour=QUIET)
    page.words(left + 7.1, 0.24, "time", at="right", size=10, colour=QUIET)
    return page


def column_and_row() -> Page:
    """Y = f(X A) B on two ranks: A by columns, then B by rows."""
    page = Page(10.6, 4.4)
    page.words(0.2, 4.15, "Y = f(X A) B, --plan tp=2:  A by columns, then B by rows", at="left", bold=True)
    page.box(0.25, 1.75, 1.15, 0.7, "X\nwhole", colour=EVERYBODY)
    for rank in range(2):
        y, colour = 2.55 - 1.75 * rank, RANKS[rank]
        page.words(1.75, y + 1.22, f"rank {rank}", at="left", size=10, bold=True)
        page.arrow((1.42, 2.25 - 0.3 * rank), (1.75, y + 0.5))
        for part in range(2):
            words = f"$A_{rank}$" if part == rank else ""
            page.box(1.8 + 0.45 * part, y, 0.45, 1.0, words, colour=colour if part == rank else "white")
        page.arrow((2.75, y + 0.5), (3.2, y + 0.5))
        page.box(3.25, y + 0.15, 1.45, 0.7, f"$H_{rank} = f(X A_{rank})$", colour=colour, size=10)
        page.words(3.97, y + 1.02, "nothing is sent", size=9, colour=QUIET)
        page.arrow((4.75, y + 0.5), (5.2, y + 0.5))
        for part in range(2):
            words = f"$B_{rank}$" if part == rank else ""
            page.box(5.25, y + 0.5 * (1 - part), 0.95, 0.5, words, colour=colour if part == rank else "white")
        page.arrow((6.25, y + 0.5), (6.7, y + 0.5))
        page.box(6.75, y + 0.15, 1.0, 0.7, f"$H_{rank} B_{rank}$", colour=colour, size=10)
        page.arrow((7.8, y + 0.5), (8.2, 2.25 - 0.3 * rank))
    page.box(8.25, 1.6, 2.1, 1.0, "all-reduce:\n$Y = H_0 B_0 + H_1 B_1$", colour=EVERYBODY, size=10.5)
    backward = "Backward is the mirror image: gradients of A and B stay where they are, and one all-reduce adds up the gradient of X."
    page.words(0.25, 0.3, backward, at="left", size=10, colour=QUIET)
    return page


def grid() -> Page:
    """Eight ranks: dp=2,pp=2,tp=2."""
    mesh = Mesh(dp=2, pp=2, tp=2)
    page = Page(10.2, 4.3)
    wide, high = 1.55, 0.85

    def corner(rank: int) -> tuple[float, float]:
        place = mesh.place(rank)
        return 1.15 + 4.75 * place.pp + 2.15 * place.tp, 2.35 - 1.5 * place.dp

    for stage in range(mesh.pp):
        x, _ = corner(mesh.rank(MeshCoordinates(pp=stage)))
        page.words(x + 1.85, 3.95, f"pp={stage}: {('first', 'last')[stage]} half of the layers", bold=True)
        for part in range(mesh.tp):
            page.words(x + 2.15 * part + wide / 2, 3.55, f"tp={part}", size=10)
    for replica in range(mesh.dp):
        _, y = corner(mesh.rank(MeshCoordinates(dp=replica)))
        page.words(
            0.1,
            y + high / 2,
            f"dp={replica}\n{('first', 'second')[replica]} half\nof the batch",
            at="left",
            size=9.5,
        )
    for rank in range(mesh.size):
        x, y = corner(rank)
        page.box(
            x,
            y,
            wide,
            high,
            f"rank {rank}",
            colour=RANKS[mesh.place(rank).pp * 2 + mesh.place(rank).tp],
            size=12,
        )
    for axis, (colour, _, _) in zip(AXES, SENT, strict=True):
        for first, last in mesh.groups(axis):
            (x, y), (to_x, to_y) = corner(first), corner(last)
            if axis == "dp":
                page.arrow(
                    (x + wide / 2, y - 0.03), (to_x + wide / 2, to_y + high + 0.03), both=True, colour=colour
                )
            elif axis == "tp":
                page.arrow(
                    (x + wide + 0.03, y + high / 2), (to_x - 0.03, to_y + high / 2), both=True, colour=colour
                )
            else:
                page.arrow(
                    (x + wide - 0.2, y + high + 0.03),
                    (to_x + 0.2, to_y + high + 0.03),
                    both=True,
                    colour=colour,
                    bend=-0.1,
                )
    for colour, x, words in SENT:
        page.arrow((x, 0.3), (x + 0.4, 0.3), both=True, colour=colour)
        page.words(x + 0.5, 0.3, words, at="left", size=10)
    page.words(9.6, 0.7, "same colour: same parameters", at="right", size=9.5, colour=QUIET)
    return page


def held() -> Page:
    """Elements that ranks hold under six plans, from simulated runs of a small model, as shares of one device's."""
    plans = (
        "dp=1",
        "dp=4",
        "dp=4,zero=1",
        "dp=4,exchange=server,servers=2",
        "tp=4",
        "pp=4,microbatches=4,cuts=1+2+3",
    )
    kinds = (("parameters", RANKS[0]), ("gradients", RANKS[1]), ("optimizer state", RANKS[2]))
    found = {plan: _held_under(plan) for plan in plans}
    whole = found["dp=1"][0]
    page, bar = Page(10.2, 4.4), 2.3
    for number, (plan, ranks) in enumerate(found.items()):
        x, wide = 0.35 + 1.62 * number, 0.31
        head = plan.replace(",microbatches=4,cuts=1+2+3", "").replace(",", "\n")
        page.words(x + 0.66, 3.75, head, size=9.5, bold=True)
        for rank, elements in enumerate(ranks):
            y = 0.95
            for (_, colour), mine, all_of_it in zip(kinds, elements, whole, strict=True):
                high = bar / 3 * mine / all_of_it
                if mine:
                    page.box(x + rank * (wide + 0.03), y, wide, high, colour=colour)
                y += high
            page.words(x + rank * (wide + 0.03) + wide / 2, 0.78, f"{rank}", size=9)
    page.axes.plot([0.2, 10.0], [0.95 + bar] * 2, color=LINE, linewidth=0.6, linestyle=":")
    page.words(
        0.35,
        0.45,
        "rank (below each bar)   |   dotted: what one device holds",
        at="left",
        size=9.5,
        colour=QUIET,
    )
    for number, (name, colour) in enumerate(kinds):
        page.box(5.6 + 1.45 * number, 0.33, 0.25, 0.24, colour=colour)
        page.words(5.9 + 1.45 * number, 0.45, name, at="left", size=10)
    return page


def _held_under(plan: str) -> list[tuple[int, int, int]]:
    """By rank: elements of parameters, of the gradients that its backward makes, and of parameters whose optimizer state it keeps."""
    blocks = lambda: nn.Sequential(  # noqa: E731
        *(
            nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
            for _ in range(4)
        )
    )

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch).pow(2).mean()

    data = list(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
    job = ml.Job(
        model=blocks,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        data=lambda: data,
        batch_size=16,
        steps=1,
    )
    with ml.Trainer(job, plan, devices="simulated") as trainer:
        trainer.fit()
        here = [
            sum(each.numel() for each in replica.model.parameters() if not each.is_meta)
            for replica in trainer.replicas
        ]
        owned = [
            sum(each.stop - each.start for each in replica.exchange.ownership.owned)
            for replica in trainer.replicas
        ]
        return list(zip(here, here, owned, strict=True))
