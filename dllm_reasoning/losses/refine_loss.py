"""The refinement loss on a policy's own samples, so that an RL update keeps the policy able to draft for itself."""

import hashlib

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from dllm_reasoning.config.iterative import IterativeConfig, RefineLossConfig
from dllm_reasoning.inference.settings import NOISE_KEY, trained_window
from dllm_reasoning.losses.iterative_loss import CachedPrefix, IterativeLoss, SharedPrefix, sharing
from dllm_reasoning.losses.layouts import Layout, build_layout, count_labels
from dllm_reasoning.utils.attention import window_of
from verl.config.actor import FSDPActorConfig
from verl.protocol import DataProto
from verl.training.actor.base import AuxiliaryLoss, register_auxiliary_loss
from verl.training.engine import FSDPEngine
from verl.training.policy.attention import NAME, NAME_OF_FLASH
from verl.training.policy.causal_lm import causal_model
from verl.training.policy.packing import Packing, on_host, pack_batch


@register_auxiliary_loss("refine_loss")
class RefineLoss(AuxiliaryLoss):
    """Packed windows next to each sample, as in refinement SFT, divided by the labels of all ranks' mini-batch.

    Where windows begin depends on a sample's tokens only, so neither the cut into micro-batches nor the number of ranks
    changes the loss. With `samples=positive`, samples of advantage 0 or less have no labels.

    The clean text in front of a window is what the policy's forward reads. If that is packed, windows attend to its
    keys and values, and its backward pass takes their gradients along; else the text is read again for them.
    """

    settings_type = RefineLossConfig
    cache: SharedPrefix | None = None

    def __init__(self, settings: RefineLossConfig, config: FSDPActorConfig, engine: FSDPEngine) -> None:
        model = causal_model(engine.module)
        window = trained_window(model.config)
        if window is None:
            raise ValueError(
                f"{settings.section}.coef={settings.coef} needs a model trained by iterative refinement: its "
                "config.json has no dllm_window. Train it with dllm_reasoning.train_iterative_refine "
                f"(iterative.noise_pattern=packed), or set {settings.section}.coef=0."
            )
        self.settings, self.config, self.engine = settings, config, engine
        self.noise_token = model.config.to_dict().get(NOISE_KEY, model.config.eos_token_id)
        self.noise = IterativeConfig(
            noise_pattern="packed", block_length=window, windows_per_sample=settings.windows_per_sample,
            num_iterations=settings.num_iterations, aligned_windows=settings.aligned_windows,
        )  # fmt: skip
        with engine.eval_mode():
            share = sharing(engine.module, "auto", settings.num_iterations, packed=True)
        self.loss = IterativeLoss(self.noise.round_weights, ar_weight=0.0, share=share)
        self.labels = 0
        packed = model.config._attn_implementation in (NAME, NAME_OF_FLASH)
        self.needs_cache = share and packed and window_of(model.config) is None

    def new_cache(self) -> SharedPrefix:
        self.cache = SharedPrefix(causal_model(self.engine.module).config.num_hidden_layers)
        return self.cache

    def begin(self, mini: DataProto) -> None:
        """Count the labels of a mini-batch over all ranks: a collective call."""
        rows = self._rows(mini.batch)
        own = count_labels(rows["response_mask"], seeds_of(rows), self.noise)
        labels = torch.tensor(own, device=self.engine.device)
        dist.all_reduce(labels)
        self.labels = int(labels)

    def backward(self, batch: TensorDict) -> dict[str, float]:
        """Add the weighted gradient of a micro-batch; its share of actor/refine_loss, a mean over labels and rounds."""
        rows, prefix = self._rows(batch), None
        layout = build_layout(rows, seeds_of(rows), self.noise, self.noise_token)
        if self.cache is not None:
            self.cache.detach_for_sharing()
            prefix = CachedPrefix(self.cache, self._packing(batch, rows, layout))
            layout, self.cache = layout.flat_tail(), None
        share = self.engine.get_data_parallel_size() / max(1, self.labels) / self.noise.num_iterations
        with self.engine.autocast():
            losses = self.loss.run(
                self.engine.module, layout.to(self.engine.device),
                lambda loss, _: self.engine.backward(loss, is_last_micro_batch=False),
                scale=self.settings.coef * share, ar_scale=0.0, is_last=False, cached_prefix=prefix,
            )  # fmt: skip
        if prefix is not None:
            prefix.cache.return_gradients()
        return {"actor/refine_loss": sum(losses.rounds).item() * share}

    def _packing(self, batch: TensorDict, rows: dict[str, torch.Tensor], layout: Layout) -> Packing:
        """How the windows of `layout`, a flat row, attend to the policy's flat row and, after it, to themselves."""
        responses = batch["response_mask"].shape[1]
        policy = pack_batch(batch, responses, share_prompt=self.config.share_prompt_forward)
        kept = self._kept(batch)
        attended = on_host(batch)["attention_mask"].bool().cpu()[kept]
        # The keys of a row: its clean tokens, in the policy's flat row, then its window tokens, which follow that row.
        clean_places = [row[mask] for row, mask in zip(policy.places[kept], attended, strict=True)]
        width, count = self.noise.block_length, layout.tail.ids.shape[1]
        every = torch.arange(len(clean_places) * count)
        window_places = policy.length + every.view(-1, count)
        keys = torch.cat([torch.cat(places) for places in zip(clean_places, window_places, strict=True)])
        lengths = rows["attention_mask"].sum(1)  # [B]
        sizes = torch.stack([torch.full_like(lengths, count), lengths + count], 1)
        # A query attends to the clean tokens before its window, and to its window up to itself.
        committed = layout.attention_mask[:, :, : rows["input_ids"].shape[1]].sum(-1)  # [B, Q]: number of the former
        key, query = torch.arange(int(lengths.max()) + count), torch.arange(count)[:, None]
        number = key - lengths[:, None, None]  # [B, 1, K]: of the key among the row's window tokens
        same_window = (number >= 0) & (number <= query) & (number // width == query // width)
        attention_mask = ((key < committed[..., None]) | same_window).unsqueeze(1)
        return Packing(every, every, every, sizes, keys, attention_mask, single_part=True, group=policy.group,
                       prefix_len=policy.length, device=self.engine.device)  # fmt: skip

    def _counts(self, batch: TensorDict) -> torch.Tensor:
        """Which samples have labels: bool [b], on the CPU."""
        columns = on_host(batch)
        generated = columns["response_mask"]  # [b, R], 1 = generated token
        counts = generated.sum(-1) > 0
        if self.settings.samples == "positive":
            counts = counts & ((columns["advantages"] * generated).sum(-1) > 0)
        return counts.cpu()

    def _kept(self, batch: TensorDict) -> torch.Tensor:
        """Which samples have a row: bool [b], on the CPU, at least one."""
        counts = self._counts(batch)
        return counts if counts.any() else torch.arange(len(counts)) == 0

    def _rows(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Left-padded prompts with responses [b, P+R] as the right-padded rows of `build_layout`, on the CPU.

        Every token of a response is a label, those of tools too. Samples without labels have no row; if there are no
        others, the first one has a row, since each rank must make the same forwards.
        """
        counts, kept, given = self._counts(batch), self._kept(batch), on_host(batch)
        attended, ids = given["attention_mask"].bool().cpu()[kept], given["input_ids"].cpu()[kept]
        answer = torch.arange(ids.shape[1]) >= ids.shape[1] - batch["response_mask"].shape[1]
        answer = attended & answer & counts[kept][:, None]
        columns = {"input_ids": ids, "attention_mask": attended.long(), "response_mask": answer.long()}
        rows = {
            name: pad_sequence([row[mask] for row, mask in zip(column, attended, strict=True)], batch_first=True)
            for name, column in columns.items()
        }
        positions = torch.arange(rows["input_ids"].shape[1])
        return rows | {"position_ids": positions.expand_as(rows["input_ids"])}


def seeds_of(rows: dict[str, torch.Tensor]) -> list[int]:
    """A seed below 2**56 per row, from its tokens."""
    texts = (ids[mask.bool()].numpy() for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True))
    return [int.from_bytes(hashlib.blake2b(text.tobytes(), digest_size=7).digest(), "big") for text in texts]
