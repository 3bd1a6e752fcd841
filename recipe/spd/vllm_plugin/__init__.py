"""A scorer in vLLM's speculative decoding: the target's head judges mismatches that vLLM would reject.

    from recipe.spd.vllm_plugin import engine_options
    llm = vllm.LLM(**engine_options(TARGET, SCORER, draft=DRAFT, threshold=1.0))

`scripts/serve_spd.py` starts vLLM's HTTP server with the same options.
"""

from recipe.spd.vllm_plugin.serving import ServedScorer, engine_options

__all__ = ["ServedScorer", "engine_options"]
