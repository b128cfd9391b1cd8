#!/bin/bash
# Convert, train, export every iteration: each job starts when the one before it ended with 0.
#   MODEL  Hugging Face directory        CKPT  the model for Megatron     TRAIN  your training job,
#   RUN    what training saves           OUT   the exports                       which reads CKPT
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export MODEL CKPT RUN OUT

convert=$(sbatch --parsable "$here/convert.sbatch")
train=$(sbatch --parsable --dependency="afterok:$convert" "$TRAIN")
# one task for each saved iteration; at most 4 at a time, as they share the file system
export=$(sbatch --parsable --dependency="afterok:$train" --array="${ITERATIONS:-500-2000:500}%4" \
  "$here/export.sbatch")
echo "submitted: convert $convert, train $train, export $export"
