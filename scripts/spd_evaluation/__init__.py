"""What the evaluation of an SPD scorer measures, draws and labels; used by scripts/eval_spd_scorer.py."""
