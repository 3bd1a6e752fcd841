"""IterativeRefineTrainer: verl's SFT trainer with noised responses and several rounds per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import Dataset

from dllm_reasoning.config.iterative import IterativeConfig, IterativeRefineConfig
from dllm_reasoning.inference.settings import NOISE_KEY, WINDOW_KEY
from dllm_reasoning.losses.iterative_loss import IterativeLoss, RoundLosses, packed_refusal, sharing
from dllm_reasoning.losses.layouts import Layout, build_layout, count_labels
from dllm_reasoning.trainer.self_generate import KEY, own_answers
from dllm_reasoning.trainer.sft_dataset import ROW_COLUMN, IterativeSFTDataset
from dllm_reasoning.utils.attention import kinds_problem
from dllm_reasoning.utils.noise_utils import PATTERNS, noise_token_of
from verl.config.compose import to_omegaconf, to_settings, with_values
from verl.data.rl_dataset import custom_dataset_class
from verl.planning.checks import Findings
from verl.trainer.run.ranks import all_reduce_values
from verl.trainer.sft.data import cut
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.training.policy.causal_lm import causal_model
from verl.training.policy.packing import on_host, to_device
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.problems import Problem, wrong

SEED_COLUMN = "noise_seed"
VALIDATION_SEED = 1_000_003  # of the first row of the validation set; row n has this plus n


@dataclass(frozen=True)
class StepInputs:
    """What the noise decides for a step: labels of a round on all ranks, and warm-up rounds without a gradient."""

    counted: int
    warm_up: int


class IterativeRefineTrainer(FSDPSFTTrainer):
    """Each step noises the batch's responses and trains `iterative.num_iterations` rounds of prediction.

    A sample's noise depends on its position in the global batch and on the noise generator, not on rank or micro-batch.
    Losses are divided by the global number of labels, as in plain SFT.
    """

    config_type = IterativeRefineConfig

    def __init__(
        self, config: IterativeRefineConfig, device_mesh: Any, ulysses_device_mesh: Any, tokenizer: Any,
        train_dataset: Dataset, val_dataset: Dataset | None = None,
    ) -> None:
        unpacked = {"use_remove_padding": False, "data.packing": False}  # rounds keep their rows and padding
        config = with_values(to_settings(config, self.config_type), unpacked)
        super().__init__(config, device_mesh, ulysses_device_mesh, tokenizer, train_dataset, val_dataset)
        settings = config.iterative
        self.iterative, self.val_noise = settings, replace(settings, noise_schedule="uniform")
        self.noise_token = noise_token_of(settings.noise_token, tokenizer)
        self.noise_generator = torch.Generator().manual_seed(settings.noise_seed)
        self.pattern = PATTERNS[settings.noise_pattern]
        model = causal_model(self.engine.module)
        # The clean text of unpacked rows is one more forward that attends to the same instruction.
        forwards = settings.num_iterations + int(settings.ar_loss_weight > 0)
        with self.engine.eval_mode():
            share = sharing(self.engine.module, settings.share_instruction, forwards, self.pattern.windows)
        self.loss = IterativeLoss(settings.round_weights, settings.ar_loss_weight, share=share)
        setattr(model.config, NOISE_KEY, self.noise_token)
        if self.pattern.has_width:
            setattr(model.config, WINDOW_KEY, settings.block_length)

    @classmethod
    def problems(cls, config: IterativeRefineConfig, findings: Findings) -> Iterator[Problem]:
        """A noise token or pattern that the tokenizer or model rules out, a reward function that cannot be loaded."""
        settings = config.iterative
        if findings.tokenizer is not None:
            try:
                noise_token_of(settings.noise_token, findings.tokenizer)
            except ValueError as error:
                yield wrong("iterative.noise_token", str(error))
        if PATTERNS[settings.noise_pattern].windows and findings.hf_config is not None:
            if problem := kinds_problem(findings.hf_config):
                yield wrong("iterative.noise_pattern", packed_refusal(problem))
        if settings.self_generate.enable:
            function, key = settings.self_generate.reward_function, f"{KEY}.reward_function"
            try:
                load_extern_object(function.path, function.name)
            except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
                yield wrong(key, f"{key}: {error}")

    @classmethod
    def build_dataset(cls, files: Any, config: IterativeRefineConfig, tokenizer: Any, max_samples: int = -1) -> Dataset:
        """Instruction and response pairs to train on; with iterative.self_generate, of the model's own answers."""
        dataset = cls.build_val_dataset(files, config, tokenizer, max_samples)
        settings = config.iterative.self_generate
        if not settings.enable or config.trainer.dry_run:
            return dataset
        own = type(dataset)(str(own_answers(config, dataset)), tokenizer, dataset.config)
        asked = len(dataset) if settings.max_prompts < 0 else min(settings.max_prompts, len(dataset))
        own.skipped = asked - len(own)
        if settings.keep_ground_truth:
            return dataset.extend(own)
        own.skipped += dataset.skipped
        return own

    @classmethod
    def build_val_dataset(
        cls, files: Any, config: IterativeRefineConfig, tokenizer: Any, max_samples: int = -1
    ) -> Dataset:
        """Instruction and response pairs of the files themselves."""
        files = [files] if isinstance(files, str) else files
        local = [copy_to_local(file, use_shm=config.data.use_shm) for file in files]
        dataset_class = custom_dataset_class(config.data) or IterativeSFTDataset
        if not issubclass(dataset_class, IterativeSFTDataset):
            raise ValueError(
                f"data.custom_cls.name={config.data.custom_cls.name} is no subclass of IterativeSFTDataset, whose rows "
                "are checked and numbered; derive it from that class of dllm_reasoning.trainer.sft_dataset."
            )
        return dataset_class(local, tokenizer, to_omegaconf(config.data), max_samples)

    def training_step(self, batch: TensorDict) -> dict[str, float]:
        metrics, rows = super().training_step(batch), self.train_stream.loader.dataset
        if skipped := getattr(rows, "skipped", 0):
            metrics["train/skipped_rows"] = skipped / (skipped + len(rows))
        return metrics

    def step_inputs(self, batch: TensorDict) -> StepInputs:
        """Draw the step's noise, the same on every rank; its seeds become a column [b] of `batch`."""
        ranks, rank = self.engine.world_size, self.engine.rank
        seeds = torch.randint(2**62, (len(batch) * ranks,), generator=self.noise_generator)[rank::ranks].tolist()
        warm_up = 0
        if self.pattern.warm_up:
            limit = self.iterative.trajectory_max_rounds + 1
            warm_up = int(torch.randint(limit, (), generator=self.noise_generator))
        batch[SEED_COLUMN] = torch.tensor(seeds)
        counted = count_labels(batch["loss_mask"], seeds, self.iterative)
        return StepInputs(int(all_reduce_values({"counted": float(counted)}, self.engine.device)["counted"]), warm_up)

    def backward(
        self, micro: TensorDict, tokens: int, is_last: bool, inputs: StepInputs
    ) -> dict[str, float | torch.Tensor]:
        """The rounds' losses and the AR loss of a micro-batch [b, T], with a backward pass for each round."""
        layout = self._layout(micro, self.iterative)
        ranks = self.engine.get_data_parallel_size()
        scale, ar_scale = ranks / inputs.counted, ranks / tokens
        with self.engine.autocast():
            losses = self.loss.run(
                self.engine.module, layout.to(self.engine.device),
                lambda loss, last: self.engine.backward(loss, is_last_micro_batch=last),
                scale=scale, ar_scale=ar_scale, is_last=is_last, warm_up=inputs.warm_up,
                rounds=1 if self.global_steps <= self.iterative.single_round_steps else None,
            )  # fmt: skip
        metrics = self._with_total("train", self._metrics("train", losses, scale, ar_scale))
        return metrics | {"train/noise_mean": layout.noised * ranks / inputs.counted}

    def validation_step(self, batch: TensorDict) -> dict[str, float]:
        """Sums of the rounds' losses and of the plain next-token loss over this rank's rows [b, T].

        A row's noise depends on its number in the validation set alone; its level comes from the full range of noise,
        whatever the schedule, and no warm-up rounds come first: values of any two steps are comparable.
        """
        batch[SEED_COLUMN] = batch[ROW_COLUMN] + VALIDATION_SEED
        sums: dict[str, float] = defaultdict(float)
        for micro in cut(batch, self.config.data):
            layout = self._layout(micro, self.val_noise)
            with self.engine.autocast():
                losses = self.loss.run(self.engine.module, layout.to(self.engine.device), None, scale=1.0, ar_scale=1.0)
            plain = self.summed_loss(to_device(micro, self.engine.device)).double()
            metrics = {"counted": losses.counted, "val/noise_mean": layout.noised, "val/loss": plain}
            for name, value in (metrics | self._metrics("val", losses, 1.0, 1.0)).items():
                sums[name] += value
        return {name: float(value) for name, value in sums.items()}

    def validation_means(self, sums: dict[str, float], tokens: float) -> dict[str, float]:
        """Losses of rounds and the noise per label of a round, the others per learned token."""
        per_token = ("val/loss", "val/loss_ar")
        means = {name: value / (tokens if name in per_token else sums["counted"]) for name, value in sums.items()}
        del means["counted"]
        return self._with_total("val", means)

    def _layout(self, micro: TensorDict, noise: IterativeConfig) -> Layout:
        rows = on_host(micro)
        batch = {name: rows[name].cpu() for name in ("input_ids", "attention_mask", "position_ids")}
        batch["response_mask"] = rows["loss_mask"].cpu()
        progress = self.global_steps / max(1, self.total_training_steps)
        seeds = rows[SEED_COLUMN].tolist()
        return build_layout(batch, seeds, noise, self.noise_token, progress=progress, split=self.loss.share)

    def _metrics(self, split: str, losses: RoundLosses, scale: float, ar_scale: float) -> dict[str, torch.Tensor]:
        metrics = {f"{split}/loss_s{k}": (loss * scale).double() for k, loss in enumerate(losses.rounds)}
        if self.loss.ar_weight:
            metrics[f"{split}/loss_ar"] = (losses.ar * ar_scale).double()
        return metrics

    def _with_total(self, split: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """With the weighted sum of the rounds that ran and of the clean text's loss."""
        weights = {f"{split}/loss_s{k}": weight for k, weight in enumerate(self.loss.round_weights)}
        weights[f"{split}/loss_ar"] = self.loss.ar_weight
        total = sum(weight * metrics[name] for name, weight in weights.items() if name in metrics)
        return metrics | {f"{split}/loss_total": total}

    def variant_state(self) -> dict[str, Any]:
        return {"noise_generator": self.noise_generator.get_state().numpy().tobytes().hex()}

    def load_variant_state(self, state: dict[str, Any]) -> None:
        if "noise_generator" not in state:
            run = self.config.trainer
            raise ValueError(
                f"the checkpoint to resume from (trainer.resume_mode={run.resume_mode}, trainer.default_local_dir="
                f"{run.default_local_dir}) was not written by iterative refinement: it has no noise generator. Name "
                "another trainer.default_local_dir, with trainer.resume_mode=auto; to start from its weights, save "
                "them with hf_model in trainer.checkpoint.save_contents and set model.partial_pretrain to the folder "
                "huggingface."
            )
        raw = bytearray.fromhex(state["noise_generator"])
        self.noise_generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))
