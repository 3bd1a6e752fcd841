"""vLLM's worker with a scorer; named by `--worker-cls`, set up by additional_config["spd"]."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from loguru import logger
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from vllm.distributed import get_pp_group
from vllm.model_executor.models.interfaces import supports_eagle3

from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.model import HEAD_FILE
from recipe.spd.vllm_plugin.judge import ServedJudge
from recipe.spd.vllm_plugin.serving import TESTED_VLLM, WORKS, ServedScorer
from verl.data.fingerprint import model_folder
from verl.rollout.vllm_rollout.platform_worker import PlatformWorker
from verl.utils.weight_files import safetensors_of


class SPDWorker(PlatformWorker):
    """Judges between the target's forward and vLLM's sampling, whose code stays as it is."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.served = ServedScorer.from_engine(vllm_config.additional_config)
        parallel, model, speculative = (
            vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
        )  # fmt: skip
        options = {name: getattr(parallel, name, None) for name in WORKS}
        options |= {"enable_lora": vllm_config.lora_config is not None, "logprobs_mode": model.logprobs_mode}
        names = ("method", "model", "rejection_sample_method")
        proposer = None if speculative is None else {name: getattr(speculative, name) for name in names}
        if not vllm.__version__.startswith(TESTED_VLLM):
            logger.warning("the scorer was tested with vLLM {}x; this is {}.", TESTED_VLLM, vllm.__version__)
        self.scorer = self.served.check(model.model, proposer, options)
        super().__init__(vllm_config, *args, **kwargs)
        self.judge: ServedJudge | None = None

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.use_v2_model_runner:
            from recipe.spd.vllm_plugin import v2 as runner_parts
        else:
            from recipe.spd.vllm_plugin import v1 as runner_parts
        check_interface(runner_parts)
        self._parts = runner_parts
        head = SCORERS[self.scorer.backbone].make_head(self.scorer).to(self.device).eval()
        head.load_state_dict(load_file(Path(self.served.scorer) / HEAD_FILE, device=str(self.device)))
        embed = target_embedding(self.get_model(), self.vllm_config.model_config.model, self.device)
        self.judge = ServedJudge(head, embed, self.served.threshold, self.device)
        runner_parts.install(self.model_runner, self.judge)
        if (layer := self.scorer.state_layer) is not None:
            given = self.model_runner.use_aux_hidden_state_outputs or get_pp_group().world_size > 1
            if given or not supports_eagle3(self.get_model()):
                raise ValueError(
                    f"the scorer reads the states after layer {layer} (spd.state_layer), which vLLM returns only for "
                    "models with EAGLE-3 support, without pipeline parallelism and a drafter that reads such states. "
                    "Train a scorer without spd.state_layer."
                )
            self.model_runner.use_aux_hidden_state_outputs = True
            self.get_model().set_aux_hidden_state_layers((layer,))

    def execute_model(self, scheduler_output: Any) -> Any:
        self.judge.register_requests(scheduler_output)
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        self._parts.begin(self.model_runner, self.judge)
        return super().sample_tokens(grammar_output)

    def spd_counts(self, prefix: str | None = None) -> dict[str, Any]:
        """See ServedJudge.report; for collective_rpc."""
        return self.judge.report(prefix)


def check_interface(parts: Any) -> None:
    """RuntimeError where this vLLM's methods or fields are not those that `parts` (v1 or v2) overrides or reads."""
    wrong = [
        f"{method.__qualname__}{inspect.signature(method)}, expected {', '.join(names)}"
        for method, names in parts.INTERFACE.items()
        if tuple(inspect.signature(method).parameters) != names
    ]
    state, fields = parts.STATE
    wrong += [f"{state.__name__} without {name}" for name in fields if name not in state._fields]
    if wrong:
        raise RuntimeError(
            f"vLLM {vllm.__version__} has {'; '.join(wrong)}. The scorer's plugin was made for vLLM {TESTED_VLLM}x: "
            "install that, or adapt recipe/spd/vllm_plugin."
        )


def target_embedding(model: nn.Module, path: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """ids [N] -> the target's input embeddings [N, H]; read from its files on a pipeline rank that lacks them."""
    if get_pp_group().is_first_rank:
        return model.embed_input_ids
    for file in safetensors_of(model_folder(path)):
        with safe_open(file, "pt", device=str(device)) as opened:
            if names := [name for name in opened.keys() if name.endswith("embed_tokens.weight")]:
                table = opened.get_tensor(names[0])
                return lambda ids: nn.functional.embedding(ids, table)
    raise ValueError(f"{path} has no embed_tokens.weight, which the last pipeline rank needs. Use tensor parallelism.")
