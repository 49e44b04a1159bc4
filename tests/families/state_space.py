"""State-space models and other recurrences: what came before is kept in a state of fixed size."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family, from_transformers
from tests.families.samples import TOKENS, next_words


def _recurrent(name: str, notes: str, model: str, settings: dict[str, Any]) -> Family:
    return from_transformers(
        name, "state-space", notes, model, next_words, {**TOKENS, "use_cache": False, **settings}
    )


_ATTENTION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 29, "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip

STATE_SPACE = [
    _recurrent("mamba", "selective scan; a causal convolution", "MambaForCausalLM",
               {"hidden_size": 15, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 3, "time_step_rank": 3}),
    _recurrent("mamba2", "scan over chunks of heads", "Mamba2ForCausalLM",
               {"hidden_size": 15, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "head_dim": 10, "num_heads": 3, "n_groups": 1,
                "chunk_size": 4, "conv_kernel": 3}),
    _recurrent("falcon_mamba", "selective scan with RMS norms of its parameters", "FalconMambaForCausalLM",
               {"hidden_size": 15, "state_size": 5, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 3, "time_step_rank": 3}),
    _recurrent("rwkv", "a recurrence with learned decays, token by token", "RwkvForCausalLM",
               {"hidden_size": 15, "attention_hidden_size": 15, "intermediate_size": 29, "num_hidden_layers": 2, "context_length": 11}),
    _recurrent("recurrent_gemma", "a gated linear recurrence and windowed attention in turn", "RecurrentGemmaForCausalLM",
               {**_ATTENTION, "num_hidden_layers": 3, "lru_width": 24, "attention_window_size": 4, "conv1d_width": 3, "intermediate_size": 58}),
    _recurrent("lfm2", "short gated convolutions and attention in turn", "Lfm2ForCausalLM",
               {**_ATTENTION, "num_hidden_layers": 2, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    _recurrent("jamba", "selective scan, attention and experts in turn", "JambaForCausalLM",
               {**_ATTENTION, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 3,
                "num_experts_per_tok": 2, "expert_layer_offset": 1, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 3,
                "experts_implementation": "batched_mm"}),
    _recurrent("bamba", "chunked scan and attention with partial rotation", "BambaForCausalLM",
               {**_ATTENTION, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 3, "mamba_d_head": 16, "mamba_expand": 2,
                "mamba_d_state": 5, "mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_chunk_size": 4}),
]  # fmt: skip
