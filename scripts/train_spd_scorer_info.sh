#!/usr/bin/env bash
# Trains the SPD scorer with short logs; the settings are those of train_spd_scorer.sh.
LOGURU_LEVEL=INFO exec "$(dirname "${BASH_SOURCE[0]}")/train_spd_scorer.sh" "$@"
