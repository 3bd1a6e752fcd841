"""Settings of the trained model, and the Hugging Face config and tokenizer they lead to."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import MISSING

from verl.config.base import BaseConfig
from verl.config.common import LIGER, RECOMPUTED
from verl.config.fields import setting

LOGITS_CHUNK = 896  # tokens whose logits the token policy computes at once, unless policy.kwargs.chunk_tokens is set


@dataclass
class PluginConfig(BaseConfig, section="model.plugin"):
    """A registered part by name, with the keyword arguments it is built with."""

    name: str = setting(
        MISSING,
        "Registered loader (auto, value_head) or policy (causal_lm, bernoulli), or your own of external_lib.",
    )
    kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the loader or policy; any key.")


@dataclass
class HFModelConfig(BaseConfig, section="model"):
    """A model directory or hub name, and how the model is built from it.

    The fields without a description are no settings. The constructor completes the local_* paths, from which the files
    are read. `load()` fills hf_config, generation_config, architectures (of hf_config), untied and, with
    `load_tokenizer`, tokenizer. `processor` is for users' code.
    """

    path: str = setting(MISSING, "Folder or hub name of the model.")
    local_path: str | None = None
    hf_config_path: str | None = setting(None, "Folder of the config.json; null takes the model's.")
    local_hf_config_path: str | None = None
    tokenizer_path: str | None = setting(None, "Folder of the tokenizer; null takes the model's.")
    local_tokenizer_path: str | None = None
    load_tokenizer: bool = True
    hf_config: Any = None
    generation_config: Any = None
    tokenizer: Any = None
    processor: Any = None
    use_shm: bool = setting(False, "Copy weights to /dev/shm first, once for all ranks of a machine.")
    trust_remote_code: bool = setting(False, "Let the model run code that comes with it.")
    custom_chat_template: str | None = setting(None, "Replaces the tokenizer's chat template: text or a .jinja file.")
    external_lib: str | None = setting(
        None,
        "Dotted name of one module that registers your parts, such as my_parts (no path; its folder on PYTHONPATH). It "
        "may import others.",
    )
    override_config: dict[str, Any] = setting(dict, "Values that replace those of config.json; any key.")
    enable_gradient_checkpointing: bool | None = setting(True, RECOMPUTED)
    enable_activation_offload: bool = setting(False, "Move activations to the CPU between forward and backward.")
    use_remove_padding: bool = setting(True, "Remove padding before the forward.")
    lora_rank: int = setting(0, "Rank of LoRA; 0 trains all weights.", low=0)
    lora_alpha: int = setting(16, "Alpha of LoRA: the update is scaled by alpha / rank.", above=0)
    target_modules: Any = setting("all-linear", "Layers that get LoRA: all-linear, or a list of names.")
    exclude_modules: Any = setting(None, "Names of layers without LoRA: a list, or a regular expression, as in peft.")
    lora_adapter_path: str | None = setting(None, "LoRA adapter in peft's format to start from.")
    use_liger: bool = setting(False, LIGER)
    architectures: list[str] | None = None
    untied: bool = False  # the output matrix is not the embedding, whatever config.json says
    loader: PluginConfig = setting(lambda: PluginConfig(name="auto"), "Model loader; auto is AutoModelForCausalLM.")
    policy: PluginConfig = setting(
        lambda: PluginConfig(name="causal_lm"),
        "How log-probs are computed: causal_lm (of the next token), or bernoulli (of accepting a draft token).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path == MISSING:  # the check of the whole config reports it
            return
        model = self.local_path or os.path.expanduser(self.path)
        paths = {
            "local_path": model,
            "local_hf_config_path": self.local_hf_config_path or _expand(self.hf_config_path) or model,
            "local_tokenizer_path": self.local_tokenizer_path or _expand(self.tokenizer_path) or model,
        }
        for name, path in paths.items():  # fields are written once; see BaseConfig
            object.__setattr__(self, name, path)

    def load(self) -> HFModelConfig:
        """A copy with what the model's files say; with `use_shm` its local_path is a copy in /dev/shm.

        Imports `external_lib` first, so that what it registers is known.
        """
        from transformers import AutoConfig, GenerationConfig

        from verl.utils.weight_files import untie_by_weights

        if self.external_lib:
            importlib.import_module(self.external_lib)
        local_path, tokenizer = self.local_path, self.tokenizer
        if self.use_shm and os.path.isdir(local_path):
            from verl.utils.fs import copy_to_shm

            local_path = copy_to_shm(local_path)
        hf_config = AutoConfig.from_pretrained(
            self.local_hf_config_path, trust_remote_code=self.trust_remote_code, **self.override_config
        )
        untied = untie_by_weights(hf_config, local_path) or self.override_config.get("tie_word_embeddings") is False
        try:
            generation_config = GenerationConfig.from_pretrained(local_path)
        except OSError:  # without generation_config.json
            generation_config = GenerationConfig.from_model_config(hf_config)
        if self.load_tokenizer:
            from verl.utils.tokenizer import hf_tokenizer, use_chat_template

            tokenizer = hf_tokenizer(self.local_tokenizer_path, trust_remote_code=self.trust_remote_code)
            use_chat_template(tokenizer, self.custom_chat_template)
        return replace(
            self,
            local_path=local_path,
            hf_config=hf_config,
            generation_config=generation_config,
            architectures=hf_config.architectures,
            untied=untied,
            tokenizer=tokenizer,
        )

    def get_processor(self) -> Any:
        """The processor where there is one, else the tokenizer."""
        return self.processor if self.processor is not None else self.tokenizer


def _expand(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)
