"""Tiny models of each family in vLLM on the CPU, each in a process of its own that has the trainer's model too."""

import re
import tempfile
from multiprocessing import forkserver

from omegaconf import OmegaConf

from tests.helpers.ranks import run_ranks
from tests.models.checks import LIMIT, STOPS, WORKS, plain_log_probs
from tests.models.families import IN_VLLM, model_of
from verl.trainer.ppo.weight_sync import RolloutCheck

SETTINGS = {"name": "vllm", "dtype": "float32", "engine_kwargs": {}, "quantization": None, "skip_rollout": False,
            "logprobs_mode": "processed_logprobs"}  # fmt: skip
IMPORTS = ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
CONFIG = {"actor_rollout_ref": {"rollout": SETTINGS, "actor": {"fsdp_config": {"dtype": "float32"}}}}


def observed_in_vllm(name: str) -> dict[str, str]:
    """Whether vLLM, with weights that the trainer sent, samples with the log-probs of the model, or the reason for
    which a run stops at its start. AssertionError if log-probs differ and the run would not stop.
    """
    forkserver.set_forkserver_preload(["tests.helpers.engines", "tests.rollout.test_vllm_rollout", *IMPORTS])
    forkserver.ensure_running()  # imports what each process would import again
    return run_ranks(_observed, 1, name)[0]


def _observed(rank: int, ranks: int, name: str) -> dict[str, str]:
    from tests.rollout.test_vllm_rollout import Hybrid, prompts

    model = model_of(name, **IN_VLLM.get(name, {}))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            made = Hybrid(folder, {"max_model_len": 64, "max_num_batched_tokens": 64})
            made.rollout.bind_actor(made.engine, made.policy)
            samples = made.generate(prompts())
            samples.batch["old_log_probs"] = made.log_probs(samples, 1.0)
            RolloutCheck(OmegaConf.create(CONFIG)).compare(samples)
        except Exception as error:  # noqa: BLE001 - vLLM raises errors of many types
            return {"vLLM": STOPS, "reason": reason(error).replace(type(model).__name__, "this model")}
    mask = samples.batch["response_mask"].bool()
    difference = (samples.batch["rollout_log_probs"] - plain_log_probs(model, samples.batch))[mask].abs().max().item()
    assert difference < LIMIT, f"log-probs of vLLM differ by {difference:.2g}"
    return {"vLLM": WORKS}


def reason(error: Exception) -> str:
    """The first sentence of the message, without what pydantic adds and without decimal numbers."""
    message = re.search(r"(?:Value error|Assertion failed), (.*?) \[type=", str(error), re.DOTALL)
    text = " ".join((message[1] if message else str(error)).split())
    return re.sub(r"\d+\.\d+", "...", text.partition(". ")[0].removesuffix("."))
