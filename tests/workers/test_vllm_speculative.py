"""Drafts in vLLM's rollout: samples keep the model's distribution, weights are handed over, the draft model's stay."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.engines import leave_group, rl_batch
from tests.helpers.models import save_tiny_llama
from tests.workers.test_vllm_rollout import Hybrid, difference, prompts
from verl.config.rollout import SpeculativeConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout import check_drafter

WORDS, LENGTH = 8, 3  # so that all answers can be enumerated


def save(folder, seed):
    """A model of 8 words with uneven probabilities."""
    path = save_tiny_llama(folder, vocab_size=WORDS, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["draft_model", "ngram"])
def speculative(request, tmp_path_factory):
    """A rollout with drafts of 2 tokens; the draft model is another model."""
    folder = tmp_path_factory.mktemp(request.param)
    draft = save(folder / "draft", 1) if request.param == "draft_model" else None
    settings = SpeculativeConfig(method=request.param, draft_path=draft, num_tokens=2)
    made = Hybrid(save(folder / "model", 0), {"speculative": settings, "response_length": LENGTH, "ignore_eos": True})
    made.draft = draft
    yield made
    made.rollout.close()
    leave_group()


def asked(**meta):
    batch = prompts(eos_token_id=None, **meta)[:1]
    batch.batch["input_ids"] = torch.tensor([[5, 6, 7, 5, 6, 7]])
    return batch


def exact(hybrid, prompt, temperature):
    """log-probs [8^3, 3] of the tokens of every answer, numbered in base 8."""
    answers = torch.cartesian_prod(*[torch.arange(WORDS)] * LENGTH)
    with torch.no_grad(), hybrid.engine.eval_mode():
        rows = torch.cat([prompt.expand(len(answers), -1), answers], 1)
        logits = hybrid.engine.module(input_ids=rows).logits[:, -LENGTH - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


@pytest.mark.process
def test_answers_have_the_models_distribution_before_and_after_a_hand_over(speculative):
    n, temperature = 2000, 0.7
    batch = asked(n=n, temperature=temperature)
    for step in range(2):
        output = speculative.generate(batch)
        log_probs = exact(speculative, batch.batch["input_ids"], temperature)
        number = output.batch["responses"] @ torch.tensor([WORDS**2, WORDS, 1])
        assert (output.batch["rollout_log_probs"] - log_probs[number]).abs().max() < 1e-3
        expected, seen = n * log_probs.sum(-1).exp(), torch.bincount(number, minlength=WORDS**LENGTH)
        common = expected >= 5
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        seen = torch.cat([seen[common], seen[~common].sum()[None]])
        cells = len(expected) - 1
        assert cells > 20
        assert ((seen - expected) ** 2 / expected).sum() < cells + 4 * (2 * cells) ** 0.5
        metrics = output.meta_info["metrics"]
        assert 0 < metrics["rollout/draft_acceptance"][0] < 1
        assert 1 < metrics["rollout/tokens_per_forward"][0] < 3
        update = rl_batch(seed=step, vocab=WORDS)
        update.pop(["old_log_probs"])  # those of another model, which would all be clipped
        speculative.actor.update_policy(update)
        batch.meta_info["global_steps"] = step + 2
    assert difference(output, speculative.log_probs(output, temperature)) > 1e-2  # the last update has not been sent


@pytest.mark.process
def test_greedy_answers_are_those_without_drafts_and_the_draft_model_keeps_its_weights(speculative):
    output = speculative.generate(asked(n=1, validate=True, do_sample=False))
    with torch.no_grad(), speculative.engine.eval_mode():
        inputs = {key: output.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        best = speculative.engine.module(**inputs).logits.argmax(-1)[:, -LENGTH - 1 : -1]
    assert torch.equal(best, output.batch["responses"])
    if speculative.draft is not None:
        runner = speculative.rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        held = dict(runner.drafter.model.named_parameters())["lm_head.weight"][:WORDS]
        assert torch.equal(held, AutoModelForCausalLM.from_pretrained(speculative.draft).lm_head.weight)


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="draft_model needs the folder of a draft model"):
        SpeculativeConfig(method="draft_model")
    with pytest.raises(ValueError, match="method=ngram with rollout.speculative.draft_path=x"):
        SpeculativeConfig(method="ngram", draft_path="x")


def test_a_dry_run_reads_the_draft_models_vocabulary(tmp_path, tiny_llama):
    def problems(path):
        rollout = {"name": "vllm", "speculative": {"method": "draft_model", "draft_path": str(path)}}
        findings = SimpleNamespace(hf_config=AutoConfig.from_pretrained(tiny_llama), to_start=False)
        return list(check_drafter(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), findings))

    assert problems(tiny_llama) == []
    (missing,) = problems(tmp_path / "none")
    assert missing.kind == "absent" and "has no config.json that can be read" in missing.message
    (unlike,) = problems(save(tmp_path / "draft", 1))
    assert unlike.kind == "wrong" and "has 8 tokens in its vocabulary, the model 64" in unlike.message
