"""A judged block as readable pieces of text, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipe.spd.hybrid import Hybrid


def spd_segments(
    tokenizer: Any, draft_ids: Sequence[int], target_ids: Sequence[int], actions: Sequence[int], hybrid: Hybrid,
    completion: Sequence[int],
) -> list[dict[str, str]]:  # fmt: skip
    """{text, kind} of each draft token (match, accepted, rejected, unused), then what the target wrote after it.

    A mismatch shows the target's own choice beside the draft's.
    """
    drafted = tokenizer.convert_ids_to_tokens(list(draft_ids))
    wanted = tokenizer.convert_ids_to_tokens(list(target_ids))
    segments = []
    for i, word in enumerate(drafted):
        if i >= hybrid.reached:
            segments.append({"text": word, "kind": "unused"})
        elif draft_ids[i] == target_ids[i]:
            segments.append({"text": word, "kind": "match"})
        else:
            segments.append({"text": f"{word}≠{wanted[i]}", "kind": "accepted" if actions[i] else "rejected"})
    correction = hybrid.tokens[hybrid.effective_len :]
    if correction:
        segments.append({"text": tokenizer.convert_ids_to_tokens(list(correction))[0], "kind": "correction"})
    if completion:
        segments.append({"text": tokenizer.decode(list(completion), skip_special_tokens=True), "kind": "completion"})
    return segments
