"""The update on branches of a conversation: a common prefix forwarded once, against every branch by itself."""

from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.harness import Row, alternate, ratios, row, say
from benchmarks.rl_forward import Update

MODEL = Path(__file__).resolve().parents[1] / "outputs/pretrained/model"
BRANCHES, LENGTH, PROMPT = 4, 512, 64
PREFIX = LENGTH * 3 // 4
RATIO = BRANCHES * LENGTH / (PREFIX + BRANCHES * (LENGTH - PREFIX))  # of token counts
REPETITIONS = 5


def batch(vocabulary: int) -> TensorDict:
    """BRANCHES rows of LENGTH tokens with PREFIX tokens in common, the first PROMPT of which are the prompt."""
    ids = torch.randint(5, vocabulary, (BRANCHES, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, :PREFIX] = ids[0, :PREFIX]
    positions = torch.arange(LENGTH).expand(BRANCHES, -1)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions.clone(),
               "responses": ids[:, PROMPT:], "group_index": torch.zeros(BRANCHES, dtype=torch.int64)}  # fmt: skip
    return TensorDict(columns, batch_size=BRANCHES)


def rms_norm(module: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    """The norm in the type of its input; that of transformers is always computed in float32."""
    return F.rms_norm(hidden_states, hidden_states.shape[-1:], module.weight, module.variance_epsilon)


def exact_gradients(model: LlamaForCausalLM, data: TensorDict) -> list[torch.Tensor]:
    """Gradients in float64 of branches by themselves. The model is float64 afterwards."""
    with mock.patch.object(LlamaRMSNorm, "forward", rms_norm):
        exact = Update(model.double(), data, remove_padding=True)
        exact()
    return exact.gradients


def distance(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry of all expected gradients."""
    apart = max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True))
    return apart / max(float(b.abs().max()) for b in expected)


def run() -> list[Row]:
    """Share of the possible speed-up that the update reaches, with the distances of gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    data = batch(model.config.vocab_size)
    alone, tree = Update(model, data, remove_padding=True), Update(model, data, share_prompt=True)
    seconds = alternate({"alone": alone, "tree": tree}, REPETITIONS)
    speedups = ratios(seconds["alone"], seconds["tree"])
    say("gradients in float64")
    exact = exact_gradients(model, data)
    return [
        row("tree_update_share_of_limit", [x / RATIO for x in speedups], "speed-up over the ratio of token counts"),
        row("tree_update_speedup", speedups, "times, alone / tree"),
        row("tree_update_gradient_difference", [distance(tree.gradients, alone.gradients)], "relative, tree - alone"),
        row("tree_update_gradient_error", [distance(tree.gradients, exact)], "relative, tree - float64"),
        row("tree_update_gradient_error_alone", [distance(alone.gradients, exact)], "relative, alone - float64"),
        row("tree_update", seconds["tree"], "s"),
    ]
