"""From a sharded checkpoint to a Hugging Face folder: `python -m verl.model_merger merge|test`."""
