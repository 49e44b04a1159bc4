"""Decoders: language models that predict the next token, one for each way of mixing positions."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family, from_transformers
from tests.families.samples import TOKENS, next_words


def _decoder(
    name: str,
    notes: str,
    model: str,
    settings: dict[str, Any],
    *,
    config: str | None = None,
    drops: bool = True,
) -> Family:
    settings = {**TOKENS, "use_cache": False, **settings}
    return from_transformers(name, "decoder", notes, model, next_words, settings, config=config, drops=drops)


# Two layers; six query heads of 4 on a width of 30, so that nothing divides anything by accident.
_GROUPED: dict[str, Any] = {
    "hidden_size": 30, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "max_position_embeddings": 16,
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": 15, "n_layer": 2, "n_head": 3, "n_inner": 29, "n_positions": 11}


def _rotary(share: float) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    }


DECODERS = [
    _decoder("gpt2", "learned positions; packed q, k, v as a matrix [in, out]; tied head", "GPT2LMHeadModel", _GPT),
    _decoder(
        "gpt_neo", "learned positions; every second layer sees a window of 3; attention is not scaled", "GPTNeoForCausalLM",
        {"hidden_size": 15, "num_layers": 2, "num_heads": 3, "attention_types": [[["global", "local"], 1]], "window_size": 3,
         "intermediate_size": 29, "max_position_embeddings": 11},
    ),
    _decoder(
        "gpt_neox", "a quarter of each head is rotated; q, k, v packed by head; attention and MLP side by side", "GPTNeoXForCausalLM",
        {**_PLAIN, **_rotary(0.25)},
    ),
    _decoder("gptj", "interleaved rotation of a part of each head; one norm for attention and MLP", "GPTJForCausalLM",
             {**_GPT, "n_embd": 24, "rotary_dim": 4}),
    _decoder("codegen", "q, v, k packed in four groups, interleaved rotation", "CodeGenForCausalLM",
             {**_GPT, "n_embd": 32, "n_head": 4, "rotary_dim": 4}),
    _decoder("bloom", "ALiBi; q, k, v packed by head; a norm on the embedding", "BloomForCausalLM", {"hidden_size": 15, "n_layer": 2, "n_head": 3}),
    _decoder("falcon", "multi-query attention: one key/value head, packed with the queries", "FalconForCausalLM",
             {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "multi_query": True, "ffn_hidden_size": 29,
              "max_position_embeddings": 16}),
    _decoder("mpt", "ALiBi; no biases, norms without bias", "MptForCausalLM",
             {"d_model": 15, "n_layers": 2, "n_heads": 3, "expansion_ratio": 2, "max_seq_len": 11}),
    _decoder("opt", "learned positions counted by the mask; ReLU; embedding narrower than the layers", "OPTForCausalLM",
             {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 29, "max_position_embeddings": 11,
              "word_embed_proj_dim": 9}),
    _decoder("llama", "rotary positions; grouped queries; gated MLP; RMS norms", "LlamaForCausalLM", _GROUPED),
    _decoder("mistral", "a sliding window of 3", "MistralForCausalLM", {**_GROUPED, "num_key_value_heads": 1, "sliding_window": 3}),
    _decoder("qwen2", "biases on q, k, v only; tied head", "Qwen2ForCausalLM", {**_PLAIN, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    _decoder("qwen3", "a norm on every query and key", "Qwen3ForCausalLM", _GROUPED),
    _decoder("gemma2", "soft-capped scores and logits; norms before and after; a window in every second layer", "Gemma2ForCausalLM",
             {**_GROUPED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 4, "sliding_window": 5,
              "attn_implementation": "eager"}),
    _decoder("gemma3", "windows and whole layers turn at different speeds", "Gemma3ForCausalLM",
             {**_GROUPED, "query_pre_attn_scalar": 4, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
             config="Gemma3TextConfig"),
    _decoder("phi", "half of each head is rotated; attention and MLP side by side; biases everywhere", "PhiForCausalLM", {**_PLAIN, **_rotary(0.5)}),
    _decoder("phi3", "packed q, k, v of unequal parts; packed gate and up", "Phi3ForCausalLM", {**_PLAIN, "num_key_value_heads": 1}),
    _decoder("stablelm", "a layer norm per head on queries and keys", "StableLmForCausalLM",
             {**_PLAIN, "qk_layernorm": True, "use_qkv_bias": True, **_rotary(0.25)}),
    _decoder("gpt_bigcode", "learned positions; multi-query attention; packed q, k, v", "GPTBigCodeForCausalLM", {**_GPT, "multi_query": True}),
    _decoder("olmo2", "norms behind the layers; one norm over all heads' queries", "Olmo2ForCausalLM", _PLAIN),
    _decoder("cohere", "interleaved rotation; scaled logits; a norm per head", "CohereForCausalLM", {**_PLAIN, "use_qk_norm": True}),
    _decoder("nemotron", "squared ReLU; norms whose weight is counted from one", "NemotronForCausalLM", {**_PLAIN, **_rotary(0.5)}),
    _decoder("diffllama", "the difference of two softmaxes, which its class allows no dropout for", "DiffLlamaForCausalLM",
             {**_PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}, drops=False),
    _decoder("granite", "constant multipliers on embedding, scores, residuals and logits", "GraniteForCausalLM",
             {**_PLAIN, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    _decoder("ctrl", "sinusoidal positions kept as a plain attribute", "CTRLLMHeadModel",
             {**_GPT, "n_embd": 18, "dff": 29}),
    _decoder("xlnet", "relative positions; two-stream attention module", "XLNetLMHeadModel",
             {"d_model": 18, "n_layer": 2, "n_head": 3, "d_inner": 29}),
]  # fmt: skip
