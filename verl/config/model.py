"""Settings of the trained model, and the Hugging Face config and tokenizer they lead to."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl.base_config import BaseConfig
from verl.config.fields import setting

FILLED = (
    "local_path", "local_hf_config_path", "local_tokenizer_path", "hf_config", "generation_config", "tokenizer",
    "processor", "architectures",
)  # fmt: skip


@dataclass
class PluginConfig(BaseConfig, section="model.plugin"):
    """A registered part by name, with the keyword arguments it is built with."""

    name: str = MISSING
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class HFModelConfig(BaseConfig, section="model", mutable=FILLED):
    """A model directory or hub name and how the model is built from it.

    The fields hf_config, generation_config, tokenizer and processor are empty until `load()` fills them.
    """

    path: str = MISSING
    local_path: str | None = None
    hf_config_path: str | None = None
    local_hf_config_path: str | None = None
    tokenizer_path: str | None = None
    local_tokenizer_path: str | None = None
    load_tokenizer: bool = True
    hf_config: Any = None
    generation_config: Any = None
    tokenizer: Any = None
    processor: Any = None
    use_shm: bool = False
    trust_remote_code: bool = False
    custom_chat_template: str | None = None
    external_lib: str | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = False
    use_remove_padding: bool = True
    lora_rank: int = setting(0, low=0)
    lora_alpha: int = setting(16, above=0)
    target_modules: Any = "all-linear"
    exclude_modules: Any = None
    lora: dict[str, Any] = field(default_factory=dict)
    lora_adapter_path: str | None = None
    use_liger: bool = False
    use_fused_kernels: bool = False
    fused_kernel_options: dict[str, Any] = field(default_factory=lambda: {"impl_backend": None})
    architectures: list[str] | None = None
    loader: PluginConfig = field(default_factory=lambda: PluginConfig(name="auto"))
    policy: PluginConfig = field(default_factory=lambda: PluginConfig(name="causal_lm"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path == MISSING:
            return
        self.local_path = self.local_path or os.path.expanduser(self.path)
        self.local_hf_config_path = self.local_hf_config_path or _expand(self.hf_config_path) or self.local_path
        self.local_tokenizer_path = self.local_tokenizer_path or _expand(self.tokenizer_path) or self.local_path

    def load(self) -> HFModelConfig:
        """Import external_lib; fill hf_config, generation_config, architectures, and tokenizer if load_tokenizer."""
        from transformers import AutoConfig, GenerationConfig

        if self.external_lib:
            importlib.import_module(self.external_lib)
        self.hf_config = AutoConfig.from_pretrained(
            self.local_hf_config_path, trust_remote_code=self.trust_remote_code, **self.override_config
        )
        self.architectures = self.hf_config.architectures
        self.generation_config = GenerationConfig.from_model_config(self.hf_config)
        if self.load_tokenizer:
            from verl.utils.tokenizer import hf_tokenizer

            self.tokenizer = hf_tokenizer(self.local_tokenizer_path, trust_remote_code=self.trust_remote_code)
            if self.custom_chat_template is not None:
                self.tokenizer.chat_template = self.custom_chat_template
        return self

    def get_processor(self) -> Any:
        """The processor where there is one, else the tokenizer."""
        return self.processor if self.processor is not None else self.tokenizer


def _expand(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)
