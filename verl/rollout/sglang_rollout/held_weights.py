"""Compares the weights that an SGLang server holds with those that it was sent; runs inside the server.

SGLang calls a function of --custom-weight-loader with its model and tensors. `compare_weights` is such a function: it
lets the model's own `load_weights` run, which fuses and splits tensors, and compares where that would copy.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl.rollout.weight_check import WeightCheck, difference_of

LOADER = f"{__name__}.compare_weights"
FOLDER = "VERL_SGLANG_WEIGHT_CHECK"  # environment variable of the server: where `compare_weights` writes its results
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor,
           torch.ops.aten.zero_.default}  # fmt: skip


class CompareInsteadOfCopy(TorchDispatchMode):
    """While active, a copy into one of the model's parameters is a comparison, and the parameter stays as it is.

    Any other operation that would change a parameter raises NotImplementedError.

    Attributes:
        current: the name of the tensor that is being loaded.
        differences: how that tensor differs, by name.
        compared: entries that were compared, by name.
        written: entries that would have been written, by parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.numel()}
        self.current = ""
        self.differences: dict[str, str] = {}
        self.compared: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def follow(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, each of which is the current one until the next is asked for."""
        for name, tensor in tensors:
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func._schema.is_mutable and args and isinstance(args[0], torch.Tensor)):
            return func(*args, **(kwargs or {}))
        held = args[0]
        parameter = self.parameters.get(held.untyped_storage().data_ptr())
        if parameter is None:
            return func(*args, **(kwargs or {}))
        if func not in _COPIES:
            raise NotImplementedError(f"{func} would change {parameter}")
        source = torch.as_tensor(args[1] if len(args) > 1 else 0)
        if text := difference_of(held, source.expand(held.shape)):
            self.differences.setdefault(self.current, text)
        self.compared[self.current] += held.numel()
        self.written[parameter] += held.numel()
        return held


def compare_weights(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Append one line of JSON about these tensors to rank<N>.jsonl in the folder that the environment names.

    Never raises: an exception would end the server. A line has names or {"error": text}; see `read_results`.
    """
    mode = CompareInsteadOfCopy(model)
    result: dict[str, Any]
    try:
        with torch.no_grad(), mode:
            model.load_weights(mode.follow(named_tensors))
        modules = model.named_modules()
        padded = {f"{name}.weight" for name, module in modules if hasattr(module, "num_embeddings_padded")}
        sizes = {name: p.numel() for name, p in model.named_parameters() if name not in padded}
        result = {
            "compared": [name for name, _ in named_tensors if mode.compared[name]], "differences": mode.differences,
            "unread": [name for name, _ in named_tensors if not mode.compared[name]], "written": mode.written,
            "sizes": {name: sizes[name] for name in mode.written if name in sizes},
        }  # fmt: skip
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with open(Path(os.environ[FOLDER]) / f"rank{rank}.jsonl", "a") as file:
        print(json.dumps(result), file=file)


def read_results(folder: Path) -> WeightCheck:
    """The outcome of all calls since the last `read_results`, over all ranks of the server.

    Raises RuntimeError if a call failed or left no line. A parameter that only a part of the tensors would have written
    is a difference: the others of a fused layer were not sent.
    """
    check = WeightCheck()
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise RuntimeError("the SGLang server wrote no result")
    equal: set[str] | None = None
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        if failed := [line["error"] for line in lines if "error" in line]:
            raise RuntimeError(failed[0])
        rank = f" (rank {file.stem.removeprefix('rank')} of the server)" if len(files) > 1 else ""
        written: Counter[str] = Counter()
        same: set[str] = set()
        for line in lines:
            written.update(line["written"])
            same.update(name for name in line["compared"] if name not in line["differences"])
            for name, text in line["differences"].items():
                check.add(name, f"{text}{rank}")
        for name, size in {name: size for line in lines for name, size in line["sizes"].items()}.items():
            if written[name] < size:
                check.add(name, f"was sent in part: {written[name]} of {size} entries{rank}")
        unread = dict.fromkeys(name for line in lines for name in line["unread"])
        check.unread += [name for name in unread if name not in check.unread]
        equal = same if equal is None else equal & same
    check.equal = len(equal or ())
    return check
