#!/usr/bin/env bash
# Downloads DAPO's training prompts and AIME 2024 as parquet files from the Hugging Face Hub.
#   DATA_DIR=dir recipe/dapo/prepare_dapo_data.sh      default: data/dapo in the repository
set -euo pipefail
cd "$(dirname "$0")/../.."
DATA_DIR="${DATA_DIR:-data/dapo}"
mkdir -p "$DATA_DIR"

download() {  # dataset, file in it, local name
    [ -s "$DATA_DIR/$3" ] && { echo "$DATA_DIR/$3 exists"; return; }
    hf download --repo-type dataset "$1" "$2" --local-dir "$DATA_DIR/.download"
    mv "$DATA_DIR/.download/$2" "$DATA_DIR/$3"
    echo "$DATA_DIR/$3"
}

download BytedTsinghua-SIA/DAPO-Math-17k data/dapo-math-17k.parquet dapo-math-17k.parquet
download BytedTsinghua-SIA/AIME-2024 data/aime-2024.parquet aime-2024.parquet
