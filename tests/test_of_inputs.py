"""What programs are given is held against what their chunks have: numbers, texts, data, draws of Python, and the seeds of torch's draws; and
what modules output in them against one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.pieces import Pieces, take
from meshloom.core.random import derive, seed_torch
from meshloom.program.python_draws.explore import DrawnBatch
from meshloom.verify.causes.of_inputs import DrawSeeds, GivenInputs, causes_of
from meshloom.verify.compared.compare_values import FirstWrong, Value, first_wrong_value
from meshloom.verify.reference.float64_blocks import ramp_of
from meshloom.verify.reference.step_records import ModuleOutput
from meshloom.verify.stage_outputs import ramp_of_part


def batch(number: float, task: str = "copy") -> dict[str, Any]:
    return {"x": torch.full((2, 3), number), "level": number, "task": task}


def program_of(**others: str | None) -> Any:
    return SimpleNamespace(others=others)


def inputs(number: float) -> dict[str, Tensor]:
    return {"x": torch.full((2, 3), number), "level": torch.tensor(number)}


def test_of_what_is_the_chunks_own_nothing_is_said():
    seen = GivenInputs({4: batch(0.5), 5: batch(0.25, "swap")})
    seen.given(0, program_of(level="a float", task="'copy'"), inputs(0.5))
    seen.given(1, program_of(level="a float", task="'swap'"), inputs(0.25))
    seen.given(1, program_of(task=None), {"x": torch.full((2, 3), torch.nan)} | {"x": inputs(0.25)["x"]})
    assert not seen.found and not [*causes_of(seen.found)]


def test_missing_numbers_are_no_other_data():
    seen = GivenInputs({0: {"x": torch.tensor([1.0, torch.nan])}})
    seen.given(0, program_of(), {"x": torch.tensor([1.0, torch.nan])})
    assert not seen.found


def test_what_another_chunk_has_is_said_to_be_its():
    seen = GivenInputs({4: batch(0.5), 5: batch(0.25)})
    seen.given(1, program_of(), inputs(0.5))
    assert [fact[0] for fact in seen.found] == ["microbatches", "stale"]
    data, number = causes_of(seen.found)
    assert "of chunk 5 x of the batch has other values than the chunk's, that of chunk 4" in data.sentence
    assert "level of the batch is 0.5, that of chunk 4, and the chunk's own is 0.25" in number.sentence
    assert data.explains and number.explains


def test_a_program_for_another_text_is_named():
    seen = GivenInputs({0: batch(0.5, "swap")})
    seen.given(0, program_of(level="a float", task="'copy'"), inputs(0.5))
    (cause,) = causes_of(seen.found)
    assert (
        "the program for batches in which task of the batch is 'copy', and the chunk has 'swap'"
        in cause.sentence
    )


def test_draws_of_python_are_those_of_the_chunk():
    own = {
        number: DrawnBatch(len, batch(0.5), [torch.tensor(drawn, dtype=torch.float64)])
        for number, drawn in enumerate((0.1, 0.7, 0.9))
    }
    seen = GivenInputs(own)
    for number in range(3):
        seen.given(number, program_of(), {"batch.x": torch.full((2, 3), 0.5), "drawn.0": own[0]["drawn"][0]})
    (cause,) = causes_of(seen.found)
    assert cause.kind == "same draws" and "with 1 other chunk." in cause.sentence
    assert (
        "of chunk 1 what its loss draws with random or numpy, or makes of the step, is 0.1, that of chunk 0, and the chunk's own is 0.7"
        in cause.sentence
    )
    # a way that the chunk's own draws do not go has inputs of its own
    seen = GivenInputs({0: own[0]})
    seen.given(0, program_of(), {"drawn.1": torch.tensor(0.1)})
    assert "and the chunk's own is none" in next(causes_of(seen.found)).sentence


def draw(number: int, path: str = "drop", target: Any = None) -> Any:
    return SimpleNamespace(target=target, draw=number, num_draws=1, path=path, operator="dropout", line=None)


def test_each_draw_of_torch_has_the_seed_of_its_number():
    right, wrong = DrawSeeds(3, 11), DrawSeeds(3, 11)
    seed = 11
    for number in range(3):
        seed = derive(seed, "next")
        seed_torch(seed)
        right.visit(draw(number))
        if number:
            wrong.visit(draw(number + 1, f"drop{number}"))
    assert not right.found
    ((kind, chunk, path, what),) = wrong.found
    assert (kind, chunk, path) == ("same draws", 3, "drop1")
    assert what.startswith("dropout of drop1") and "another seed than draw 2 of the chunk has" in what


def test_attention_that_drops_nothing_is_not_the_first_that_draws():
    attention = torch.ops.aten.scaled_dot_product_attention.default
    for rate, found in ((0.0, 0), (0.1, 1)):
        seen = DrawSeeds(3, 11)
        seed_torch(12)
        seen.visit(draw(0))
        node = draw(1, target=attention)
        node.args, node.kwargs = (None, None, None, None, rate), {}
        seen.visit(node)
        assert len(seen.found) == found


def output(name: str, total: float, count: int = 3) -> ModuleOutput:
    return ModuleOutput(name=name, call=0, total=total, square=total**2, count=count)


def said(total: float, count: int = 3) -> list[Value]:
    return [(True, total, total**2, count, None, ())]


def test_modules_whose_output_is_not_compared_are_said_beside_the_first_wrong_one():
    """The story: of a layer of experts that returns two tensors nothing was compared, and what was sent in the next one was said to be wrong."""
    one = [
        output("enter", 1.0),
        output("block.last", 2.0),
        output("block", 2.0),
        output("moe", 3.0),
        output("cross", 4.0),
    ]
    ranks = [{"enter": said(1.0), "block.last": said(2.0), "moe": said(3.0, count=1), "cross": said(4.5)}]
    found = first_wrong_value(one, ranks, 1e-4)
    assert found == FirstWrong(module="cross", unseen=["moe"])
    assert first_wrong_value(one, [{**ranks[0], "cross": said(4.0)}], 1e-4) is None


def test_parts_tell_orders_apart():
    halves = Pieces((2, 6), ((None, ((0, 3),)), (None, ((3, 6),))))
    x = torch.arange(12.0, dtype=torch.float64).view(2, 6)
    ramps = [ramp_of_part(take(halves, rank, x), halves, rank) for rank in range(2)]
    assert abs(sum(ramps) - ramp_of(x)) < 1e-12
    other = [x[:1].reshape(2, 3), x[1:].reshape(2, 3)]  # cut along its first dim
    assert abs(sum(ramp_of_part(each, halves, rank) for rank, each in enumerate(other)) - ramp_of(x)) > 1
