"""Faults that are put into the weights of rollouts: each is reported with the name of the tensor."""

import json

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group, make_actor, make_engine, rl_batch
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from tests.models.families import IN_VLLM, model_of
from tests.rollout.test_vllm_rollout import Hybrid, prompts
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.rollout.sglang_rollout import held_weights
from verl.rollout.weight_check import WeightCheck, WeightMismatchError, compare_modules, digest
from verl.trainer.ppo.rollout_check import RolloutCheck
from verl.utils.fsdp_utils import full_tensor
from verl.workers.config import RolloutConfig

LAYER = "model.layers.0"
SHORT = {"max_model_len": 64, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module", params=["tied", "untied"])
def hybrid(request, tmp_path_factory):
    path = save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=96, tied=request.param == "tied")
    made = Hybrid(path, SHORT)
    made.is_tied = request.param == "tied"
    yield made
    made.rollout.close()
    leave_group()


def weights(hybrid):
    return hybrid.engine.get_per_tensor_param()


def checked(hybrid):
    return hybrid.rollout.verify_weights(hybrid.engine, weights(hybrid))


def names(check):
    return [said.split()[0] for said in check.differences]


@pytest.mark.process
def test_everything_that_was_sent_is_compared(hybrid):
    for step in range(2):
        hybrid.rollout.update_weights(weights(hybrid))
        check = checked(hybrid)
        sent = [name for name, _ in weights(hybrid)]
        assert (check.equal, check.unread, check.differences) == (len(sent), [], [])
        hybrid.actor.update_policy(rl_batch(seed=step))


def changed(hybrid, name, change):
    """The weights with one of them changed."""
    for own, tensor in weights(hybrid):
        yield own, change(tensor.clone()) if own == name else tensor


def one_entry(tensor):
    tensor.view(-1)[-1] += 1e-3
    return tensor


FAULTS = {
    "stale": (f"{LAYER}.self_attn.q_proj.weight", lambda t: t * 1.01),
    "one entry": (f"{LAYER}.self_attn.v_proj.weight", one_entry),
    "transposed": (f"{LAYER}.self_attn.o_proj.weight", lambda t: t.T),
    "rows swapped": (f"{LAYER}.mlp.up_proj.weight", lambda t: t.flip(0)),
    "scale missed": (f"{LAYER}.mlp.down_proj.weight", lambda t: t / 2),
    "norm": (f"{LAYER}.input_layernorm.weight", lambda t: t + 0.1),
    "embedding": ("model.embed_tokens.weight", lambda t: t * 1.01),
}


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tensor_is_named(hybrid, fault):
    name, change = FAULTS[fault]
    hybrid.rollout.update_weights(changed(hybrid, name, change))
    check = checked(hybrid)
    assert names(check) == [name]
    with pytest.raises(WeightMismatchError, match=f"1 of {check.equal + 1} compared tensors.*{name} "):
        check.raise_if_different("vllm")


@pytest.mark.process
def test_a_wide_matrix_is_compared_in_parts_and_as_a_whole(hybrid, monkeypatch):
    """With 16 columns at a time: the entry is detected by the sum, or bit for bit when its columns are read."""
    monkeypatch.setattr("verl.rollout.vllm_rollout.held_weights.COLUMNS_AT_ONCE", 16)
    name = f"{LAYER}.mlp.gate_proj.weight"
    hybrid.rollout.update_weights(changed(hybrid, name, one_entry))
    said = []
    for _ in range(4):  # 64 columns
        check = checked(hybrid)
        assert names(check) == [name]
        said += check.differences
    assert sum("entries" in text for text in said) == 1 and sum("rows" in text for text in said) == 3


@pytest.mark.process
def test_weights_of_the_step_before_are_other_weights(hybrid):
    hybrid.rollout.update_weights(weights(hybrid))
    hybrid.actor.update_policy(rl_batch(seed=9))
    check = checked(hybrid)
    assert check.equal == 0 and len(check.differences) == len(list(weights(hybrid)))
    with pytest.raises(WeightMismatchError, match=f"and {len(check.differences) - 5} more"):
        check.raise_if_different("vllm")


@pytest.mark.process
def test_a_tensor_that_was_not_sent_is_named(hybrid):
    hybrid.rollout.update_weights(weights(hybrid))
    left = ((name, tensor) for name, tensor in weights(hybrid) if "v_proj" not in name)
    check = hybrid.rollout.verify_weights(hybrid.engine, left)
    assert check.differences == [f"model.layers.{i}.self_attn.v_proj.weight was not sent" for i in range(2)]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "Phi-3", "StableLM", "GLM-4", "Mamba 2", "gpt-oss", "Llama 4", "Mixtral"])
def test_what_vllm_stores_in_another_way_is_no_difference(tmp_path, name):
    model_of(name, **IN_VLLM.get(name, {})).save_pretrained(tmp_path)
    made = Hybrid(str(tmp_path), SHORT)
    made.actor.update_policy(rl_batch())
    made.rollout.update_weights(weights(made))
    check = checked(made)
    assert not check.differences and check.equal > 10
    made.rollout.close()
    leave_group()


@pytest.mark.process
def test_a_packed_head_that_keeps_its_weights_is_seen(hybrid, monkeypatch):
    from verl.rollout.vllm_rollout.platform_worker import PlatformWorker

    monkeypatch.setattr(PlatformWorker, "_pack_again", staticmethod(lambda model: None))
    hybrid.actor.update_policy(rl_batch(seed=3))
    hybrid.rollout.update_weights(weights(hybrid))
    said = checked(hybrid).differences
    # A head with weights of its own is packed by the reload.
    assert [text.split(" in ")[0] for text in said] == ["model.embed_tokens.weight as packed differs"] * hybrid.is_tied


def log_prob_check():
    types = ("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=fp32")
    return RolloutCheck(compose_ppo("trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", *types))


def compare_log_probs(hybrid, asked):
    """What a run does with a probe; RuntimeError if log-probs differ."""
    samples = hybrid.rollout.generate_sequences(asked)
    samples.batch["old_log_probs"] = hybrid.log_probs(samples, 1.0)
    log_prob_check().compare(samples)


@pytest.mark.process
def test_a_stale_derived_buffer_is_seen_by_its_log_probs(hybrid):
    model = hybrid.rollout.llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    (rotary,) = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}.values()
    hybrid.rollout.update_weights(weights(hybrid))
    compare_log_probs(hybrid, prompts())
    right = rotary.cos_sin_cache.clone()
    rotary.cos_sin_cache.copy_(right.roll(3, 0))
    try:
        assert not checked(hybrid).differences
        with pytest.raises(RuntimeError, match="do not give the trainer's log-probs"):
            compare_log_probs(hybrid, prompts(global_steps=2))
    finally:
        rotary.cos_sin_cache.copy_(right)


@pytest.mark.process
def test_a_prefix_cache_of_other_weights_is_seen_by_its_log_probs(hybrid, monkeypatch):
    ids = torch.randint(5, 60, (3, 40), generator=torch.Generator().manual_seed(1))  # a block has 32 tokens
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
    asked = DataProto.from_dict(columns, meta_info=prompts().meta_info)
    hybrid.rollout.update_weights(weights(hybrid))
    monkeypatch.setattr("tests.rollout.test_vllm_rollout.P", 40)
    monkeypatch.setattr(hybrid, "log_probs", lambda samples, _: log_probs_of(hybrid, samples))
    compare_log_probs(hybrid, asked)
    hybrid.actor.update_policy(rl_batch(seed=4))
    monkeypatch.setattr(hybrid.rollout, "forget_prefixes", lambda: None)
    hybrid.rollout.update_weights(weights(hybrid))
    assert not checked(hybrid).differences
    with pytest.raises(RuntimeError, match="do not give the trainer's log-probs"):
        compare_log_probs(hybrid, asked)
    monkeypatch.undo()
    hybrid.rollout.forget_prefixes()


def log_probs_of(hybrid, samples):
    with torch.no_grad(), hybrid.engine.eval_mode():
        forward = hybrid.policy.log_probs
        return forward(hybrid.engine.module, samples.batch, temperature=1.0, with_entropy=False)[0]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    path = save_tiny_llama(tmp_path_factory.mktemp("adapted"), vocab_size=96)
    made = Hybrid(path, {"lora_as_adapter": True, **SHORT}, lora_rank=4, lora_alpha=16)
    for layer in made.engine.module.modules():
        if hasattr(layer, "lora_B"):
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    yield made
    made.rollout.close()
    leave_group()


def send(hybrid, scale=1.0, without="nothing"):
    adapter, tensors = hybrid.engine.get_adapter()
    sent = {k: v * (scale if "lora_B" in k else 1.0) for k, v in tensors.items() if without not in k}
    hybrid.rollout.update_weights(sent.items(), peft_config=adapter)
    return hybrid.rollout.verify_weights(hybrid.engine, tensors.items(), peft_config=adapter)


@pytest.mark.process
def test_an_adapter_in_the_engine_is_compared_with_the_trained_one(adapted):
    check = send(adapted)
    assert (check.equal, check.unread, check.differences) == (len(adapted.engine.get_adapter()[1]), [], [])
    scaled = send(adapted, scale=1 / 4)  # alpha / rank
    assert scaled.differences and all("lora_B" in said for said in scaled.differences)
    dropped = send(adapted, without="v_proj")
    assert len(dropped.differences) == 4 and all("v_proj" in said for said in dropped.differences)
    send(adapted)
    adapter, tensors = adapted.engine.get_adapter()
    left = ((name, tensor) for name, tensor in tensors.items() if "layers.1.mlp.down_proj" not in name)
    (said,) = adapted.rollout.verify_weights(adapted.engine, left, peft_config=adapter).differences
    assert "down_proj" in said and "not sent" in said
    adapted.rollout.adapter = None
    assert "is not applied to requests" in check_again(adapted).differences[-1]


def check_again(hybrid):
    adapter, tensors = hybrid.engine.get_adapter()
    return hybrid.rollout.verify_weights(hybrid.engine, tensors.items(), peft_config=adapter)


@pytest.mark.process
def test_an_adapter_that_is_not_loaded_ends_the_run(adapted, monkeypatch):
    monkeypatch.setattr(adapted.rollout.llm.llm_engine, "add_lora", lambda request: False)
    with pytest.raises(RuntimeError, match="did not load the LoRA adapter.*lora_as_adapter=false"):
        send(adapted)
    monkeypatch.undo()
    send(adapted)
    adapted.rollout.llm.llm_engine.remove_lora(1)
    assert check_again(adapted).differences == ["the adapter is not loaded"]


@pytest.mark.process
def test_an_adapter_that_is_not_merged_is_seen(tmp_path):
    made = Hybrid(save_tiny_llama(tmp_path / "m", vocab_size=96), SHORT, lora_rank=4, lora_alpha=16)
    made.actor.update_policy(rl_batch())
    with made.engine.disable_adapter():
        base = {name: tensor.clone() for name, tensor in make_engine_weights(made)}
    made.rollout.update_weights(base.items())
    held = names(checked(made))
    assert f"{LAYER}.self_attn.q_proj.weight" in held and "model.norm.weight" not in held
    made.rollout.close()
    leave_group()


def make_engine_weights(hybrid):
    """The base model's weights, without the adapter."""
    for name, tensor in hybrid.engine.module.named_parameters():
        if ".lora_" not in name:
            yield name.replace("base_model.model.", "").replace(".base_layer", ""), full_tensor(tensor)


def on_two_ranks(rank, ranks, path):
    from tests.rollout.test_vllm_rollout import P, R
    from verl.rollout.vllm_rollout.held_weights import parts_of

    engine = make_engine(path)
    config = RolloutConfig(name="vllm", prompt_length=P, response_length=R, dtype="float32", max_num_seqs=16,
                           max_num_batched_tokens=64, max_model_len=32, tensor_model_parallel_size=2)  # fmt: skip
    rollout = get_rollout_class("vllm", "sync")(config, engine.model_config, engine.mesh)
    rollout.update_weights(engine.get_per_tensor_param())
    equal = rollout.verify_weights(engine, engine.get_per_tensor_param())

    def swapped():  # the halves of one tensor change places
        for name, tensor in engine.get_per_tensor_param():
            yield name, torch.cat(tensor.chunk(2)[::-1]) if name == f"{LAYER}.mlp.gate_proj.weight" else tensor

    rollout.update_weights(swapped())
    wrong = rollout.verify_weights(engine, engine.get_per_tensor_param())
    rollout.update_weights(engine.get_per_tensor_param())
    if rank == 1:  # one rank computes with an old part
        (parts,) = rollout.llm.collective_rpc(lambda worker: parts_of(worker.model_runner.get_model()))
        parts["model.norm.weight"][0].layer.weight.data.mul_(2)
    stale = rollout.verify_weights(engine, engine.get_per_tensor_param())
    rollout.close()
    return equal, wrong, stale


@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_shards_of_two_ranks_are_compared(tmp_path, tied):
    path = save_tiny_llama(tmp_path / "m", vocab_size=96, tied=tied)
    (equal, wrong, stale), (other, also_wrong, also_stale) = run_ranks(on_two_ranks, 2, path)
    assert equal == other and equal.equal > 15 and not equal.differences and not equal.unread
    assert names(wrong) == names(also_wrong) == [f"{LAYER}.mlp.gate_proj.weight"]
    assert not stale.differences and names(also_stale) == ["model.norm.weight"]


@pytest.fixture
def lora(tmp_path):
    """An actor's engine with an adapter."""
    engine = make_engine(save_tiny_llama(tmp_path / "m"), lora_rank=4, lora_alpha=16)
    make_actor(engine).update_policy(rl_batch())
    yield engine
    leave_group()


@pytest.mark.parametrize("name", ["hf", "refine", "spd"])
def test_a_rollout_of_the_actors_module_is_compared_with_the_actor(lora, name):
    cls = get_rollout_class(name, "sync")
    rollout = cls.__new__(cls)
    rollout.engine = lora
    check = rollout.verify_weights(lora, iter(()))
    assert check.equal == len(list(lora.module.named_parameters())) and not check.differences


def layer_of(engine):
    return engine.module.get_submodule(f"base_model.model.{LAYER}.self_attn.q_proj")


def test_adapters_that_the_module_does_not_apply_are_named(lora):
    layer = layer_of(lora)
    layer.enable_adapters(False)
    (said,) = compare_modules(lora, lora).differences
    assert "self_attn.q_proj computes without its adapter" in said
    layer.enable_adapters(True)
    layer.scaling["default"] = 1.0
    (said,) = compare_modules(lora, lora).differences
    assert said.endswith("self_attn.q_proj scales its adapter by 1, expected 4")


def test_a_module_of_its_own_that_keeps_old_weights_is_named(lora, tmp_path):
    other = make_engine(save_tiny_llama(tmp_path / "m"), lora_rank=4, lora_alpha=16)
    other.module.load_state_dict(lora.module.state_dict())
    assert not compare_modules(lora, other).differences
    make_actor(lora).update_policy(rl_batch(seed=2))
    held = compare_modules(lora, other).differences
    assert held and all("lora_" in said for said in held)


def with_a_copy_left_behind(rank, ranks, path):
    engine = make_engine(path)
    equal = compare_modules(engine, engine)
    layers = [m for m in engine.module.modules() if isinstance(m, FSDPModule)]
    layers[1].unshard()
    gathered = dict(engine.module.named_parameters())[f"{LAYER}.mlp.up_proj.weight"]
    with torch.no_grad():
        gathered.mul_(2)
    return equal, compare_modules(engine, engine), compare_modules(engine, engine)


@pytest.mark.process
@pytest.mark.slow
def test_a_gathered_copy_that_was_left_behind_is_named(tmp_path):
    for equal, stale, after in run_ranks(with_a_copy_left_behind, 2, save_tiny_llama(tmp_path / "m")):
        assert not equal.differences and not after.differences
        assert stale.differences == [f"{LAYER}.mlp.up_proj.weight differs"]


def test_a_digest_covers_entries_shape_and_type():
    ones = torch.ones(4)
    others = [torch.ones(2, 2), torch.ones(4, dtype=torch.bfloat16), torch.tensor([1.0, 1, 1, 1.0001]), ones[:3]]
    assert digest(ones) == digest(ones.clone()) and len({digest(t) for t in [ones, *others]}) == 5
    assert digest(torch.zeros(0))
    check = WeightCheck()
    check.raise_if_different("hf")


class Fused(torch.nn.Module):
    """Loads tensors a and b of 2 rows each into one parameter, pads c with a row of zeros, and ignores all others."""

    def __init__(self):
        super().__init__()
        self.ab = torch.nn.Parameter(torch.zeros(4, 3))
        self.c = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in "ab":
                self.ab.data.narrow(0, 2 * "ab".index(name), 2).copy_(tensor)
            elif name == "c":
                self.c.data[:2].copy_(tensor)
                self.c.data[2:].zero_()


def of_sglang(model, monkeypatch, folder, *parts):
    """The check of a server whose model this is, to which the tensors are sent in these parts."""
    monkeypatch.setenv(held_weights.FOLDER, str(folder))
    for part in parts:
        held_weights.compare_weights(model, part)
    return held_weights.read_results(folder)


def test_sglangs_loader_compares_where_it_would_copy(monkeypatch, tmp_path):
    model, drawn = Fused(), torch.Generator().manual_seed(0)
    sent = {name: torch.randn(shape, generator=drawn) for name, shape in {"a": (2, 3), "b": (2, 3), "c": (2,)}.items()}
    model.load_weights(sent.items())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    a, b, c = sent.items()
    check = of_sglang(model, monkeypatch, tmp_path, [a, ("other", torch.ones(1))], [b, c])
    assert (check.equal, check.unread, check.differences) == (3, ["other"], [])
    wrong = b[1].clone()
    wrong[1, 2] += 0.5
    check = of_sglang(model, monkeypatch, tmp_path, [a], [("b", wrong), c])
    assert check.equal == 2 and check.differences == ["b differs in 1 of 6 entries, by 0.5 at most"]
    check = of_sglang(model, monkeypatch, tmp_path, [a, c])
    assert check.differences == ["ab was sent in part: 6 of 12 entries"]
    model.c.data[2] = 1.0  # what is padded with zeros
    assert of_sglang(model, monkeypatch, tmp_path, [a, b, c]).differences[0].startswith("c differs in 1 of 1 entries")
    model.c.data[2] = 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_sglangs_loader_cannot_compare_is_an_error_and_changes_nothing(monkeypatch, tmp_path):
    class Adds(Fused):
        def load_weights(self, weights):
            for _, tensor in weights:
                self.c.data.add_(tensor)

    model = Adds()
    with pytest.raises(RuntimeError, match=r"add_.* would change c"):
        of_sglang(model, monkeypatch, tmp_path, [("c", torch.ones(3))])
    assert not model.c.any()
    with pytest.raises(RuntimeError, match="wrote no result"):
        of_sglang(model, monkeypatch, tmp_path)


def test_sglangs_ranks_are_named(tmp_path):
    line = {"compared": ["a"], "differences": {}, "unread": [], "written": {"a": 2}, "sizes": {"a": 2}}
    (tmp_path / "rank0.jsonl").write_text(json.dumps(line))
    (tmp_path / "rank1.jsonl").write_text(json.dumps(line | {"differences": {"a": "differs"}}))
    check = held_weights.read_results(tmp_path)
    assert check.equal == 0 and check.differences == ["a differs (rank 1 of the server)"]
