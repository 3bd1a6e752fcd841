"""Compatibility with verl: entry of training one step off the policy; `python -m` runs it."""

from verl.trainer.fully_async.fully_async_main import one_step_off_main as main

if __name__ == "__main__":
    main()
