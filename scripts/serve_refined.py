"""Start vLLM's OpenAI-compatible server with a model trained by iterative refinement, which drafts for itself.

    python scripts/serve_refined.py --model DIR --port 8000 [--mode auto|slide|verify|redraft]
                                    [--guesses 3] [--tokens-per-step 64]

Greedy answers are those of the model without drafts. Options that are not listed below go to vLLM as they are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dllm_reasoning.inference.settings import SELF_DRAFT_MODES, self_draft_options  # noqa: E402
from scripts.serve_spd import serve  # noqa: E402
from verl.planning.checks import load_model_part  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Check, then become vLLM's server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="model folder")
    add("--mode", choices=SELF_DRAFT_MODES, default="auto")
    add("--guesses", type=int, help="most guesses of a window (default: those of the trained window)")
    add("--tokens-per-step", type=int, default=64, help="for auto: tokens of a forward from which more cost time")
    add("--print", action="store_true", help="show vLLM's command instead of running it")
    args, rest = parser.parse_known_args(argv)
    try:
        load_model_part("--model", args.model, AutoConfig.from_pretrained)
        options = self_draft_options(
            args.model, mode=args.mode, tokens_per_step=args.tokens_per_step, guesses=args.guesses
        )
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    serve(options, rest, only_print=args.print)


if __name__ == "__main__":
    main()
