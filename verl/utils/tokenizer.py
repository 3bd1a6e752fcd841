"""A model's tokenizer or processor: loading it, its end and special tokens, a check that two are the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from verl.utils.fs import copy_to_local

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Use the EOS token for padding when there is no pad token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has neither pad nor eos token; add one to tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info(f"tokenizer {tokenizer.name_or_path!r} has no pad token; padding with {tokenizer.eos_token!r}")


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """AutoTokenizer of a model folder or hub name. `correct_pad_token`: without a pad token, eos pads."""
    from transformers import AutoTokenizer

    if correct_gemma2 and isinstance(name_or_path, str) and "gemma-2-2b-it" in name_or_path:
        kwargs.setdefault("eos_token", "<end_of_turn>")  # this model's chat turns end there, not at its eos
        kwargs.setdefault("eos_token_id", 107)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def use_chat_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Replace the tokenizer's chat template, unless `given` is None, by that text or by that of a .jinja file."""
    if given is not None:
        tokenizer.chat_template = Path(given).read_text(encoding="utf-8") if given.endswith(".jinja") else given


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, model: str | None = None, given: Sequence[int] | None = None
) -> list[int]:
    """The ids that end an answer: `given` where it is not None, else the tokenizer's eos token and every eos_token_id
    of the model's generation_config.json (of its config.json where there is none), as in vLLM.

    `model`: folder, hub name or hdfs:// path; None takes that of the tokenizer.
    """
    if given is not None:
        return list(given)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    source = model or tokenizer.name_or_path
    of_model = _eos_ids(copy_to_local(source)) if source else ()
    return list(dict.fromkeys([*own, *of_model]))  # each once, in order


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All special tokens, with those that have no name such as eos_token: Gemma's <end_of_turn> and the like."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, draft_name: str) -> None:
    """Raise ValueError unless both tokenizers give each token the same id.

    Sizes of embeddings may differ, since they are padded, and so may the names of special tokens.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    special = {*target.added_tokens_decoder, *draft.added_tokens_decoder}
    in_one_alone = ours.items() ^ theirs.items()  # pairs of token and id
    if differing := sorted(token for token, number in in_one_alone if number not in special):
        token = differing[0]
        raise ValueError(
            f"{draft_name} has another vocabulary than the target ({len(theirs)} and {len(ours)} tokens; {token!r} is "
            f"id {theirs.get(token, 'none')} and {ours.get(token, 'none')}); take two models of one family."
        )


@functools.lru_cache(maxsize=16)
def _eos_ids(model: str) -> tuple[int, ...]:
    """Every eos_token_id of a folder's or hub model's generation_config.json; without that file, of its config.json."""
    from transformers import GenerationConfig, PretrainedConfig

    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        try:
            config = PretrainedConfig.get_config_dict(model)[0]
        except OSError:  # a folder with a tokenizer alone
            return ()
        ids = config.get("text_config", config).get("eos_token_id")
    return (ids,) if isinstance(ids, int) else tuple(ids or ())


def hf_processor(name_or_path: str, **kwargs: Any) -> ProcessorMixin | None:
    """AutoProcessor of a multi-modal model; None for a text model."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    folder = Path(name_or_path)
    files = ("processor_config.json", "preprocessor_config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in files):
        return None
    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def policy_tokenizer(config: Any) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    """Tokenizer, with the configured chat template, and processor (None for text) of an RL run's policy."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(model.get("tokenizer_path") or model.path)
    trust = {"trust_remote_code": config.data.get("trust_remote_code", model.get("trust_remote_code", False))}
    tokenizer = hf_tokenizer(path, **trust)
    use_chat_template(tokenizer, model.get("custom_chat_template"))
    return tokenizer, hf_processor(path, **trust)
