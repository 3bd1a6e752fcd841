"""vLLM as the rollout: in the rank's process, called in batches or served over HTTP."""

from verl.rollout.vllm_rollout.vllm_rollout import vLLMRollout

__all__ = ["vLLMRollout"]
