"""Command line that writes a checkpoint as a Hugging Face folder or compares it with one.

    python -m verl.model_merger merge --backend fsdp --local_dir .../global_step_N/actor --target_dir DIR
    python -m verl.model_merger test  --backend fsdp --local_dir .../global_step_N/actor --test_hf_dir DIR
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from loguru import logger

from verl.utils.fs import output_folder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of verl 0.7's merger without its uploads, and dtype and max_shard_size.

    An option that is not given is no attribute if MergeOptions has its default.
    """
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--backend", choices=["fsdp", "megatron"], default="fsdp", help="megatron is not supported")
    common.add_argument("--local_dir", type=Path, required=True, help=".../global_step_<N>/actor")
    common.add_argument("--hf_model_path", type=Path, help="model that was trained, where the checkpoint lacks weights")
    common.add_argument("--dtype", help="fp32, bf16, fp16; auto: as config.json of the checkpoint says")
    common.add_argument("--tie-word-embedding", action="store_true", help="the output layer is the embedding")
    common.add_argument("--trust-remote-code", action="store_true", help="the model may run code that comes with it")
    common.add_argument("--is-value-model", action="store_true", help="a critic: one value per token")
    common.add_argument("--use_cpu_initialization", action="store_true", help="taken, and not needed: nothing is built")
    parser = argparse.ArgumentParser(prog="python -m verl.model_merger", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="operation", required=True)
    merging = commands.add_parser("merge", parents=[common], help="write a Hugging Face folder")
    merging.add_argument("--target_dir", type=output_folder, required=True, help="folder to make")
    merging.add_argument("--max_shard_size", default=argparse.SUPPRESS, help="bytes of one safetensors file")
    testing = commands.add_parser("test", parents=[common], help="compare with a Hugging Face folder")
    testing.add_argument("--test_hf_dir", type=Path, required=True, help="folder to compare with")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """0 when merged or equal, 1 when weights differ; exits with one message where neither can be done."""
    args = parse_args(argv)
    if args.backend == "megatron":
        sys.exit("--backend megatron is not supported: this package trains with FSDP2 only. Use upstream verl.")
    from verl.model_merger.merge import MergeOptions, differences, merge

    options = MergeOptions(**{f.name: vars(args)[f.name] for f in fields(MergeOptions) if f.name in args})
    try:
        if args.operation == "merge":
            merge(options, args.target_dir)
            return 0
        wrong = differences(options, args.test_hf_dir, logger.error)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(str(error))
    logger.info("{} of the weights differ" if wrong else "all weights are equal", wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
