# Fine-tune an exported model on conversations: bash finetune.sh FOLDER CHATS.jsonl
set -eu
tilemoe train --recipe smoke --init-from "$1" --data.format chat --data.corpus "$2" \
  --data.heldout-every 4 --data.batch-size 4 --optim.lr 1e-3 --train.out-dir runs/chat
tilemoe generate --checkpoint runs/chat --chat --prompt "Capital of France?" --max-new-tokens 20
tilemoe export --checkpoint runs/chat --out tuned
