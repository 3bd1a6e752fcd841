"""The trainings of scripts/gpu_check.py: commands, how many GPUs they need, and what their metrics must keep.

Rows of GRPO that reuse stored samples train on those of the row REFERENCE (rollout.skip_rollout), so that only the
update differs: the first step's loss and gradient norm must be those of that row, in float32 on one GPU. All rows of
GRPO bound the distance between the rollout's probabilities and the actor's in their first step, those that generate in
the last one too. SFT and refinement are compared with the same training on the CPU.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scripts.loss_compare import ROOT, TRAININGS, read_metrics, run

ALL = -1
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
ENGINE = f"{ACTOR}.fsdp_config"
RANKS = "trainer.n_gpus_per_node"
LIMIT_S = 1800  # of a command; collectives that do not match would hang for hours
REFERENCE = "GRPO, reference update (stores the samples)"
STEPS = 3  # of GRPO
DEMO_LIMIT_S = 7200
#: The demos of examples/pretrained, which need a model of the user, by their modules' names.
DEMOS = {"demo": "GRPO of a pretrained model", "gsm8k.demo": "GRPO on GSM8K",
         "dllm.demo": "refinement of a pretrained model"}  # fmt: skip
BFLOAT16 = (f"{ENGINE}.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16")
#: dtype of the update -> largest differences from REFERENCE: gradient norm (relative), loss (absolute)
TOLERANCES = {"float32": (1e-2, 1e-3), "bfloat16": (5e-2, 1e-2)}
#: dtype of the update -> largest mean of |probability in the rollout - in the actor| of sampled tokens
DISTANCES = {"float32": 1e-3, "bfloat16": 2e-2}
DISTANCE = "training/rollout_probs_diff_mean"
#: training -> metrics that are compared: gradient norm, loss
COMPARED = {
    "grpo": ("actor/grad_norm", "actor/pg_loss"),
    "sft": ("train/grad_norm", "train/loss"),
    "refinement": ("train/grad_norm", "train/loss_total"),
}


@dataclass(frozen=True)
class Result:
    """One check or measurement: its value with the bound that it must keep, or none.

    A check that could not be done has the value NaN, and says why in `message`.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None
    message: str = ""

    @property
    def holds(self) -> bool:
        return math.isfinite(self.value) and (self.bound is None or self.value <= self.bound)


@dataclass(frozen=True)
class Run:
    """A training of scripts/loss_compare.py with further settings, on `ranks` GPUs (ALL: those of the machine, from 2).

    `then`: "merge" writes its checkpoint as a Hugging Face model and compares it with the one in the checkpoint,
    "resume" ends it a step early and starts it again. `needs`: a package without which the row is left out.
    """

    training: str = "grpo"
    changes: tuple[str, ...] = ()
    ranks: int = 1
    replays: bool = False
    then: str = ""
    needs: str = ""

    @property
    def least_gpus(self) -> int:
        return 2 if self.ranks == ALL else self.ranks

    @property
    def dtype(self) -> str:
        return "bfloat16" if BFLOAT16[0] in self.changes else "float32"


def _replay(*changes: str, ranks: int = 1, **keywords: str) -> Run:
    return Run("grpo", changes, ranks, True, **keywords)


_SEQUENCES, _LAYERS = f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ENGINE}.tensor_parallel_size=2"
_ENGINE_OF_TWO = f"{ROLLOUT}.tensor_model_parallel_size=2"
_LORA = f"{MODEL}.lora_rank=8"
RUNS = {
    "GRPO, vLLM with sleep and wake": Run(),
    "GRPO in bfloat16": Run(changes=BFLOAT16),
    "GRPO with agent loops": Run(changes=(f"{ROLLOUT}.mode=async",)),
    "GRPO with LoRA": Run(changes=(_LORA,)),
    "GRPO with LoRA as an adapter in vLLM": Run(changes=(_LORA, f"{ROLLOUT}.lora_as_adapter=true", *BFLOAT16)),
    "GRPO with the refinement loss": Run(changes=(f"+{ACTOR}.auxiliary_losses.refine_loss.coef=0.5",)),
    "PPO with a critic": Run(changes=(
        "algorithm.adv_estimator=gae", f"{ACTOR}.share_prompt_forward=false", "critic.model.path=MODEL",
        "critic.model.fsdp_config.dtype=float32", "critic.ppo_micro_batch_size_per_gpu=32",
    )),
    "GRPO, tensor parallel rollout": Run(changes=(_ENGINE_OF_TWO,), ranks=2),
    "GRPO, two engines of two ranks": Run(changes=(_ENGINE_OF_TWO, *BFLOAT16), ranks=4),
    REFERENCE: _replay(),
    "update in bfloat16": _replay(*BFLOAT16),
    "update with offloaded weights and optimizer": _replay(
        f"{ENGINE}.param_offload=true", f"{ENGINE}.optimizer_offload=true"
    ),
    "update with Liger": _replay(f"{MODEL}.use_liger=true", *BFLOAT16, needs="liger_kernel"),
    "update, saved in the background and resumed": _replay(
        f"{ACTOR}.checkpoint.async_save=true", "trainer.save_freq=1", then="resume"
    ),
    "update on all GPUs, merged": _replay(
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]", ranks=ALL, then="merge"
    ),
    "update on all GPUs in bfloat16": _replay(*BFLOAT16, ranks=ALL),
    "update, sequence parallel": _replay(_SEQUENCES, ranks=2),
    "update, sequence parallel in bfloat16": _replay(_SEQUENCES, *BFLOAT16, ranks=2),
    "update, tensor parallel": _replay(_LAYERS, ranks=2),
    "update, tensor parallel in bfloat16": _replay(_LAYERS, *BFLOAT16, ranks=2),
    "update, tensor parallel, tokens split too": _replay(_LAYERS, f"{ENGINE}.sequence_parallel=true", ranks=2),
    "update, tensor parallel 2 x FSDP 2": _replay(_LAYERS, *BFLOAT16, ranks=4),
    "update, two copies of two shards (HSDP)": _replay(f"{ENGINE}.fsdp_size=2", *BFLOAT16, ranks=4),
    "SPD scorer": Run("spd"), "refinement": Run("refinement"), "SFT": Run("sft"),
    "SFT, packed": Run("sft", ("data.packing=true",)),
    "refinement, sequence parallel": Run("refinement", ("ulysses_sequence_parallel_size=2",), 2),
}  # fmt: skip


def left_out(row: Run, gpus: int) -> str | None:
    """Why a row cannot run on this machine; None if it can."""
    if row.least_gpus > gpus:
        return f"needs {row.least_gpus} GPUs"
    return f"needs the package {row.needs}" if row.needs and find_spec(row.needs) is None else None


def prompts_a_mini_batch(gpus: int) -> int:
    """At least 8, and a multiple of all numbers of ranks that rows use: 1, 2, 4 and `gpus`."""
    step = math.lcm(4, gpus)
    return step * math.ceil(8 / step)


def command_of(row: Run, inputs: Path, folder: Path, gpus: int) -> list[str]:
    """The command of a row on a machine with `gpus` GPUs, from one of scripts/loss_compare.py, which uses the CPU."""
    ranks = gpus if row.ranks == ALL else row.ranks
    changes = []
    if row.training == "grpo":
        mini = prompts_a_mini_batch(gpus)
        changes += [f"data.train_batch_size={2 * mini}", f"{ACTOR}.ppo_mini_batch_size={mini}"]
        changes += [f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={-1 if row.then else 0}"]
        if row.replays:
            changes += [f"{ROLLOUT}.skip_rollout=true", f"{ROLLOUT}.skip_dump_dir={inputs / 'samples'}"]
        else:  # steps large enough to tell new weights from old ones in bfloat16
            changes.append(f"{ACTOR}.optim.lr={'1e-2' if _LORA in row.changes else '1e-3'}")
    if row.training in ("refinement", "sft"):
        changes.append(f"--nproc_per_node={ranks}")
    changes.append(f"{RANKS}={ranks}")
    changes += [change.replace("=MODEL", f"={inputs / 'start' / 'model'}") for change in row.changes]
    words = [word.replace("trainer.device=cpu", "trainer.device=cuda")
             for word in TRAININGS[row.training].train(inputs, folder)]  # fmt: skip
    changed = {change.partition("=")[0]: change for change in changes}
    return [changed.pop(word.partition("=")[0], word) for word in words] + list(changed.values())


def commands_of(row: Run, inputs: Path, folder: Path, gpus: int) -> list[list[str]]:
    """All commands of a row, in their order."""
    command = command_of(row, inputs, folder, gpus)
    if row.then == "resume":
        steps = f"trainer.total_training_steps={STEPS}"
        early = [f"trainer.total_training_steps={STEPS - 1}" if word == steps else word for word in command]
        return [early, command]
    if row.then == "merge":
        actor, merged = folder / f"global_step_{STEPS}" / "actor", folder / "merged"
        merger, checkpoint = [sys.executable, "-m", "verl.model_merger"], ["--local_dir", str(actor)]
        return [command, [*merger, "merge", *checkpoint, "--target_dir", str(merged)],
                [*merger, "test", *checkpoint, "--test_hf_dir", str(merged)],
                [*merger, "test", *checkpoint, "--test_hf_dir", str(actor / "huggingface")]]  # fmt: skip
    return [command]


def make_inputs(row: Run, work: Path) -> Path:
    """The folder of a training's models and data, made for the first row that needs it."""
    recipe = TRAININGS[row.training]
    inputs = work / recipe.inputs
    if not inputs.exists():
        inputs.mkdir()
        try:
            for command in recipe.make(inputs):
                run(command, ROOT, work / f"{recipe.inputs}.log", LIMIT_S)
        except BaseException:
            shutil.rmtree(inputs)  # the next row tries again
            raise
    return inputs


def run_row(name: str, work: Path, gpus: int) -> Iterator[Result]:
    """Run a row of RUNS in `work`; SystemExit with the end of the log if a command fails."""
    row, folder = RUNS[name], work / name.replace(" ", "_")
    inputs, log = make_inputs(row, work), work / f"{folder.name}.log"
    for command in commands_of(row, inputs, folder, gpus):
        run(command, ROOT, log, LIMIT_S)
    metrics, reference = read_metrics(folder), None
    if row.then == "resume":
        resumed = "resuming from" in log.read_text()
        yield Result(f"{name}: resumed", float(not resumed), "failures", 0)
    if row.replays and name != REFERENCE:
        reference = read_metrics(work / REFERENCE.replace(" ", "_"))
    elif row.training in ("sft", "refinement"):
        reference = on_cpu(row.training, inputs, work)
    yield from judged(name, row, metrics, reference)


def on_cpu(training: str, inputs: Path, work: Path) -> dict[tuple[int, str], float]:
    """Metrics of a training of scripts/loss_compare.py as it is, run once."""
    folder = work / f"{training}-cpu"
    if not folder.exists():
        run(TRAININGS[training].train(inputs, folder), ROOT, work / f"{folder.name}.log", LIMIT_S)
    return read_metrics(folder)


def judged(
    name: str, row: Run, metrics: Mapping[tuple[int, str], float], reference: Mapping[tuple[int, str], float] | None
) -> Iterator[Result]:
    """What a run's {(step, metric): value} must keep: finite values, and for GRPO distances.

    `reference` are the metrics that its first step is compared with; the last one too for a run that was resumed.
    """
    bad = sum(not math.isfinite(value) for value in metrics.values()) if metrics else math.nan
    yield Result(name, bad, "bad metrics", 0)
    # In the last step the rollout has slept and got new weights: with those of step 1 it would be 0.06 to 0.07 away
    # (measured on a CPU in bfloat16). Of samples that another run stored, only those of step 1 are by the same weights.
    for step in () if row.training != "grpo" else (1,) if row.replays else (1, STEPS):
        distance = _at(metrics, step, DISTANCE)
        yield Result(f"{name}: rollout and actor, step {step}", distance, "probability", DISTANCES[row.dtype])
    if reference is None:
        return
    of_norm, of_loss = TOLERANCES[row.dtype]
    norm, loss = COMPARED[row.training]
    for step in (1, STEPS) if row.then == "resume" else (1,):
        here, there = (_at(side, step, norm) for side in (metrics, reference))
        yield Result(f"{name}: gradient norm, step {step}", abs(here - there) / there, "relative", of_norm)
        here, there = (_at(side, step, loss) for side in (metrics, reference))
        yield Result(f"{name}: loss, step {step}", abs(here - there), "", of_loss)


def _at(metrics: Mapping[tuple[int, str], float], step: int, name: str) -> float:
    """A metric; NaN, which misses every bound, where the run did not report it."""
    return metrics.get((step, name), math.nan)


def run_demo(name: str, model: Path, work: Path) -> Iterator[Result]:
    """A demo of DEMOS with a model of the user: a failure for each criterion of GRPO's that is missed, and the figures
    of refinement, whose bounds are those of one model."""
    out = work / f"pretrained.{name}"
    command = [sys.executable, "-m", f"examples.pretrained.{name}", "--model", str(model), "--out", str(out)]
    run(command, ROOT, work / f"pretrained.{name}.log", DEMO_LIMIT_S)
    if name != "dllm.demo":
        for criterion in json.loads((out / "result.json").read_text())["criteria"].values():
            shown = f"{DEMOS[name]}: {criterion['what']}: {criterion['value']}"
            yield Result(shown, float(not criterion["met"]), "failures", 0)
        return
    for figure, value in json.loads((out / "result.json").read_text())["means"].items():
        yield Result(f"{DEMOS[name]}: {figure}", value, "points" if figure == "gap" else "times")


def described(rows: Sequence[str]) -> Iterator[str]:
    """A line about each row, with the GPUs that it needs."""
    for name in rows:
        gpus = RUNS[name].least_gpus
        yield f"Training: {name}{'' if gpus == 1 else f' (from {gpus} GPUs on)'}."
