"""Further rounds: the same text as a loop of plain forwards, and the same number of forwards on every rank."""

import torch

from recipe.spd.rollout.rounds import FurtherRounds
from tests.spd.test_decode import noisy_copy, ragged_prompts, tiny_llama

SEP, EOS, GAMMA = 3, 7, 4


def parity_scores(blocks) -> torch.Tensor:
    """z > 0 where draft and target ids differ by an even number: a decision that depends on the block only."""
    rows = []
    for ids, (_, _, draft, length, target) in zip(blocks.input_ids.tolist(), blocks.spd_layout.tolist(), strict=True):
        pairs = zip(ids[draft : draft + length], ids[target : target + length], strict=True)
        rows.append([1.0 if (d - t) % 2 == 0 else -1.0 for d, t in pairs])
    width = max(map(len, rows))
    return torch.tensor([row + [50.0] * (width - len(row)) for row in rows])


def argmax_after(model, ids: list[int]) -> int:
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def plainly(target, draft, context: list[int], blocks: int) -> tuple[tuple[int, ...], bool]:
    """The same blocks one token at a time, each by a forward over the whole text."""
    written: list[int] = []
    for _ in range(blocks):
        drafted: list[int] = []
        for _ in range(GAMMA):
            drafted.append(argmax_after(draft, [*context, *written, *drafted]))
        taken: list[int] = []
        for d in [*drafted, None]:
            wanted = argmax_after(target, [*context, *written, *taken])
            accept = d is not None and (d == wanted or (d - wanted) % 2 == 0)
            taken.append(d if accept else wanted)
            if taken[-1] == EOS:
                return (*written, *taken[:-1]), True
            if not accept:
                break
        written += taken
    return tuple(written), False


def further(target, draft, blocks: int, gather=lambda mine: [mine], size: int = 3) -> FurtherRounds:
    return FurtherRounds(
        target, draft, blocks=blocks, gamma=GAMMA, eos=frozenset([EOS]), sep_token_id=SEP, rows_per_forward=size,
        gather=gather,
    )  # fmt: skip


@torch.no_grad()
def test_further_rounds_equal_plain_forwards():
    target = tiny_llama(0)
    draft = noisy_copy(target, 0.08, 1)
    contexts = [tuple(ids) for ids in ragged_prompts(9)]
    added = further(target, draft, blocks=3).extend([*contexts, contexts[0]], parity_scores)
    assert set(added) == set(contexts)
    for context in contexts:
        assert added[context] == plainly(target, draft, list(context), 3)
    assert {ended for _, ended in added.values()} == {True, False}


def test_a_rank_with_fewer_blocks_takes_part_in_every_forward():
    target = tiny_llama(0)
    contexts = [tuple(ids) for ids in ragged_prompts(4)]
    shapes: list[int] = []

    def scores(blocks):
        shapes.append(len(blocks.input_ids))
        return parity_scores(blocks)

    # Another rank has 7 blocks each time: three forwards of up to three rows.
    asked = iter([1, 3, 3])  # by that rank: chunks, then forwards of each round
    rounds = further(target, target, blocks=2, gather=lambda mine: [mine, next(asked)])
    rounds.extend(contexts, scores)
    assert len(shapes) == 6
    shapes.clear()
    asked = iter([1, 3, 3])
    assert rounds.extend([], scores) == {} and shapes == [1] * 6


@torch.no_grad()
def test_chunks_change_nothing(monkeypatch):
    target = tiny_llama(0)
    contexts = [tuple(ids) for ids in ragged_prompts(9)]
    whole = further(target, noisy_copy(target, 0.08, 1), blocks=2).extend(contexts, parity_scores)
    monkeypatch.setattr("recipe.spd.rollout.rounds.ROWS_AT_A_TIME", 4)
    assert further(target, noisy_copy(target, 0.08, 1), blocks=2).extend(contexts, parity_scores) == whole
