"""Makes the report page of a run: `python -m verl.report RUN`."""

import argparse
import sys

from verl.report.page import write_report

parser = argparse.ArgumentParser(prog="python -m verl.report", description="Makes the report page of a run.")
parser.add_argument("run_dir", metavar="RUN_DIR", help="trainer.default_local_dir of the run, finished or not")
try:
    sys.stdout.write(f"{write_report(parser.parse_args().run_dir)}\n")
except (OSError, ValueError) as e:
    sys.exit(str(e))
