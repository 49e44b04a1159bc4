"""Whatever is chosen, what is trained is what one device trains: divisions and cuts as a test's variable,
each pair repeated by its seed.

What tp and pp do depends on measured rates, and only what one machine prefers was tested. Here rates, prices,
placements, cuts and schedules are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

import meshloom.pipeline.stages.stage_cutter
import meshloom.tensor_parallel.division
from meshloom.core.job import Job
from meshloom.program.cost.rates import Rates
from tests.any_choice import NAMES, Outcome, Pair, Readings, name_of, outcome_of, pair_of
from tests.jobs import Samples
from tests.verified import equals_one_device

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("silent_export"),
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last:UserWarning"),
]
QUARTERS = [NAMES[first::4] for first in range(4)]  # of the models, so that each is read in one test
MANY = range(100, 150)
MANY_MORE = range(150, 2200)
AGAIN = "to repeat it: python -m tests.any_choice"
BLOCK = 25  # of the many, which are tests of their own so that they can be divided over processes


@pytest.fixture(scope="module")
def readings() -> Readings:
    return Readings()


@pytest.fixture(autouse=True)
def kept(readings: Readings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    with readings.kept(monkeypatch):
        yield readings


def outcomes(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pair, Outcome]]:
    """Of every seed; the first that differs fails, and says how to repeat it."""
    found: list[tuple[Pair, Outcome]] = []
    for seed in seeds:
        pair = pair_of(seed)
        try:
            outcome = outcome_of(pair, monkeypatch)
        except Exception as error:
            error.add_note(f"{pair}; {AGAIN} {seed}")
            raise
        assert not outcome.error, f"{pair}: {outcome.what} ({outcome.error:.1e}); {AGAIN} {seed}"
        found.append((pair, outcome))
    return found


@pytest.mark.parametrize("names", QUARTERS, ids=range(4))
@pytest.mark.slow
def test_a_hundred_choices_equal_one_device(names: list[str], monkeypatch: pytest.MonkeyPatch):
    found = outcomes([each for each in range(100) if name_of(each) in names], monkeypatch)
    assert {pair.name for pair, _ in found} == set(names)
    check_shares(found)


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(
    "first",
    [
        *MANY[::BLOCK],
        *(pytest.param(first, marks=pytest.mark.campaign) for first in MANY_MORE[::BLOCK]),
    ],
)
def test_thousands_of_choices_equal_one_device(first: int, monkeypatch: pytest.MonkeyPatch):
    outcomes(range(first, first + BLOCK), monkeypatch)


# What was found from outside, by name.

WHISPER = {
    "flops_per_second": 2.2e9,
    "bytes_per_second": 4.4e9,
    "start_seconds": 2.3e-5,
    "latency_seconds": 7e-6,
    "link_bytes_per_second": 2.8e10,
}


def verified(job: Job, plan: str, rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshloom.tensor_parallel.division, "rates_for", lambda *_: rates)
    monkeypatch.setattr(meshloom.pipeline.stages.stage_cutter, "rates_here", lambda *_: rates)
    equals_one_device(job, plan)


def whisper() -> Job:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=96, decoder_ffn_dim=96,
        vocab_size=131, max_source_positions=32, max_target_positions=32, num_mel_bins=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    source = torch.Generator().manual_seed(7)
    samples = Samples(
        sound=torch.randn(8, 16, 64, generator=source), words=torch.randint(3, 131, (8, 12), generator=source)
    )
    return Job(
        model=lambda: WhisperForConditionalGeneration(config).train(), batch_size=4, steps=2, data=lambda: samples,
        optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-2),
        loss=lambda model, batch: model(input_features=batch["sound"], labels=batch["words"], use_cache=False).loss,
    )  # fmt: skip


@pytest.mark.slow  # seconds to read
def test_a_whisper_where_memory_has_no_price_equals_one_device(monkeypatch: pytest.MonkeyPatch):
    """Its updates were 0.95 off in 88 tensors: the ranks' programs were right, and what they sent each other
    was not."""
    verified(whisper(), "tp=3", Rates(memory_price=0.0, **WHISPER), monkeypatch)


def check_shares(found: list[tuple[Pair, Outcome]]) -> None:
    """It is no test of anything if all is left whole, in one stage, or refused."""
    divided = [outcome for pair, outcome in found if pair.plan.tp > 1 and not outcome.refused]
    refused = [f"{pair}: {outcome.refused}" for pair, outcome in found if outcome.refused]
    assert len(refused) <= 0.1 * len(found), "\n".join(refused)
    elements = sum(each.divided for each in divided) / len(divided)
    operators = sum(each.parts for each in divided) / len(divided)
    assert elements > 0.2 and operators > 0.3, (
        f"of {len(divided)} programs {elements:.0%} of the elements and {operators:.0%} of the operators were divided"
    )
    assert sum(each.divided > 0 for each in divided) > 0.5 * len(divided)
