"""Mixtures of experts: a router decides which of several MLPs reads a token."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family, from_transformers
from tests.families.samples import TOKENS, next_words, translations


def _mixture(name: str, notes: str, model: str, settings: dict[str, Any]) -> Family:
    return from_transformers(
        name,
        "experts",
        notes,
        model,
        next_words,
        {**TOKENS, "use_cache": False, "experts_implementation": "batched_mm", **settings},
    )


_BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}  # fmt: skip

EXPERTS = [
    _mixture("mixtral", "two of five experts; a loss that balances them over the batch", "MixtralForCausalLM",
             {**_BASE, "num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True}),
    _mixture("qwen3_moe", "a dense layer and one of small experts", "Qwen3MoeForCausalLM",
             {**_BASE, "head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11, "mlp_only_layers": [0],
              "decoder_sparse_step": 1, "norm_topk_prob": True}),
    _mixture("deepseek_v3", "compressed keys and values; a shared expert; routing in groups by sigmoid", "DeepseekV3ForCausalLM",
             {**_BASE, "num_key_value_heads": 3, "moe_intermediate_size": 11, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
              "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 7, "q_lora_rank": 9, "qk_rope_head_dim": 4,
              "qk_nope_head_dim": 5, "v_head_dim": 7}),
    _mixture("gpt_oss", "a learned sink in each softmax; windows; experts with biases", "GptOssForCausalLM",
             {**_BASE, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3}),
    _mixture("olmoe", "norms on queries and keys; eight small experts", "OlmoeForCausalLM",
             {**_BASE, "num_key_value_heads": 3, "num_experts": 8, "num_experts_per_tok": 3}),
    _mixture("granitemoe", "experts as one packed matrix, tokens sorted by expert", "GraniteMoeForCausalLM",
             {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    from_transformers("switch_transformers", "experts", "an encoder-decoder in which one expert reads a token, up to a capacity",
                      "SwitchTransformersForConditionalGeneration", translations,
                      {**TOKENS, "decoder_start_token_id": 1, "use_cache": False, "d_model": 15, "d_kv": 5, "d_ff": 29, "num_layers": 2,
                       "num_decoder_layers": 2, "num_heads": 3, "num_experts": 3, "expert_capacity": 64, "num_sparse_encoder_layers": 1,
                       "num_sparse_decoder_layers": 1, "relative_attention_num_buckets": 8, "router_jitter_noise": 0.0}),
]  # fmt: skip
