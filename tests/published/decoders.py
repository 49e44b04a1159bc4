"""Decoders: language models that predict the next token."""

from __future__ import annotations

from typing import Any

from tests.published.model import Published, from_transformers, tokens


def _decoder(
    name: str,
    model: str,
    length: int,
    settings: dict[str, Any] | None = None,
    *,
    config: str | None = None,
    chunk: int = 1,
    huge: bool = False,
) -> Published:
    size = f"{length:,} tokens"
    return from_transformers(
        name,
        "decoder",
        size,
        model,
        tokens(length),
        settings or {},
        config=config,
        chunk=chunk,
        dense=True,
        huge=huge,
    )


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads}


def _llama(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """LLaMA 3: grouped queries, 128,256 words."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip


LLAMA_1B = {**_llama(2048, 8192, 16, 32), "tie_word_embeddings": True}

DECODERS = [
    _decoder("gpt2", "GPT2LMHeadModel", 1024, chunk=4),
    _decoder("gpt2-medium", "GPT2LMHeadModel", 1024, _gpt2(1024, 24, 16), chunk=4),
    _decoder("gpt2-large", "GPT2LMHeadModel", 1024, _gpt2(1280, 36, 20), chunk=4),
    _decoder("gpt2-xl", "GPT2LMHeadModel", 1024, _gpt2(1600, 48, 25), chunk=4),
    _decoder("llama-1b", "LlamaForCausalLM", 4096, LLAMA_1B),
    _decoder("llama-1b, long", "LlamaForCausalLM", 131072, LLAMA_1B),
    _decoder("llama-7b", "LlamaForCausalLM", 4096, {"max_position_embeddings": 4096}),
    _decoder("llama-70b", "LlamaForCausalLM", 8192, _llama(8192, 28672, 80, 64), huge=True),
    _decoder("llama-405b", "LlamaForCausalLM", 8192, _llama(16384, 53248, 126, 128), huge=True),
    _decoder("mistral-7b", "MistralForCausalLM", 8192),  # its window is 4,096
    _decoder("qwen3", "Qwen3ForCausalLM", 4096),
    _decoder("gemma2-2b", "Gemma2ForCausalLM", 8192),
    _decoder("gemma3", "Gemma3ForCausalLM", 8192, config="Gemma3TextConfig"),
    _decoder("phi3-mini", "Phi3ForCausalLM", 4096),
    _decoder("falcon-7b", "FalconForCausalLM", 2048),
    _decoder("bloom-560m", "BloomForCausalLM", 2048, {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    _decoder("opt-1.3b", "OPTForCausalLM", 2048,
             {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "word_embed_proj_dim": 2048}),
    _decoder("olmo2-7b", "Olmo2ForCausalLM", 2048),
]  # fmt: skip
