"""What is computed of each family, against plain forwards of one row without padding."""

import json
from pathlib import Path

import peft
import torch
from loguru import logger
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.engines import FakeEngine, make_engine
from tests.models.families import FAMILIES, model_of
from verl.model_merger.__main__ import main as merge
from verl.protocol import DataProto
from verl.rollout.hf_rollout import HFRollout
from verl.training.checkpoint import CheckpointWriter
from verl.training.peft_weights import without_adapters
from verl.training.policy import get_policy
from verl.workers.config import RolloutConfig

TABLE = Path(__file__).with_name("table.json")
WORKS, UNSHARED, PADDED, REFUSED = "works", "works without shared prompts", "works with padding", "refused"
STOPS = "stops at the start"
LIMIT = 1e-3  # of differences between log-probs in float32
PROMPTS, ANSWERS = (11, 5), ((12, 7), (3, 9))  # tokens; two answers to each prompt


def batch() -> TensorDict:
    """Four rows [4, 11 + 12] in two groups, left-padded prompts and right-padded answers."""
    generator, width = torch.Generator().manual_seed(0), max(PROMPTS)
    ids, mask = torch.zeros(4, width + 12, dtype=torch.int64), torch.zeros(4, width + 12, dtype=torch.int64)
    for group, (prompt, answers) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        shared = torch.randint(3, 96, (prompt,), generator=generator)
        for row, answer in enumerate(answers, 2 * group):
            ids[row, width - prompt : width] = shared
            ids[row, width : width + answer] = torch.randint(3, 96, (answer,), generator=generator)
            mask[row, width - prompt : width + answer] = 1
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    columns |= {"responses": ids[:, width:], "group_index": torch.tensor([0, 0, 1, 1])}
    return TensorDict(columns, batch_size=4)


@torch.no_grad()
def plain_log_probs(model: nn.Module, rows: TensorDict) -> torch.Tensor:
    """[B, R]: each row alone, in the family's own attention with soft caps."""
    inner, (count, length) = without_adapters(model), rows["responses"].shape
    before = inner.config._attn_implementation
    if getattr(inner.config, "attn_logit_softcapping", None):
        inner.set_attn_implementation("eager")
    result = torch.zeros(count, length)
    for row in range(count):
        kept = rows["attention_mask"][row].bool()
        own, answers = rows["input_ids"][row][kept], int(kept[-length:].sum())
        logits = model(input_ids=own[None], use_cache=False).logits[0, -answers - 1 : -1].float()
        result[row, :answers] = logits.log_softmax(-1).gather(-1, own[-answers:, None])[:, 0]
    inner.set_attn_implementation(before)
    return result


def layouts(model: nn.Module) -> str:
    """How the default layout, flat rows with shared prompts, ends; AssertionError if log-probs are wrong in silence."""
    rows, policy, warned = batch(), get_policy("causal_lm"), []
    expected = plain_log_probs(model, rows)
    policy.set_forward(remove_padding=True, share_prompt=True)
    sink = logger.add(warned.append, level="WARNING", format="{message}")
    policy.bind(model)
    try:
        policy.compare_layouts(model, torch.device("cpu"))
    except ValueError as error:
        assert "does not leave padding out" in str(error), error
        return REFUSED
    finally:
        logger.remove(sink)
    chosen, results = policy.remove_padding, []
    for flat, share in {(chosen, policy.share_prompt), (chosen, False), (False, False)}:
        policy.remove_padding, policy.share_prompt = flat, share
        log_probs, _ = policy.log_probs(model, rows, temperature=1.0, with_entropy=False)
        difference = (log_probs - expected).abs().max().item()
        assert difference < LIMIT, f"flat={flat}, shared={share}: log-probs differ by {difference:.2g}"
        model.zero_grad()
        log_probs.sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item() + 1e-5)
    assert len(results) == 3 or warned, "another layout than the default is used, and nothing says so"
    return WORKS if len(results) == 3 else UNSHARED if chosen else PADDED


def with_adapters(model: PreTrainedModel) -> nn.Module:
    """LoRA, with weights that change the output, in all linear layers but routers of experts, some of which give
    tuples, and the last ones of Mamba's mixers, which peft refuses."""
    settings = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=r".*\.(router|out_proj)")
    adapted = peft.get_peft_model(model, settings)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return adapted


def rollout(model: PreTrainedModel) -> str:
    """Whether rollout.name=hf draws with the log-probs of a plain forward, for rows of uneven lengths."""
    config = RolloutConfig(name="hf", mode="sync", prompt_length=11, response_length=8, calculate_log_probs=True)
    made = HFRollout(config, model_config=None, device_mesh=None)
    made.bind_actor(FakeEngine(model), policy=None)
    rows, width = batch()[::2], max(PROMPTS)
    prompts = {key: rows[key][:, :width] for key in ("input_ids", "attention_mask", "position_ids")}
    meta = {"n": 3, "eos_token_id": list(range(3, 20)), "pad_token_id": 0, "do_sample": True, "global_steps": 1}
    try:
        out = made.generate_sequences(DataProto.from_dict(tensors=prompts, meta_info=meta)).batch
    except ValueError as error:
        assert "rollout.name" in str(error), error
        return REFUSED
    lengths = out["response_mask"].sum(1)
    assert lengths.min() < lengths.max(), "no row left the batch before another"
    difference = (plain_log_probs(model, out) - out["rollout_log_probs"] * out["response_mask"]).abs().max().item()
    assert difference < LIMIT, f"log-probs of the rollout differ by {difference:.2g}"
    return WORKS


@torch.no_grad()
def merged_logits(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of an engine, and of its checkpoint, merged and loaded by plain transformers, at tokens [N, V]."""
    model_of(name).save_pretrained(folder / "model")
    engine, rows = make_engine(str(folder / "model")), batch()
    inputs = {key: rows[key] for key in ("input_ids", "attention_mask", "position_ids")}
    with engine.eval_mode():
        expected = engine.module(**inputs, use_cache=False).logits[rows["attention_mask"].bool()]
    with CheckpointWriter(folder / "run", 1) as writer:
        engine.save_checkpoint(str(writer.path / "actor"), global_step=1)
    saved, target = folder / "run/global_step_1/actor", folder / "merged"
    assert merge(["merge", "--backend", "fsdp", "--local_dir", str(saved), "--target_dir", str(target)]) == 0
    again = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return expected, again(**inputs, use_cache=False).logits[rows["attention_mask"].bool()]


def observed(name: str) -> dict[str, str]:
    """The row of the table for a family."""
    return {
        "has": FAMILIES[name][2],
        "flat rows": layouts(model_of(name)),
        "LoRA": layouts(with_adapters(model_of(name))),
        "rollout hf": rollout(model_of(name)),
    }


def stored() -> dict[str, dict[str, str]]:
    return json.loads(TABLE.read_text())
