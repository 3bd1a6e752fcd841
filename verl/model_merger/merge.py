"""Writes a checkpoint as a Hugging Face folder, one tensor in memory at a time, or compares it with one."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from transformers import AutoConfig, AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from verl.model_merger.sources import Described, HuggingFaceFolder, MergeError, TensorSource, nbytes, open_checkpoint
from verl.models.loading import get_hf_auto_model_class, torch_dtype_of
from verl.models.stored_weights import hf_name, write_weights
from verl.training.checkpoint.publish import disk_full
from verl.utils.weight_files import untie

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@dataclass(frozen=True)
class MergeOptions:
    """What the command line says; `dtype` "auto" is that of the checkpoint's config.json, else as stored."""

    local_dir: Path
    hf_model_path: Path | None = None
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    is_value_model: bool = False


class MergedWeights(TensorSource):
    """The weights under Hugging Face names: trained ones (adapters added), else those of the model it started from."""

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.trained = open_checkpoint(options.local_dir)
        stored = list(self.trained.described)
        self.plain = {hf_name(n): n for n in stored if ".lora_" not in n and ".modules_to_save." not in n}
        self.plain |= {_replaced(n): n for n in stored if ".modules_to_save." in n}
        lora_a = [n for n in stored if ".lora_A." in n]
        self.adapters = {f"{hf_name(n.split('.lora_A.')[0])}.weight": n for n in lora_a}
        self.lora = self._lora_config() if self.adapters else None
        self.base: HuggingFaceFolder | None = None
        self.config, expected = self._expected()
        if set(expected) - set(self.plain):
            self.base = self._base_model(sorted(set(expected) - set(self.plain)))
        self.described = expected
        self._check_shapes()

    def read(self, name: str) -> torch.Tensor:
        weight = self.trained.read(self.plain[name]) if name in self.plain else self.base.read(name)
        return self._with_adapter(name, weight).to(self.described[name].dtype).contiguous()

    def _with_adapter(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """W + scaling * B A in float32, where an adapter covers W."""
        if name not in self.adapters:
            return weight
        a = self.trained.read(self.adapters[name]).float()  # [r, in]
        b = self.trained.read(self.adapters[name].replace(".lora_A.", ".lora_B.")).float()  # [out, r]
        alphas, layer = self.lora.alpha_pattern, name.removesuffix(".weight")
        alpha = alphas.get(get_pattern_key(alphas, layer), self.lora.lora_alpha)
        delta = (b @ a) * (alpha / (math.sqrt(len(a)) if self.lora.use_rslora else len(a)))
        return weight.float() + (delta.T if self.lora.fan_in_fan_out else delta)

    def _lora_config(self) -> LoraConfig:
        folder = self.options.local_dir / "lora_adapter"
        if not (folder / "adapter_config.json").is_file():
            raise MergeError(f"{folder / 'adapter_config.json'} is missing: copy that folder of the checkpoint too.")
        config = LoraConfig.from_pretrained(str(folder))
        odd = [n for n in self.trained.described if ".lora_" in n and ".lora_A." not in n and ".lora_B." not in n]
        if odd or config.use_dora:
            part = odd[0] if odd else "use_dora=true"
            raise MergeError(f"{folder} is not plain LoRA ({part}) and cannot be merged here; merge it with peft.")
        return config

    def _expected(self) -> tuple[PretrainedConfig, Described]:
        """Config, and name, shape and dtype of every weight of the model that it describes; tied ones once."""
        options = self.options
        own = options.local_dir / "huggingface" / "config.json"  # counts before --hf_model_path
        self.remedy = f"replace {own} with that model's" if own.is_file() else "name that model in --hf_model_path"
        folder = own.parent if own.is_file() else options.hf_model_path
        if folder is None:
            raise MergeError(f"{own} is missing; name the model in --hf_model_path.")
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
            if options.tie_word_embedding:
                config.tie_word_embeddings = True
            value_model = options.is_value_model or not {"score.weight", "classifier.weight"}.isdisjoint(self.plain)
            if value_model:
                config.num_labels = 1
            auto = AutoModelForTokenClassification if value_model else get_hf_auto_model_class(config)
            with torch.device("meta"):
                model = auto.from_config(config, trust_remote_code=options.trust_remote_code)
            if not options.tie_word_embedding and self._has_own_head(model):
                untie(config, options.local_dir)
                with torch.device("meta"):
                    model = auto.from_config(config, trust_remote_code=options.trust_remote_code)
        except (OSError, ValueError) as error:
            raise MergeError(f"{folder} describes no model that transformers can build: {error}") from error
        if lost := sorted(set(self.plain) - set(model.state_dict())):
            flag = "leave --is-value-model out" if options.is_value_model else "a critic needs --is-value-model"
            raise MergeError(
                f"{options.local_dir} holds {len(lost)} weights that {type(model).__name__} does not have (such as "
                f"{lost[0]}): {flag}; if another model was trained, {self.remedy}. Models of your own loader cannot be "
                "merged; put hf_model into checkpoint.save_contents to export them in training."
            )
        config.architectures = [type(model).__name__]
        dtype = self._dtype(config)
        tensors = {n: t for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}
        return config, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def _has_own_head(self, model: PreTrainedModel) -> bool:
        """Whether a weight that `model` ties to another one was trained to other values."""
        pairs = [(self.plain[n], self.plain[source]) for n, source in model.all_tied_weights_keys.items()
                 if n in self.plain and source in self.plain]  # fmt: skip
        return any(not torch.equal(self.trained.read(n), self.trained.read(source)) for n, source in pairs)

    def _dtype(self, config: PretrainedConfig) -> torch.dtype:
        if self.options.dtype != "auto":
            config.dtype = torch_dtype_of(self.options.dtype, "--dtype")
        if config.dtype is None:
            config.dtype = next(t.dtype for t in self.trained.described.values() if t.is_floating_point())
        return config.dtype

    def _base_model(self, needed: list[str]) -> HuggingFaceFolder:
        """The model that the training started from: frozen weights are not in a checkpoint."""
        origin = self.options.hf_model_path or (self.lora and self.lora.base_model_name_or_path)
        if not origin or not Path(origin).expanduser().is_dir():
            raise MergeError(
                f"{len(needed)} weights are not in {self.options.local_dir} (such as {needed[0]}), since frozen ones "
                f"are not stored; name the folder of the model that was trained in --hf_model_path"
                f"{f' ({origin} is not there)' if origin else ''}."
            )
        base = HuggingFaceFolder(Path(origin).expanduser())
        if absent := [n for n in needed if n not in base.described]:
            what = f"{absent[0]} is not in {self.options.local_dir} or {origin}"
            raise MergeError(f"{what}; name the model that was trained in --hf_model_path.")
        return base

    def _check_shapes(self) -> None:
        for name, wanted in self.described.items():
            tensor = self.trained.described[self.plain[name]] if name in self.plain else self.base.described[name]
            if tensor.shape != wanted.shape:
                raise MergeError(
                    f"{name} has shape {tuple(tensor.shape)}, but the config describes {tuple(wanted.shape)}: another "
                    f"model was trained; {self.remedy}."
                )


def _replaced(name: str) -> str:
    """Name of the weight whose trained copy (peft's modules_to_save) this is."""
    head, _, tail = name.partition(".modules_to_save.")
    return f"{hf_name(head)}.{tail.partition('.')[2]}"


def merge(options: MergeOptions, target_dir: Path) -> None:
    """Writes config, tokenizer and weights into `target_dir`, which appears when it is complete."""
    if target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir())):
        raise MergeError(f"--target_dir {target_dir} is not empty; name a new folder.")
    weights = MergedWeights(options)
    partial = target_dir.with_name(f"{target_dir.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    needed = nbytes(weights.described)
    if shutil.disk_usage(partial).free < needed:
        partial.rmdir()
        raise disk_full(target_dir, needed)
    try:
        _copy_other_files(options, partial)
        weights.config.save_pretrained(partial)
        write_weights(partial, weights.described, weights.read, options.max_shard_size)
        if target_dir.exists():
            target_dir.rmdir()
        partial.rename(target_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("{} weights, {:.1f} MiB, written to {}", len(weights.described), needed / 2**20, target_dir)


def _copy_other_files(options: MergeOptions, target: Path) -> None:
    """Tokenizer, generation config, the model's own code: the checkpoint's, else those of hf_model_path."""
    folders = [folder for folder in (options.hf_model_path, options.local_dir / "huggingface") if folder is not None]
    for file in (file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())):
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy2(file, target / file.name)


def differences(options: MergeOptions, test_hf_dir: Path, report: Callable[[str], None], atol: float = 1e-6) -> int:
    """Number of weights of the checkpoint that are not those of `test_hf_dir`; each is reported in a line.

    Both are compared in the coarser of their dtypes.
    """
    weights, reference = MergedWeights(options), HuggingFaceFolder(test_hf_dir)
    tied = {n for n in reference.described if n not in weights.described and weights.config.tie_word_embeddings}
    odd = sorted(set(weights.described) ^ (set(reference.described) - tied))
    for name in odd:
        report(f"{name}: only in {test_hf_dir if name in reference.described else options.local_dir}")
    wrong = len(odd)
    for name in sorted(set(weights.described) & set(reference.described)):
        tensor, expected = weights.read(name), reference.read(name)
        if tensor.shape != expected.shape:
            report(f"{name}: shape {tuple(tensor.shape)}, {test_hf_dir} has {tuple(expected.shape)}")
            wrong += 1
            continue
        coarser = min(tensor.dtype, expected.dtype, key=lambda t: t.itemsize)
        gaps = (tensor.to(coarser).double() - expected.to(coarser).double()).abs()
        gap = gaps.max().item() if gaps.numel() else 0.0
        if not gap <= atol:
            report(f"{name}: differs by up to {gap:.3g}")
            wrong += 1
    return wrong
