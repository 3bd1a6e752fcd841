"""vLLM's worker with a scorer, for `--worker-cls`; its settings are additional_config["spd"]."""

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
from recipe.spd.vllm_plugin.serving import TESTED_VLLM, WORKING_VALUES, ServedScorer
from verl.data.fingerprint import model_folder
from verl.rollout.vllm_rollout.platform_worker import PlatformWorker
from verl.utils.weight_files import safetensors_of


class SPDWorker(PlatformWorker):
    """vLLM's worker in which a scorer accepts drafted tokens that the target would reject.

    Between the target's forward and vLLM's sampling, `ServedJudge` raises the logits of the accepted tokens. The module
    v1 or v2 connects it to the model runner; vLLM's files are not changed.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.served = ServedScorer.from_engine(vllm_config.additional_config)
        if not vllm.__version__.startswith(TESTED_VLLM):
            logger.warning("recipe/spd/vllm_plugin was made for vLLM {}x; this is {}.", TESTED_VLLM, vllm.__version__)
        # Before vLLM's own start, which takes long.
        self.scorer = self.served.check(vllm_config.model_config.model, *options_to_check(vllm_config))
        super().__init__(vllm_config, *args, **kwargs)
        self.judge: ServedJudge | None = None  # until load_model

    def load_model(self, **kwargs: Any) -> None:
        """Load the target, then the scorer's head, and connect the judge to the model runner.

        Raises ValueError if the head reads the states of a layer that this engine cannot return.
        """
        super().load_model(**kwargs)
        if self.use_v2_model_runner:
            from recipe.spd.vllm_plugin import v2 as hooks
        else:
            from recipe.spd.vllm_plugin import v1 as hooks
        check_interface(hooks)
        self._hooks = hooks
        head = SCORERS[self.scorer.backbone].make_head(self.scorer).to(self.device).eval()
        head.load_state_dict(load_file(Path(self.served.scorer) / HEAD_FILE, device=str(self.device)))
        embed = target_embedding(self.get_model(), self.vllm_config.model_config.model, self.device)
        self.judge = ServedJudge(head, embed, self.served.threshold, self.device)
        hooks.install(self.model_runner, self.judge)
        if self.scorer.state_layer is not None:
            self._request_states(self.scorer.state_layer)

    def _request_states(self, layer: int) -> None:
        """Let the target return its states after `layer`, by vLLM's interface for EAGLE-3 drafters."""
        taken_by_drafter = self.model_runner.use_aux_hidden_state_outputs
        if taken_by_drafter or get_pp_group().world_size > 1 or not supports_eagle3(self.get_model()):
            raise ValueError(
                f"the scorer reads the states after layer {layer} (spd.state_layer). vLLM returns them only for models "
                "with EAGLE-3 support, and neither with pipeline parallelism nor with a drafter that reads such states "
                "itself. Train a scorer without spd.state_layer."
            )
        self.model_runner.use_aux_hidden_state_outputs = True
        self.get_model().set_aux_hidden_state_layers((layer,))

    def execute_model(self, scheduler_output: Any) -> Any:
        """Forward of a step; the judge first learns which requests begin or have ended."""
        self.judge.register_requests(scheduler_output)
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sampling of the step; the judge first gets the states of its forward."""
        self._hooks.begin(self.model_runner, self.judge)
        return super().sample_tokens(grammar_output)

    def spd_counts(self, response_id: str | None = None) -> dict[str, Any]:
        """See ServedJudge.report; for collective_rpc."""
        return self.judge.report(response_id)


def options_to_check(vllm_config: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(speculative_config, other options) of an engine, as `ServedScorer.check` takes them.

    An option that this version of vLLM lacks is None, its default.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    options = {name: getattr(parallel, name, None) for name in WORKING_VALUES}
    options |= {"enable_lora": vllm_config.lora_config is not None,
                "logprobs_mode": vllm_config.model_config.logprobs_mode}  # fmt: skip
    names = ("method", "model", "rejection_sample_method")
    return None if speculative is None else {name: getattr(speculative, name) for name in names}, options


def check_interface(hooks: Any) -> None:
    """Raise RuntimeError if vLLM's methods or fields differ from what `hooks` (module v1 or v2) overrides or reads."""
    wrong = [
        f"{method.__qualname__}{inspect.signature(method)}, expected {', '.join(names)}"
        for method, names in hooks.INTERFACE.items()
        if tuple(inspect.signature(method).parameters) != names
    ]
    state, fields = hooks.STATE
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
    raise ValueError(f"{path} has no embed_tokens.weight, which the later pipeline ranks need. Use tensor parallelism.")
