"""A data set: data.custom_cls.path=examples/extending/my_dataset.py data.custom_cls.name=ShoutedDataset"""

from verl.data.rl_dataset import RLHFDataset


class ShoutedDataset(RLHFDataset):
    """RLHFDataset whose prompts are in capitals.

    Any torch Dataset works that is built as (data_files, tokenizer, config, processor, max_samples) and whose items
    have input_ids, attention_mask, position_ids [P], the columns of the row, and the one that data.reward_fn_key names.
    """

    def messages(self, item):
        """The chat messages of a row, before the chat template."""
        return [{**message, "content": message["content"].upper()} for message in super().messages(item)]
