"""Draws batches of prompts from a StatefulDataLoader, epoch after epoch, from a position that can be saved."""

import copy
import multiprocessing
import signal
from typing import Any

import numpy as np
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl.data.dynamicgen_dataset import DynamicGenDataset
from verl.protocol import DataProto
from verl.trainer.run.stop_signals import obey_parent_only
from verl.utils.children import PROCESS_STARTS

GROWTH, RNG = "dataset_growth", "sampler_rng"  # keys of the saved state of a loader whose data set grows


class LoaderProcess(multiprocessing.Process):
    """Starts while no thread starts another process, and with the signals that stop a run blocked.

    The new process inherits the blocked signals, so none that arrives before `obey_parent_only` runs ends it.
    """

    def start(self) -> None:
        with PROCESS_STARTS:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def terminate(self) -> None:
        self.kill()  # the DataLoader waits for the process then, which could hang before it obeys a SIGTERM


class PromptLoader(StatefulDataLoader):
    """A loader whose processes outlive the signals that stop a run."""

    def __init__(self, dataset: Any, *, num_workers: int = 0, **options: Any) -> None:
        if num_workers:
            context = copy.copy(multiprocessing.get_context())
            context.Process = LoaderProcess
            options.update(multiprocessing_context=context, worker_init_fn=obey_parent_only)
        super().__init__(dataset, num_workers=num_workers, **options)


class PromptStream:
    """Endless batches of prompts. `epoch` counts finished passes over the data; every drawn prompt gets a number."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.loader = loader
        self.epoch = 0
        self.drawn = 0
        self._batches_in_epoch = 0
        self._iterator = None

    def draw(self) -> DataProto:
        """The next batch; column `uid` names each prompt by its number in the run, the same after a resume."""
        if self._iterator is None:
            if self._batches_in_epoch == 0 and isinstance(self.loader.dataset, DynamicGenDataset):
                self.loader.dataset.begin_epoch()
            self._iterator = iter(self.loader)
        batch = DataProto.from_single_dict(next(self._iterator))
        batch.non_tensor_batch["uid"] = np.array([str(self.drawn + i) for i in range(len(batch))], dtype=object)
        self.drawn += len(batch)
        self._batches_in_epoch += 1
        if self._batches_in_epoch == len(self.loader):
            # The loader notices its end only at one more `next`; a state saved before that would be restored as an
            # epoch without batches.
            if next(self._iterator, None) is not None:
                what = f"the data loader has more than the {len(self.loader)} batches that its length says"
                raise RuntimeError(f"{what}; correct __len__ of the data set or of its sampler")
            self._iterator = None
            self._batches_in_epoch = 0
            self.epoch += 1
        return batch

    def position(self) -> dict[str, int]:
        """Counters that go into trainer_state.json."""
        return {"epoch": self.epoch, "drawn": self.drawn, "batches_in_epoch": self._batches_in_epoch}

    def loader_state(self) -> dict[str, Any]:
        """The loader's own state; of a data set that grows, with the rows that it has added.

        Between epochs of such a data set it is the order's random state: the loader would draw the finished epoch's
        order again to come to it, from more rows.
        """
        dataset, sampler = self.loader.dataset, self.loader.sampler
        if not isinstance(dataset, DynamicGenDataset):
            return self.loader.state_dict()
        if self._batches_in_epoch:
            return self.loader.state_dict() | {GROWTH: dataset.growth()}
        order = sampler.generator.get_state() if isinstance(sampler, RandomSampler) else None
        return {GROWTH: dataset.growth(), RNG: order}

    def resume(self, position: dict[str, int], loader_state: dict[str, Any]) -> None:
        """Continue after the last drawn batch of a saved stream.

        Raises ValueError if the state is of another number of loader processes, which only as many can read.
        """
        snapshot = loader_state.get("_snapshot")
        saved = snapshot["_main_snapshot"]["_num_workers"] if snapshot else 0
        if saved != self.loader.num_workers and RNG not in loader_state:
            raise ValueError(
                f"data.dataloader_num_workers={self.loader.num_workers}, but the checkpoint was saved with {saved}, "
                f"and its position in the data can only be read with as many. Set data.dataloader_num_workers={saved}."
            )
        self.restart(position)
        if GROWTH in loader_state:
            self.loader.dataset.restore_growth(loader_state.pop(GROWTH))
        if RNG not in loader_state:
            self.loader.load_state_dict(loader_state)
        elif isinstance(self.loader.sampler, RandomSampler):
            self.loader.sampler.generator.set_state(loader_state[RNG])
        self._batches_in_epoch = position["batches_in_epoch"]

    def restart(self, position: dict[str, int]) -> None:
        """Continue with the counters of a saved stream at the first batch of other data."""
        self.epoch, self.drawn = position["epoch"], position["drawn"]
        self._batches_in_epoch = 0
        self._iterator = None
