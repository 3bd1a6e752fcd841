"""Tiny random models of the families of the installed transformers."""

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZE = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.2, pad_token_id=0,
            bos_token_id=1, eos_token_id=2)  # fmt: skip
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
SHARED = dict(shared_expert_intermediate_size=32)  # vLLM makes a shared expert wherever a config has this
WINDOW = dict(sliding_window=8, use_sliding_window=True)
LATENT = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
              n_shared_experts=1, first_k_dense_replace=1)  # fmt: skip
DEEPSEEK = dict(**LATENT, **ROUTED, num_key_value_heads=2, head_dim=16)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
              linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"])  # fmt: skip
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
PARTS = dict(layer_types=["sliding_attention", "full_attention"], **WINDOW)

#: name -> (class of the config, changes of SIZE, what it has that others have not)
FAMILIES: dict[str, tuple[str, dict, str]] = {
    "Llama": ("LlamaConfig", {}, "dense, own output matrix"),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}, "tied output matrix"),
    "Llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, "biases everywhere"),
    "Qwen2": ("Qwen2Config", {}, "biases of query, key and value"),
    "Qwen2, window": ("Qwen2Config", {"max_window_layers": 1, **WINDOW}, "window in some layers"),
    "Qwen2 MoE": ("Qwen2MoeConfig", {**MOE, **SHARED}, "shared expert"),
    "Qwen3": ("Qwen3Config", {"tie_word_embeddings": True}, "norms of query and key"),
    "Qwen3 MoE": ("Qwen3MoeConfig", MOE, "experts"),
    "Qwen3-Next": ("Qwen3NextConfig", {**LINEAR, **MOE, **SHARED}, "linear attention, experts"),
    "Qwen3.5": ("Qwen3_5TextConfig", LINEAR, "linear attention"),
    "Mistral": ("MistralConfig", WINDOW, "window"),
    "Mixtral": ("MixtralConfig", MOE, "experts"),
    "Gemma": ("GemmaConfig", {}, "tied, scaled embeddings"),
    "Gemma 2": ("Gemma2Config", {**PARTS, "attn_logit_softcapping": 2.0}, "windows, soft caps"),
    "Gemma 3": ("Gemma3TextConfig", PARTS, "windows with rotations of their own"),
    "gpt-oss": ("GptOssConfig", {**MOE, **PARTS}, "attention sinks, windows, experts"),
    "Phi-3": ("Phi3Config", WINDOW, "joint projections, window"),
    "StableLM": ("StableLmConfig", {}, "partial rotations, layer norms"),
    "Starcoder2": ("Starcoder2Config", WINDOW, "biases, layer norms, window"),
    "SmolLM3": ("SmolLM3Config", {}, "layers without positions"),
    "OLMo 2": ("Olmo2Config", {}, "norms after the layers"),
    "OLMo 3": ("Olmo3Config", PARTS, "windows, norms after the layers"),
    "OLMoE": ("OlmoeConfig", MOE, "experts, norms of query and key"),
    "Cohere": ("CohereConfig", {}, "parallel layers, scaled logits"),
    "Cohere 2": ("Cohere2Config", PARTS, "windows, layers without positions"),
    "GLM-4": ("Glm4Config", {}, "norms around the layers"),
    "GLM-4.5": ("Glm4MoeConfig", ROUTED, "experts, a dense first layer"),
    "Granite": ("GraniteConfig", {}, "multipliers of embeddings, residuals and logits"),
    "Granite hybrid": ("GraniteMoeHybridConfig", {
        **MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 32}, "Mamba 2, attention, experts"),
    "DeepSeek-V2": ("DeepseekV2Config", DEEPSEEK, "latent attention, experts"),
    "DeepSeek-V3": ("DeepseekV3Config", DEEPSEEK, "latent attention, experts"),
    "Llama 4": ("Llama4TextConfig", {"num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8},
                "attention in chunks, experts"),
    "Seed-OSS": ("SeedOssConfig", {}, "biases"),
    "ERNIE 4.5": ("Ernie4_5Config", {}, "interleaved rotations"),
    "HunYuan": ("HunYuanDenseV1Config", {}, "norms of query and key after rotation"),
    "EXAONE 4": ("Exaone4Config", PARTS, "windows, norms after the layers"),
    "Helium": ("HeliumConfig", {}, "dense"),
    "GPT-NeoX": ("GPTNeoXConfig", {}, "parallel layers, joint projections"),
    "GPT-2": ("GPT2Config", {}, "learned positions"),
    "LFM2": ("Lfm2Config", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"],
                            "conv_dim": 64, "block_dim": 64},  # transformers does not read these two, vLLM does
             "convolutions"),
    "Bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}, "Mamba 2, attention"),
    "Falcon-H1": ("FalconH1Config", {**MAMBA2, "mamba_d_head": 16, "mamba_d_ssm": 64},
                  "Mamba 2 and attention in every layer"),
    "Jamba": ("JambaConfig", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8}, "Mamba, attention, experts"),
    "Nemotron-H": ("NemotronHConfig", {
        "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 4, "mamba_head_dim": 32,
        "n_groups": 1, "ssm_state_size": 16}, "Mamba 2, attention"),
    "Mamba": ("MambaConfig", {"state_size": 8}, "no attention"),
    "Mamba 2": ("Mamba2Config", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1,
                                 "intermediate_size": 128}, "no attention"),
    "RecurrentGemma": ("RecurrentGemmaConfig", {}, "gated recurrences, windows"),
}  # fmt: skip


#: Sizes that vLLM's kernels on a CPU need, where the small ones are none of them.
IN_VLLM = {
    "Llama 4": {"attention_chunk_size": 32},
    **dict.fromkeys(("DeepSeek-V2", "DeepSeek-V3"), {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}),
}


def config_of(name: str, **changes) -> PreTrainedConfig:
    kind, given, _ = FAMILIES[name]
    return getattr(transformers, kind)(**{**SIZE, **given, **changes})


def model_of(name: str, **changes) -> PreTrainedModel:
    """Random weights in float32, the same in every call, in evaluation mode; `changes` of the config."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=torch.float32).eval()
