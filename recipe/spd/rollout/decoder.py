"""Batched speculative decoding in which a judge decides on every mismatch between draft and target.

It works for Hugging Face causal models that share a tokenizer and have full attention; sliding windows are allowed
where no row exceeds one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from recipe.spd.data.blocks import Block, Judge
from recipe.spd.rollout.hybrid import effective_lengths
from recipe.spd.scorer.masks import refuse_other_attention
from recipe.spd.scorer.token_tree import TREE_ROWS, TokenTree, alike
from verl.models.grouped_attention import grouped_queries
from verl.models.kv_cache import Prefills, RowCache, drop_rows, last_columns

FROM_TARGET, FROM_MATCH, FROM_MISMATCH = 0, 1, 2


@dataclass
class Sampling:
    """Draft and target sample at a temperature, from one stream of random numbers.

    The target keeps a draft token d with probability min(1, p(d) / q(d)) and otherwise draws from the normalised excess
    of p over q (Leviathan et al. 2023); a mismatch is a draft token that it would replace. A judge that rejects all of
    them samples exactly as the target alone.
    """

    temperature: float
    generator: torch.Generator

    @classmethod
    def seeded(cls, temperature: float, seed: int, device: torch.device | str) -> Sampling | None:
        """None at temperature 0: greedy decoding."""
        if temperature < 0:
            raise ValueError(f"temperature={temperature} is below 0")
        return cls(temperature, torch.Generator(device).manual_seed(seed)) if temperature else None

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Softmax of logits [..., V] at the temperature; same shape."""
        return (logits / self.temperature).softmax(-1)

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor:
        """One id, int64 [...], drawn from unnormalised weights [..., V]."""
        flat = probabilities.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def choices(self, draft_ids: torch.Tensor, draft_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The target's tokens, int64 [B, g + 1], for a draft [B, g] with draft_logits [B, g, V] and the target's logits
        [B, g + 1, V]; where rejection sampling keeps the draft's token they equal it.
        """
        p, count = self.probabilities(logits), draft_ids.shape[1]
        q, p_draft = self.probabilities(draft_logits), p[:, :count]  # [B, g, V]: where the draft has tokens
        q_of_token, p_of_token = (x.gather(-1, draft_ids[..., None])[..., 0] for x in (q, p_draft))  # [B, g]
        kept = torch.rand(draft_ids.shape, generator=self.generator, device=q.device) * q_of_token < p_of_token
        excess = (p_draft - q).clamp(min=0)
        excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, p_draft)  # no excess: p = q, the token is kept
        drawn = self.draw(torch.cat([excess, p[:, count:]], dim=1))
        return torch.cat([torch.where(kept, draft_ids, drawn[:, :count]), drawn[:, count:]], dim=1)


@dataclass
class SpecResult:
    """One entry per prompt in every list; `tokens` exclude the prompt and include the end token."""

    tokens: list[list[int]]
    origin: list[list[int]]  # of each token: FROM_TARGET, FROM_MATCH or FROM_MISMATCH (an accepted mismatch)
    rounds: list[int]  # target forwards
    accepted: list[int]  # draft tokens in `tokens`
    judged_mismatches: list[int]  # mismatches up to and including the first rejection of each block
    accepted_mismatches: list[int]
    finished: list[bool]  # True: ended by the end token; False: cut at max_new_tokens
    seconds: float = 0.0

    @classmethod
    def empty(cls, questions: int) -> SpecResult:
        counts = ([0] * questions for _ in range(4))
        return cls([[] for _ in range(questions)], [[] for _ in range(questions)], *counts, [False] * questions)


@dataclass
class _Rows:
    """The rows still running: row k of each cache and tensor belongs to prompt `question[k]`."""

    question: torch.Tensor  # [B] int64
    previous: torch.Tensor  # [B] the committed token before `last`; `last` itself where it is the only one
    last: torch.Tensor  # [B] the last committed token, not yet in any cache
    length: torch.Tensor  # [B] committed tokens, prompt included
    vocabulary: int  # V
    caches: list[RowCache] = field(default_factory=list)  # the target's and, with a draft, the draft's
    copied_seconds: float = 0.0  # that an earlier call took to read the prompts, if `caches` were copied from it

    def advance(self, block: Block, accepted: torch.Tensor, done: Sequence[bool]) -> None:
        """Move past the committed tokens, `accepted` [B] drafted ones and the target's next; drop the rows `done`."""
        fed = torch.cat([self.last[:, None], block.draft_ids], dim=1)  # [B, g + 1]
        self.previous = fed.gather(1, accepted[:, None]).flatten()
        self.last = block.target_ids.gather(1, accepted[:, None]).flatten()
        self.length = self.length + accepted + 1
        order = drop_rows(done, self.caches)
        if len(order) < len(done):
            for name in ("question", "previous", "last", "length"):
                setattr(self, name, getattr(self, name)[order])


def speculative_generate(
    target: nn.Module, draft: nn.Module, prompts: Sequence[Sequence[int]], judge: Judge, *, gamma: int = 8,
    max_new_tokens: int, eos_token_id: int | Sequence[int] | None, batch_size: int = 256,
    on_block: Callable[[Block, torch.Tensor], None] | None = None, max_rounds: int | None = None,
    temperature: float = 0.0, seed: int = 0, target_first: bool = False, prefills: Prefills | None = None,
) -> SpecResult:  # fmt: skip
    """Continue every prompt in rounds: draft proposes gamma tokens, target verifies them in one forward, judge decides.

    Both models are greedy at temperature 0. Each round commits the leading accepted draft tokens and the target's
    token after them. A row ends with its first committed end token, at `max_new_tokens` or after `max_rounds`; the
    rest of its block is dropped, also from the counts. `on_block(block, accepted)` gets every block with its
    leading accepts [B] int64 (before such a cut). With `target_first` the first round has no draft, as in vLLM,
    whose prefill gives a token of the target. Calls on the same prompts that share `prefills` read them once.
    Raises ValueError for empty prompts, prompts too long for the models, a temperature below 0, or gamma or
    max_new_tokens below 1, TypeError for a judge that returns anything but bool [B, g].
    """
    _check_prompts(prompts, gamma, max_new_tokens)
    return _generate(
        [target, draft], prompts, judge, gamma=gamma, ends=end_ids(eos_token_id), batch_size=batch_size,
        on_block=on_block, max_new_tokens=max_new_tokens, max_rounds=max_rounds, target_first=target_first,
        sampling=Sampling.seeded(temperature, seed, target.device), prefills=prefills,
    )  # fmt: skip


def greedy_generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None, batch_size: int = 256, temperature: float = 0.0, seed: int = 0,
    prefills: Prefills | None = None,
) -> SpecResult:  # fmt: skip
    """Continue every prompt (ragged lists of ids) with the model's greedy tokens, sampled ones above temperature 0, one
    forward each; `prefills` as in speculative_generate. Raises ValueError for an empty prompt, one that is too long for
    the model, or a temperature below 0.
    """
    _check_prompts(prompts, 1, max_new_tokens)
    return _generate(
        [model], prompts, lambda block: block.mismatch, gamma=0, ends=end_ids(eos_token_id), batch_size=batch_size,
        max_new_tokens=max_new_tokens, sampling=Sampling.seeded(temperature, seed, model.device), prefills=prefills,
    )  # fmt: skip


def _generate(
    models: Sequence[nn.Module], prompts: Sequence[Sequence[int]], judge: Judge, *, gamma: int, ends: frozenset[int],
    batch_size: int, max_new_tokens: int, sampling: Sampling | None, prefills: Prefills | None,
    on_block: Callable[[Block, torch.Tensor], None] | None = None, max_rounds: int | None = None,
    target_first: bool = False,
) -> SpecResult:  # fmt: skip
    """`speculative_generate` with models = (target, draft); (target,) with gamma 0 decodes token by token."""
    target, draft = models[0], models[-1]  # without a draft gamma is 0, and draft is not called
    result = SpecResult.empty(len(prompts))
    started = time.perf_counter()
    with _inference(*models):
        for first in range(0, len(prompts), batch_size):
            chunk = range(len(prompts))[first : first + batch_size]
            contexts = {k: list(prompts[k]) for k in sorted(chunk, key=lambda k: -len(prompts[k]))}  # see RowCache.read
            rows = _start(models, contexts, max_new_tokens, gamma, prefills)
            started -= rows.copied_seconds  # calls that share prefills are compared: each pays for the reading
            rounds = 0
            while rows.question.numel() and rounds != max_rounds:
                drafted = 0 if target_first and not rounds else gamma
                draft_ids, draft_logits = _propose(draft, rows, drafted, sampling)
                block = _verify(target, rows, contexts, draft_ids, draft_logits, sampling)
                verdict = judge(block) if drafted else block.mismatch
                if verdict.dtype != torch.bool or verdict.shape != block.draft_ids.shape:
                    raise TypeError(
                        f"the judge returned {verdict.dtype} of shape {tuple(verdict.shape)}; expected torch.bool of "
                        f"shape {tuple(block.draft_ids.shape)}, True = accept"
                    )
                accepted = effective_lengths(verdict | ~block.mismatch)
                if on_block is not None:
                    on_block(block, accepted)
                rows.advance(block, accepted, _commit(block, accepted, contexts, result, max_new_tokens, ends))
                rounds += 1
    result.seconds = time.perf_counter() - started
    return result


def replay_blocks(
    target: nn.Module, draft: nn.Module, context_ids: Sequence[Sequence[int]], draft_ids: Sequence[Sequence[int]], *,
    batch_size: int = TREE_ROWS,
) -> Iterator[Block]:  # fmt: skip
    """Recompute recorded blocks for a judge: yields Blocks whose `rows` are indices into the given lists.

    The target's tokens are computed by these models, not taken from the record. Drafts of one length come together, and
    blocks that begin alike: each model reads what `batch_size` of them have in common once.
    """
    _check_prompts(context_ids, 1, 1)
    by_length: dict[int, list[int]] = {}
    for index, tokens in enumerate(draft_ids):
        by_length.setdefault(len(tokens), []).append(index)
    for length, indices in sorted(by_length.items()):
        if length == 0:
            raise ValueError(f"draft_ids[{indices[0]}] is empty; a block needs at least one drafted token")
        texts = [[*context_ids[k], *draft_ids[k]] for k in indices]
        for similar in alike(texts, batch_size):
            rows, tree = [indices[i] for i in similar], TokenTree([texts[i] for i in similar])
            # [B, g + 1]: where the tree has the last token of each context and the drafted ones.
            places = torch.stack([path[-length - 1 :] for path in tree.paths]).to(target.device)
            with _inference(target, draft):
                draft_logits, _ = tree.outputs(draft, places)
                target_logits, layers = tree.outputs(target, places)
            size = min(draft_logits.shape[-1], target_logits.shape[-1])
            drafted, target_ids = tree.ids.to(target.device)[places[:, 1:]], target_logits[..., :size].argmax(-1)
            yield Block(
                context_ids=[list(context_ids[k]) for k in rows], draft_ids=drafted, target_ids=target_ids,
                target_logits=target_logits[..., :size], draft_logits=draft_logits[:, :-1, :size], target_layers=layers,
                mismatch=drafted != target_ids[:, :-1], rows=torch.tensor(rows, device=target.device),
            )  # fmt: skip


def _start(
    models: Sequence[nn.Module], contexts: dict[int, list[int]], new_tokens: int, spare: int,
    prefills: Prefills | None,
) -> _Rows:  # fmt: skip
    """Prefill every context without its last token into one cache per model.

    Reserves slots for `new_tokens` committed tokens and `spare` ones of a draft that exceeds them.
    """
    device = models[0].device
    lengths = [len(tokens) for tokens in contexts.values()]
    rows = _Rows(
        question=torch.tensor(list(contexts), device=device),
        previous=torch.tensor([tokens[-2:][0] for tokens in contexts.values()], device=device),
        last=torch.tensor([tokens[-1] for tokens in contexts.values()], device=device),
        length=torch.tensor(lengths, device=device),
        vocabulary=min(model.config.get_text_config().vocab_size for model in models),
    )
    # Right padding fills slots after each row's end, which are masked until a real token overwrites them.
    read = [length - 1 for length in lengths]
    width = max(read)
    padded = torch.tensor([(tokens[:-1] + [0] * width)[:width] for tokens in contexts.values()], device=device)
    for model in models:
        limit = model.config.get_text_config().max_position_embeddings
        if max(lengths) + new_tokens > limit:
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and {new_tokens} new ones do not fit into the {limit} positions of "
                f"{type(model).__name__}; shorten the prompt or lower max_new_tokens, in training spd.rollout.rounds"
            )
        refuse_other_attention(model, max(lengths) + new_tokens)
        layers = model.config.get_text_config().num_hidden_layers
        cache = RowCache(len(lengths), max(lengths) + new_tokens + spare, layers)
        if width and prefills is not None:
            rows.copied_seconds += prefills.fill(model, padded, cache, read)
        elif width:
            cache.read(model, padded, read)
        rows.caches.append(cache)
    return rows


def _propose(draft: nn.Module, rows: _Rows, gamma: int, sampling: Sampling | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's `gamma` tokens [B, gamma] and their logits [B, gamma, V], one forward each."""
    # The draft has not read the last token of a fully accepted block: feeding the last two tokens covers every row.
    tokens = torch.stack([rows.previous, rows.last], dim=1)
    positions = torch.stack([rows.length - 2, rows.length - 1], dim=1).clamp_(min=0)
    draft_ids = [tokens[:, :0]]  # for gamma 0: [B, 0]
    draft_logits = torch.empty(len(tokens), gamma, rows.vocabulary, device=tokens.device)
    for step in range(gamma):
        logits = draft_logits[:, step : step + 1]  # a view
        logits.copy_(_forward(draft, rows.caches[1], tokens, positions, keep=1)[0][..., : rows.vocabulary])
        draft_ids.append(sampling.draw(sampling.probabilities(logits)) if sampling else logits.argmax(-1))
        tokens, positions = draft_ids[-1], rows.length[:, None] + step
    return torch.cat(draft_ids, dim=1), draft_logits


def _verify(
    target: nn.Module, rows: _Rows, contexts: dict[int, list[int]], draft_ids: torch.Tensor, draft_logits: torch.Tensor,
    sampling: Sampling | None,
) -> Block:  # fmt: skip
    """The target's one forward over a drafted block: draft_ids [B, g], draft_logits [B, g, V]."""
    tokens = torch.cat([rows.last[:, None], draft_ids], dim=1)  # [B, g + 1], the last committed token first
    positions = (rows.length - 1)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    logits, layers = _forward(target, rows.caches[0], tokens, positions, with_hidden=True)
    logits = logits[..., : rows.vocabulary].float()
    target_ids = sampling.choices(draft_ids, draft_logits, logits) if sampling else logits.argmax(-1)
    return Block(
        context_ids=[list(contexts[question]) for question in rows.question.tolist()], draft_ids=draft_ids,
        target_ids=target_ids, target_logits=logits, draft_logits=draft_logits, target_layers=layers,
        mismatch=draft_ids != target_ids[:, :-1], rows=rows.question.clone(),
    )  # fmt: skip


def _forward(
    model: nn.Module, cache: RowCache, tokens: torch.Tensor, positions: torch.Tensor, *, keep: int | None = None,
    with_hidden: bool = False,
) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:  # fmt: skip
    """Run tokens [B, q] at positions [B, q] with the model's cache. Returns its logits [B, q, its own V], of the
    last `keep` tokens alone if that is given, and the hidden states, each [B, q, H], or None.
    """
    mask = cache.announce(positions, model.dtype)
    # A draft may exceed the last position that can be committed; tokens there are dropped, so any position id will do.
    limit = model.config.get_text_config().max_position_embeddings - 1
    output = model(
        input_ids=tokens, attention_mask=mask, position_ids=positions.clamp(max=limit), past_key_values=cache,
        use_cache=True, output_hidden_states=with_hidden,
        logits_to_keep=last_columns(tokens, tokens.shape[1] if keep is None else keep),
    )  # fmt: skip
    return output.logits, output.hidden_states if with_hidden else None


def _commit(
    block: Block, accepted: torch.Tensor, contexts: dict[int, list[int]], result: SpecResult, max_new_tokens: int,
    ends: frozenset[int],
) -> list[bool]:  # fmt: skip
    """Write each row's leading accepts [B] and the target's next token, up to the first end token or the limit, into
    the result and the contexts; returns which rows are done.
    """
    done = []
    columns = (block.rows, accepted, block.draft_ids, block.target_ids, block.mismatch)
    for question, count, drafted, chosen, mismatch in zip(*(column.tolist() for column in columns), strict=True):
        tokens = [*drafted[:count], chosen[count]]
        origin = [FROM_MISMATCH if wrong else FROM_MATCH for wrong in mismatch[:count]] + [FROM_TARGET]
        kept = min(len(tokens), max_new_tokens - len(result.tokens[question]))
        end = next((i for i, token in enumerate(tokens[:kept]) if token in ends), None)
        if end is not None:
            kept = end + 1
            result.finished[question] = True
        passed = origin[:kept].count(FROM_MISMATCH)
        rejected = kept == count + 1 and count < len(drafted)  # the block was not cut before its rejected token
        result.tokens[question].extend(tokens[:kept])
        result.origin[question].extend(origin[:kept])
        result.rounds[question] += 1
        result.accepted[question] += min(kept, count)
        result.accepted_mismatches[question] += passed
        result.judged_mismatches[question] += passed + rejected
        contexts[question].extend(tokens[:kept])
        done.append(result.finished[question] or len(result.tokens[question]) >= max_new_tokens)
    return done


def _check_prompts(prompts: Sequence[Sequence[int]], gamma: int, max_new_tokens: int) -> None:
    if gamma < 1 or max_new_tokens < 1:
        raise ValueError(f"gamma={gamma} and max_new_tokens={max_new_tokens} must both be at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token, for example the bos token")


def end_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """The end tokens as a set, from one id, several, or None."""
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())


@contextmanager
def _inference(*models: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; each model's training flag is restored afterwards."""
    with ExitStack() as stack:
        for model in models:
            stack.callback(model.train, model.training)
            stack.enter_context(grouped_queries(model))
            model.eval()
        # Not inference_mode: a judge's caller may train on the tensors of a recorded block.
        stack.enter_context(torch.no_grad())
        yield
