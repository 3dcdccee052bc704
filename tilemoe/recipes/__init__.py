"""The packaged recipes, one JSON file each; ``tilemoe.train.config`` reads them."""
