"""Mixtures of experts: each token goes to a few of many."""

from __future__ import annotations

from typing import Any

from tests.published.model import Published, from_transformers, tokens


def _experts(
    name: str, model: str, length: int, settings: dict[str, Any] | None = None, *, huge: bool = False
) -> Published:
    return from_transformers(
        name,
        "experts",
        f"{length:,} tokens",
        model,
        tokens(length),
        settings or {},
        chunk=1,
        huge=huge,
    )


EXPERTS = [
    _experts("mixtral-8x7b", "MixtralForCausalLM", 4096, huge=True),
    _experts("qwen3-moe", "Qwen3MoeForCausalLM", 4096),
    # Its three dense blocks and nine of its 58 with experts, at full width.
    _experts("deepseek-v3, 12 blocks", "DeepseekV3ForCausalLM", 4096, {"num_hidden_layers": 12}, huge=True),
]
