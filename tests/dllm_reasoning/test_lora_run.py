"""A LoRA run by iterative refinement: checkpoint, resume, export for plain transformers."""

import json
from functools import partial

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dllm_reasoning.inference import generator
from tests.dllm_reasoning import runs
from tests.dllm_reasoning.models import EOS, PAD
from tests.dllm_reasoning.test_trainer import rows_of

details_of = partial(generator.iterative_generate, return_details=True)

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
SETTINGS = ("model.lora_rank=4", "iterative.noise_pattern=packed", "iterative.ar_loss_weight=1",
            "trainer.save_checkpoint_steps=2", "optim.lr=3e-2",
            "iterative.noise_token='<sep>'",
            "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]")  # fmt: skip


def test_an_adapter_resumes_bit_for_bit_and_is_exported_with_its_window(tmp_path):
    assets = runs.save_model(tmp_path / "model"), runs.save_rows(tmp_path / "train.parquet", runs.sums(40))
    full = runs.trainer(*assets, tmp_path / "full", *SETTINGS)
    assert full.loss.share  # the adapters learn through a shared instruction
    full.fit()
    expected, rows = runs.weights(full), rows_of(tmp_path / "full")
    with torch.no_grad(), full.engine.eval_mode():
        ours = full.engine.module(input_ids=IDS, use_cache=False).logits.clone()

    by_path = ("trainer.resume_mode=resume_path",
               f"trainer.resume_from_path={tmp_path / 'full' / 'global_step_2'}")  # fmt: skip
    again = runs.trainer(*assets, tmp_path / "again", *SETTINGS, *by_path)
    again.fit()
    assert [row[0] for row in rows] == [1, 2, 3, 4] and rows_of(tmp_path / "again") == rows[2:]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in runs.weights(again).items())

    saved = tmp_path / "full" / "global_step_4"
    adapter = load_file(saved / "lora_adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapter) and any(t.any() for name, t in adapter.items() if "lora_B" in name)
    config = json.loads((saved / "huggingface" / "config.json").read_text())
    assert config["dllm_window"] == 4 and config["dllm_noise_token_id"] == 3
    merged, base = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (saved / "huggingface", assets[0]))
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, ours, atol=1e-5, rtol=0)
        assert (base(IDS).logits - ours).abs().max() > 1e-2
    stats = details_of(merged, IDS.tolist(), EOS, PAD, refine_iter=0, max_new_tokens=8).stats
    assert stats.forwards == [-(-count // 4) for count in stats.tokens]  # blocks of the window
