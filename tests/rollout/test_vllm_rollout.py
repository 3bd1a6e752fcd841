"""vLLM in this process against the trained model: the same log-probs after every hand-over of weights."""

import ast
import asyncio
import importlib.util
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from tests.helpers.engines import leave_group, left_padded, make_actor, make_engine, rl_batch
from tests.helpers.logs import logged
from tests.helpers.models import save_tiny_llama
from tests.models.families import model_of
from verl.config.rollout import SamplingConfig, SpeculativeConfig
from verl.protocol import DataProto
from verl.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.rollout import get_rollout_class
from verl.rollout.replica import ServerClient
from verl.rollout.sampling import GenerationRequest
from verl.rollout.vllm_rollout import vLLMRollout
from verl.rollout.vllm_rollout.vllm_rollout import HARMLESS, TIED_HEAD
from verl.training.policy import get_policy
from verl.workers.config import RolloutConfig

PAD, EOS, P, R = 0, 2, 6, 8


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory):
    """A model with more words (96) than its tokenizer knows (64)."""
    return save_tiny_llama(tmp_path_factory.mktemp("wide"), vocab_size=96)


class Hybrid:
    """An actor's engine with a vLLM of its weights, as a rank has them."""

    def __init__(self, path, rollout=None, mode="sync", **model):
        self.engine = make_engine(path, lr=3e-2, **model)
        self.actor = make_actor(self.engine)
        settings = {"name": "vllm", "prompt_length": P, "response_length": R, "dtype": "float32", "max_num_seqs": 32,
                    "calculate_log_probs": True, "max_model_len": 400,
                    "max_num_batched_tokens": 400, "disable_log_stats": False, **(rollout or {})}  # fmt: skip
        config = RolloutConfig(**settings, val_kwargs=SamplingConfig(temperature=0, do_sample=False))
        self.rollout = get_rollout_class("vllm", mode)(config, self.engine.model_config, self.engine.mesh)
        self.policy = get_policy("causal_lm")

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.rollout.close()
        leave_group()

    def generate(self, prompts, sync=True):
        if sync:
            self.rollout.resume(["weights"])
            if self.rollout.config.lora_as_adapter:
                adapter, tensors = self.engine.get_adapter(check_finite=True)
                self.rollout.update_weights(tensors.items(), peft_config=adapter)
            else:
                self.rollout.update_weights(self.engine.get_per_tensor_param())
            self.rollout.resume(["kv_cache"])
        output = self.rollout.generate_sequences(prompts)
        self.rollout.release()
        return output

    def log_probs(self, output, temperature):
        with torch.no_grad(), self.engine.eval_mode():
            batch = output.batch
            return self.policy.log_probs(self.engine.module, batch, temperature=temperature, with_entropy=False)[0]

    def sample_with(self, **settings):
        for name, value in settings.items():
            object.__setattr__(self.rollout.config, name, value)


@pytest.mark.process
@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_a_tied_head_computes_with_every_update_and_with_weights_from_disk(tmp_path, load_format):
    start, other = (save_tiny_llama(tmp_path / f"{seed}", vocab_size=96, tied=True, seed=seed) for seed in (0, 1))
    with Hybrid(start, {"load_format": load_format}, "async") as made:
        for step in range(2):
            made.actor.update_policy(rl_batch(seed=step))
            output = made.generate(prompts(global_steps=step))
            assert difference(output, made.log_probs(output, 1.0)) < 1e-5
        made.rollout.resume(["weights", "kv_cache"])
        made.rollout.read_weights(other)
        output = made.rollout.generate_sequences(prompts())
        inputs = {key: output.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(other)(**inputs).logits[:, P - 1 : -1]
        read = logits.log_softmax(-1).gather(-1, output.batch["responses"].unsqueeze(-1)).squeeze(-1)
        assert difference(output, read) < 1e-5


@pytest.mark.process
def test_experts_compute_with_every_update(tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path)
    with Hybrid(str(tmp_path), {"max_model_len": 64, "max_num_batched_tokens": 64}) as made:
        for step in range(2):
            made.actor.update_policy(rl_batch(seed=step))
            output = made.generate(prompts(global_steps=step))
            assert difference(output, made.log_probs(output, 1.0)) < 1e-4


@pytest.fixture(scope="module")
def hybrid(wide_llama):
    with logged("INFO") as lines, Hybrid(wide_llama) as made:
        made.log_lines = list(lines)
        with pytest.raises(RuntimeError, match="update_weights before generate_sequences"):
            made.rollout.generate_sequences(prompts())  # before the first hand-over, whichever test runs first
        yield made


def prompts(n=4, seed=0, lengths=(6, 3, 1), **meta):
    return left_padded(lengths, P, seed, **{"n": n, "temperature": 1.0, **meta})


def difference(output, log_probs):
    mask = output.batch["response_mask"].bool()
    return (output.batch["rollout_log_probs"] - log_probs)[mask].abs().mean().item()


@pytest.mark.process
def test_a_hand_over_that_breaks_off_leaves_an_engine_that_does_not_answer(hybrid):
    def torn():
        yield next(iter(hybrid.engine.get_per_tensor_param()))
        raise FloatingPointError("a weight is not finite")

    hybrid.generate(prompts())
    with pytest.raises(FloatingPointError):
        hybrid.rollout.update_weights(torn())
    with pytest.raises(RuntimeError, match="update_weights before generate_sequences"):
        hybrid.generate(prompts(), sync=False)
    output = hybrid.generate(prompts())
    assert difference(output, hybrid.log_probs(output, 1.0)) < 1e-4


def test_weights_of_a_start_do_not_serve_an_actor():
    loaded = object.__new__(vLLMRollout)  # as after load_format=auto
    loaded.has_weights = True
    native = SimpleNamespace(using_transformers_backend=lambda: False)
    loaded.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=native))
    loaded.bind_actor(None, None)
    with pytest.raises(RuntimeError, match="not given the actor's weights since it started or slept"):
        loaded.generate_sequences(prompts())


@pytest.mark.parametrize(("name", "text"), [*HARMLESS, TIED_HEAD])
def test_a_silenced_warning_is_in_the_library(name, text):
    package, *modules = name.split(".")
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    source = ast.parse(Path(folder, *modules).with_suffix(".py").read_text())
    texts = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    formatted = re.sub(r"torch\.b?float\d+", "%s", text)  # types are arguments of the message
    assert any(text[text.find(": Failed") :] in t if ": Failed" in text else formatted in t for t in texts)


@pytest.mark.process
def test_only_warnings_are_silenced(hybrid):
    name, text = HARMLESS[0]
    kept = [
        bool(logging.getLogger(name).filter(logging.makeLogRecord({"msg": said, "levelno": level})))
        for said, level in ((text, logging.WARNING), (text, logging.ERROR), ("another", logging.WARNING))
    ]
    assert kept == [False, True, True]


@pytest.mark.process
def test_log_probs_agree_after_every_update_in_between(hybrid):
    versions = []
    for step in range(3):
        output = hybrid.generate(prompts(global_steps=step))
        mask = output.batch["response_mask"]
        assert mask.sum() > 40 and output.batch["responses"].max() >= 64  # words beyond the tokenizer are drawn too
        assert difference(output, hybrid.log_probs(output, 1.0)) < 1e-4
        versions.append(output.batch["rollout_log_probs"])
        hybrid.actor.update_policy(rl_batch(seed=step))
    stale = hybrid.generate(prompts(global_steps=9), sync=False)
    assert difference(stale, hybrid.log_probs(stale, 1.0)) > 1e-2  # without a hand-over the comparison fails


@pytest.mark.process
def test_with_filters_the_rollout_says_what_it_drew_from(hybrid):
    # Compared with: the trained model's distribution at this temperature, cut to the allowed words, norm restored.
    hybrid.sample_with(top_k=5, top_p=0.6)
    try:
        output = hybrid.generate(prompts(temperature=0.7))
    finally:
        hybrid.sample_with(top_k=-1, top_p=1.0)
    batch = output.batch
    with torch.no_grad(), hybrid.engine.eval_mode():
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        logits = hybrid.engine.module(**inputs).logits[:, P - 1 : -1].float() / 0.7
    ordered, words = logits.sort(-1, descending=True)
    ordered[..., 5:] = -torch.inf
    probs = ordered.softmax(-1)
    ordered[probs.cumsum(-1) - probs >= 0.6] = -torch.inf
    allowed = torch.full_like(logits, -torch.inf).scatter(-1, words, ordered).log_softmax(-1)
    drawn = allowed.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    assert difference(output, drawn) < 1e-4


@pytest.mark.process
def test_rows_end_at_the_end_token_and_are_padded(hybrid):
    output = hybrid.generate(prompts(n=16, global_steps=3, eos_token_id=[EOS, 7, 8, 9, 10, 11, 12]))
    ids, mask = output.batch["responses"], output.batch["response_mask"]
    ends = torch.isin(ids, torch.tensor([EOS, 7, 8, 9, 10, 11, 12])) & mask.bool()
    assert ends.any() and (mask.sum(-1) < R).any()
    for row, kept, end in zip(ids, mask, ends, strict=True):
        length = int(end.float().argmax()) + 1 if end.any() else R
        assert kept.tolist() == [1] * length + [0] * (R - length) and (row[length:] == PAD).all()
    assert torch.equal(output.batch["attention_mask"][:, P:], mask)
    assert (output.batch["rollout_log_probs"][mask == 0] == 0).all()


@pytest.mark.process
def test_seeds_make_samples_repeatable_and_different(hybrid):
    first = hybrid.generate(prompts()).batch["responses"]
    again = hybrid.generate(prompts()).batch["responses"]
    other = hybrid.generate(prompts(global_steps=2)).batch["responses"]
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row) for row in first[:4].tolist()}) == 4
    alone = hybrid.generate(prompts().select_idxs(np.array([1]))).batch["responses"]
    assert torch.equal(alone, first[4:8])  # no other row decides what a prompt's samples are


def outputs_of(hybrid, batch, n):
    """vLLM's own outputs for a batch."""
    asked = DataProto(batch.batch, {}, {**batch.meta_info, "n": n})
    return list(hybrid.rollout._generate(GenerationRequest.from_batch(asked, hybrid.rollout.config)).values())


@pytest.mark.process
def test_more_prompts_than_one_pass_can_read_keep_their_seeds(hybrid):
    # One pass of the engine holds 400 tokens: two prompts of 150 and a half.
    long = left_padded([150] * 6, 150, seed=3, temperature=1.0)
    together = [output.outputs[0].token_ids for output in outputs_of(hybrid, long, 1)]
    alone = [outputs_of(hybrid, long.select_idxs(np.array([i])), 1)[0].outputs[0].token_ids for i in range(6)]
    assert together == alone


@pytest.mark.process
def test_ignored_end_tokens_end_nothing(hybrid):
    ended = hybrid.generate(prompts(n=64))
    assert ended.batch["response_mask"].sum() < 3 * 64 * R  # one of 96 words is the end token
    hybrid.sample_with(ignore_eos=True)
    try:
        whole = hybrid.generate(prompts(n=64))
    finally:
        hybrid.sample_with(ignore_eos=False)
    assert (whole.batch["response_mask"] == 1).all() and (whole.batch["responses"] == EOS).any()


@pytest.mark.process
def test_greedy_validation_follows_the_argmax(hybrid):
    output = hybrid.generate(prompts(n=1, validate=True, do_sample=False))
    ids, mask = output.batch["input_ids"], output.batch["attention_mask"]
    with torch.no_grad(), hybrid.engine.eval_mode():
        inputs = {key: output.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        best = hybrid.engine.module(**inputs).logits.argmax(-1)[:, P - 1 : -1]
    kept = mask[:, P:].bool()
    assert torch.equal(best[kept], ids[:, P:][kept])


def counted(hybrid):
    """(tokens looked up in the prefix cache, tokens hit) since the engine started."""
    values = {metric.name: metric.value for metric in hybrid.rollout.llm.get_metrics() if hasattr(metric, "value")}
    return np.array([values[f"vllm:prefix_cache_{what}"] for what in ("queries", "hits")])


@pytest.mark.process
def test_samples_of_a_prompt_share_its_cache(hybrid):
    hybrid.rollout.update_weights(hybrid.engine.get_per_tensor_param())
    block = hybrid.rollout.llm.llm_engine.vllm_config.cache_config.block_size
    long = left_padded([390], 390, temperature=1.0)
    before = counted(hybrid)
    assert len(outputs_of(hybrid, long, 3)[0].outputs) == 3
    # The first sample reads the prompt; the other two find all its whole blocks, within this one request.
    assert (counted(hybrid) - before).tolist() == [3 * 390, 2 * (389 // block * block)]
    (again,) = outputs_of(hybrid, long, 1)
    assert again.num_cached_tokens == 389 // block * block > 0
    hybrid.rollout.update_weights(hybrid.engine.get_per_tensor_param())
    (fresh,) = outputs_of(hybrid, long, 1)
    assert not fresh.num_cached_tokens  # other weights: nothing of the cache holds


@pytest.mark.process
@pytest.mark.parametrize("alone", [False, True])
def test_adapters_are_merged_or_sent_alone(wide_llama, alone):
    with Hybrid(wide_llama, {"lora_as_adapter": alone}, "async", lora_rank=4, lora_alpha=16) as made:
        for step in range(2):
            output = made.generate(prompts(global_steps=step))
            assert difference(output, made.log_probs(output, 1.0)) < 1e-4
            made.actor.update_policy(rl_batch(seed=step))
        with made.engine.disable_adapter():
            assert difference(output, made.log_probs(output, 1.0)) > 1e-4
        output = made.generate(prompts(n=1, do_sample=False, validate=True))
        row, mask = output.batch["input_ids"][0], output.batch["attention_mask"][0].bool()
        ids = row[:P][mask[:P]].tolist()
        greedy = {"temperature": 0.0, "max_tokens": R, "stop_token_ids": [EOS]}
        made.rollout.resume(["weights", "kv_cache"])
        served = asyncio.run(ServerClient(made.rollout.server_handle).generate("a", ids, greedy, False))
        assert served.token_ids == row[P:][mask[P:]].tolist()


class RecordingLLM:
    """Stands for vLLM on a GPU: records its calls, in order."""

    def __init__(self):
        self.calls, self.llm_engine = [], self

    def wake_up(self, tags):
        self.calls.append(("wake", *tags))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def collective_rpc(self, method, kwargs):
        self.calls.append((method, [name for name, _ in kwargs["weights_iterator"]]))

    def add_lora(self, request):
        self.calls.append(("add_lora", request.lora_name))
        return True

    def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))
        return True


@pytest.mark.parametrize(("adapter_rank", "draft_path", "update", "level"), [
    (0, None, ("reload_weights", ["w"]), 2), (8, None, ("add_lora", "actor"), 1),
    (0, "draft", ("reload_weights", ["w"]), 1),
], ids=["weights", "adapter", "draft model"])  # fmt: skip
def test_weights_wake_and_are_replaced_before_the_cache_wakes(adapter_rank, draft_path, update, level):
    """On GPUs: the cache has no memory while weights are gathered, and holds nothing that old weights computed."""
    rollout = vLLMRollout.__new__(vLLMRollout)
    speculative = {"method": "draft_model", "draft_path": draft_path} if draft_path else {}
    config = RolloutConfig(name="vllm", speculative=SpeculativeConfig(**speculative), verify_weights_every=0)
    rollout.__dict__.update(config=config, llm=RecordingLLM(), can_sleep=True, keeps_weights=False, drafter=None,
                            adapter_rank=adapter_rank, takes_adapters=adapter_rank > 0)  # fmt: skip
    weights, saved = {"w": torch.zeros(1)}, SimpleNamespace(save_pretrained=lambda folder: None)
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    engine = SimpleNamespace(eval_mode=nullcontext, has_adapters=adapter_rank > 0,
                             get_adapter=lambda check_finite: (saved, weights),
                             get_per_tensor_param=lambda *_, check_finite: iter(weights.items()))  # fmt: skip
    worker.__dict__.update(rollout=rollout, engine=engine, weights_version=1, rollout_version=None, syncs=0,
                           config=OmegaConf.create({"rollout": dict(config)}))  # fmt: skip
    cycle = [("wake", "weights"), update, ("reset_prefix_cache",), ("wake", "kv_cache"), ("reset_prefix_cache",),
             ("sleep", level)]  # fmt: skip
    for _ in range(2):  # a sleeping engine lost the actor's weights, whatever their version
        assert worker.rollout_mode()
        assert rollout.has_weights
        worker.trainer_mode()
        assert not rollout.has_weights and rollout.llm.calls == cycle
        rollout.llm.calls.clear()


def test_an_adapter_alone_needs_a_model_that_trains_nothing_else(wide_llama):
    engine = make_engine(wide_llama)
    with pytest.raises(ValueError, match="lora_as_adapter=true, but the model has no adapter of its own"):
        engine.get_adapter()
    leave_group()


def test_experts_and_quantization_reach_the_engine(wide_llama, monkeypatch):
    given = {}

    def start(arguments, on_cuda):
        given.update(arguments)
        raise InterruptedError

    monkeypatch.setattr("verl.rollout.vllm_rollout.vllm_rollout.start_engine", start)
    engine = make_engine(wide_llama)
    for experts in (1, 2):
        config = RolloutConfig(name="vllm", quantization="torchao", quantization_config_file="q.json",
                               data_parallel_size=2, expert_parallel_size=experts)  # fmt: skip
        with pytest.raises(InterruptedError):
            get_rollout_class("vllm", "sync")(config, engine.model_config, engine.mesh)
        assert given["enable_expert_parallel"] == (experts == 2)
    assert given["hf_overrides"] == {"quantization_config_file": "q.json"}
    leave_group()


@pytest.mark.process  # vLLM reads the model's class in a process of its own
def test_a_model_that_vllm_runs_with_its_transformers_backend_is_refused_next_to_an_actor(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    rollouts = {}
    for name in ("Llama", "OLMo 2"):
        model_of(name).save_pretrained(tmp_path / name)
        model = EngineArgs(model=str(tmp_path / name), skip_tokenizer_init=True).create_model_config()
        rollouts[name] = object.__new__(vLLMRollout)
        rollouts[name].llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model))
    rollouts["Llama"].bind_actor(None, None)
    with pytest.raises(ValueError, match=r"Olmo2ForCausalLM.*Transformers backend.*rollout\.name=hf"):
        rollouts["OLMo 2"].bind_actor(None, None)


def test_an_unknown_engine_option_is_named(wide_llama):
    engine = make_engine(wide_llama)
    config = RolloutConfig(name="vllm", engine_kwargs={"vllm": {"swap_spaec": 1}})
    with pytest.raises(ValueError, match="engine_kwargs.vllm has swap_spaec"):
        get_rollout_class("vllm", "sync")(config, engine.model_config, engine.mesh)
