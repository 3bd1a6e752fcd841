"""The report page of a run: `python -m verl.report RUN`."""
