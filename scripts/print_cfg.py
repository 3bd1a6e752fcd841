"""Prints a composed configuration, resolved, as YAML: `python scripts/print_cfg.py [--config-name NAME] key=value ...`.

The arguments are those of `python -m verl.trainer.main_ppo`. Only their keys are checked, and nothing is started. `???`
is a value that must be given; secrets are hidden.
"""

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.config.aliases import current_names_or_exit  # noqa: E402
from verl.config.compose import hydra_main  # noqa: E402
from verl.config.defaults import resolved  # noqa: E402
from verl.planning.config_check import known_tree, unknown_keys  # noqa: E402
from verl.utils.problems import ConfigError  # noqa: E402
from verl.utils.redact import redact  # noqa: E402


@hydra_main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer")
def main(config: DictConfig) -> None:
    try:
        resolved(config)  # names the key of an interpolation that fails
    except OmegaConfBaseException as error:
        sys.exit(f"{error.full_key} cannot be resolved: {str(error.msg).splitlines()[0]}")
    config = current_names_or_exit(config)
    raw, known = (OmegaConf.to_container(tree, resolve=False) for tree in (config, known_tree()))
    if problems := unknown_keys(raw, known):
        sys.exit(str(ConfigError(problems)))
    sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(redact(resolved(config)))))


if __name__ == "__main__":
    main()
