"""The models of one worker process, and the execution of its tasks."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from recipe.spd.data.blocks import Block, Judge
from recipe.spd.rollout.answers import is_correct
from recipe.spd.rollout.decoder import SpecResult, end_ids, greedy_generate, speculative_generate
from recipe.spd.scorer.auto import SCORERS
from scripts.spd_evaluation import harm, rules
from scripts.spd_evaluation.pool import Harm, Job, Run, Scores
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, resolve_sep_token_id
from verl.data.chat_template import answer_text
from verl.models.kv_cache import Prefills
from verl.models.loading import torch_dtype_of
from verl.utils.import_utils import load_extern_object
from verl.utils.tokenizer import check_tokenizers, hf_tokenizer, stop_ids


@dataclass
class Outcome:
    """Result of a Run."""

    result: SpecResult
    correct: list[bool]  # one entry per sample of each question in turn; an answer cut at the limit is wrong

    def __add__(self, other: "Outcome") -> "Outcome":
        """The outcome over the questions of both."""
        sums = {f.name: getattr(self.result, f.name) + getattr(other.result, f.name) for f in fields(SpecResult)}
        return Outcome(SpecResult(**sums), self.correct + other.correct)


class Worker:
    """Target, draft and the scorers. `done` counts the questions and blocks that all processes have finished."""

    def __init__(self, job: Job, done: Synchronized):
        torch.set_num_threads(1)  # one core per process; sums do not depend on the number of cores
        transformers.logging.set_verbosity_error()  # it warns of a target loaded without its output layer
        transformers.logging.disable_progress_bar()
        self.job, self.args = job, job.args
        self.tokenizer = hf_tokenizer(self.args.target)
        check_tokenizers(self.tokenizer, hf_tokenizer(self.args.draft), f"--draft {self.args.draft}")
        self.target = load_model(self.args.target, self.args.device, self.args.dtype)
        self.draft = load_model(self.args.draft, self.args.device, self.args.dtype)
        self.eos = stop_ids(self.tokenizer, self.args.target)
        self.scores = {name: scores_of(model, self.tokenizer, self.eos) for name, model in self._load_scorers().items()}
        figures = rules.figure_ids(self.tokenizer, self.target.config.get_text_config().vocab_size)
        deferred = rules.deferred_entropy(6, end_ids(self.eos))  # the published window
        self.values = {**rules.STATISTICS, "deferred": deferred, **self.scores}
        self.judges: dict[str, Callable[[float], Judge]] = {
            "exact": lambda _: rules.exact(),
            "all": lambda _: rules.accept_all(),
            "random": lambda share: rules.random_share(share, self.args.seed + self.first),
            **{name: partial(rules.above, z_of) for name, z_of in self.scores.items()},
            "margin": rules.margin,
            "top_rank": lambda count: rules.top_rank(math.ceil(count)),
            "rank_margin": lambda gap: rules.top_rank(3, gap),
            "deferred": partial(rules.above, deferred),
            "entropy": rules.entropy,
            "words": lambda _: rules.words(figures),
            "typical": lambda eps: rules.typical(eps, eps / rules.TYPICAL),
            "divergence": rules.divergence,
            "divergence_strict": lambda nats: rules.divergence(nats, strict=True),
            **{name: load_extern_object(file, function) for name, (file, function, _) in self.args.rules.items()},
        }
        self.first = 0  # question of the part at work: each draws numbers of its own
        self.prefills = Prefills()
        self._done = done

    def decode(self, run: Run) -> Outcome:
        """Decode the run's questions and check the answers."""
        questions = self.job.questions[run.split][run.first : run.last]
        questions = [question for question in questions for _ in range(self.args.samples)]
        prompts = [question["prompt_ids"] for question in questions]
        size, counted = self.args.batch_size, 0
        common = {"max_new_tokens": self.args.max_new_tokens, "eos_token_id": self.eos, "batch_size": size,
                  "temperature": self.args.temperature, "seed": self.args.seed + run.first,
                  "prefills": self.prefills}  # fmt: skip

        def count(block: Block, _: torch.Tensor) -> None:
            nonlocal counted
            chunk_end = min((int(block.rows[0]) // size + 1) * size, len(questions))
            self._count(chunk_end - len(block.rows) - counted)
            counted = chunk_end - len(block.rows)

        if run.rule == "target":
            result = greedy_generate(self.target, prompts, **common)
        else:
            self.first = run.first
            judge = self.judges[run.rule](run.threshold)
            result = speculative_generate(
                self.target, self.draft, prompts, judge, gamma=self.args.gamma, on_block=count,
                target_first=self.args.target_first, **common
            )
        self._count(len(questions) - counted)
        answers = zip(questions, result.tokens, result.finished, strict=True)
        return Outcome(result, [finished and self._is_right(question, ids) for question, ids, finished in answers])

    def harm_shares(self, task: Harm) -> list[tuple[float | None, float | None]]:
        """See harm.harm_shares."""
        self.first = 0  # the draws of `random` are the same whatever this process decoded before
        judges = [self.judges[run.rule](run.threshold) for run in task.runs]
        shares = harm.harm_shares(judges, self.target, self.draft, self.job.blocks)
        self._count(len(self.job.blocks))
        return shares

    def labelled_scores(self, task: Scores) -> dict[str, list[list[tuple[float, bool]]]]:
        """See harm.labelled_scores."""
        wanted = {name: self.values[name] for name in task.rules}
        blocks = self.job.labelled(task.split)
        scores = harm.labelled_scores(wanted, self.target, self.draft, blocks)
        self._count(len(blocks))
        return scores

    def _count(self, more: int) -> None:
        with self._done.get_lock():
            self._done.value += more

    def _is_right(self, question: dict, tokens: Sequence[int]) -> bool:
        return is_correct(answer_text(self.tokenizer, tokens), question["ground_truth"])

    def _load_scorers(self) -> dict[str, torch.nn.Module]:
        """The trained scorers by the names of their rules, and an untrained one: from its directory, or with the config
        of the first, drawn from the seed."""
        models = {name: load_scorer(directory, self.target) for name, directory in self.args.scorers.items()}
        if self.args.untrained is not None:
            untrained = load_scorer(self.args.untrained, self.target)
        else:
            config = replace(models["scorer"].config, seed=self.args.seed)
            backbone = shared_backbone(config, self.target)
            untrained = AutoModelForSPDScoring.from_config(config, self.target.dtype, backbone).eval()
        return {n: m.to(self.args.device) for n, m in {**models, "scorer_untrained": untrained}.items()}


def load_scorer(directory: str, target: torch.nn.Module) -> torch.nn.Module:
    """A saved scorer for inference, in the target's dtype."""
    shared = shared_backbone(ScoringModelConfig.load(Path(directory)), target)
    return AutoModelForSPDScoring.from_pretrained(directory, base_model=shared, torch_dtype=target.dtype).eval()


def shared_backbone(config: ScoringModelConfig, target: torch.nn.Module) -> torch.nn.Module | None:
    """The loaded target for a `target` head; None for an `own` scorer, which has its backbone with it."""
    return None if SCORERS[config.backbone].trains_backbone else target


def scores_of(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Callable[[Block], torch.Tensor]:
    """Block -> z [B, g] of a loaded scorer, with the target's tokenizer and end tokens."""
    sep = resolve_sep_token_id(tokenizer, read=model.reads_separator)
    return model.block_scores(sep_token_id=sep, pad_token_id=tokenizer.pad_token_id, end_ids=end_ids(ends))


def load_model(directory: str, device: str, dtype: str) -> torch.nn.Module:
    """A causal model for inference."""
    kind = torch_dtype_of(dtype, "--dtype")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=kind).to(device).eval()
