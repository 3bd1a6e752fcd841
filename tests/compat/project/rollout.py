"""A rollout that counts: it answers every prompt with its number of samples, without a model."""

import torch
from tensordict import TensorDict

from verl import DataProto
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout


class CountingRollout(BaseRollout):
    """Answers 6, 7, 8, ... (token ids), one more token for each further sample."""

    def __init__(self, config, model_config, device_mesh):
        super().__init__(config, model_config, device_mesh)
        self.events = []

    async def resume(self, tags):
        self.events.append(("resume", tuple(tags)))

    async def update_weights(self, weights, **kwargs):
        self.events.append(("weights", sum(1 for _ in weights)))

    async def release(self):
        self.events.append(("release",))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        n = prompts.meta_info.get("n", self.config.n)
        batch = prompts.batch
        rows, length = len(batch["input_ids"]) * n, self.config.response_length
        number = torch.arange(rows) % n
        position = torch.arange(length)
        mask = (position[None] <= number[:, None]).long()
        responses = torch.where(mask.bool(), 6 + position[None], prompts.meta_info["pad_token_id"])
        ids = batch["input_ids"].repeat_interleave(n, 0)
        attention = batch["attention_mask"].repeat_interleave(n, 0)
        positions = batch["position_ids"].repeat_interleave(n, 0)
        return DataProto(
            batch=TensorDict(
                {
                    "prompts": ids,
                    "responses": responses,
                    "input_ids": torch.cat([ids, responses], -1),
                    "attention_mask": torch.cat([attention, mask], -1),
                    "position_ids": torch.cat([positions, positions[:, -1:] + 1 + position[None]], -1),
                },
                batch_size=rows,
            )
        )


_ROLLOUT_REGISTRY[("counting", "sync")] = "tests.compat.project.rollout.CountingRollout"
