"""FSDPEngine on one rank: steps, schedules, bad numbers, adapters, weights out."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from tests.helpers.engines import make_engine, weights_of
from tests.helpers.logs import logged
from verl.training.engine import EngineRegistry, FSDPEngine
from verl.training.engine.build import build_lr_scheduler
from verl.training.peft_weights import full_weights
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig


def loss_of(engine, scale=1.0):
    ids = torch.arange(5, 17).reshape(2, 6)
    return scale * engine.module(input_ids=ids, labels=ids).loss


def step(engine, scale=1.0):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        loss = loss_of(engine, scale)
        engine.backward(loss, is_last_micro_batch=True)
        return loss.item(), engine.optimizer_step()


def test_activations_wait_on_the_cpu_where_asked_for(tiny_llama):
    results = []
    for offload in (False, True):
        engine = make_engine(tiny_llama, enable_activation_offload=offload)
        results.append([step(engine) for _ in range(2)])
        x = torch.ones(3, requires_grad=True)
        with engine.autocast():
            double = x * 2
            total = (double * double).sum()
        double.data.zero_()  # the backward sees this unless it has a copy: d total / dx = 8 x
        total.backward()
        assert x.grad.tolist() == ([8.0] * 3 if offload else [0.0] * 3)
    assert results[0] == results[1]


def test_layers_are_checkpointed_where_their_activations_would_not_fit(tiny_llama, monkeypatch):
    # Per token 2 layers of 64 hidden units keep 34 values of 4 bytes a unit: 17,408 bytes.
    engine = make_engine(tiny_llama, enable_gradient_checkpointing=None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("verl.training.engine.fsdp.available_memory", lambda: 2 * 2 * 10 * 17_408)
    results = []
    for tokens, checkpointed in ((10, False), (11, True), (10, False)):
        with engine.train_mode(), engine.autocast(tokens):
            assert engine.module.is_gradient_checkpointing == checkpointed
            engine.optimizer_zero_grad()
            loss = loss_of(engine)
            engine.backward(loss, is_last_micro_batch=True)
            results.append([loss.item(), *(p.grad.to_local().norm().item() for p in engine.module.parameters())])
    assert results[0] == results[2] and results[1] == pytest.approx(results[0], rel=1e-5)


def test_steps_equal_plain_torch(llama):
    engine = make_engine(llama)
    plain = LlamaForCausalLM.from_pretrained(llama)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, betas=(0.9, 0.999))
    ids = torch.arange(5, 17).reshape(2, 6)
    for _ in range(3):
        loss, result = step(engine)
        optimizer.zero_grad()
        reference = plain(input_ids=ids, labels=ids).loss
        reference.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert loss == pytest.approx(reference.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    expected = {name: p.detach().numpy() for name, p in plain.named_parameters()}
    torch.testing.assert_close(weights_of(engine), expected, rtol=1e-4, atol=1e-5)


def test_a_finite_gradient_under_a_bad_loss_is_skipped_too(tiny_llama):
    engine = make_engine(tiny_llama)
    before = weights_of(engine)
    with engine.train_mode():
        engine.backward(loss_of(engine) + float("inf"), is_last_micro_batch=True)
        assert engine.optimizer_step().skipped
    np.testing.assert_equal(weights_of(engine), before)


def test_a_forward_in_eval_mode_does_not_hide_later_weights(llama):
    engine = make_engine(llama)
    with engine.eval_mode(), torch.no_grad():
        before = loss_of(engine).item()
    step(engine)
    with engine.eval_mode(), torch.no_grad():
        assert loss_of(engine).item() < before


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0, 0.5, 1, None, None, None, 0.55, None, None, None, 0.1]),
        ("linear", [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        ("wsd", [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_schedules_by_hand(kind, expected):
    config = FSDPOptimizerConfig(
        lr=2.0, lr_scheduler_type=kind, lr_warmup_steps=2, total_training_steps=10, min_lr_ratio=0.1
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = build_lr_scheduler(optimizer, config)
    for value in expected:
        if value is not None:
            assert schedule.get_last_lr()[0] == pytest.approx(2.0 * value, abs=1e-9)
        optimizer.step()
        schedule.step()


def test_a_decaying_schedule_without_a_length_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="total_training_steps"):
        build_lr_scheduler(optimizer, FSDPOptimizerConfig(lr_scheduler_type="cosine"))


def test_lora_trains_adapters_only_and_hands_out_merged_weights(llama):
    engine = make_engine(llama, lora_rank=4, lora_alpha=8)
    base = LlamaForCausalLM.from_pretrained(llama)
    trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained)
    for _ in range(2):
        step(engine)
    merged = weights_of(engine)
    assert set(merged) == {n for n, _ in base.named_parameters()}
    key = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(merged[key] - base.get_parameter(key).detach().numpy()).max() > 1e-4
    assert (merged["model.embed_tokens.weight"] == base.model.embed_tokens.weight.detach().numpy()).all()
    base.load_state_dict({k: torch.from_numpy(v) for k, v in merged.items()}, strict=False)  # a tied head comes once
    ids = torch.arange(5, 17).reshape(2, 6)
    with engine.eval_mode(), torch.no_grad():
        assert loss_of(engine).item() == pytest.approx(base(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_on_a_bfloat16_base_is_merged_in_float32_and_rounded_once(tiny_llama, dtype):
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"]))
    layer = base.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data.normal_(std=0.01)
    exact = layer.base_layer.weight.double() + 3 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    sent = dict(full_weights(model, dtype=dtype))["model.layers.0.self_attn.q_proj.weight"]
    assert sent.dtype == dtype
    torch.testing.assert_close(sent, exact.to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-7)


def test_without_its_adapter_the_model_is_the_base(llama):
    engine = make_engine(llama, lora_rank=4)
    with engine.eval_mode(), torch.no_grad():
        before = loss_of(engine).item()
    step(engine)
    step(engine)
    with engine.eval_mode(), torch.no_grad():
        trained = loss_of(engine).item()
        with engine.disable_adapter():
            assert loss_of(engine).item() == before
        assert loss_of(engine).item() == trained != before
    assert any(p.requires_grad for p in engine.module.parameters())


def test_gradient_checkpointing_and_bfloat16_stay_near_the_plain_step(llama):
    plain = make_engine(llama)
    other = make_engine(llama, enable_gradient_checkpointing=True, engine={"dtype": "bfloat16"})
    (loss, _), (loss_bf16, result) = step(plain), step(other)
    assert loss_bf16 == pytest.approx(loss, rel=1e-2) and not result.skipped
    assert next(iter(other.module.parameters())).dtype == torch.float32


def test_settings_that_cannot_work_are_named(tiny_llama):
    with pytest.raises(ValueError, match="lora_rank=3"):
        adapter = f"{tiny_llama}/adapter"
        get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), LoraConfig(r=2)).save_pretrained(adapter)
        make_engine(tiny_llama, lora_rank=3, lora_adapter_path=adapter)
    with pytest.raises(ValueError, match="wrap_policy"):
        make_engine(tiny_llama, engine={"wrap_policy": {"transformer_layer_cls_to_wrap": ["GPTBlock"]}})
    with pytest.raises(ValueError, match="float16"):
        make_engine(tiny_llama, engine={"dtype": "float16"})
    settings = (FSDPEngineConfig(wrap_policy={"by": 1}), None, CheckpointConfig())
    with pytest.raises(ValueError, match="^critic.model.fsdp_config.wrap_policy has unknown keys .'by'"):
        FSDPEngine.of_section("critic.model", HFModelConfig(path=tiny_llama, load_tokenizer=False), *settings)
    with pytest.raises(ValueError, match="no engine for"):
        EngineRegistry.get_engine_cls("language_model", "megatron", "cpu")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp", "cpu") is FSDPEngine


def mixed(**dtypes):
    return {"engine": {"mixed_precision": dtypes}}


def wrapped(name):
    return {"engine": {"wrap_policy": {"transformer_layer_cls_to_wrap": [name]}}}


def adapted(*layers):
    return {"lora_rank": 2, "target_modules": list(layers)}


@pytest.mark.parametrize(
    ("wrong", "advice", "right"),
    [
        (mixed(param_dtyp="bf16"), "mixed_precision.param_dtyp .* mean 'param_dtype'", mixed(param_dtype="bf16")),
        (mixed(reduce_dtype="bf61"), "mixed_precision.reduce_dtype='bf61'.*bf16", mixed(reduce_dtype="bf16")),
        (wrapped("LlamaLayer"), "It has: .*LlamaDecoderLayer", wrapped("LlamaDecoderLayer")),
        ({"override_config": {"hidden_size": 128}}, "Correct .*override_config", {"override_config": {}}),
        (adapted("q_proj", "embed_tokens"), "embed_tokens has .* out of .*model.target_modules", adapted("q_proj")),
    ],
)
def test_the_advice_of_a_refusal_helps(tiny_llama, wrong, advice, right):
    with pytest.raises((ValueError, TypeError), match=advice):
        dict(make_engine(tiny_llama, **wrong).get_per_tensor_param())
    assert dict(make_engine(tiny_llama, **right).get_per_tensor_param())


def test_an_adapter_is_named_by_its_folder(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, dora in (("plain", False), ("dora", True)):
        config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=dora, task_type="CAUSAL_LM")
        get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="lora_adapter_path must name an adapter's folder; no hub/name/"):
        make_engine(tiny_llama, lora_adapter_path="hub/name")
    with pytest.raises(ValueError, match="set actor_rollout_ref.model.lora_rank=0, or 2"):
        make_engine(tiny_llama, lora_adapter_path="~/plain", lora_rank=4)
    with pytest.raises(TypeError, match="LoRA .not DoRA.* or set another lora_adapter_path"):
        dict(make_engine(tiny_llama, lora_adapter_path="~/dora", lora_rank=0).get_per_tensor_param())
    assert dict(make_engine(tiny_llama, lora_adapter_path="~/plain", lora_rank=0).get_per_tensor_param())


@pytest.mark.parametrize(
    ("steps", "settings", "warned"),
    [(1, {"lr_warmup_steps": 1}, True), (1, {"lr_warmup_steps": 0}, False), (2, {"lr_warmup_steps": 1}, False),
     (3, {"lr": 0.0}, True), (1, {"lr_warmup_steps_ratio": 1.0, "lr_scheduler_type": "cosine"}, True)],
)  # fmt: skip
def test_a_rate_that_is_0_in_all_steps_is_warned_of(steps, settings, warned):
    config = FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": steps} | settings)
    with logged() as lines:
        build_lr_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=config.lr), config)
    assert any("the learning rate is 0 in all" in line for line in lines) == warned
