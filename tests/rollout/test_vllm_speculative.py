"""Drafts in vLLM's rollout: samples keep the model's distribution; weights are handed over; draft models learn."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.helpers.engines import leave_group, rl_batch
from tests.rollout.test_vllm_rollout import Hybrid, difference
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.planning.rollouts import check_drafter
from verl.protocol import DataProto
from verl.rollout.vllm_rollout.drafter import Drafter
from verl.rollout.vllm_rollout.vllm_rollout import vLLMRollout

WORDS, LENGTH, PROMPT = 8, 3, (5, 6, 7, 5, 6, 7)
LEAST_EXPECTED = 5  # answers that are expected less often share a cell


def save_toy(folder, seed, change=0.0, tied=False):
    """A random model of 8 words with uneven probabilities, and heads of the width that vLLM has CPU kernels for.

    With `change`, a model that resembles it: that share of the weights' spread is added as noise.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        dtype="float32", tie_word_embeddings=tied,
    ))  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.add_(change * weight.std() * torch.randn_like(weight)).mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


def request(n, **meta):
    """The prompt, for n samples."""
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1},
        meta_info={"n": n, "eos_token_id": None, "pad_token_id": 0, "do_sample": True, "global_steps": 1} | meta,
    )


def answer_log_probs(engine, temperature):
    """[8^3, 3]: log-probs of the tokens of every answer, which are numbered in base 8."""
    answers = torch.cartesian_prod(*[torch.arange(WORDS)] * LENGTH)
    with torch.no_grad(), engine.eval_mode():
        rows = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], 1)
        logits = engine.module(input_ids=rows).logits[:, -LENGTH - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def numbers_of(responses):
    """Answers [N, 3] -> their numbers [N]."""
    return responses @ torch.tensor([WORDS**2, WORDS, 1])


def p_value(numbers, log_probs):
    """Of Pearson's chi-squared test that answers [N] have these log-probs [8^3, 3]."""
    expected = len(numbers) * log_probs.double().sum(-1).exp()
    seen = torch.bincount(numbers, minlength=len(expected)).double()
    common = expected >= LEAST_EXPECTED
    if not common.all():
        expected, seen = (torch.cat([part[common], part[~common].sum()[None]]) for part in (expected, seen))
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


def hybrid_of(folder, method, tied=False, **more):
    """A rollout with drafts of 2 tokens; the draft model is another model, with more rows if `method` is padded."""
    model, draft = save_toy(folder / "model", 0, tied=tied), None
    if method != "ngram":
        draft = save_toy(folder / "draft", 1, tied=tied)
    if method == "padded":
        pad(draft, 5)
        for path in (model, draft):
            words({f"w{i}": i for i in range(WORDS)}).save_pretrained(path)
    method = "draft_model" if method == "padded" else method
    settings = SpeculativeConfig(method=method, draft_path=draft, num_tokens=2, **more)
    made = Hybrid(model, {"speculative": settings, "response_length": LENGTH, "ignore_eos": True})
    made.draft = draft
    return made


def pad(path, rows):
    """Add rows to the embeddings of the model at `path`, whose logits are larger than those of tokens."""
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(model.config.vocab_size + rows, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[-rows:] = 3 * model.lm_head.weight[:rows]
    model.save_pretrained(path)


def words(vocabulary):
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w2")


def held_by_the_draft_model(hybrid):
    runner = hybrid.rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return dict(runner.drafter.model.named_parameters())


@pytest.mark.process
@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_model_that_is_trained_on_the_samples_is_accepted_more_often(tmp_path, tied):
    """First in this file: drafts by n-grams load numba, after which vLLM starts no other engine in the process."""
    hybrid = hybrid_of(tmp_path, "draft_model", tied, refresh_every=2, refresh_lr=3e-3)
    start = AutoModelForCausalLM.from_pretrained(hybrid.draft)
    accepted = []
    for step in range(4):
        output = hybrid.generate(request(600, temperature=0.7, global_steps=step))
        accepted.append(output.meta_info["metrics"]["rollout/draft_acceptance"][0])
        hybrid.generate(request(1, validate=True, do_sample=False), sync=False)  # not trained on
        trained, held = hybrid.rollout.drafter.model, held_by_the_draft_model(hybrid)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert torch.equal(held[name][:WORDS], trained.lm_head.weight)
        norm = "model.layers.1.input_layernorm.weight"  # matrices are in the kernels' own layout
        assert torch.equal(held[norm], trained.get_parameter(norm))
    assert p_value(numbers_of(output.batch["responses"]), answer_log_probs(hybrid.engine, 0.7)) > 1e-4
    assert (trained.lm_head.weight - start.lm_head.weight).abs().max() > 1e-3
    assert (1.2 if tied else 2) * max(accepted[:2]) < min(accepted[2:])  # tied models repeat their input: both alike
    assert sum(len(kept) for kept in hybrid.rollout.drafter.samples) == 1200
    hybrid.rollout.close()
    leave_group()


@pytest.fixture(scope="module", params=["draft_model", "padded", "ngram"])
def speculative(request, tmp_path_factory):
    with hybrid_of(tmp_path_factory.mktemp(request.param), request.param) as made:
        yield made


@pytest.mark.process
def test_answers_have_the_models_distribution_before_and_after_a_hand_over(speculative):
    temperature = 0.7
    batch = request(2000, temperature=temperature)
    for step in range(2):
        output = speculative.generate(batch)
        log_probs = answer_log_probs(speculative.engine, temperature)
        number = numbers_of(output.batch["responses"])
        assert (output.batch["rollout_log_probs"] - log_probs[number]).abs().max() < 1e-3
        assert p_value(number, log_probs) > 1e-4
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
    output = speculative.generate(request(1, validate=True, do_sample=False))
    with torch.no_grad(), speculative.engine.eval_mode():
        inputs = {key: output.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        best = speculative.engine.module(**inputs).logits.argmax(-1)[:, -LENGTH - 1 : -1]
    assert torch.equal(best, output.batch["responses"])
    if speculative.draft is not None:
        own = AutoModelForCausalLM.from_pretrained(speculative.draft).lm_head.weight
        assert torch.equal(held_by_the_draft_model(speculative)["lm_head.weight"][: len(own)], own)


def test_a_refresh_is_a_step_on_the_cross_entropy_of_the_sampled_tokens(tmp_path):
    path = save_toy(tmp_path, 1)
    drafter, data = Drafter(path, 1e-2, torch.device("cpu")), rl_batch(vocab=WORDS)
    with torch.no_grad():
        drafter.keep(data[:3])
        drafter.keep(data[3:])
        made = dict(drafter.refresh())
    assert drafter.samples == []
    model, columns = AutoModelForCausalLM.from_pretrained(path), data.batch
    inputs = {key: columns[key] for key in ("input_ids", "attention_mask", "position_ids")}
    log_probs = model(**inputs).logits[:, 3:-1].log_softmax(-1)
    chosen = log_probs.gather(-1, columns["responses"][..., None])[..., 0]
    (-chosen[columns["response_mask"].bool()].mean()).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(made[name], weight.detach(), rtol=1e-3, atol=1e-4)


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="refresh_every=3 needs rollout.speculative.method=draft_model, not ngram"):
        SpeculativeConfig(method="ngram", refresh_every=3)
    with pytest.raises(ValueError, match="method=ngram with rollout.speculative.draft_path=x"):
        SpeculativeConfig(method="ngram", draft_path="x")


def test_a_dry_run_reads_the_draft_models_vocabulary(tmp_path, tiny_llama):
    def problems(path, every=0, mode="async", sharing=1):
        drafts = {"method": "draft_model", "draft_path": str(path), "refresh_every": every}
        rollout = {"name": "vllm", "mode": mode, "speculative": drafts}
        section = {"rollout": rollout, "actor": {"ulysses_sequence_parallel_size": sharing}}
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        hf_config = LlamaConfig.from_pretrained(tiny_llama)
        findings = SimpleNamespace(hf_config=hf_config, tokenizer=tokenizer, to_start=False)
        return list(check_drafter(OmegaConf.create({"actor_rollout_ref": section}), findings))

    assert problems(tiny_llama) == []
    (served,) = problems(tiny_llama, every=5)
    assert "refresh_every=5 needs actor_rollout_ref.rollout.mode=sync, not async" in served.message
    (shared,) = problems(tiny_llama, every=5, mode="sync", sharing=2)
    assert "refresh_every does not work with actor_rollout_ref.actor.ulysses_sequence_parallel_size" in shared.message
    (missing,) = problems(tmp_path / "none")
    assert missing.kind == "absent" and "has no config.json that can be read" in missing.message
    (bare,) = problems(path := save_toy(tmp_path / "draft", 1))
    assert bare.kind == "wrong" and "vocabulary has 8 entries and the model's 64" in bare.message
    assert bare.message.endswith("Copy the tokenizer's files into its folder.")
    words({f"w{i}": i for i in range(WORDS)}).save_pretrained(path)
    (unlike,) = problems(path)
    assert unlike.kind == "wrong" and "draft_path=" in unlike.message and "another vocabulary" in unlike.message
    assert "speculative.method=ngram, without draft_path" in unlike.message
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(path)
    assert problems(path) == []  # the same tokens, in embeddings of other sizes


@pytest.mark.parametrize(("rows", "mapped"), [(0, False), (5, True)])
def test_vllm_compares_the_tokens_of_a_draft_model_that_is_padded_to_another_size(tmp_path, rows, mapped):
    model, draft = (save_toy(tmp_path / name, seed) for seed, name in enumerate(("model", "draft")))
    if rows:
        pad(draft, rows)
    settings = SpeculativeConfig(method="draft_model", draft_path=draft)
    rollout = vLLMRollout.__new__(vLLMRollout)
    rollout.config = RolloutConfig(name="vllm", speculative=settings)
    rollout.model_config = SimpleNamespace(local_path=model, trust_remote_code=False)
    given = {"load_format": "auto", "tensor_parallel_size": 1, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    drafts = rollout._speculative_arguments(given)["speculative_config"]
    assert drafts.pop("use_heterogeneous_vocab", False) is mapped
    assert drafts == {"method": "draft_model", "num_speculative_tokens": 4, "model": draft,
                      "draft_tensor_parallel_size": 1}  # fmt: skip
