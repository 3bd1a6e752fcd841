"""Compatibility with verl: entry of asynchronous training; `python -m` runs it."""

from verl.trainer.fully_async.fully_async_main import main

if __name__ == "__main__":
    main()
