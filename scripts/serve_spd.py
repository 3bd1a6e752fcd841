"""Start vLLM's OpenAI-compatible server with a scorer in its speculative decoding.

    python scripts/serve_spd.py --target DIR --draft DIR --scorer DIR --threshold 1 --port 8000
    python scripts/serve_spd.py --target DIR --scorer DIR --print \\
        --speculative-config '{"method": "eagle", "model": "HEAD", "num_speculative_tokens": 5}'

The server listens on 127.0.0.1; for other machines give --host and --api-key. Scorer, target and drafter are checked
first. Options that are not listed below go to vLLM as they are. On a CPU, --kv-cache-memory-bytes is a quarter of the
free memory. A request sets its own threshold by "vllm_xargs": {"spd_threshold": 0.5}, and exact match by {"spd": 0}.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipe.spd.vllm_plugin.serving import WORKING_VALUES, engine_options  # noqa: E402
from verl.planning.checks import load_model_part  # noqa: E402
from verl.training.host_memory import available_memory  # noqa: E402
from verl.utils.accelerator import default_dtype, get_device_name  # noqa: E402


def flags_of(options: dict[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line has them."""
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in options.items()}
    return [part for name, text in texts.items() for part in (f"--{name.replace('_', '-')}", text)]


def given_values(rest: Sequence[str]) -> dict[str, Any]:
    """The options among vLLM's that a scorer restricts."""
    values: dict[str, Any] = {}
    for i, text in enumerate(rest):
        name, _, value = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if name in WORKING_VALUES:
            following = rest[i + 1 : i + 2]
            value = value or (following[0] if following and not following[0].startswith("-") else "true")
            values[name] = int(value) if value.isdigit() else True if value == "true" else value
    return values


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and those for vLLM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="model folder")
    add("--scorer", required=True, help="folder of a saved scorer with a target head")
    add("--draft", help="draft model folder; without it give --speculative-config")
    add("--threshold", type=float, default=0.0, help="mismatches with z above it are accepted")
    add("--gamma", type=int, default=8, help="drafted tokens per round")
    add("--allow-foreign-target", action="store_true", help="such as a quantised copy of the scorer's target")
    add("--allow-foreign-drafter", action="store_true", help="another drafter than the one of the training blocks")
    add("--speculative-config", type=json.loads, help="vLLM's, for other proposers than a draft model")
    add("--additional-config", type=json.loads, default={}, help="vLLM's; the scorer is added")
    add("--print", action="store_true", help="show vLLM's command instead of running it")
    args, rest = parser.parse_known_args(argv)
    if not (args.draft or args.speculative_config):
        parser.error("name the drafter: --draft DIR, or --speculative-config JSON")
    return args, rest


def main(argv: Sequence[str] | None = None) -> None:
    """Check, then become vLLM's server."""
    args, rest = parse_arguments(argv)
    try:
        for option in ("target", "draft"):
            if model := getattr(args, option):
                load_model_part(f"--{option}", model, AutoConfig.from_pretrained)
        options = engine_options(
            args.target, args.scorer, draft=args.draft, threshold=args.threshold, gamma=args.gamma,
            allow_foreign_target=args.allow_foreign_target, allow_foreign_drafter=args.allow_foreign_drafter,
            additional_config=args.additional_config,
            **({"speculative_config": args.speculative_config} if args.speculative_config else {}),
            **given_values(rest),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    options = {name: options[name] for name in ("model", "worker_cls", "speculative_config", "additional_config")}
    middleware = ["--middleware", "recipe.spd.vllm_plugin.http.CountsMiddleware"]
    serve(options, [*middleware, *rest], only_print=args.print)


def serve(options: dict[str, Any], rest: Sequence[str], *, only_print: bool) -> None:
    """Become vLLM's server with these engine arguments, and `rest` as it is; or print the command."""
    # vLLM would listen on every interface, and on a CPU take bfloat16 even without instructions for it and want 92 % of
    # the memory to be free; of two options of one name, the later one counts.
    defaults: dict[str, Any] = {"host": "127.0.0.1"}
    if get_device_name() != "cuda":
        defaults["dtype"] = default_dtype("cpu")
        if not any(part.replace("_", "-").startswith("--gpu-memory-utilization") for part in rest):  # else of no effect
            defaults["kv-cache-memory-bytes"] = available_memory() // 4
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags_of(options | defaults), *rest]
    if only_print:
        print(shlex.join(command))
        return
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # vLLM imports the plugin by name
    os.execve(command[0], command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


if __name__ == "__main__":
    main()
