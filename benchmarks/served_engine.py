"""vLLM engines in processes of their own, which generate in turn and report their CPU seconds."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16, "seed": 0,
    "enable_prefix_caching": False, "kv_cache_memory_bytes": 256 << 20, "disable_log_stats": True,
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@dataclass
class Generated:
    """Answers of one call."""

    tokens: list[list[int]]
    cpu: float  # seconds of the engine's process, all threads
    wall: float
    judging: float  # CPU seconds of them in the scorer's judge
    counts: dict[str, int]  # the judge's, since the engine's start

    @property
    def speed(self) -> float:
        """Tokens per CPU second."""
        return sum(map(len, self.tokens)) / self.cpu


class EngineProcess:
    """`vllm.LLM(**options)` with one thread in another process; ready after `wait()`."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.served_engine", json.dumps({**ENGINE, **options})]
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip
        self.log = log

    def wait(self) -> "EngineProcess":
        """Wait until the engine has loaded."""
        self._answer()
        return self

    def generate(
        self, prompts: list[list[int]], batch: int, *, max_tokens: int = 128, **xargs: float | list[float]
    ) -> Generated:
        """Greedy answers, at most `batch` requests at a time; a list in `xargs` has a value for each prompt."""
        asked = {"prompts": prompts, "batch": batch, "max_tokens": max_tokens, "xargs": xargs}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Generated(**self._answer())

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the engine has ended: {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)


def time_judge(llm: Any) -> list[float]:
    """A list whose only entry grows by the CPU seconds spent in the engine's judge."""
    spent = [0.0]
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:  # in other processes: not timed
        return spent
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def timed(work: Any) -> Any:
        def run(*args: Any) -> Any:
            begun = time.process_time()
            result = work(*args)
            spent[0] += time.process_time() - begun
            return result

        return run

    for name in ("register_requests", "begin", "accept_by_raising_logits", "finish"):
        setattr(worker.judge, name, timed(getattr(worker.judge, name)))
    return spent


def main() -> None:
    """Answer the parent's requests until it closes the pipe."""
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    llm = LLM(**options)
    judges = "spd" in options.get("additional_config", {})
    spent = time_judge(llm) if judges else [0.0]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        settings = {"temperature": 0.0, "max_tokens": asked["max_tokens"], "detokenize": False}
        each = [
            {name: value[i] if isinstance(value, list) else value for name, value in asked["xargs"].items()}
            for i in range(len(prompts))
        ]
        params = [SamplingParams(**settings, extra_args=xargs or None) for xargs in each]
        cpu, wall, judging, outputs = time.process_time(), time.perf_counter(), spent[0], []
        # A full batch stays full: the scheduler starts the next request as soon as one ends.
        step = len(prompts) if asked["batch"] == options["max_num_seqs"] else asked["batch"]
        for first in range(0, len(prompts), step):
            outputs += llm.generate(prompts[first : first + step], params[first : first + step], use_tqdm=False)
        reply = {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs], "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall, "judging": spent[0] - judging,
            "counts": llm.collective_rpc("spd_counts")[0] if judges else {},
        }  # fmt: skip
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
