"""One rank of a reward model that scores complete responses."""

import torch
import torch.nn.functional as F
from tensordict import TensorDict

from verl.config.reward_model import RewardModelConfig
from verl.data.chat_template import render_chat
from verl.models.loading import compute_position_id_with_mask
from verl.profiling.profile import DistProfiler
from verl.protocol import DataProto
from verl.reward.rows import judged_text, place_scores
from verl.roles.critic import value_model
from verl.roles.ranks import ModelWorker
from verl.single_controller.base.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.training.actor.batch_cuts import micro_batches
from verl.training.actor.optimizer_step import forward_in_order
from verl.training.critic.dp_critic import packs_values
from verl.training.policy.packing import pack_batch
from verl.utils.tokenizer import hf_tokenizer

INPUTS = ("input_ids", "attention_mask", "position_ids")


class RewardModelWorker(ModelWorker):
    """A frozen model with one value per token; an answer's score is the value at its last token.

    With `model.input_tokenizer` (the policy's) the conversation is decoded and rendered with the chat template of the
    reward model's own tokenizer.
    """

    config_type = RewardModelConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the process group, load the reward model."""
        self.join_ranks("reward")
        self.settings: RewardModelConfig = self.config
        model = self.settings.model
        self.engine = self.make_engine("reward_model.model", value_model(model), model.fsdp_config)
        self.packs = packs_values(self.engine)
        self.policy_tokenizer = self.tokenizer = None
        if model.input_tokenizer is not None:
            trust = model.trust_remote_code
            self.policy_tokenizer = hf_tokenizer(model.input_tokenizer, trust_remote_code=trust)
            self.tokenizer = hf_tokenizer(model.tokenizer_path or model.path, trust_remote_code=trust)
            # An answer is scored at its end: what is too long loses its beginning.
            self.tokenizer.padding_side = self.tokenizer.truncation_side = "left"

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    @DistProfiler.annotate()
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """rm_scores [B, R] float32: each answer's score at its last counted token, 0 elsewhere."""
        settings = self.settings
        inputs = data if self.tokenizer is None else self._rewritten(data)
        inputs = inputs.select(batch_keys=list(INPUTS), non_tensor_batch_keys=[])
        rows = settings.micro_batch_size_per_gpu
        if settings.micro_batch_size is not None:
            rows = max(1, settings.micro_batch_size // self.world_size)
        tokens = None
        if settings.use_dynamic_bsz:
            tokens = settings.forward_max_token_len_per_gpu * self.engine.sequence_parallel_size
        inputs, own = self.engine.gather_over_sequence_group(inputs)
        micros = micro_batches(inputs, rows=rows, tokens=tokens, whole_groups=False)
        (scores,) = forward_in_order(self.engine, micros, self._last_values)
        return DataProto.from_dict({"rm_scores": place_scores(data, scores[own].tolist())})

    def _last_values(self, batch: TensorDict) -> list[torch.Tensor]:
        """The value [b] at the last token of each row [b, T], as the only entry of a list."""
        mask = batch["attention_mask"]  # [b, T]
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask.bool(), positions, 0).amax(-1, keepdim=True)
        if not self.packs:
            inputs = {name: batch[name] for name in INPUTS}
            values = self.engine.module(**inputs, use_cache=False).logits[..., 0].float()
            return [values.gather(1, last).squeeze(1)]
        # The packing gives the values at tokens that predict a response. So each row is rotated until it ends with its
        # last token, and one token is appended as its response.
        rotated = (positions + last + 1) % mask.shape[1]
        rows = {name: F.pad(batch[name].gather(1, rotated), (0, 1), value=1) for name in INPUTS}
        packing = pack_batch(rows, 1)
        flat = packing.model_inputs(rows["input_ids"], rows["position_ids"])
        values = self.engine.module(**flat).logits[0, :, 0][packing.predicted_from].float()
        return [packing.scatter_to_responses(values, last.shape).squeeze(1)]

    def _rewritten(self, data: DataProto) -> DataProto:
        """The conversations in the reward model's own chat template: input_ids [B, L], left-padded, with masks."""
        responses, prompts = data.batch["responses"], data.non_tensor_batch["raw_prompt"]
        kept = data.batch["attention_mask"][:, -responses.shape[1] :].bool()
        generated = data.batch["response_mask"] if "response_mask" in data.batch else kept
        chats = []
        for messages, ids, own, mask in zip(prompts, responses, generated, kept, strict=True):
            text = judged_text(self.settings, self.policy_tokenizer, ids[mask].tolist(), own[mask].tolist())
            chats.append(render_chat(self.tokenizer, [*messages, {"role": "assistant", "content": text}]))
        encoded = self.tokenizer(
            chats, add_special_tokens=False, return_tensors="pt", padding="max_length", truncation=True,
            max_length=self.settings.max_length or data.batch["input_ids"].shape[1], padding_side="left",
        )  # fmt: skip
        rewritten = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        rewritten["position_ids"] = compute_position_id_with_mask(encoded["attention_mask"])
        return DataProto.from_dict(rewritten)
