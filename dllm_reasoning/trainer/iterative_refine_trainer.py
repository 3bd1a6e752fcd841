"""IterativeRefineTrainer: verl's SFT trainer with noised responses and several rounds a step."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch.utils.data import Dataset

from dllm_reasoning.config.iterative import IterativeConfig, IterativeRefineConfig
from dllm_reasoning.inference.generator import NOISE_KEY, WINDOW_KEY
from dllm_reasoning.losses.iterative_loss import IterativeLoss, RoundLosses, sharing
from dllm_reasoning.losses.layouts import Layout, NoiseSettings, build_layout, count_labels
from dllm_reasoning.trainer.self_generate import own_answers
from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from dllm_reasoning.utils.noise_utils import PATTERNS, draw_seeds, noise_token_of
from verl.trainer.sft.data import cut
from verl.trainer.sft.ranks import summed
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.policy.causal_lm import causal_model

SEED_COLUMN = "noise_seed"
VALIDATION_SEED = 1_000_003  # the same noise in every validation


class IterativeRefineTrainer(FSDPSFTTrainer):
    """Each step noises the batch's responses and trains `iterative.num_iterations` rounds of prediction.

    A sample's noise hangs on its place in the global batch and on the noise generator, not on rank or micro-batch.
    Losses are divided by the global number of places that count, as in plain SFT.
    """

    config_type = IterativeRefineConfig

    def __init__(
        self, config: DictConfig, device_mesh: Any, ulysses_device_mesh: Any, tokenizer: Any, train_dataset: Dataset,
        val_dataset: Dataset | None = None,
    ) -> None:
        super().__init__(config, device_mesh, ulysses_device_mesh, tokenizer, train_dataset, val_dataset)
        settings: IterativeConfig = omega_conf_to_dataclass(config.iterative, IterativeConfig)
        self.iterative = settings
        self.noise = noise_settings(settings, tokenizer)
        self.noise_generator = torch.Generator().manual_seed(settings.noise_seed)
        self.pattern = PATTERNS[settings.noise_pattern]
        model = causal_model(self.engine.module)
        # The clean text of unpacked rows is one more forward that looks at the same instruction.
        forwards = settings.num_iterations + int(settings.ar_loss_weight > 0)
        share = sharing(model, settings.share_instruction, forwards, self.pattern.windows)
        self.loss = IterativeLoss(settings.round_weights, settings.ar_loss_weight, share=share)
        setattr(model.config, NOISE_KEY, self.noise.token)
        if self.pattern.has_width:
            setattr(model.config, WINDOW_KEY, settings.block_length)
        self._counted, self._warm_up = 0, 0

    @classmethod
    def build_tokenizer(cls, config: DictConfig) -> Any:
        """The model's tokenizer; refuses one without the noise token."""
        tokenizer = super().build_tokenizer(config)
        noise_token_of(config.iterative.noise_token, tokenizer)
        return tokenizer

    @classmethod
    def build_dataset(cls, files: Any, config: DictConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """Instruction and response pairs; for training, with iterative.self_generate, of the model's own answers."""
        files = [files] if isinstance(files, str) else list(files)
        wanted = config.data.train_files
        trains = files == ([wanted] if isinstance(wanted, str) else list(wanted))
        dataset = IterativeSFTDataset(files, tokenizer, config.data, max_samples)
        if not (config.iterative.self_generate.enable and trains) or config.trainer.dry_run:
            return dataset
        own = own_answers(config, dataset)
        kept = [*files, own] if config.iterative.self_generate.keep_ground_truth else [own]
        return IterativeSFTDataset([str(file) for file in kept], tokenizer, config.data)

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        """Draw the step's noise, the same on every rank, then train."""
        ranks, rank = self.engine.world_size, self.engine.rank
        seeds = draw_seeds(self.noise_generator, len(batch) * ranks)[rank::ranks]
        if self.pattern.warm_up:
            limit = self.iterative.trajectory_max_rounds + 1
            self._warm_up = int(torch.randint(limit, (), generator=self.noise_generator))
        batch[SEED_COLUMN] = torch.tensor(seeds)
        counted = count_labels({"response_mask": batch["loss_mask"]}, seeds, self.noise)
        self._counted = int(summed({"counted": float(counted)}, self.engine.device)["counted"])
        return super().training_step(batch)

    def backward(self, micro: TensorDict, tokens: int, is_last: bool) -> dict[str, float]:
        layout = self._layout(micro)
        ranks = self.engine.get_data_parallel_size()
        with self.engine.autocast():
            told = self.loss.run(
                self.engine.module, layout.to(self.engine.device),
                lambda loss, last: self.engine.backward(loss, is_last_micro_batch=last),
                scale=ranks / self._counted, ar_scale=ranks / tokens, is_last=is_last, warm_up=self._warm_up,
                rounds=1 if self.global_steps <= self.iterative.single_round_steps else None,
            )  # fmt: skip
        found = self._losses("train", told, ranks / self._counted, ranks / tokens)
        return found | {"train/noise_mean": layout.noised * ranks / self._counted}

    def validation_step(self, batch: TensorDict) -> dict[str, float]:
        """Rounds under noise that is the same each time, and the plain next-token loss."""
        batch[SEED_COLUMN] = torch.arange(len(batch)) + VALIDATION_SEED
        sums = {"val/loss": 0.0}
        for micro in cut(batch, self.config.data):
            layout = self._layout(micro)
            with self.engine.autocast():
                told = self.loss.run(self.engine.module, layout.to(self.engine.device), None, scale=1.0, ar_scale=1.0)
            # run_keeping divides by learned tokens; windows count other places
            learned = float(micro["loss_mask"][:, 1:].sum())
            for name, value in self._losses("val", told, learned / max(1, told.counted), 1.0).items():
                sums[name] = sums.get(name, 0.0) + value
            sums["val/loss"] += self.summed_loss(micro.to(self.engine.device)).item()
            sums["val/noise_mean"] = sums.get("val/noise_mean", 0.0) + layout.noised * learned / max(1, told.counted)
        return sums

    def _layout(self, micro: TensorDict) -> Layout:
        names = ("input_ids", "attention_mask", "position_ids")
        batch = {name: micro[name].cpu() for name in names} | {"response_mask": micro["loss_mask"].cpu()}
        progress = self.global_steps / max(1, self.total_training_steps)
        seeds = micro[SEED_COLUMN].tolist()
        return build_layout(batch, seeds, self.noise, progress=progress, split=self.loss.share)

    def _losses(self, split: str, told: RoundLosses, scale: float, ar_scale: float) -> dict[str, float]:
        rounds = [(loss * scale).item() for loss in told.rounds]
        found = {f"{split}/loss_s{k}": value for k, value in enumerate(rounds)}
        total = sum(w * value for w, value in zip(self.loss.round_weights[: len(rounds)], rounds, strict=True))
        if self.loss.ar_weight:
            found[f"{split}/loss_ar"] = (told.ar * ar_scale).item()
            total += self.loss.ar_weight * found[f"{split}/loss_ar"]
        return found | {f"{split}/loss_total": total}

    def variant_state(self) -> dict[str, Any]:
        return {"noise_generator": self.noise_generator.get_state().numpy().tobytes().hex()}

    def load_variant_state(self, state: dict[str, Any]) -> None:
        raw = bytearray.fromhex(state["noise_generator"])
        self.noise_generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))


def noise_settings(settings: IterativeConfig, tokenizer: Any) -> NoiseSettings:
    """What layouts read of the config."""
    return NoiseSettings(
        settings.noise_pattern, settings.noise_schedule, settings.noise_min, settings.noise_max,
        settings.block_length, settings.windows_per_sample, noise_token_of(settings.noise_token, tokenizer),
    )  # fmt: skip
