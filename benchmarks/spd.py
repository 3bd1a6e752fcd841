"""Cost of a scorer's training step: the n samples of a prompt sharing one forward, against every prompt repeated."""

import random
import tempfile

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaModel

from benchmarks.harness import Row, alternate, ratios, resident_bytes, restart_peak, row
from recipe.spd.scorer.bernoulli_policy import BernoulliPolicy
from spd_scorer import AutoModelForSPDScoring, ScoringActor, ScoringModelConfig, SPDInputData

PROMPTS, N, GAMMA, VOCABULARY = 32, 8, 8, 512
PAD_ID, SEP_ID, FIRST_WORD = 0, 3, 5
REPETITIONS = 5


def model_config() -> LlamaConfig:
    """4 layers of width 256."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512,
    )


def scorer() -> ScoringActor:
    """An `own` scorer with a random backbone."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        LlamaModel(model_config()).save_pretrained(directory)
        return AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=directory, backbone="own"))


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Ids of words, no special tokens."""
    return [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]


def contexts(rng: random.Random) -> list[list[int]]:
    """32 contexts; draft, target with its bonus token and 3 separators make inputs of 160 to 192 tokens of them."""
    lengths = [rng.randrange(160, 193) - 2 * GAMMA - 4 for _ in range(PROMPTS)]
    return [random_ids(rng, length) for length in lengths]


def prompts() -> TensorDict:
    """32 random blocks as the policy reads them."""
    rng = random.Random(0)
    texts = contexts(rng)
    data = SPDInputData.from_blocks(
        texts, [random_ids(rng, GAMMA) for _ in texts], [random_ids(rng, GAMMA + 1) for _ in texts],
        sep_token_id=SEP_ID, pad_token_id=PAD_ID,
    )
    batch = TensorDict(data.as_kwargs(), batch_size=PROMPTS)
    batch["group_index"] = torch.arange(PROMPTS)
    return batch


def step(model: ScoringActor, batch: TensorDict, share: bool, advantages: torch.Tensor) -> None:
    """Forward, sampling, old log-probs and backward of one step; advantages [B*n]."""
    policy = BernoulliPolicy(share=share)
    rows = batch[torch.arange(PROMPTS).repeat_interleave(N)]
    with torch.no_grad():
        z = policy.scores(model, batch if share else rows)
        z = z.repeat_interleave(N, 0) if share else z
        draws = torch.rand(z.shape, generator=torch.Generator().manual_seed(1))
        rows["responses"] = (draws < torch.sigmoid(z)).long()
        old, _ = policy.log_probs(model, rows, temperature=1.0, with_entropy=False)
    new, _ = policy.log_probs(model, rows, temperature=1.0, with_entropy=False)
    loss = -(torch.exp(new - old) * advantages[:, None]).mean()
    loss.backward()


class Variant:
    """The step and its update one way; remembers each run's peak memory, and the clipped gradients of the last.

    With a learning rate of 0 the update costs what it costs, and every run meets the same weights.
    """

    def __init__(self, model: ScoringActor, batch: TensorDict, share: bool, advantages: torch.Tensor):
        self.arguments = (model, batch, share, advantages)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.0)
        self.peaks: list[int] = []  # bytes above what the process held before the step
        self.gradients: list[torch.Tensor] = []

    def __call__(self) -> None:
        before = resident_bytes()
        step(*self.arguments)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.peaks.append(resident_bytes(peak=True) - before)
        self.gradients = [p.grad for p in self.weights if p.grad is not None]


def run() -> list[Row]:
    """Time and peak memory of both ways, their ratios, and the largest relative difference of their gradients."""
    model, batch = scorer(), prompts()
    advantages = torch.randn(PROMPTS * N, generator=torch.Generator().manual_seed(2))
    ways = {name: Variant(model, batch, name == "shared", advantages) for name in ("repeated", "shared")}

    def rest() -> None:
        model.zero_grad()  # new gradients count in the peak, and do not add up
        restart_peak()

    seconds = alternate(ways, REPETITIONS, rest)
    repeated, shared = ways["repeated"], ways["shared"]
    apart = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
                for a, b in zip(shared.gradients, repeated.gradients, strict=True))
    mib = {name: [peak / 2**20 for peak in way.peaks[1:]] for name, way in ways.items()}  # without the untimed round
    return [
        row("spd_step_speedup", ratios(seconds["repeated"], seconds["shared"]), "times, repeated / shared"),
        row("spd_step_shared", seconds["shared"], "s"),
        row("spd_step_repeated", seconds["repeated"], "s"),
        row("spd_step_gradient_difference", [apart], "relative"),
        row("spd_step_memory_ratio", ratios(mib["repeated"], mib["shared"]), "times, repeated / shared"),
        row("spd_step_memory_shared", mib["shared"], "MiB, peak"),
        row("spd_step_memory_repeated", mib["repeated"], "MiB, peak"),
    ]
