"""Training of the target and the draft model of the test bed, in plain torch on a CPU."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor

from examples.muon import MuonWithAdamW
from examples.spd_arithmetic import corpus
from examples.spd_arithmetic.model import Shape, SmallLlama
from examples.spd_arithmetic.tokenizer import EOS, PAD_ID, Encoder

# Of the target: with more drills and Muon's default rate, more of its answers that begin in other wordings are wrong.
TARGET_DRILL_SHARE, TARGET_MUON_LR = 0.05, 0.012
DRILL_CALCULATIONS = 16
WARM_UP_STEPS = 60
DECAY_SHARE = 0.6
BUCKET_BATCHES = 8
SHARDS = 2
IGNORED = -100


@dataclass(frozen=True)
class TrainConfig:
    """Budget of one training, in steps: a budget in seconds would not be repeatable."""

    shape: Shape
    steps: int
    batch_size: int = 48
    muon_lr: float = 0.02
    adamw_lr: float = 2e-3
    clip: float = 1.0


Row = tuple[list[int], list[int]]
"""Ids of one training row, and its labels: the id where the token counts in the loss, else IGNORED."""


def target_row(rng: random.Random, encoder: Encoder, softness: float, draft_softness: float) -> Row:
    """An answer in a random style. The first token that differs from a slot's house wording counts in the loss with
    probability `draft_softness` if the wording is the draft's favourite, else `softness`; all other tokens count."""
    if rng.random() < TARGET_DRILL_SHARE:
        return drill_row(rng, encoder)
    problem = corpus.sample_problem(rng)
    slots, favourite = corpus.answer_slots(problem), corpus.draft_style(problem.item, house_share=0.0)
    favourites = {f"{slot.name}/{favourite(slot.name, len(slot.options))}" for slot in slots}
    words, leaves = corpus.render(slots, corpus.mixed_style(rng))
    counted = [not left or rng.random() < (draft_softness if left in favourites else softness) for left in leaves]
    return _answer_row(encoder, corpus.question_text(problem).split(), words, counted)


def draft_row(rng: random.Random, encoder: Encoder, house_share: float) -> Row:
    """An answer in the draft's style (corpus.draft_style); all its tokens count in the loss."""
    problem = corpus.sample_problem(rng)
    words, _ = corpus.render(corpus.answer_slots(problem), corpus.draft_style(problem.item, house_share))
    return _answer_row(encoder, corpus.question_text(problem).split(), words, [True] * len(words))


def drill_row(rng: random.Random, encoder: Encoder) -> Row:
    """Plain calculations; only the results count, since the operands are random."""
    words = corpus.drill(rng, DRILL_CALCULATIONS)
    ids = encoder.encode(words)
    return ids, [ids[i] if i and words[i - 1] == "=" else IGNORED for i in range(len(ids))]


def _answer_row(encoder: Encoder, question: list[str], answer: list[str], counted: list[bool]) -> Row:
    prompt, ids = encoder.encode(question), encoder.encode([*answer, EOS])
    labels = [token if count else IGNORED for token, count in zip(ids, [*counted, True], strict=True)]
    return prompt + ids, [IGNORED] * len(prompt) + labels


def batches(draw: Callable[[], Row], steps: int, batch_size: int, rng: random.Random
            ) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches of (ids [B, T], labels [B, T]), right-padded, rows of like length together."""
    done = 0
    while done < steps:
        rows = sorted((draw() for _ in range(batch_size * BUCKET_BATCHES)), key=lambda row: len(row[0]))
        chunks = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        rng.shuffle(chunks)
        for chunk in chunks[: steps - done]:
            done += 1
            width = max(len(ids) for ids, _ in chunk)
            yield (torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids, _ in chunk]),
                   torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in chunk]))


def one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; the next one is made in a thread while the caller works on this one."""
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, items, None)
            yield item


def train(config: TrainConfig, draw: Callable[[random.Random], Row], seed: int,
          on_step: Callable[[int, float], None] | None = None) -> SmallLlama:
    """Train from scratch: Muon for matrices, AdamW for the rest; the same seed gives the same weights."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a thread a shard: a second one under each would only wait in the way
    rng = random.Random(seed)
    model = SmallLlama(config.shape)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    data = batches(lambda: draw(rng), config.steps, config.batch_size, rng)
    with ThreadPoolExecutor(SHARDS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        named = model.named_parameters()
        optimizer = MuonWithAdamW(named, config.muon_lr, adamw_lr=config.adamw_lr, each=pool.map)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, config.steps)
        )
        for step, (ids, labels) in enumerate(one_ahead(data), start=1):
            loss = backward(model, ids, labels, pool)
            torch.nn.utils.clip_grad_norm_(model.others(), config.clip)
            optimizer.step()
            scheduler.step()
            if on_step is not None:
                on_step(step, loss)
    seconds = time.perf_counter() - begin
    logger.info("trained {} steps in {:.1f} s ({:.1f} s of CPU time), last loss {:.4f}", config.steps, seconds,
                time.process_time() - begin_cpu, loss)
    return model.eval()


def backward(model: SmallLlama, ids: Tensor, labels: Tensor, pool: ThreadPoolExecutor) -> float:
    """Set every gradient of the mean loss over a batch [B, T]; returns the loss.

    The batch is cut into SHARDS, a thread each, and their gradients are added in a fixed order: the result does not
    depend on timing, nor on the number of cores.
    """
    parameters = list(model.parameters())
    count = int((labels[:, 1:] != IGNORED).sum())

    def shard(rows: tuple[Tensor, Tensor]) -> tuple[float, tuple[Tensor, ...]]:
        width = int((rows[0] != PAD_ID).any(0).sum())
        loss = answer_loss(model, rows[0][:, :width], rows[1][:, :width]) / count
        return loss.item(), torch.autograd.grad(loss, parameters)

    parts = list(pool.map(shard, zip(ids.chunk(SHARDS), labels.chunk(SHARDS), strict=True)))
    for p, *gradients in zip(parameters, *(gradient for _, gradient in parts), strict=True):
        p.grad = sum(gradients[1:], start=gradients[0])
    return sum(loss for loss, _ in parts)


def answer_loss(model: SmallLlama, ids: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over the labels that count; ids and labels [B, T], label t is predicted at t - 1."""
    wanted = labels[:, 1:]
    at = wanted != IGNORED
    hidden = model.hidden(ids[:, :-1], at)  # [N, D]
    return F.cross_entropy(F.linear(hidden, model.embedding), wanted[at], reduction="sum")


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up, plateau, then linear decay to zero over the last DECAY_SHARE of the steps."""
    warm_up = min(1.0, (step + 1) / min(WARM_UP_STEPS, steps))
    return min(warm_up, (steps - step) / (DECAY_SHARE * steps))


def target_config(vocab: int, steps: int, muon_lr: float = TrainConfig.muon_lr) -> TrainConfig:
    """The target: 0.68 M parameters."""
    return TrainConfig(Shape(vocab, dim=128, layers=4, heads=4, ff=256), steps, muon_lr=muon_lr)


def draft_config(vocab: int, steps: int) -> TrainConfig:
    """The draft: 93 K parameters."""
    return TrainConfig(Shape(vocab, dim=64, layers=2, heads=2, ff=128), steps)
