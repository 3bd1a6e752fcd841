"""Saves a sharded model with its optimizer into a folder that any number of ranks can load.

Layout of the folder: `model/` and `optim/` (torch distributed checkpoints of tensors), `extra_state.json` (schedule,
parameter groups, names), `rng_rank_<r>.safetensors`, `fsdp_config.json`, `huggingface/`, `lora_adapter/`. Every rank
hashes its own files; their digests lie in `.digests.json` until a CheckpointWriter takes them into its manifest.
"""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from verl.models.stored_weights import write_weights
from verl.training.checkpoint import rng
from verl.training.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.training.checkpoint.dcp_storage import load_tensors, read_metadata, save_tensors
from verl.training.checkpoint.publish import CheckpointCorruptError, digest_files, disk_full, remove, write_digests
from verl.training.parallel.sharding import full_tensors, local_tensor
from verl.training.peft_weights import adapter_weights, described_weights, full_weights, peft_models, without_adapters
from verl.utils.distributed import HOST_TIMEOUT, host_barrier
from verl.utils.problems import one_line
from verl.utils.weight_files import safetensors_of

EXTRA_FILE = "extra_state.json"
#: files of the layout below a folder, and those that name the rank which writes them; rank 0 writes all others
_LAYOUT = ("model/**/*", "optim/**/*", "huggingface/**/*", "lora_adapter/**/*", "rng_rank_*.safetensors", EXTRA_FILE,
           "fsdp_config.json")  # fmt: skip
_OWNED = re.compile(r"(?:__(\d+)_\d+\.distcp|rng_rank_(\d+)\.safetensors)")
_FORMAT = 1
SHARD_BYTES = 5 * 10**9  # of a file of weights for transformers, as in huggingface_hub; more for a larger tensor


class FSDPCheckpointManager(BaseCheckpointManager):
    """Frozen parameters are left out: they come from model.path again. Every method is called on all ranks.

    A module that is no transformers model writes itself by `save_pretrained(directory, state_dict=weights)`; until it
    has, its full weights are on the disk twice. One around
    an adapted model that trains more than adapters writes its other weights next to them, by
    `save_with_adapters(directory, state_dict=weights)`.
    """

    def __init__(self, model, optimizer, lr_scheduler=None, processing_class=None, checkpoint_config=None, *, device):
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        self.device = device
        self.background: ThreadPoolExecutor | None = None
        self.background_group: dist.ProcessGroup | None = None  # a thread's collectives must not mix with training's
        self.writing: Future | None = None
        if checkpoint_config is not None and checkpoint_config.async_save:
            # A thread begins on the first GPU, whichever is this rank's.
            choose_gpu = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
            self.background = ThreadPoolExecutor(1, initializer=choose_gpu)
            self.background_group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Writes save_contents into `local_path`; rotation is CheckpointWriter's, which sees all folders of a step.

        Full weights for transformers are written before this returns, one tensor at a time. With checkpoint.async_save
        it returns when this rank's other tensors are copied to the CPU; see `save_is_finished`.
        """
        folder = _local(local_path, hdfs_path)
        folder.mkdir(parents=True, exist_ok=True)
        model = self._model_tensors() if self.should_save_model else {}
        optim = self._optimizer_tensors() if self.should_save_optimizer and self.optimizer is not None else {}
        own = sum(local_tensor(t).numel() * t.element_size() for t in [*model.values(), *optim.values()])
        of_all = torch.tensor([own], dtype=torch.int64, device=self.device)
        dist.all_reduce(of_all)
        needed = int(of_all.item())
        if shutil.disk_usage(folder).free < needed:
            raise disk_full(folder, needed)
        if self.background is not None:
            model, optim = ({k: self._on_cpu(v) for k, v in part.items()} for part in (model, optim))
        writes = self._prepare(folder, model, optim, global_step)
        if self.background is None:
            self._write(folder, writes, needed)
        else:
            self.writing = self.background.submit(self._write, folder, writes, needed)

    def save_is_finished(self) -> bool:
        """Whether the files of the last save_checkpoint are written, on all ranks; raises what went wrong on one."""
        if self.writing is None:
            return True
        if not self.writing.done():
            return False
        writing, self.writing = self.writing, None
        writing.result()
        return True

    def _on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU; a copy if training continues while it is written."""
        return tensor.detach().to("cpu", copy=self.background is not None)

    def _prepare(self, folder: Path, model: dict, optim: dict, global_step: int) -> list[Callable[[], Any]]:
        """Gathers full tensors from the ranks; returns the calls that write this rank's files."""
        writes: list[Callable[[], Any]] = []
        for name, tensors in (("model", model), ("optim", optim)):
            if tensors:
                writes.append(partial(save_tensors, tensors, folder / name, self.background_group))
        if self.should_save_extra:
            file = folder / f"rng_rank_{dist.get_rank()}.safetensors"
            writes.append(partial(save_file, rng.get_rng_state(), file))
        writes += self._adapter_writes(folder / "lora_adapter")
        writes += self._huggingface_writes(folder / "huggingface")
        if dist.get_rank() == 0:
            extra, ranks = self._extra_state(model, optim, global_step), dist.get_world_size()
            writes.append(partial(_write_json, folder / EXTRA_FILE, extra))
            writes.append(partial(_write_json, folder / "fsdp_config.json", {"FSDP_version": 2, "world_size": ranks}))
        return writes

    def _write(self, folder: Path, writes: list[Callable[[], Any]], needed: int) -> None:
        """Write and digest this rank's files, and let rank 0 leave the digests of all ranks in the folder.

        All ranks take part. Raises what kept this rank from writing; OSError if another one could not.
        """
        digests: dict[str, tuple[int, str]] = {}
        error: Exception | None = None
        try:
            for write in writes:
                write()
            digests = digest_files(folder, files_of_rank(folder, dist.get_rank()))
        except Exception as e:  # reported to the other ranks before it is raised
            full = isinstance(e, OSError | SafetensorError) and shutil.disk_usage(folder).free < needed
            error = disk_full(folder, needed) if full else e
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (str(error) if error else None, digests), group=self.background_group)
        if error is not None:
            raise error
        if messages := [message for message, _ in gathered if message is not None]:
            raise OSError(f"another rank could not write {folder}: {messages[0]}")
        if dist.get_rank() == 0:
            write_digests(folder, {name: digest for _, files in gathered for name, digest in files.items()})

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Trained parameters and stored buffers by name."""
        stored = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        persistent = self.model.state_dict().keys()
        return stored | {name: b for name, b in self.model.named_buffers() if name in persistent}

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """`<parameter>/<moment>` for every tensor of the optimizer's state."""
        tensors = {}
        for name, param in self._optimized().items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise TypeError(
                        f"optimizer state {key!r} of {name} is a {type(value).__name__}; only tensors can be stored."
                    )
                tensors[f"{name}/{key}"] = value
        return tensors

    def _optimized(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _extra_state(self, model: dict, optim: dict, global_step: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "format": _FORMAT,
            "global_step": global_step,
            "world_size": dist.get_world_size(),
            "model": sorted(model),
            "optimizer": None,
            "lr_scheduler": None,
        }
        if self.optimizer is not None and self.should_save_optimizer:
            groups = self.optimizer.state_dict()["param_groups"]
            state["optimizer"] = {
                "class": type(self.optimizer).__name__,
                "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
                "tensors": len(optim),  # 0 before the first step, and of SGD without momentum
            }
        if self.lr_scheduler is not None and self.should_save_extra:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        return state

    def _adapter_writes(self, folder: Path) -> list[Callable[[], Any]]:
        """LoRA adapters in peft's own format; one inside another model gets a folder of its module's name."""
        inside, writes = peft_models(self.model), []
        for name, peft_model in inside.items():
            tensors = adapter_weights(peft_model, self.device)
            if dist.get_rank() == 0 and tensors:
                home = folder / name if len(inside) > 1 else folder
                home.mkdir(parents=True, exist_ok=True)
                tensors = {key: self._on_cpu(tensor).contiguous() for key, tensor in tensors.items()}
                writes.append(partial(save_file, tensors, home / "adapter_model.safetensors"))
                peft_model.peft_config[peft_model.active_adapter].save_pretrained(str(home))
        if inside and hasattr(self.model, "save_with_adapters"):
            adapted = tuple(f"{name}." for name in inside)
            rest = ((name, p.detach().to(self.device)) for name, p in self.model.named_parameters()
                    if p.requires_grad and not name.startswith(adapted))  # fmt: skip
            state = {name: self._on_cpu(tensor) for name, tensor in full_tensors(rest)}  # by all ranks together
            if dist.get_rank() == 0:
                writes.append(partial(self.model.save_with_adapters, str(folder), state_dict=state))
        return writes

    def _huggingface_writes(self, folder: Path) -> list[Callable[[], Any]]:
        """Config and tokenizer; weights too when hf_model is requested."""
        inner, first = without_adapters(self.model), dist.get_rank() == 0
        plain = isinstance(inner, PreTrainedModel)
        if self.should_save_hf_model and not hasattr(inner, "save_pretrained"):
            raise TypeError(
                f"checkpoint.save_contents has hf_model, but {type(inner).__name__} has no "
                "save_pretrained(directory, state_dict=...); take hf_model out, or give it one."
            )
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            if plain:
                inner.config.save_pretrained(folder)
                if inner.can_generate() and inner.generation_config is not None:
                    inner.generation_config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        if not self.should_save_hf_model:
            return []
        if plain:
            return self._write_weights(folder)
        gathered = folder / "gathered"  # the module reads the full weights there when it writes its own files
        if first:
            shutil.rmtree(gathered, ignore_errors=True)  # of a save that failed
        writes = self._write_weights(gathered)

        def write_itself() -> None:
            weights = {name: tensor for file in safetensors_of(gathered) for name, tensor in load_file(file).items()}
            inner.save_pretrained(str(folder), state_dict=weights)
            remove(gathered)

        return [*writes, write_itself] if first else writes

    def _write_weights(self, folder: Path) -> list[Callable[[], Any]]:
        """Gathers the full weights and writes them on rank 0, one tensor at a time.

        Returns a call that raises what kept rank 0 from writing: until then it gathers with the others.
        """
        weights, failed = full_weights(self.model, self.device, bucket_bytes=1), []

        def read(name: str) -> torch.Tensor:
            following, tensor = next(weights)
            if following != name:
                raise RuntimeError(f"the weights of {folder} are gathered in another order: {following}, not {name}")
            return tensor.cpu()

        def raise_failure() -> None:
            if failed:
                raise failed[0]

        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                described = described_weights(self.model)
                largest = max(like.nbytes for like in described.values())
                write_weights(folder, described, read, max(SHARD_BYTES, largest))
            except Exception as e:
                if inspect.getgeneratorstate(weights) == inspect.GEN_CLOSED:  # the gathering failed, on all ranks
                    raise
                failed.append(e)
        while next(weights, None) is not None:  # what is not written is gathered, and not kept
            pass
        return [raise_failure]

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Reads load_contents from `local_path`; generators only when it was written by as many ranks."""
        folder = _local(local_path, hdfs_path)
        if not (folder / EXTRA_FILE).is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint of this engine: it has no {EXTRA_FILE}")
        try:
            extra = json.loads((folder / EXTRA_FILE).read_text())
        except ValueError as e:
            raise CheckpointCorruptError(f"{folder / EXTRA_FILE} is not JSON ({e}).") from e
        if self.should_load_model:
            if not extra["model"]:
                raise ValueError(
                    f"{folder} holds no model to resume: its checkpoint.save_contents had no 'model'. Set "
                    f"trainer.resume_mode=disable, and the model's path to {folder / 'huggingface'} if it has weights."
                )
            tensors = self._model_tensors()
            _check_names(folder / "model", set(tensors), set(extra["model"]))
            _check_shapes(folder / "model", tensors)
            load_tensors(tensors, folder / "model")
        if self.should_load_optimizer and self.optimizer is not None:
            self._load_optimizer(folder, extra)
        elif self.optimizer is not None and extra["optimizer"] is not None and dist.get_rank() == 0:
            logger.warning(f"{folder}: the optimizer starts anew, since checkpoint.load_contents lacks 'optimizer'")
        if self.should_load_extra:
            self._load_extra(folder, extra)
        host_barrier()
        if del_local_after_load and dist.get_rank() == 0:
            remove(folder)

    def _load_optimizer(self, folder: Path, extra: dict[str, Any]) -> None:
        stored = extra["optimizer"]
        if stored is None:
            raise ValueError(
                f"{folder} holds no optimizer state; remove 'optimizer' from checkpoint.load_contents to reset it."
            )
        if stored["class"] != type(self.optimizer).__name__:
            raise ValueError(
                f"{folder} holds the state of {stored['class']}, but optim.optimizer is "
                f"{type(self.optimizer).__name__}; use the same, or take 'optimizer' out of checkpoint.load_contents."
            )
        described, params = {}, self._optimized()
        if stored.get("tensors") != 0:
            described = read_metadata(folder / "optim").state_dict_metadata
            _check_names(folder / "optim", set(params), {key.rpartition("/")[0] for key in described})
        tensors, fresh = {}, {}
        for key, meta in described.items():
            name, _, moment = key.rpartition("/")
            param = params[name].detach()
            like = param if tuple(meta.size) == tuple(param.shape) else torch.empty(meta.size)
            value = torch.empty_like(like, dtype=meta.properties.dtype)
            tensors[key] = value
            fresh.setdefault(params[name], {})[moment] = value
        if tensors:
            load_tensors(tensors, folder / "optim")
        self.optimizer.state.clear()
        self.optimizer.state.update(fresh)
        for group, values in zip(self.optimizer.param_groups, stored["param_groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def _load_extra(self, folder: Path, extra: dict[str, Any]) -> None:
        if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        if extra["world_size"] != dist.get_world_size():
            logger.warning(
                "{} was written by {} ranks and is loaded by {}: random generators keep their fresh seeds",
                folder, extra["world_size"], dist.get_world_size(),
            )  # fmt: skip
            return
        file = folder / f"rng_rank_{dist.get_rank()}.safetensors"
        if not file.is_file():
            raise CheckpointCorruptError(
                f"{file} is missing; remove 'extra' from checkpoint.load_contents to resume without it."
            )
        try:
            state = load_file(file)
        except SafetensorError as error:
            raise CheckpointCorruptError(f"{file} is not loaded: {one_line(error)}") from error
        rng.load_rng_state(state)


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files of the layout that this rank wrote into a checkpoint of this engine."""

    def owner(file: Path) -> int:
        named = _OWNED.fullmatch(file.name)
        return int(named[1] or named[2]) if named else 0

    files = {f for pattern in _LAYOUT for f in folder.glob(pattern) if f.is_file()}
    return sorted(f for f in files if owner(f) == rank)


def _local(local_path: str, hdfs_path: str | None) -> Path:
    if hdfs_path is not None:
        raise ValueError(
            f"hdfs_path={hdfs_path!r}: an engine saves and loads local folders only. Leave it None; the trainer copies "
            "published checkpoints to trainer.default_hdfs_dir."
        )
    return Path(local_path)


def _check_names(folder: Path, wanted: set[str], stored: set[str]) -> None:
    if wanted == stored:
        return
    missing, unknown = sorted(wanted - stored), sorted(stored - wanted)
    what = []
    if missing:
        what.append(f"{len(missing)} trained parameters are not in it (such as {missing[:3]})")
    if unknown:
        what.append(f"{len(unknown)} of its own are not trained here (such as {unknown[:3]})")
    there = _adapted_layers(stored)
    if there == _adapted_layers(wanted):
        remedy = "Check the model's path (model.path; in SFT model.partial_pretrain), model.lora_rank and "
        remedy += "what is frozen"
    elif there:
        described = read_metadata(folder).state_dict_metadata
        rank = next(_adapter_rank(name, meta.size) for name, meta in described.items() if ".lora_" in name)
        remedy = f"It has adapters: set model.lora_rank={rank} and model.target_modules=[{','.join(sorted(there))}]"
        remedy += ", with model.exclude_modules as they were"
    else:
        remedy = "It has no adapters: set model.lora_rank=0 and model.lora_adapter_path=null"
    raise ValueError(f"{folder} does not fit the model: {', '.join(what)}. {remedy}.")


def _adapted_layers(names: set[str]) -> set[str]:
    """The layers with adapters, by their own names without those of the modules that contain them."""
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}


def _adapter_rank(name: str, shape: Sequence[int]) -> int:
    return shape["_A." not in name]  # [rank, in] and [out, rank]


def _check_shapes(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    described = read_metadata(folder).state_dict_metadata
    for name, tensor in tensors.items():
        stored, here = tuple(described[name].size), tuple(tensor.shape)
        if stored != here:
            remedy = "Check the model's path (model.path; in SFT model.partial_pretrain)"
            if ".lora_" in name and _adapter_rank(name, stored) != _adapter_rank(name, here):
                remedy = f"Set model.lora_rank={_adapter_rank(name, stored)}"
            raise ValueError(f"{folder} does not fit the model: {name} is {stored} there, {here} here. {remedy}.")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1, allow_nan=False))
