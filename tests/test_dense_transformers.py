"""Dense transformers are divided as Megatron-LM divides them, by themselves: nearly all of a block, two
all-reduces per direction, or gathers and scatters instead.

Shoeybi et al., 2019, and for sequence parallelism Korthikanti et al., 2022, section 4.2.2. Collectives are
counted as the ranks start them; to which block each belongs is read off the divided program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom.replica.program_stages
from meshloom.core.job import Job
from meshloom.program.cost.rates import Rates
from meshloom.program.operators.linears import GatheredLinears
from meshloom.tensor_parallel.division import Division
from meshloom.tensor_parallel.sent_bytes import SentCollective, sent_at_step_end, sent_in_chunk
from meshloom.train.trainer import Trainer
from tests.jobs import Samples, own_loss

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("silent_export"),
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]

WIDTH, LENGTH, VOCABULARY, BATCH = 256, 64, 512, 4


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A model of three blocks. blocks: prefix of an inner block's parameters -> linear pairs in it, each a
    column split and a row split."""

    model: str
    settings: Mapping[str, Any]
    blocks: Mapping[str, int]
    length: int = LENGTH  # of what its blocks see

    def job(self) -> Job:
        """A step of it."""
        return Job(
            model=self.build,
            loss=own_loss,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
            data=self.samples,
            batch_size=BATCH,
            steps=2,
        )

    def build(self) -> nn.Module:
        import transformers  # here, because tests that use no family need not wait for it

        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.settings)
        for name in list(vars(config)):
            if "drop" in name and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        return kind(config)

    def samples(self) -> Samples:
        source = torch.Generator().manual_seed(0)
        if "image_size" in self.settings:
            return Samples(
                pixel_values=torch.randn(2 * BATCH, 3, 32, 32, generator=source), labels=torch.randint(2, (2 * BATCH,), generator=source)
            )  # fmt: skip
        words: Tensor = torch.randint(VOCABULARY, (2 * BATCH, LENGTH), generator=source)
        return Samples(input_ids=words, labels=words)


_LLAMA: dict[str, Any] = {"intermediate_size": 688, "num_key_value_heads": 2, "use_cache": False}
_USUAL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
DENSE = {
    "gpt2": Dense(
        model="GPT2LMHeadModel", blocks={"transformer.h.1.": 2},
        settings={"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY, "use_cache": False},
    ),
    "llama": Dense(model="LlamaForCausalLM", blocks={"model.layers.1.": 2}, settings={**_USUAL, **_LLAMA}),
    "bert": Dense(model="BertForMaskedLM", blocks={"bert.encoder.layer.1.": 2}, settings={**_USUAL, "intermediate_size": 4 * WIDTH}),
    "t5": Dense(
        model="T5ForConditionalGeneration", blocks={"encoder.block.1.": 2, "decoder.block.1.": 3},
        settings={"d_model": WIDTH, "d_kv": 64, "d_ff": 4 * WIDTH, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY,
                  "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
    ),
    "vit": Dense(
        model="ViTForImageClassification", blocks={"vit.layers.1.": 2}, length=17,
        settings={"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH, "image_size": 32,
                  "patch_size": 8},
    ),
}  # fmt: skip
BOTH = "all_gather", "reduce_scatter"
# Memory is slow to read, so norms and sums are divided as well.
BY_SEQUENCE = Rates(bytes_per_second=3e8)


def step_of(dense: Dense) -> tuple[list[SentCollective], Mapping[str, str], Mapping[str, float], int]:
    """What a rank sends in a step, checked against the record, and of what.

    Then node -> module; block -> share of its parameters that is divided; how many inputs in the blocks are
    gathered twice.
    """
    with Trainer(dense.job(), "tp=2", devices="simulated") as trainer:
        batches = trainer.batches()
        trainer.step(next(batches))  # the first step also sends what later ones need
        replica = trainer.replicas[0]
        group, division = replica.context.groups["tp"], replica.engine.stages.division
        group.counts.clear()
        trainer.step(next(batches))
        batches.close()
        assert division is not None
        part = division.first
        sent = [*sent_in_chunk(part.programs[0], 0), *sent_at_step_end(part)]
        counted = dict(group.counts)
        rates = SentCollective(collective="all_reduce", num_bytes=8, backward=True)  # which ranks compare
        calls = Counter(each.collective for each in [*sent, rates])
        assert {kind: count.calls for kind, count in counted.items()} == calls
        for kind in calls:
            of_kind = [each.num_bytes for each in [*sent, rates] if each.collective == kind]
            assert counted[kind].bytes == sum(of_kind)
        shares = {
            block: sum(
                math.prod(each.shape)
                for name, each in part.parameters.items()
                if name.startswith(block) and not each.is_whole
            )
            / sum(math.prod(each.shape) for name, each in part.parameters.items() if name.startswith(block))
            for block in dense.blocks
        }
        paths = {node.name: f"{node.path}." for node in part.programs[0].nodes}
        again = sum(
            isinstance(node.target, GatheredLinears)
            and node.target.change.source == "part"
            and paths[node.name].startswith(tuple(dense.blocks))
            for node in part.programs[0].nodes
        )
        return sent, paths, shares, again


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.slow
def test_a_block_is_divided_but_for_its_norms_and_sums_each_pair_once_per_direction(name: str):
    dense = DENSE[name]
    sent, paths, shares, _ = step_of(dense)
    size = BATCH * dense.length * WIDTH * 4
    for block, num_pairs in dense.blocks.items():
        assert shares[block] >= 0.99
        inside = [each for each in sent if each.node and paths[each.node].startswith(block)]
        expected = {("all_reduce", False, size): num_pairs, ("all_reduce", True, size): num_pairs}
        assert Counter((each.collective, each.backward, each.num_bytes) for each in inside) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_parts_of_the_sequence_the_volume_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meshloom.replica.program_stages, "Division", partial(Division, rates=BY_SEQUENCE))
    dense = DENSE[name]
    sent, paths, shares, again = step_of(dense)
    size = BATCH * dense.length * WIDTH * 4
    (block,) = dense.blocks
    assert shares[block] >= 0.99
    inside = [each for each in sent if each.node and paths[each.node].startswith(block)]
    found = Counter((each.collective, each.backward, each.num_bytes) for each in inside)
    found["all_gather", True, size // 2] -= again  # brings back inputs that were not kept
    assert found == {
        (collective, backward, size // (2 if collective == "all_gather" else 1)): 2
        for collective in BOTH
        for backward in (False, True)
    }
