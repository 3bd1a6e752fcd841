"""Packaging: `pip install -e .`; extras cuda, sglang, flash-attn, liger, wandb, debug, mcp, pretrained, test, and one
for each library of environments."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "verl" / "__init__.py").read_text()).group(1)


def requirements(name: str) -> list[str]:
    """Lines of requirements/<name>.txt, and of the files that it includes by -r, that name a package."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()
    included = [line.removeprefix("-r ").removesuffix(".txt") for line in lines if line.startswith("-r ")]
    own = [line for line in lines if line and line[0] not in "#-"]
    return [*own, *(line for part in included for line in requirements(part))]


setup(
    name="verl-spd",
    version=VERSION,
    description="A smaller fork, in shape, of verl: RL for LLMs, with an SPD scorer and a dLLM reasoning recipe",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["verl", "verl.*", "recipe", "recipe.*", "dllm_reasoning", "dllm_reasoning.*"]),
    py_modules=["spd_scorer", "train_spd_scorer"],
    package_data={"": ["*.yaml", "*.html", "*.jinja"]},
    entry_points={
        "verl.rollouts": [
            "refine.sync = dllm_reasoning.rollout:RefineRollout",
            "spd.sync = recipe.spd.rollout.spd_rollout:SPDRollout",
        ],
        "verl.rollouts_of_the_actor": [
            "refine = dllm_reasoning.rollout:RefineRollout",
            "spd = recipe.spd.rollout.spd_rollout:SPDRollout",
        ],
        "verl.auxiliary_losses": ["refine_loss = dllm_reasoning.losses.refine_loss:RefineLoss"],
        "verl.metrics": ["dllm = dllm_reasoning.metrics:METRICS", "spd = recipe.spd.metrics:METRICS"],
        "verl.reward_rules": ["spd_scorer = recipe.spd.reward:compute_score"],
    },
    install_requires=requirements("base"),
    extras_require={
        "cuda": ["vllm==0.32.0"],
        "sglang": ["sglang==0.5.23"],
        "flash-attn": ["flash-attn"],
        "liger": ["liger-kernel"],
        "wandb": ["wandb"],
        "debug": ["debugpy"],
        "mcp": ["mcp>=2"],
        # The versions that the adapters name (LIBRARY); those of different libraries contradict each other.
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "verifiers": ["verifiers==0.4.0"],
        "openenv": ["openenv==0.10.0"],
        "skyrl-gym": ["skyrl-gym==0.4.0"],
        "pretrained": requirements("pretrained"),
        "test": requirements("test"),
    },
)
