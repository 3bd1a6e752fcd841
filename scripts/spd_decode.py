"""Decode prompts speculatively with a judge, and by plain greedy decoding of the target for comparison.

    python scripts/spd_decode.py --target DIR --draft DIR --scorer DIR --prompt "how many pens ?"
    python scripts/spd_decode.py --target DIR --draft DIR --rule margin --threshold 2 --prompts questions.jsonl

Without --prompt and --prompts each line of standard input is a prompt. The text shows where each token comes from; the
lines below it compare both ways of decoding.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipe.spd.data.blocks import Block, Judge  # noqa: E402
from recipe.spd.rollout.decoder import (  # noqa: E402
    FROM_MATCH,
    FROM_MISMATCH,
    FROM_TARGET,
    SpecResult,
    greedy_generate,
    speculative_generate,
)
from recipe.spd.scorer.auto import SCORERS  # noqa: E402
from scripts.spd_evaluation import rules  # noqa: E402
from scripts.spd_evaluation.worker import load_model, scores_of  # noqa: E402
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig  # noqa: E402
from verl.data.chat_template import render_chat  # noqa: E402
from verl.data.rl_dataset import read_rows  # noqa: E402
from verl.utils.accelerator import default_dtype  # noqa: E402
from verl.utils.tokenizer import check_tokenizers, hf_tokenizer, stop_ids  # noqa: E402

STYLES = {FROM_TARGET: "", FROM_MATCH: "green", FROM_MISMATCH: "bold yellow"}
MARKERS = {FROM_TARGET: "{}", FROM_MATCH: "[={}=]", FROM_MISMATCH: "[~{}~]"}


@dataclass
class Request:
    """One prompt as the models read it."""

    text: str
    ids: list[int]


@dataclass
class Segment:
    """A stretch of an answer from one origin; the pieces of all segments add up to the decoded text."""

    origin: int
    text: str
    wanted: str | None = None  # the target's own token at an accepted mismatch


class WantedTokens:
    """The target's token at every drafted mismatch: `at[question][position]`, 0 = the answer's first token."""

    def __init__(self, requests: Sequence[Request]):
        self.prompt_lengths = [len(request.ids) for request in requests]
        self.at: list[dict[int, int]] = [{} for _ in requests]

    def __call__(self, block: Block, accepted: torch.Tensor) -> None:
        questions, mismatch, chosen = block.rows.tolist(), block.mismatch.tolist(), block.target_ids.tolist()
        for k, (question, count) in enumerate(zip(questions, accepted.tolist(), strict=True)):
            start = len(block.context_ids[k]) - self.prompt_lengths[question]
            self.at[question].update({start + i: chosen[k][i] for i in range(count) if mismatch[k][i]})


class Session:
    """Target, draft and judge, loaded and checked against each other; exits for a wrong option."""

    def __init__(self, args: argparse.Namespace):
        for option in ("target", "draft", "scorer"):
            directory = getattr(args, option)
            if directory is not None and not Path(directory).is_dir():
                raise SystemExit(f"--{option} {directory}: the directory does not exist.")
        self.args = args
        self.tokenizer = hf_tokenizer(args.target)
        check_tokenizers(self.tokenizer, hf_tokenizer(args.draft), f"--draft {args.draft}")
        self.target = load_model(args.target, args.device, args.dtype)
        self.draft = load_model(args.draft, args.device, args.dtype)
        self.eos = stop_ids(self.tokenizer, args.target)
        self.judge = self._make_judge()

    def _make_judge(self) -> Judge:
        args = self.args
        if args.rule != "scorer":
            makers = {"exact": rules.exact, "all": rules.accept_all, "margin": lambda: rules.margin(args.threshold)}
            return makers[args.rule]()
        return rules.above(scores_of(load_scorer(args, self.target), self.tokenizer, self.eos), args.threshold)

    def speculative(self, requests: Sequence[Request], on_block: Any = None, **changed: int) -> SpecResult:
        """Continue every request by draft, target and judge."""
        return speculative_generate(
            self.target, self.draft, [r.ids for r in requests], self.judge, gamma=self.args.gamma, on_block=on_block,
            **self._limits(changed),
        )  # fmt: skip

    def greedy(self, requests: Sequence[Request], **changed: int) -> SpecResult:
        """Continue every request by the target alone."""
        return greedy_generate(self.target, [r.ids for r in requests], **self._limits(changed))

    def _limits(self, changed: dict[str, int]) -> dict[str, Any]:
        args = self.args
        limits = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size, "eos_token_id": self.eos}
        return {**limits, **changed}

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of an answer, special tokens left out."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def word(self, token: int) -> str:
        """Text of one token, a special token by its name."""
        return self.tokenizer.decode([token], clean_up_tokenization_spaces=False)


def load_scorer(args: argparse.Namespace, target: torch.nn.Module) -> torch.nn.Module:
    """The saved scorer; a `target` head shares the loaded target, an `own` scorer brings its backbone along."""
    config = ScoringModelConfig.load(Path(args.scorer))
    if config.lora_rank and not Path(config.base_model_path).is_dir():
        raise SystemExit(
            f"--scorer {args.scorer}: its adapters belong to the model in {config.base_model_path}, which is not "
            "there; write where it is as base_model_path into its spd_config.json."
        )
    shared = (args.target, target) if not SCORERS[config.backbone].trains_backbone else ()
    try:
        model = AutoModelForSPDScoring.from_pretrained(args.scorer, *shared, torch_dtype=target.dtype)
    except (RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        folder = config.base_model_path if config.lora_rank else args.scorer
        text = f"--scorer {args.scorer}: the model in {folder} cannot be loaded ({reason}); copy that folder again."
        raise SystemExit(text) from error
    return model.to(args.device).eval()


def read_requests(args: argparse.Namespace, tokenizer: Any) -> list[Request]:
    """The prompts of --prompt, --prompts or standard input, as token ids; exits for an invalid one."""
    if args.prompts is not None and not args.prompts.is_file():
        raise SystemExit(f"--prompts {args.prompts}: the file does not exist.")
    if args.chat_template and tokenizer.chat_template is None:
        raise SystemExit(f"--target {args.target} has no chat template: leave out --chat-template.")
    if args.prompts is not None:
        texts = [row.get("prompt") or row.get("question") for row in read_rows(args.prompts)]
    else:
        texts = args.prompt or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not texts:
        raise SystemExit("there is no prompt: give --prompt TEXT, --prompts FILE.jsonl, or lines on standard input.")
    requests = []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            raise SystemExit(f"prompt {number} is empty or no text (--prompts reads the columns prompt and question).")
        if args.chat_template:
            filled = render_chat(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)
            ids = tokenizer(filled, add_special_tokens=False)["input_ids"]  # the template has its own
        else:
            ids = tokenizer(text)["input_ids"]
        requests.append(Request(text, list(ids)))
    return requests


def token_texts(session: Session, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character that spans several tokens belongs to the last of them."""
    texts, begin, done = [], 0, 0
    for i in range(len(tokens)):
        # Decoded together with the previous token that added text, which determines the space between them.
        before, now = session.decode(tokens[begin:done]), session.decode(tokens[begin : i + 1])
        whole = not now.endswith("\N{REPLACEMENT CHARACTER}") or i == len(tokens) - 1
        texts.append(now[len(before) :] if whole else "")
        if texts[-1]:
            begin, done = done, i + 1
    return texts


def segments_of(session: Session, result: SpecResult, question: int, wanted: dict[int, int]) -> list[Segment]:
    """An answer cut where the origin of its tokens changes; every accepted mismatch is a segment of its own."""
    segments: list[Segment] = []
    texts = token_texts(session, result.tokens[question])
    for i, (origin, text) in enumerate(zip(result.origin[question], texts, strict=True)):
        if origin == FROM_MISMATCH:
            segments.append(Segment(origin, text, session.word(wanted[i])))
        elif segments and segments[-1].origin == origin:
            segments[-1].text += text
        else:
            segments.append(Segment(origin, text))
    return segments


def marked(segments: Sequence[Segment], colour: bool) -> Text:
    """The answer with its origins as colours, or as plain markers."""
    line = Text()
    for segment in segments:
        if colour:
            line.append(visible(segment.text), style=STYLES[segment.origin])
            if segment.wanted is not None:
                line.append(f"({visible(segment.wanted).strip()})", style="dim")
        elif segment.text or segment.wanted is not None:
            said = "" if segment.wanted is None else f"|{segment.wanted.strip()}"
            line.append(visible(MARKERS[segment.origin].format(segment.text + said)))
    return line


def visible(text: str) -> str:
    """The text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def records(
    requests: Sequence[Request], fast: SpecResult, plain: SpecResult, wanted: WantedTokens
) -> list[dict[str, Any]]:
    """One plain record a prompt."""
    return [
        {"prompt": request.text, "prompt_ids": request.ids, "tokens": fast.tokens[k], "origin": fast.origin[k],
         "wanted": {i: t for i, t in wanted.at[k].items() if i < len(fast.tokens[k])}, "accepted": fast.accepted[k],
         "accepted_mismatches": fast.accepted_mismatches[k], "finished": fast.finished[k],
         "greedy_tokens": plain.tokens[k]}
        for k, request in enumerate(requests)
    ]  # fmt: skip


def summary(fast: SpecResult, plain: SpecResult) -> list[str]:
    """What was accepted, and how far the two ways agree."""
    accepted, forwards = sum(fast.accepted), sum(fast.rounds)
    ratio = sum(map(len, fast.tokens)) / sum(map(len, plain.tokens))
    same = sum(a == b for a, b in zip(fast.tokens, plain.tokens, strict=True))
    return [
        f"draft tokens accepted: {accepted} in {forwards} target forwards, {accepted / forwards:.2f} a forward",
        f"mismatches accepted: {sum(fast.accepted_mismatches)} of {sum(fast.judged_mismatches)} judged",
        f"same text as plain greedy decoding: {same} of {len(fast.tokens)}; output length ratio {ratio:.3f}; "
        f"{plain.seconds / fast.seconds:.2f} times as fast",
    ]


def show(
    session: Session, requests: Sequence[Request], fast: SpecResult, plain: SpecResult, wanted: WantedTokens
) -> None:
    """Print every answer with its marks, then the summary."""
    colour = sys.stdout.isatty()
    console = Console(no_color=not colour, highlight=False, soft_wrap=True, markup=False)
    legend = [
        Segment(FROM_TARGET, "from the target, "), Segment(FROM_MATCH, "drafted, the same as the target's token"),
        Segment(FROM_TARGET, ", "), Segment(FROM_MISMATCH, "drafted mismatch, accepted", "the target's token"),
    ]  # fmt: skip
    for number, request in enumerate(requests, 1):
        console.print(Text(f"[{number}] {visible(request.text)}", style="bold"))
        console.print(marked(segments_of(session, fast, number - 1, wanted.at[number - 1]), colour))
        if fast.tokens[number - 1] != plain.tokens[number - 1]:
            greedy = visible(session.decode(plain.tokens[number - 1]))
            console.print(Text(f"    plain greedy decoding: {greedy}", style="dim"))
        console.print()
    console.print(marked(legend, colour))
    console.print(*summary(fast, plain), sep="\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face directory of the target model, with its tokenizer")
    add("--draft", required=True, help="directory of the draft model (same vocabulary)")
    add("--scorer", help="directory of a trained scorer, e.g. RUN/global_step_N/actor/huggingface")
    add("--rule", choices=("scorer", "exact", "margin", "all"), help="default: scorer with --scorer, else exact")
    add("--threshold", type=float, help="scorer: accept where z lies above (default 0); margin: largest gap of logits")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="jsonl or parquet with a text prompt or question")
    add("--gamma", type=int, default=8, help="drafted tokens a round")
    add("--max-new-tokens", type=int, default=256)
    add("--batch-size", type=int, default=64, help="prompts decoded at once")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of all models (default: bfloat16 on cuda "
        "and on CPUs with instructions for it, else float32)")
    add("--chat-template", action="store_true", help="wrap each prompt as a user's message")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or default_dtype(args.device)
    args.rule = args.rule or ("scorer" if args.scorer else "exact")
    if (args.rule == "scorer") != (args.scorer is not None):
        parser.error(f"--rule {args.rule} with --scorer {args.scorer}: name a scorer for --rule scorer, and only then")
    if args.rule in ("exact", "all") and args.threshold is not None:
        parser.error(f"--rule {args.rule} has no --threshold; leave it out")
    if args.rule == "margin" and args.threshold is None:
        parser.error("--rule margin needs --threshold, the largest gap of two logits that may stand (try 2)")
    if args.rule == "scorer" and args.threshold is None:
        args.threshold = 0.0
    for name in ("gamma", "max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Decode both ways, print, give the records."""
    args = parse(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()  # it warns of a target loaded without its output layer
    transformers.logging.disable_progress_bar()
    try:
        session = Session(args)
        requests = read_requests(args, session.tokenizer)
        # Warm-up: the first forwards of a process allocate memory and load kernels.
        session.speculative(requests[:1], max_new_tokens=2)
        session.greedy(requests[:1], max_new_tokens=2)
        wanted = WantedTokens(requests)
        fast = session.speculative(requests, on_block=wanted)
        plain = session.greedy(requests)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    show(session, requests, fast, plain, wanted)
    return records(requests, fast, plain, wanted)


if __name__ == "__main__":
    main()
