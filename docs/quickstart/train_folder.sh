# Train a small mixture-of-experts language model on the text of a folder: bash train_folder.sh FOLDER
set -eu
tilemoe train --recipe smoke --data.corpus "$1" --train.out-dir runs/mine
tilemoe generate --checkpoint runs/mine --prompt "The " --max-new-tokens 40
tilemoe export --checkpoint runs/mine --out exported
