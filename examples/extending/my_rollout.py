"""A rollout.

    actor_rollout_ref.model.external_lib=examples.extending.my_rollout actor_rollout_ref.rollout.name=random_words
"""

import torch

from verl import DataProto
from verl.rollout.base import BaseRollout, register_rollout
from verl.rollout.sampling import build_rollout_batch


@register_rollout("random_words")
class RandomRollout(BaseRollout):
    """Answers with random tokens: a template for an engine of your own."""

    keeps_weights = True  # what update_weights got outlasts release()

    def update_weights(self, weights, **kwargs):
        """Take the actor's weights, a stream of (Hugging Face name, full tensor); called when they have changed."""
        self.parameters = sum(tensor.numel() for _, tensor in weights)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """n answers per prompt [B, P], those of one prompt adjacent -> rows [B * n, P + R]."""
        n, length = prompts.meta_info["n"], self.config.response_length
        rows = len(prompts) * n
        generator = torch.Generator().manual_seed(prompts.meta_info["global_steps"])
        responses = torch.randint(5, 20, (rows, length), generator=generator)  # [B * n, R]
        response_mask = torch.ones_like(responses)  # 1 = token of the answer, 0 = padding after its end
        # `build_rollout_batch` repeats the prompts and builds input_ids, attention_mask and position_ids.
        return DataProto.from_dict(build_rollout_batch(prompts, n, responses, response_mask, log_probs=None))
