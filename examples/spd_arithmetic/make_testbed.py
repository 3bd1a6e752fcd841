"""The former name of `python -m examples.spd_arithmetic.prepare_blocks`."""

from examples.spd_arithmetic.prepare_blocks import run

if __name__ == "__main__":
    run()
