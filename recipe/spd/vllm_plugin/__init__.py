"""A scorer in vLLM's speculative decoding: the target's head judges mismatches that vLLM would reject."""

from recipe.spd.vllm_plugin.serving import ServedScorer, engine_options

__all__ = ["ServedScorer", "engine_options"]
