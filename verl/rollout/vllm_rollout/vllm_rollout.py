"""Generates with a vLLM engine in the rank's own process, which takes the actor's weights before every batch."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import tempfile
import uuid
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from verl.config.model import HFModelConfig
from verl.config.rollout import CPU_CACHE_BYTES, RolloutConfig
from verl.models.loading import get_lora_rank_from_adapter
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK, mask_column
from verl.rollout.base import DTYPES, KEY, BaseRollout, engine_group, register_rollout
from verl.rollout.request_queue import RequestQueue
from verl.rollout.sampling import GenerationRequest, build_rollout_batch, right_padded
from verl.training.checkpoint.rng import get_rng_state, load_rng_state
from verl.utils.accelerator import rank_device_index
from verl.utils.weight_files import WeightFileError, safetensors_of, tensor_shapes

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

WORKER = "verl.rollout.vllm_rollout.platform_worker.PlatformWorker"
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # tokens that a lookup compares
DRAFT_COUNTS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


@register_rollout("vllm", "sync")
class vLLMRollout(BaseRollout):  # noqa: N801 (the name that users of verl know)
    """One engine a rank, or one over `tensor_model_parallel_size` neighbouring ranks, which then answer together.

    `resume(["weights"])`, `update_weights`, `resume(["kv_cache"])` wake it, `release` puts it to sleep. Where vLLM
    cannot sleep (CPU) weights and cache stay in memory, which is logged once. Log-probs are those of the distribution
    that was sampled from (`logprobs_mode`; by default after temperature, top-k and top-p). Without an actor
    (`bind_actor`) and unless load_format is dummy, the engine answers with the weights it was started with.
    """

    adapter_rank = 0  # of the adapter that the actor sends
    adapter: Any = None  # vLLM's LoRARequest of every generation

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh | None) -> None:
        super().__init__(config, model_config, device_mesh)
        self.on_cuda = device_mesh is not None and device_mesh.device_type == "cuda"
        size = config.tensor_model_parallel_size
        self.tp_group = engine_group(size)
        several_engines = dist.is_initialized() and dist.get_world_size() > size
        self.queue = RequestQueue(self.tp_group) if config.prompt_queue and several_engines else None
        self.can_sleep = self.on_cuda and config.enable_sleep_mode and config.free_cache_engine
        self.keeps_weights = not self.can_sleep  # sleep of level 2 discards them
        if config.lora_as_adapter:
            path = model_config.lora_adapter_path
            self.adapter_rank = get_lora_rank_from_adapter(path) if path else model_config.lora_rank
        self.takes_adapters = self.adapter_rank > 0
        if not self.on_cuda and config.free_cache_engine:
            logger.info("vLLM cannot sleep on a CPU: its weights and cache stay in memory while the actor trains")
        arguments = self._engine_arguments()
        if getattr(model_config.hf_config, "tie_word_embeddings", False):
            _silence(*TIED_HEAD)
        random_states = get_rng_state()  # vLLM seeds all generators with its own seed, on every rank alike
        self.llm = start_engine(arguments, self.on_cuda)
        if config.stop_token_ids is not None:  # vLLM also ends answers at the ids of generation_config.json
            self.llm.llm_engine.input_processor.generation_config_fields["eos_token_id"] = list(config.stop_token_ids)
        if name := arguments.get("additional_config", {}).get("shared_memory_name"):
            dist.barrier()  # every rank has mapped the segments: without names they end with their processes
            for segment in Path("/dev/shm").glob(f"{name}-*"):
                segment.unlink(missing_ok=True)
        self.has_weights = config.load_format != "dummy"
        self.drafter = None
        self.draft_age = 0  # weight updates with samples to train the draft model on
        if config.speculative.refresh_every:
            from verl.rollout.vllm_rollout.drafter import Drafter

            device = torch.device("cuda", torch.cuda.current_device()) if self.on_cuda else torch.device("cpu")
            self.drafter = Drafter(config.speculative.draft_path, config.speculative.refresh_lr, device)
        # The first batch of an engine takes seconds more than the next ones; better here than in a step.
        logger.debug("vLLM answers one prompt to warm up")
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, temperature=0.0, detokenize=False, logprobs=0, flat_logprobs=True)
        self.llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)
        load_rng_state(random_states)
        self.llm.reset_prefix_cache()
        self.release()

    def _engine_arguments(self) -> dict[str, Any]:
        """What vLLM's LLM gets: the rollout's settings, then engine_kwargs.vllm, whose unknown keys are refused."""
        from vllm.engine.arg_utils import EngineArgs

        config, model = self.config, self.model_config
        limit = config.max_model_len or config.prompt_length + config.response_length
        given: dict[str, Any] = {
            "model": model.local_path, "skip_tokenizer_init": True, "trust_remote_code": model.trust_remote_code,
            "dtype": DTYPES.get(config.dtype, config.dtype), "max_model_len": limit, "seed": 0,
            "load_format": config.load_format, "enforce_eager": config.enforce_eager or not self.on_cuda,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, limit, config.max_num_seqs),
            "enable_prefix_caching": config.enable_prefix_caching, "logprobs_mode": config.logprobs_mode,
            "max_logprobs": max(20, config.top_k),
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "disable_log_stats": config.disable_log_stats and not config.prometheus.enable,
            "served_model_name": config.prometheus.served_model_name or Path(model.local_path).name,
            "tensor_parallel_size": config.tensor_model_parallel_size, "quantization": config.quantization,
            "gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": self.can_sleep,
            "disable_custom_all_reduce": True, "enable_expert_parallel": config.expert_parallel_size > 1,
        }  # fmt: skip
        if model.untied:
            given["hf_overrides"] = {"tie_word_embeddings": False}
        if config.quantization_config_file is not None:
            file = os.path.expanduser(config.quantization_config_file)
            given["hf_overrides"] = given.get("hf_overrides", {}) | {"quantization_config_file": file}
        if config.tensor_model_parallel_size > 1:
            given["distributed_executor_backend"] = "external_launcher"  # takes LOCAL_RANK's device
        elif self.on_cuda:
            given["device_ids"] = [rank_device_index()]  # by default every rank's engine would be on the first device
        if config.cudagraph_capture_sizes:
            given["compilation_config"] = {"cudagraph_capture_sizes": list(config.cudagraph_capture_sizes)}
        if self.adapter_rank:  # the model's own weights are not sent: they come from its files
            given |= {"load_format": "auto", "enable_lora": True, "max_loras": 1}
            given["max_lora_rank"] = self._max_lora_rank()
        if config.speculative.method is not None:
            given |= self._speculative_arguments(given)
        if not self.on_cuda:
            given["kv_cache_memory_bytes"], given["worker_cls"] = CPU_CACHE_BYTES, WORKER
            given["block_size"] = 32  # only full blocks of a prompt are shared, and the usual 128 tokens are long
            given["enable_chunked_prefill"] = False  # it rewinds the seeds of requests, which CPU generators cannot do
            if config.tensor_model_parallel_size > 1:
                name = [f"verl-{uuid.uuid4().hex}"]
                dist.broadcast_object_list(name, src=0)
                given["additional_config"] = {"shared_memory_name": name[0]}
        users = dict(config.engine_kwargs.get("vllm") or {})
        users = {name: value for name, value in users.items() if value is not None}
        if unknown := sorted(set(users) - {field.name for field in dataclasses.fields(EngineArgs)}):
            raise ValueError(f"{KEY}.engine_kwargs.vllm has {', '.join(unknown)}, which vLLM's EngineArgs do not know.")
        return given | users

    def _max_lora_rank(self) -> int:
        """The least of vLLM's ranks that holds the adapter's; ValueError if there is none."""
        from vllm.config.lora import MaxLoRARanks

        ranks = get_args(MaxLoRARanks)
        if self.adapter_rank > max(ranks):
            raise ValueError(
                f"{KEY}.lora_as_adapter=true: vLLM applies adapters up to rank {max(ranks)}, and "
                f"actor_rollout_ref.model.lora_rank is {self.adapter_rank}. Set it to false."
            )
        return min(rank for rank in ranks if rank >= self.adapter_rank)

    def _speculative_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Engine arguments for `rollout.speculative`."""
        config, model = self.config.speculative, self.model_config
        drafts: dict[str, Any] = {"method": config.method, "num_speculative_tokens": config.num_tokens}
        load_format = given["load_format"]
        if config.method == "ngram":
            drafts |= NGRAM
        else:  # nothing is sent to the draft model: it needs its weights from the start, and vLLM loads both alike
            drafts |= {"model": config.draft_path, "draft_tensor_parallel_size": given["tensor_parallel_size"]}
            load_format = "auto" if load_format == "dummy" else load_format
            read = partial(AutoConfig.from_pretrained, trust_remote_code=model.trust_remote_code)
            sizes = {read(path).get_text_config().vocab_size for path in (config.draft_path, model.local_path)}
            if len(sizes) > 1:  # padded to other sizes: vLLM compares the tokens, and drafts no padding
                drafts["use_heterogeneous_vocab"] = True
        return {
            "speculative_config": drafts, "worker_cls": WORKER, "load_format": load_format,
            "disable_log_stats": False,  # its counts are the metrics of generate_sequences
            "max_num_batched_tokens": max(given["max_num_batched_tokens"],
                                          given["max_num_seqs"] * (1 + config.num_tokens)),
        }  # fmt: skip

    def _draft_counts(self) -> tuple[int, int]:
        """Draft tokens since the engine's start, and those of them that were accepted."""
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in DRAFT_COUNTS}
        return tuple(values[name] for name in DRAFT_COUNTS)

    def bind_actor(self, engine: Any, policy: Any) -> None:
        """ValueError for a model that vLLM runs with its Transformers backend: that changes the model's class in this
        process, and the actor's forward fails.
        """
        model = self.llm.llm_engine.model_config
        if model.using_transformers_backend():
            raise ValueError(
                f"{KEY}.name=vllm cannot generate for an actor of {model.architectures[0]}: vLLM runs this model with "
                "its Transformers backend, which changes the class that the actor in the same process uses. Set "
                f"{KEY}.name=hf, or sglang, whose engine has a process of its own."
            )
        self.has_weights = False  # the actor's are what counts from now on

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], peft_config: Any = None, **kwargs: Any
    ) -> None:
        self.has_weights = False
        if peft_config is None:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        else:
            self._load_adapter(dict(weights), peft_config)
        if self.drafter is not None and self.drafter.samples:
            self.draft_age += 1
            if self.draft_age % self.config.speculative.refresh_every == 0:
                self.llm.collective_rpc("reload_draft_weights", kwargs={"weights": self.drafter.refresh()})
        self.forget_prefixes()  # they were computed by the weights before
        self.has_weights = True

    def _load_adapter(self, tensors: dict[str, torch.Tensor], peft_config: Any) -> None:
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:  # vLLM reads adapters from files only
            save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, f"{folder}/adapter_model.safetensors")
            peft_config.save_pretrained(folder)
            if not self.llm.llm_engine.add_lora(LoRARequest("actor", 1, folder, load_inplace=True)):
                raise RuntimeError(
                    f"vLLM did not load the LoRA adapter of {len(tensors)} tensors ({KEY}.lora_as_adapter=true): its "
                    f"samples would be those of the base model. Set {KEY}.lora_as_adapter=false to send merged weights."
                )
            self.adapter = LoRARequest("actor", 1, folder)

    def weights_on_disk(self, path: str) -> list[Path]:
        """The safetensors files of a model folder. WeightFileError for a damaged one, or one of another model."""
        files = safetensors_of(path)
        shapes = tensor_shapes(files)
        engine_shapes = tensor_shapes(safetensors_of(self.model_config.local_path))
        if not shapes:
            raise WeightFileError(f"{path} has no safetensors file to read weights from.")
        for name, shape in engine_shapes.items():
            if shapes.get(name, shape) != shape:
                differs = f"{path}: {name} has the shape {shapes[name]}, that of the engine's is {shape}"
                raise WeightFileError(f"{differs}. Name a folder of the engine's model.")
        if engine_shapes and not engine_shapes.keys() & shapes.keys():
            raise WeightFileError(f"{path} has none of the engine's tensors, such as {min(engine_shapes)}.")
        return files

    def load_from_disk(self, path: str) -> None:
        """Load the safetensors files of a model folder, once they were checked as by `weights_on_disk`."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        files = self.weights_on_disk(path)
        # With load_format=dummy, vLLM itself reads no files.
        weights = safetensors_weights_iterator([str(file) for file in files], use_tqdm_on_load=False)
        self.has_weights = False  # if reading fails, the engine holds parts of two models
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.adapter = None
        self.forget_prefixes()
        self.has_weights = True

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; RuntimeError if the engine keeps it, as it does while requests run."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache, since requests run: wait for them, or abort them")

    def resume(self, tags: list[str]) -> None:
        if self.can_sleep:
            self.llm.wake_up(tags=tags)
        elif "kv_cache" in tags:
            self.forget_prefixes()  # a cache that slept comes back empty

    def release(self) -> None:
        if self.can_sleep:
            self.forget_prefixes()
            # Level 2 discards all weights; those of a draft model, or under an adapter, would not come back.
            self.llm.sleep(level=1 if self.config.speculative.draft_path or self.adapter_rank else 2)
            self.has_weights = False

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        if not self.has_weights:
            raise RuntimeError(
                "vLLM was not given the actor's weights since it started or slept; call update_weights before "
                "generate_sequences."
            )
        gathered = self._prompts_of_all(prompts)
        request = GenerationRequest.from_batch(gathered, self.config)
        counts = self._draft_counts() if self.config.speculative.method else None
        answers: list[tuple[int, Any]] = []  # (number of the sample, vLLM's completion)
        for number, output in self._generate(request).items():
            answers += enumerate(output.outputs, number * request.n)
        metrics = {} if counts is None else self._draft_metrics(counts, answers)
        rows, log_probs = self._rows(answers, request)
        columns = {}
        if self._records_masks(request):
            columns[SAMPLING_MASK] = mask_column(kept_tokens(answer.logprobs) for _, answer in answers)
        owned = gathered  # the prompts whose samples this rank has
        if self.queue is not None:
            owned = prompts
            rows, log_probs = self.queue.give_back(rows, log_probs, len(prompts) * request.n)
        lengths, responses = rows[:, 1:2], rows[:, 2:].long()
        mask = (torch.arange(responses.shape[1]) < lengths).long()
        tensors = build_rollout_batch(owned, request.n, responses, mask, log_probs if request.log_probs else None)
        samples = DataProto.from_dict(tensors, columns, {"metrics": metrics} if metrics else {})
        if self.drafter is not None and not owned.meta_info.get("validate"):
            self.drafter.keep(samples)  # the same ones on every rank of the engine, whose parts must stay one model
        if owned is prompts:
            return samples
        first = dist.get_rank(self.tp_group) * len(prompts) * request.n
        return samples[first : first + len(prompts) * request.n]

    def _prompts_of_all(self, prompts: DataProto) -> DataProto:
        """The prompts of the ranks that answer together: those of one engine, or with a queue all."""
        group = self.tp_group if self.queue is None else self.queue.group
        if group is None:
            return prompts
        if self.queue is not None:  # the other columns stay with their rank
            names = ["sample_index"] if "sample_index" in prompts.non_tensor_batch else []
            prompts = prompts.select(["input_ids", "attention_mask"], names)
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, prompts, group=group)
        if len({len(part) for part in parts}) > 1:
            raise ValueError(f"ranks that answer together need equally many prompts, not {list(map(len, parts))}")
        return DataProto.concat(parts)

    def _draft_metrics(self, before: tuple[int, int], answers: list[tuple[int, Any]]) -> dict[str, list[float]]:
        """Metrics of the drafts since `_draft_counts` were `before`."""
        drafted, accepted = (now - then for now, then in zip(self._draft_counts(), before, strict=True))
        made = sum(len(answer.token_ids) for _, answer in answers)
        if self.queue is not None:  # an engine may have answered nothing
            drafted, accepted, made = self.queue.total(drafted, accepted, made)
        return {
            "rollout/draft_acceptance": [accepted / max(1, drafted)],
            "rollout/tokens_per_forward": [made / max(1, made - accepted)],
        }

    def _rows(self, answers: list[tuple[int, Any]], request: GenerationRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """Of pairs (number of the sample, vLLM's completion), in their order: rows [N, 2 + R] int32 of number, length
        and tokens, padded with `request.pad_id`, and log-probs [N, R] float32, or [N, 0] without `request.log_probs`.
        """
        heads = torch.tensor([[number, len(answer.token_ids)] for number, answer in answers], dtype=torch.int32)
        tokens = right_padded([list(a.token_ids) for _, a in answers], request.limit, request.pad_id, torch.int32)
        rows = torch.cat([heads.reshape(-1, 2), tokens], dim=1)
        if not request.log_probs:
            return rows, torch.empty(len(rows), 0)
        for _, answer in answers:
            flat = answer.logprobs
            if [flat.token_ids[start] for start in flat.start_indices] != list(answer.token_ids):
                raise RuntimeError("vLLM's log-probs are not those of the tokens that it sampled")
        values = [sampled_log_probs(answer.logprobs) for _, answer in answers]
        return rows, right_padded(values, request.limit, 0.0, torch.float32)

    def _records_masks(self, request: GenerationRequest) -> bool:
        """Whether samples get the column SAMPLING_MASK; a queue returns tokens and log-probs alone to other ranks."""
        return request.records_masks and self.config.engine_returns_kept_tokens and self.queue is None

    def _generate(self, request: GenerationRequest) -> dict[int, RequestOutput]:
        """vLLM's output for each prompt that this engine answers, by the prompt's number in the request."""
        def request_arguments(numbers: Iterable[int]) -> dict[str, Any]:
            # vLLM seeds sample k of a prompt with seed + k
            return {
                "prompts": [{"prompt_token_ids": request.prompt_ids[i]} for i in numbers],
                "sampling_params": [self._params(request, request.seeds[i][0]) for i in numbers],
                "lora_request": self.adapter,
                "use_tqdm": False,
            }

        count, engine = len(request.prompt_ids), self.llm.llm_engine
        if self.queue is None:
            return dict(enumerate(self.llm.generate(**request_arguments(range(count)))))
        # Never more at a time than an equal share, or the first engine would take all prompts of a small batch.
        share = -(-count // self.queue.engines)
        finished: dict[int, RequestOutput] = {}
        running: dict[str, int] = {}
        self.queue.open(count)
        is_open = True
        while is_open or running:
            free = self.config.max_num_seqs - engine.get_num_unfinished_requests()  # in samples
            if is_open and (room := min(-(-free // request.n), share - len(running))) > 0:
                numbers = self.queue.take(room)
                is_open = len(numbers) == room
                if numbers:
                    # An output has the id without the suffix that makes it unique.
                    names = [name.split("-")[0] for name in self.llm.enqueue(**request_arguments(numbers))]
                    running |= zip(names, numbers, strict=True)
            for output in engine.step() if running else ():
                if output.finished:
                    finished[running.pop(output.request_id)] = output
        return finished

    def _params(self, request: GenerationRequest, seed: int) -> SamplingParams:
        from vllm import SamplingParams

        # vLLM's own ignore_eos does not apply to stop ids.
        sampling, stops = request.sampling, [] if self.config.ignore_eos else list(request.eos_ids)
        drawn = sampling.parameters() | ({} if sampling.greedy else {"seed": seed})
        returned = 0 if request.log_probs else None  # log-probs in addition to the sampled token's
        if self._records_masks(request):
            returned = min(sampling.top_k, self.llm.llm_engine.model_config.get_vocab_size())
        return SamplingParams(
            n=request.n, max_tokens=request.limit, stop_token_ids=stops,
            ignore_eos=self.config.ignore_eos, detokenize=False, logprobs=returned, flat_logprobs=True,
            repetition_penalty=request.repetition_penalty, **drawn,
        )  # fmt: skip


def sampled_log_probs(log_probs: Any) -> list[float]:
    """Of vLLM's FlatLogprobs those of the sampled tokens, which are the first of each position."""
    return [log_probs.logprobs[start] for start in log_probs.start_indices]


def kept_tokens(log_probs: Any) -> list[np.ndarray]:
    """The ids that top-k and top-p left at each position, of vLLM's FlatLogprobs: those whose log-prob is finite."""
    ids, finite = np.array(log_probs.token_ids), np.isfinite(log_probs.logprobs)
    ends = zip(log_probs.start_indices, log_probs.end_indices, strict=True)
    return [np.unique(ids[start:end][finite[start:end]]) for start, end in ends]


# (logger, text) of warnings that follow from our settings or from the CPU: a user can do nothing about them.
HARMLESS = (
    # Without a tokenizer there is no chat template to warm up, which is logged with a traceback.
    ("vllm.renderers.base", "Chat template warmup failed"),
    ("vllm.renderers.base", "Using None for EOS token id because tokenizer is not initialized"),
    # Rotary embeddings have no weights to reload; logged at each transfer of weights.
    ("vllm.model_executor.model_loader.reload.layerwise", "RotaryEmbedding: Failed to load weights"),
    ("vllm.engine.arg_utils", "The global random seed is set to"),  # requests have seeds
    ("vllm.engine.arg_utils", "does not officially support disabling chunked prefill"),  # for seeded sampling on a CPU
    ("vllm.config.vllm", "Model Runner V2 requires Triton"),
    ("vllm.config.vllm", "Enforce eager set, disabling torch.compile"),
    ("vllm.config.vllm", "Inductor compilation was disabled by user settings"),
    # One for each weight. Rounding to rollout.dtype, of the same range, is what that setting asks for.
    ("vllm.model_executor.models.utils", "with dtype torch.float32 into parameter with dtype torch.bfloat16"),
    ("vllm.platforms.cpu", "Triton is not installed"),
    ("torch._library.triton", "Triton not available"),
    ("vllm.platforms.cpu", "Reset SSM cache type to float32"),
    ("vllm.v1.worker.cpu_worker", "CPU backend doesn't allow to use `torch.set_num_threads`"),
)
# With tie_word_embeddings only: such a head is the embedding, whose weights are sent once. On a CPU, PlatformWorker
# renews the copy of them that vLLM computes with.
TIED_HEAD = ("vllm.model_executor.model_loader.reload.layerwise", "ParallelLMHead: Failed to load weights")


def _silence(name: str, text: str) -> None:
    """Drop the warnings of a logger that contain the text. Filters outlast vLLM's set-up of logging, levels do not."""
    logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR or text not in record.getMessage())


def start_engine(arguments: dict[str, Any], on_cuda: bool) -> Any:
    """vLLM's `LLM(**arguments)` within this process; without prefix caching where vLLM would refuse it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights are sent inside this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_cuda:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the actor's threads are the engine's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name, text in HARMLESS:
        _silence(name, text)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    if arguments.get("enable_prefix_caching") and not arguments.get("enable_chunked_prefill", True):
        if EngineArgs(**arguments).create_model_config().has_inner_state:
            why = "vLLM caches states of recurrent layers only with chunked prefill"
            logger.info(f"rollout.enable_prefix_caching=true has no effect: {why}")
            arguments = arguments | {"enable_prefix_caching": False}
    return LLM(**arguments)
